"""The store against cpprb and against memcpy.

Sampling is timed until a network and a loss could start: observations and next observations, n-step returns, discounts and
importance weights. After every sample its priorities are updated, so that both find their trees as cold as in training.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from veldt.algorithms.base import Batch
from veldt.algorithms.dqn import DQN
from veldt.bench.learner import PIXELS, random_block
from veldt.bench.timing import alternate, machine
from veldt.errors import UserError
from veldt.machine import available_memory, format_bytes
from veldt.records.block import Block, Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized, SumTree
from veldt.storing.slots import plan_size
from veldt.storing.windows import copy_windows

VECTORS = EnvSpec("vectors", {"obs": spec((16,), np.float32)}, spec((), np.int64), spaces.Discrete(6))
CPU = torch.device("cpu")
GAMMA = 0.99


@dataclasses.dataclass(frozen=True)
class ReplayBench:
    """Sampling, priority updates and inserts of the store against cpprb and against memcpy."""

    pixels: int = 200_000
    """Atari transitions stored (84 x 84 frames, stacks of 4)."""
    vectors: int = 1_000_000
    """Transitions of 16 floats stored."""
    batch: int = 512
    """Items in one sample."""
    rounds: int = 9
    """Turns that each contender gets."""

    def run(self) -> dict[str, Any]:
        try:
            import cpprb
        except ImportError:
            raise UserError("veldt bench replay needs cpprb; install it with: pip install 'veldt[bench]'.") from None
        if min(self.pixels, self.vectors) < 8 * self.batch:
            raise UserError(f"pixels and vectors must be at least eight batches, {8 * self.batch:,}.")
        needed = self.pixels * (2 * 4 * 84 * 84 + 3 * 8_000) + 2 * 10**9
        if needed > available_memory():
            free = format_bytes(available_memory())
            raise UserError(f"This needs about {format_bytes(needed)} of memory, but {free} is free; lower --pixels.")
        before = machine()
        torch.set_num_threads(1)
        results = {**self._pixels(cpprb), **self._vectors(cpprb)}
        return {"machine": before, "results": results}

    def _pixels(self, cpprb: Any) -> dict[str, dict[str, float]]:
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (4096, 84, 84), np.uint8)
        ours = Ours(PIXELS, DQN(history=4, n=3, gamma=GAMMA), fresh=64, capacity=self.pixels, frames=frames)
        single = Ours(PIXELS, DQN(history=4, n=1, gamma=GAMMA), fresh=64, capacity=self.pixels, frames=frames)
        stack = {"shape": (4, 84, 84), "dtype": np.uint8}
        theirs = Theirs(cpprb, self.pixels, 3, {"obs": stack, "next_obs": stack}, {})
        theirs.fill(lambda index: {"obs": _stacks(frames, index), "next_obs": _stacks(frames, index + 3)}, 512)
        last = {"shape": (84, 84, 4), "dtype": np.uint8}
        compressed = Theirs(cpprb, self.pixels, 1, {"obs": last}, {"next_of": "obs", "stack_compress": "obs"})
        compressed.fill(
            lambda index: {
                "obs": np.moveaxis(_stacks(frames, index), 1, -1),
                "next_obs": np.moveaxis(_stacks(frames, index + 1), 1, -1),
            },
            512,
        )
        times = self._cycle({"ours": ours, "cpprb": theirs, "ours n=1": single, "compressed": compressed}, calls=20)
        return {
            f"{self.batch} Atari items, stack 4, n = 3, {self.pixels:,} stored": {
                **_table(times, "ours", "cpprb"),
                **self._memory(ours),
            },
            "the same with n = 1 against cpprb's compressed mode (which has no next_obs for n = 3)": _table(
                times, "ours n=1", "compressed"
            ),
        }

    def _vectors(self, cpprb: Any) -> dict[str, dict[str, float]]:
        frames = np.random.default_rng(0).random((4096, 16), np.float32)
        ours = Ours(VECTORS, DQN(n=3, gamma=GAMMA), fresh=64, capacity=self.vectors, frames=frames)
        vector = {"shape": 16, "dtype": np.float32}
        theirs = Theirs(cpprb, self.vectors, 3, {"obs": vector, "next_obs": vector}, {})
        theirs.fill(lambda index: {"obs": frames[index % 4096], "next_obs": frames[(index + 3) % 4096]}, 1 << 15)
        times = self._cycle({"ours": ours, "cpprb": theirs}, calls=200)
        return {f"{self.batch} items of 16 floats, n = 3, {self.vectors:,} stored": _table(times, "ours", "cpprb")}

    def _cycle(self, contenders: dict[str, Any], calls: int) -> dict[str, tuple[float, float]]:
        """Seconds for one sample and for one update, the medians over rounds in which the contenders take turns."""
        rng = np.random.default_rng(1)
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contenders}
        for number in range(self.rounds + 1):
            for name, contender in contenders.items():
                sampling = updating = 0.0
                for _ in range(calls):
                    began = time.perf_counter()
                    ready = contender.sample(self.batch)
                    sampled = time.perf_counter()
                    del ready
                    priorities = rng.random(self.batch, np.float32)
                    updated = time.perf_counter()
                    contender.update(priorities)
                    updating += time.perf_counter() - updated
                    sampling += sampled - began
                if number:  # the first round warms up
                    times[name][0].append(sampling / calls)
                    times[name][1].append(updating / calls)
        return {name: (statistics.median(x), statistics.median(y)) for name, (x, y) in times.items()}

    def _memory(self, ours: Ours) -> dict[str, float]:
        """Copies and inserts against plain copies of as many bytes, from RAM that is as cold in the caches."""
        store, schema, rng = ours.store, ours.store.schema, np.random.default_rng(2)
        source, rows = store.rows["obs"], schema.window.rows
        out = np.zeros((self.batch, rows, 84, 84), np.uint8)
        flat = out.reshape(-1, 84, 84)
        places = len(source) // len(flat)

        def windows() -> None:
            slot, offset = rng.integers(0, store.n_slots, self.batch), rng.integers(0, schema.starts, self.batch)
            copy_windows(source, np.sort(slot * schema.rows + offset), out)

        def memcpy() -> None:
            at = rng.integers(0, places) * len(flat)
            flat[...] = source[at : at + len(flat)]

        block = ours.block(0)
        priorities = rng.random(schema.starts)

        def insert() -> None:
            assert store.insert(block, priorities)

        def memcpy_block() -> None:
            at = rng.integers(0, store.n_slots) * schema.rows
            source[at : at + schema.rows] = block.rows["obs"]

        copying = alternate({"windows": windows, "memcpy": memcpy}, 10, self.rounds)
        inserting = alternate({"insert": insert, "memcpy": memcpy_block}, 100, self.rounds)
        tree = store.selector.tree
        assert isinstance(tree, SumTree)
        blocks = sum(x.nbytes for x in store.rows.values())
        size = blocks + tree.nodes.nbytes + store.items.nbytes
        return {
            "copy_windows_us": 1e6 * copying["windows"],
            "memcpy_us": 1e6 * copying["memcpy"],
            "copy/memcpy speed": copying["memcpy"] / copying["windows"],
            "insert_block_us": 1e6 * inserting["insert"],
            "memcpy_block_us": 1e6 * inserting["memcpy"],
            "insert/memcpy speed": inserting["memcpy"] / inserting["insert"],
            "inserted_per_s": schema.starts / inserting["insert"],
            "bytes_per_transition": size / store.capacity,
        }


class Ours:
    """A full Veldt store, sampled as transitions for a loss."""

    def __init__(self, env: EnvSpec, algorithm: DQN, fresh: int, capacity: int, frames: Array) -> None:
        rows = {**env.step, "action": env.action, **algorithm.extras(env)}
        schema = Schema(rows, algorithm.window, fresh)
        size = plan_size(capacity, schema)
        selector = Prioritized(size.slots * schema.starts)
        self.algorithm, self.env, self.frames = algorithm, env, frames
        self.store = Replay(schema, selector, MinSize(1), size.slots * schema.starts, size.slots)
        self.rng = np.random.default_rng(0)
        for number in range(size.slots):
            assert self.store.insert(self.block(number), self.rng.random(schema.starts))
        self.keys: Array = np.zeros(0, np.int64)

    def block(self, number: int) -> Block:
        """Episodes of about 500 steps, one after the other."""
        schema = self.store.schema
        seen = self.frames[np.arange(number * schema.fresh, number * schema.fresh + schema.rows) % 4096]
        return random_block(schema, self.env, self.rng, 1 / 500, seen)

    def sample(self, n: int) -> Any:
        sample = self.store.sample(n)
        assert sample is not None
        self.keys = sample.keys
        return self.algorithm.transitions(Batch(sample.rows, sample.starts, sample.weights, CPU)), sample.weights

    def update(self, priorities: Array) -> None:
        self.store.update(self.keys, priorities)


class Theirs:
    """A full cpprb.PrioritizedReplayBuffer; n-step returns are computed before they are stored."""

    def __init__(self, cpprb: Any, capacity: int, n: int, columns: dict[str, Any], options: dict[str, Any]) -> None:
        rest = {"act": {"dtype": np.int64}, "rew": {}, "done": {}}
        self.buffer = cpprb.PrioritizedReplayBuffer(capacity, {**columns, **rest}, alpha=0.6, **options)
        self.capacity, self.discount = capacity, np.float32(GAMMA**n)
        self.indexes: Any = None

    def fill(self, observations: Callable[[Array], dict[str, Array]], chunk: int) -> None:
        rng = np.random.default_rng(0)
        for begin in range(0, self.capacity, chunk):
            index = np.arange(begin, min(begin + chunk, self.capacity))
            k = len(index)
            rest = {"act": np.zeros(k), "rew": rng.random(k), "done": rng.random(k) < 1 / 500}
            self.buffer.add(**observations(index), **rest, priorities=rng.random(k))

    def sample(self, n: int) -> Any:
        found = self.buffer.sample(n, 0.4)
        self.indexes = found["indexes"]
        return found, self.discount * (1 - found["done"])

    def update(self, priorities: Array) -> None:
        self.buffer.update_priorities(self.indexes, priorities)


def _stacks(frames: Array, index: Array) -> Array:
    """[k, 4, 84, 84]: the frames up to each index."""
    return frames[(index[:, None] + np.arange(-3, 1)) % len(frames)]


def _table(times: dict[str, tuple[float, float]], ours: str, theirs: str) -> dict[str, float]:
    return {
        "sample_us": 1e6 * times[ours][0],
        "cpprb_sample_us": 1e6 * times[theirs][0],
        "sample ours/cpprb speed": times[theirs][0] / times[ours][0],
        "update_us": 1e6 * times[ours][1],
        "cpprb_update_us": 1e6 * times[theirs][1],
        "update ours/cpprb speed": times[theirs][1] / times[ours][1],
    }
