"""The whole learner step (sample, copy, loss, backward, optimizer, priorities) against the bare torch step.

The bare step has its batch ready and does only what no trainer can leave out: forward of network and target, loss,
backward, clip, Adam. Same network, same batch. For R2D2 that includes the burn-in of both networks; its bare LSTM knows no
episodes.
"""

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional as F

from veldt.algorithms.base import Batch
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.bench.timing import alternate, machine
from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.learner import Learner, LearnerConfig
from veldt.learning.params import LatestParams
from veldt.nets.networks import recurrent_input
from veldt.records.block import Block, Schema, window_items
from veldt.records.history import observations
from veldt.records.step import EnvSpec
from veldt.records.tree import spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized

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
        small = recipes.make("r2d2")
        results["r2d2, lstm 64, 32 x (8 + 16 + 3)"] = self._compare(VECTOR, small.algorithm, 32, 400, 20, fresh=64)
        results["r2d2, lstm 512, 64 x (40 + 80 + 5)"] = self._compare(VECTOR, R2D2(), 64, 40, 2, fresh=320)
        if self.device != "cpu":  # minutes for one update on a CPU
            name = "r2d2, nature cnn, lstm 512, 64 x (40 + 80 + 5)"
            results[name] = self._compare(PIXELS, R2D2(history=4), 64, 40, 10, fresh=320)
            results[name]["ours, updates_per_s"] = 1e6 / results[name]["ours_us"]
            half = make_learner(PIXELS, R2D2(history=4), 64, 40, self.device, 320, bfloat16=True)
            seconds = alternate({"ours": half.step}, 10, self.rounds, warm_up=3)["ours"]
            results[name]["with bfloat16, updates_per_s"] = 1 / seconds
        return {"machine": machine(), "results": results}

    def _compare(
        self, env: EnvSpec, algorithm: DQN | R2D2, batch: int, blocks: int, calls: int, fresh: int = 16
    ) -> dict[str, float]:
        learner = make_learner(env, algorithm, batch, blocks, self.device, fresh)
        step = bare_step(learner, batch) if isinstance(algorithm, DQN) else bare_sequence_step(learner, batch)
        assert learner.step()
        seconds = alternate({"ours": learner.step, "bare": step}, calls, self.rounds, warm_up=max(3, calls // 4))
        return {
            "ours_us": 1e6 * seconds["ours"],
            "bare_us": 1e6 * seconds["bare"],
            "ours/bare speed": seconds["bare"] / seconds["ours"],
        }


def make_learner(
    env: EnvSpec,
    algorithm: DQN | R2D2,
    batch: int,
    blocks: int,
    device: str,
    fresh: int = 16,
    **settings: Any,
) -> Learner:
    """A learner with these `settings` and a prioritized store full of random steps."""
    rows = {**env.step, "action": env.action, **algorithm.extras(env)}
    schema = Schema(rows, algorithm.window, fresh, algorithm.state(env))
    selector = Prioritized(blocks * schema.starts)
    store = Replay(schema, selector, MinSize(1), blocks * schema.starts, blocks, pinned=device != "cpu")
    rng = np.random.default_rng(0)
    for _ in range(blocks):
        store.insert(random_block(schema, env, rng), rng.random(schema.starts))
    config = LearnerConfig(**{"batch": batch, "publish_every": 4} | settings)
    return Learner(algorithm, env, store, LatestParams(), Counters(), config, 1_000_000, seed=0, device=device)


def random_block(schema: Schema, env: EnvSpec, rng: np.random.Generator, ends: float = 0.002, obs: Any = None) -> Block:
    """Episodes one after the other: a row is the last of one with probability `ends`. `obs` [rows, ...] are the
    observations, if not random ones."""
    storage = schema.layout.zeros(schema.rows)
    columns = schema.layout.columns(storage)
    for name in env.observation:
        x = columns[name]
        random = rng.integers(0, 255, x.shape) if x.dtype == np.uint8 else rng.normal(size=x.shape)
        x[...] = random if obs is None else obs
    columns["reward"][...] = rng.normal(size=schema.rows)
    columns["action"][...] = rng.integers(0, env.n_actions, schema.rows)
    columns["last"][...] = rng.random(schema.rows) < ends
    columns["discount"][...] = ~columns["last"]
    columns["first"][1:] = columns["last"][:-1]
    columns["valid"][...] = True
    items = window_items(columns["valid"], columns["last"], schema.window, schema.fresh)
    return Block(schema, storage, schema.start_layout.zeros(schema.starts), items)


def bare_step(learner: Learner, batch: int) -> Any:
    """The update as one would write it with plain torch, on ready tensors."""
    algorithm, device = learner.algorithm, learner.device
    assert isinstance(algorithm, DQN)
    rows = _batch(learner, batch)
    at = algorithm.history - 1
    s_tm1, s_t = algorithm.observe(rows, at), algorithm.observe(rows, at + algorithm.n)
    assert isinstance(s_tm1, torch.Tensor) and isinstance(s_t, torch.Tensor)
    s_tm1, s_t = s_tm1.clone(), s_t.clone()
    a_tm1, r_t = rows["action"][:, at].clone(), rows["reward"][:, at + 1].clone()
    discount_t, weights = torch.full((batch,), 0.97, device=device), torch.ones(batch, device=device)
    net, target, optimizer = _plain(learner)

    def step() -> None:
        q_tm1 = net(s_tm1).gather(1, a_tm1[:, None])[:, 0]
        with torch.no_grad():
            q_t = target(s_t)
            chooser = net(s_t) if algorithm.double else q_t
            y = r_t + discount_t * q_t.gather(1, chooser.argmax(1, keepdim=True))[:, 0]
        loss = (weights * F.smooth_l1_loss(q_tm1, y, reduction="none")).mean()
        descend(loss, net, optimizer, 10.0)

    return step


def bare_sequence_step(learner: Learner, batch: int) -> Any:
    """The same for R2D2: torch's LSTM on ready sequences, without episode boundaries."""
    algorithm, device = learner.algorithm, learner.device
    assert isinstance(algorithm, R2D2)
    rows, at, burn_in, length = _batch(learner, batch), algorithm.history - 1, algorithm.burn_in, algorithm.length
    obs = observations(rows, algorithm.history).clone()  # [B, T, ...]
    action, reward = rows["action"][:, at:].clone(), rows["reward"][:, at:].clone()
    net, target, optimizer = _plain(learner)
    taken = F.one_hot(action, net.actions).float()
    steps = slice(burn_in + algorithm.n, burn_in + algorithm.n + length)
    discount, weights = algorithm.gamma**algorithm.n, torch.ones(batch, device=device)

    def unroll(net: Any, state: Any, rows: slice) -> tuple[torch.Tensor, Any]:
        features = net.torso(obs[:, rows].flatten(0, 1)).unflatten(0, reward[:, rows].shape)
        y, state = net.core.cell(recurrent_input(features, taken[:, rows], reward[:, rows]), state)
        return y, state

    def values(net: Any) -> torch.Tensor:
        with torch.no_grad():
            state = unroll(net, None, slice(0, burn_in))[1]
        q: torch.Tensor = net.head(unroll(net, state, slice(burn_in, None))[0])
        return q

    def step() -> None:
        q = values(net)
        with torch.no_grad():
            v = values(target).gather(2, q.argmax(2, keepdim=True))[:, algorithm.n :, 0]
            y = algorithm.h(reward[:, steps] + discount * algorithm.h_inverse(v))
        error = y - q[:, :length].gather(2, action[:, burn_in : burn_in + length, None])[:, :, 0]
        loss = (weights * 0.5 * error.square().sum(1)).mean()
        descend(loss, net, optimizer, 40.0)

    return step


def descend(loss: torch.Tensor, net: nn.Module, optimizer: torch.optim.Optimizer, norm: float) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(net.parameters(), norm)
    optimizer.step()


def _batch(learner: Learner, batch: int) -> Batch:
    sample = learner.store.sample(batch)
    assert sample is not None
    return Batch(sample.rows, sample.starts, sample.weights, learner.device)


def _plain(learner: Learner) -> tuple[Any, Any, torch.optim.Optimizer]:
    """Copies of the network, and an optimizer for one of them."""
    net, target = copy.deepcopy(learner.net), copy.deepcopy(learner.net).requires_grad_(False)
    for module in (*net.modules(), *target.modules()):
        if isinstance(module, nn.LSTM):
            module.flatten_parameters()
    for parameter in net.parameters():
        parameter.grad = None
    return net, target, torch.optim.Adam(net.parameters(), 1e-3, fused=True)
