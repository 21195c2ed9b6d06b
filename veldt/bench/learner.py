"""The whole learner step (sample, copy, loss, backward, optimizer, priorities) against the bare torch step.

The bare step has its batch ready and does only what no trainer can leave out: forward of network and target, loss,
backward, clip, Adam. Same network, same batch.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.nn import functional as F

from veldt.algorithms.base import Batch
from veldt.algorithms.dqn import DQN
from veldt.bench.timing import alternate, machine
from veldt.block import Block, BlockId, Schema, window_items
from veldt.counters import Counters
from veldt.learner import Learner, LearnerConfig
from veldt.limiters import MinSize
from veldt.params import LatestParams
from veldt.selectors import Prioritized
from veldt.step import EnvSpec
from veldt.store import Replay
from veldt.tree import spec

VECTOR = EnvSpec("vector", {"obs": spec((4,), np.float32)}, spec((), np.int64), spaces.Discrete(2))
PIXELS = EnvSpec("pixels", {"obs": spec((84, 84), np.uint8)}, spec((), np.int64), spaces.Discrete(6))


@dataclasses.dataclass(frozen=True)
class LearnerBench:
    """Our whole learner step against the bare torch step of the same network and batch."""

    device: str = "cpu"
    """cpu or cuda."""
    threads: int = 1
    """Threads for tensor operations."""
    rounds: int = 7
    """Turns that each contender gets."""

    def run(self) -> dict[str, Any]:
        torch.set_num_threads(self.threads)
        results = {
            "mlp 128-128, batch 64": self._compare(VECTOR, DQN(n=3, double=True), 64, blocks=4000, calls=200),
            "nature cnn, batch 32": self._compare(PIXELS, DQN(history=4), 32, blocks=100, calls=4),
        }
        return {"machine": machine(), "results": results}

    def _compare(self, env: EnvSpec, algorithm: DQN, batch: int, blocks: int, calls: int) -> dict[str, float]:
        learner = make_learner(env, algorithm, batch, blocks, self.device)
        step = bare_step(learner, batch)
        assert learner.step()
        seconds = alternate({"ours": learner.step, "bare": step}, calls, self.rounds, warm_up=max(3, calls // 4))
        return {
            "ours_us": 1e6 * seconds["ours"],
            "bare_us": 1e6 * seconds["bare"],
            "ours/bare speed": seconds["bare"] / seconds["ours"],
        }


def make_learner(env: EnvSpec, algorithm: DQN, batch: int, blocks: int, device: str) -> Learner:
    """A learner with a prioritized store full of made-up steps."""
    rows = {**env.step, "action": env.action, **algorithm.extras(env)}
    schema = Schema(rows, algorithm.window, fresh=16)
    selector = Prioritized(blocks * schema.starts)
    store = Replay(schema, selector, MinSize(1), blocks * schema.starts, blocks)
    rng = np.random.default_rng(0)
    for number in range(blocks):
        store.insert(random_block(schema, env, number, rng), rng.random(schema.starts))
    config = LearnerConfig(batch=batch, publish_every=4)
    return Learner(algorithm, env, store, LatestParams(), Counters(), config, 1_000_000, seed=0, device=device)


def random_block(schema: Schema, env: EnvSpec, number: int, rng: np.random.Generator) -> Block:
    storage = schema.layout.zeros(schema.rows)
    columns = schema.layout.columns(storage)
    for name, column in env.observation.items():
        raw = (
            rng.integers(0, 255, columns[name].shape) if column.dtype == np.uint8 else rng.normal(size=columns[name].shape)
        )
        columns[name][...] = raw
    columns["reward"][...] = rng.normal(size=schema.rows)
    columns["action"][...] = rng.integers(0, env.n_actions, schema.rows)
    columns["last"][...] = rng.random(schema.rows) < 0.01
    columns["discount"][...] = ~columns["last"]
    columns["first"][1:] = columns["last"][:-1]
    columns["valid"][...] = True
    items = window_items(columns["valid"], columns["last"], schema.window, schema.fresh)
    return Block(BlockId(0, 0, number), schema, storage, {}, items)


def bare_step(learner: Learner, batch: int) -> Any:
    """The update as one would write it with plain torch, on tensors that are already there."""
    algorithm, device = learner.algorithm, learner.device
    assert isinstance(algorithm, DQN)
    sample = learner.store.sample(batch)
    assert sample is not None
    rows = Batch(sample.rows, sample.starts, sample.weights, device)
    at = algorithm.history - 1
    s_tm1, s_t = algorithm.observe(rows, at), algorithm.observe(rows, at + algorithm.n)
    assert isinstance(s_tm1, torch.Tensor) and isinstance(s_t, torch.Tensor)
    s_tm1, s_t = s_tm1.clone(), s_t.clone()
    a_tm1, r_t = rows["action"][:, at].clone(), rows["reward"][:, at + 1].clone()
    discount_t, weights = torch.full((batch,), 0.97, device=device), torch.ones(batch, device=device)
    net = copy.deepcopy(learner.net)
    for parameter in net.parameters():
        parameter.grad = None
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)

    def step() -> None:
        q_tm1 = net(s_tm1).gather(1, a_tm1[:, None])[:, 0]
        with torch.no_grad():
            q_t = target(s_t)
            chooser = net(s_t) if algorithm.double else q_t
            y = r_t + discount_t * q_t.gather(1, chooser.argmax(1, keepdim=True))[:, 0]
        loss = (weights * F.smooth_l1_loss(q_tm1, y, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()

    return step
