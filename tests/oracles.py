"""What must be true, by definition and in plain loops; and a chain from environments to a store that keeps a log."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from veldt.acting.actor import Actor
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Algorithm, Batch
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.envs.small import Counter
from veldt.learning.params import LatestParams
from veldt.ports import Source
from veldt.records.block import Block, Schema, Window
from veldt.records.history import observation
from veldt.records.tree import spec


def examples(n: int) -> int:
    """So many examples, times VELDT_EXAMPLES."""
    return n * int(os.environ.get("VELDT_EXAMPLES", "1"))


def n_step(reward: Any, discount: Any, last: Any, t: int, n: int, gamma: float) -> tuple[float, float, int]:
    """The n-step return of step t of columns [T]: its reward, what the bootstrap is multiplied by, and m."""
    total, m, terminated = 0.0, 0, False
    for k in range(1, n + 1):
        if not terminated:
            total += gamma ** (k - 1) * float(reward[t + k])
        m = k
        terminated |= bool(discount[t + k] == 0)
        if last[t + k]:
            break
    return total, 0.0 if terminated else gamma**m, m


def trainable(valid: Sequence[bool], last: Sequence[bool], t: int, lookahead: int) -> bool:
    """Whether step t took an action, and the stream goes on validly for `lookahead` steps or to the episode's end."""
    if not valid[t] or last[t]:
        return False
    for k in range(t + 1, t + lookahead + 1):
        if k >= len(valid) or not valid[k]:
            return False
        if last[k]:
            return True
    return True


def stack_history(x: Any, first: Any, valid: Any, at: int, history: int) -> Any:
    """What was seen at row `at` of x [T, ...] and up to history - 1 rows before it in its episode: [history, ...]."""
    out = np.zeros((history, *x.shape[1:]), x.dtype)
    for back in range(history):
        row = at - back
        if row < 0 or (back > 0 and not valid[row]):
            break
        out[history - 1 - back] = x[row]
        if first[row]:
            break
    return out


def window_starts(valid: Sequence[bool], last: Sequence[bool], window: Window) -> list[int]:
    """The positions in a stream at which a window with something to learn begins."""
    steps = [trainable(valid, last, t, window.lookahead) for t in range(len(valid))]
    return [o for o in range(0, len(steps), window.stride) if any(steps[o : o + window.length])]


def chi_square(observed: Any, expected: Any) -> float:
    """The p-value of Pearson's test, by the Wilson-Hilferty approximation."""
    k = len(observed) - 1
    x = float((((observed - expected) ** 2) / expected).sum())
    z = ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return math.erfc(z / math.sqrt(2)) / 2


def make_block(schema: Schema, source: Source, items: Sequence[bool]) -> Block:
    """A block whose every number says which message brings it, and which row or start the number belongs to."""
    stamp = 1000 * source.number + 10**6 * source.channel
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    for layout, storage in ((schema.layout, rows), (schema.start_layout, starts)):
        for column in layout.columns(storage).values():
            column[...] = stamp + np.arange(len(column)).reshape(-1, *[1] * (column.ndim - 1))
    return Block(schema, rows, starts, np.array(items, np.bool_))


def read_source(block: Block) -> Source:
    """The source that `make_block` wrote into a block; its schema has an int64 column `action`."""
    stamp = int(block.columns()["action"].flat[0])
    return Source(stamp // 10**6, stamp % 10**6 // 1000)


def select(batch: Batch, index: Any) -> Batch:
    """A batch of the windows at these indices."""
    host, starts = ({name: x[index] for name, x in columns.items()} for columns in (batch.host, batch._host_starts))
    return Batch(host, starts, batch.weights.cpu().numpy()[index], batch.device)


def counter_record(obs: Any, longest: int = 12) -> dict[str, Any]:
    """The step record that `Counter` must give with this observation."""
    env, episode, t, action = (int(x) for x in obs)
    last = t == Counter.length(env, episode, longest)
    return {
        "reward": Counter.reward(env, episode, t, action),
        "discount": 0.0 if last and Counter.terminates(env, episode) else 1.0,
        "first": t == 0,
        "last": last,
    }


class Faulty(Counter):
    """A Counter some of whose rewards are not finite: these rows are bad."""

    def step(self, action: np.int64) -> Any:
        obs, reward, *rest = super().step(action)
        return (obs, float("nan") if Counter.mix(*obs.tolist(), 3) % 6 == 0 else reward, *rest)


class Tracer(Algorithm):
    """An algorithm that acts at random, and records what it saw. Its state counts the steps since the episode began."""

    window: Any = None

    def __init__(self, window: Window) -> None:
        self.window = window

    def extras(self, env: Any) -> Any:
        shape = env.observation["obs"].shape
        return {"seen": spec((self.window.history, *shape), env.observation["obs"].dtype), "place": spec((3,), np.int64)}

    def state(self, env: Any) -> Any:
        return {"steps": spec((1,), np.float32)}

    def network(self, env: Any) -> nn.Module:
        return nn.Linear(1, 1)

    def act(self, net: Any, rows: Any, state: Any, explore: Any, rng: np.random.Generator) -> Any:
        seen = observation(rows, self.window.history - 1, self.window.history).numpy().copy()
        n = len(seen)
        out = {"action": rng.integers(0, 2, n), "steps": state["steps"].numpy().copy()}
        out["seen"] = seen.reshape(n, self.window.history, *rows["obs"].shape[2:])
        return out, {"steps": state["steps"] + 1}

    def priority(self, columns: Any, schema: Schema) -> Any:
        return None


@dataclass
class Stream:
    """What passed between a group of environments and its policy, from one reset or flush to the next."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    flushed: bool = False

    def lane(self, lane: int, name: str) -> list[Any]:
        return [row[name][lane] for row in self.rows]


class Log:
    """A policy that wraps a policy, writes down its streams, and marks each record with its place in them."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self.streams: list[Stream] = []
        self.current: dict[int, int] = {}  # group -> its stream
        self.sent: dict[int, Any] = {}

    def send(self, group: int, step: Any) -> bool:
        if self.policy.send(group, step):
            self.sent[group] = {name: x.copy() for name, x in step.items()}
        return group in self.sent

    def recv(self, group: int) -> Any:
        out = self.policy.recv(group)
        if out is not None:
            stream = self.streams[self.current[group]]
            n = len(out["action"])
            out["place"] = np.stack([np.full(n, self.current[group]), np.full(n, len(stream.rows)), np.arange(n)], 1)
            stream.rows.append({**self.sent.pop(group), **{name: x.copy() for name, x in out.items()}})
        return out

    def flush(self, group: int) -> bool:
        self.streams[self.current[group]].flushed = True
        self.begin(group)
        return self.policy.flush(group)

    def reset(self, group: int) -> None:
        self.sent.pop(group, None)
        self.begin(group)
        self.policy.reset(group)

    def begin(self, group: int) -> None:
        self.current[group] = len(self.streams)
        self.streams.append(Stream())


class Tap:
    """A store that keeps a list of the blocks that went into another."""

    def __init__(self, store: Any) -> None:
        self.store, self.blocks = store, []

    def insert(self, block: Block, priorities: Any) -> bool:
        if self.store.insert(block, priorities):
            self.blocks.append(block)
            return True
        return False


class Rig:
    """Actor - Recorder - Log - LocalPolicy, and the store that `make_store` makes for their schema."""

    def __init__(
        self,
        make_store: Any,
        window: Window,
        fresh: int,
        env: Any = "veldt/Counter-v0",
        n: int = 1,
        groups: int = 1,
        **kwargs: Any,
    ) -> None:
        probe = make_env(env, 1)
        tracer, counters = Tracer(window), Counters()
        rows = {**probe.spec.step, "action": probe.spec.action, **tracer.extras(probe.spec)}
        self.schema = Schema(rows, window, fresh, tracer.state(probe.spec))
        self.store = make_store(self.schema)
        self.tap = Tap(self.store)
        self.log = Log(LocalPolicy(tracer, probe.spec, LatestParams(), counters, lambda _: 1.0, seed=3))
        self.recorder = Recorder(self.log, self.tap, tracer, self.schema, **kwargs)
        self.actor = Actor(partial(make_env, env), n, self.recorder, counters, seed=5, groups=tuple(range(groups)))
        self.resets = 0
        probe.close()

    def reset(self) -> None:
        self.resets += 1
        self.actor.resume(self.resets)

    def items(self) -> Iterator[tuple[int, int, int]]:
        """The place (stream, position, lane) at which the window of each item ever inserted starts."""
        window = self.schema.window
        for block in self.tap.blocks:
            for s in np.flatnonzero(block.items):
                yield tuple(block.columns()["place"][window.before + s * window.stride].tolist())

    def expected_items(self, short: bool) -> list[tuple[int, int, int]]:
        """The same by definition: of a flushed stream all, of another those of its whole blocks (`short`: strides)."""
        out, window = [], self.schema.window
        for number, stream in enumerate(self.log.streams):
            unit = window.stride if short else self.schema.fresh
            stop = len(stream.rows) if stream.flushed else (len(stream.rows) - window.after) // unit * unit
            for lane in range(len(stream.rows[0]["first"]) if stream.rows else 0):
                starts = window_starts(stream.lane(lane, "valid"), stream.lane(lane, "last"), window)
                out += [(number, o, lane) for o in starts if o < stop]
        return out

    def check_slices(self, rows: dict[str, Any]) -> None:
        """Rows [T] of a window that trains one step: slices of them are the stacks of that step and of its bootstrap."""
        window = self.schema.window
        at, ends = window.before, np.flatnonzero(rows["last"][window.before + 1 :])
        m = min(window.lookahead, *(ends[:1] + 1)) if len(ends) else window.lookahead
        for row in (at, at + m):
            stack = stack_history(rows["obs"], rows["first"], rows["valid"], row, window.history)
            assert (rows["obs"][row - window.history + 1 : row + 1] == stack).all(), (rows, row)

    def check(self, rows: dict[str, Any], starts: dict[str, Any], gapless: bool) -> None:
        """Rows [T] of one sampled window and its start, against the log and against the environment's own words.

        `gapless`: no flush was without a reset, so that the recorder remembers all that the policy does.
        """
        window = self.schema.window
        number, position, lane = rows["place"][window.before].tolist()
        stream = self.log.streams[number]
        if window.slices:
            self.check_slices(rows)
            rows = {**rows, "obs": rows["obs"].copy()}
            for j in range(window.before):
                if earlier_episode(rows["first"], rows["valid"], j, window.before):
                    assert not rows["obs"][j].any(), "what lies before the episode reads as zero"
                    earlier, position_then, _ = rows["place"][j]  # and is put back for what follows
                    rows["obs"][j] = self.log.streams[earlier].rows[position_then]["obs"][lane] if rows["valid"][j] else 0
        for j in range(window.rows):
            at = position + j - window.before
            truth = stream.rows[at] if 0 <= at < len(stream.rows) else None
            if at < 0 and not gapless and rows["valid"][j]:  # a flush that had nothing to send keeps the context
                earlier, position_then, _ = rows["place"][j]
                truth = self.log.streams[earlier].rows[position_then]
                assert self.log.streams[earlier].flushed
            there = truth is not None and bool(truth["valid"][lane])
            assert rows["valid"][j] == there, (j, at, rows["valid"], "padding where, and only where, the stream has no row")
            if not there:
                continue
            for name in rows:
                assert (rows[name][j] == truth[name][lane]).all(), (name, j, rows[name][j], truth[name][lane])
            obs = rows["obs"][j]
            record = counter_record(obs)
            cut = stream.flushed and at == len(stream.rows) - 1
            assert rows["reward"][j] == record["reward"] and rows["discount"][j] == record["discount"], (obs, record)
            assert rows["first"][j] == record["first"], (obs, record)
            assert rows["last"][j] == (record["last"] or (cut and rows["last"][j])), (obs, record)
            if j + 1 < window.rows and rows["valid"][j + 1]:
                after = rows["obs"][j + 1]
                same = (after[:2] == obs[:2]).all() and after[2] == obs[2] + 1 and after[3] == rows["action"][j]
                begins = after[0] == obs[0] and after[1] == obs[1] + 1 and after[2] == 0
                assert begins if rows["last"][j] else same, (obs, after)
            if gapless and j >= window.history - 1:
                columns = (np.array(stream.lane(lane, name)) for name in ("obs", "first", "valid"))
                seen = stack_history(*columns, at, window.history)
                assert (rows["seen"][j] == seen).all(), "the policy saw what the learner will see"
        row = position - window.before + window.history - 1  # the first after the history
        if row < 0 and not gapless:
            return
        steps = stream.rows[row]["steps"][lane] if row >= 0 else 0
        assert starts["steps"] == steps, "the recurrent state is that before the first row after the history"
        begins = [at for at in range(row + 1) if stream.rows[at]["first"][lane]]
        assert not begins or steps == row - begins[-1], "and it is zero where an episode begins"


def earlier_episode(first: Any, valid: Any, j: int, at: int) -> bool:
    """Whether row j lies before the episode of row `at`, or beyond a row that is not valid."""
    return j < at and (any(first[j + 1 : at + 1]) or not all(valid[j:at]))


def tensors(*arrays: Any) -> list[Any]:
    return [torch.from_numpy(np.array(x)) for x in arrays]


def vtrace(
    value: Any,
    reward: Any,
    discount: Any,
    trains: Any,
    ratio: Any,
    s: int,
    gamma: float,
    lambda_: float,
    rho: float,
    c: float,
) -> float:
    """v_s of columns value, reward, discount [T + 1] and trains, ratio [T]: sums and products of Espeholt et al. 2018."""
    total = float(value[s])
    for t in range(s, len(ratio)):
        if not trains[t]:
            break
        after = gamma * float(discount[t + 1]) * float(value[t + 1])
        passed = min(rho, float(ratio[t])) * (float(reward[t + 1]) + after - float(value[t]))
        for i in range(s, t):
            passed *= gamma * float(discount[i + 1]) * lambda_ * min(c, float(ratio[i]))
        total += passed
    return total


def vtrace_advantage(
    value: Any,
    reward: Any,
    discount: Any,
    trains: Any,
    ratio: Any,
    s: int,
    gamma: float,
    lambda_: float,
    rho: float,
    c: float,
    pg: float,
) -> float:
    """What the policy gradient of step s is multiplied by: rho_s (r_s + gamma_s v_{s+1} - V_s)."""
    if not trains[s]:
        return 0.0
    after = vtrace(value, reward, discount, trains, ratio, s + 1, gamma, lambda_, rho, c)
    return min(pg, float(ratio[s])) * (float(reward[s + 1]) + gamma * float(discount[s + 1]) * after - float(value[s]))


def lstm_cell(x: Any, h: Any, c: Any, cell: nn.LSTM) -> tuple[Any, Any]:
    """One step of an LSTM on vectors, with the weights of torch's: its gates in the order in, forget, new, out."""
    to = [p.to(x.dtype) for p in (cell.weight_ih_l0, cell.weight_hh_l0, cell.bias_ih_l0, cell.bias_hh_l0)]
    i, f, new, o = (to[0] @ x + to[2] + to[1] @ h + to[3]).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(new)
    return torch.sigmoid(o) * torch.tanh(c), c
