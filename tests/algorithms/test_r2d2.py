"""R2D2: loss, gradient and priorities from their definitions, what crosses the borders of episodes and of the burn-in, and
that a window's stored state is the one its actor had there."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Log, examples, lstm_cell, select
from oracles import n_step as n_step_by_definition
from oracles import stack_history as seen_by_definition
from oracles import trainable as trainable_by_definition
from test_vtrace import Walk

from veldt.acting.actor import Actor
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Batch
from veldt.algorithms.r2d2 import R2D2, RecurrentQ
from veldt.bench.learner import VECTOR, make_learner
from veldt.callables import name_of
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.experiment.run import Run, train
from veldt.learning.params import LatestParams, Weights
from veldt.learning.returns import rescale, unrescale
from veldt.records.block import Block, Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Uniform
from veldt.storing.windows import Buffers

CPU = torch.device("cpu")
H, C, TAKEN = "state/h", "state/c", "state/taken"
ACTIONS = 3
ENV = EnvSpec("made up", {"obs": spec((3,), np.float32)}, spec((), np.int64), spaces.Discrete(ACTIONS))
SMALL: dict[str, Any] = {"hidden": (6,), "lstm": 5, "head": 4, "gamma": 0.9}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two of them wait for each other longer than such small networks take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The rescaling of values


def h_by_definition(x: float, eps: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def inverse_by_definition(y: float, eps: float) -> float:
    """As Pohlen et al. 2018 have it; without epsilon it is (|y| + 1)^2 - 1."""
    root = (math.sqrt(1 + 4 * eps * (abs(y) + 1 + eps)) - 1) / (2 * eps) if eps else abs(y) + 1
    return math.copysign(root * root - 1, y)


SIZES = np.concatenate([[0.0], np.logspace(-6, 6, 241)])
VALUES = np.concatenate([-SIZES[::-1], SIZES])
KINDS_OF_NUMBERS = {
    "numpy, single": lambda x: x.astype(np.float32),
    "numpy, double": lambda x: x,
    "torch, single": lambda x: torch.from_numpy(x).float(),
    "torch, double": lambda x: torch.from_numpy(x),
}


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1, 0.9])
@pytest.mark.parametrize("kind", KINDS_OF_NUMBERS)
def test_h_and_its_inverse_undo_each_other(kind: str, eps: float) -> None:
    x = KINDS_OF_NUMBERS[kind](VALUES)
    single = "single" in kind
    near = {"rtol": 2e-5, "atol": 5e-7} if single else {"rtol": 1e-11, "atol": 1e-12}
    for function, inverse in ((rescale, unrescale), (unrescale, rescale)):
        # The inverse of what the other way round is a large number would overflow where epsilon is 0.
        some = x if function is rescale else x[abs(x) < 1e4]
        there = function(some, eps)
        assert type(there) is type(x) and there.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(inverse(there, eps)), np.asarray(some), **near)
        np.testing.assert_array_equal(np.asarray(there), -np.asarray(function(-some, eps)))
        steps = np.diff(np.asarray(there))
        assert (steps >= 0).all() and (single or (steps[np.diff(np.asarray(some)) > 0] > 0).all()), "it is monotone"


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("kind", KINDS_OF_NUMBERS)
def test_h_and_its_inverse_are_the_published_ones(kind: str, eps: float) -> None:
    x = KINDS_OF_NUMBERS[kind](VALUES)
    near = {"rtol": 2e-6, "atol": 2e-7} if "single" in kind else {"rtol": 1e-9, "atol": 1e-10}
    np.testing.assert_allclose(rescale(x, eps), [h_by_definition(float(v), eps) for v in x], **near)
    some = x[abs(x) < 1e4]
    near["atol"] *= 3  # the published inverse subtracts near numbers
    np.testing.assert_allclose(unrescale(some, eps), [inverse_by_definition(float(v), eps) for v in some], **near)


def test_h_of_numbers_one_knows() -> None:
    assert rescale(np.array([0.0, 3.0, -8.0, 99.0]), 0.0).tolist() == [0, 1, -2, 9]
    np.testing.assert_allclose(rescale(np.array([3.0, -8.0]), 0.5), [1 + 1.5, -2 - 4])
    np.testing.assert_allclose(unrescale(np.array([2.5, -6.0]), 0.5), [3, -8])


# Random windows


def random_windows(of: R2D2, batch: int, seed: int, padded: bool = True) -> Batch:
    """Runs of a stream in which episodes terminate and are truncated, lives are lost, and observations are bad; some begin
    or end with padding that is full of numbers. The states are random too."""
    rng, size = np.random.default_rng(seed), of.window.rows
    shape = (batch, size)
    host: dict[str, Array] = {
        "obs": rng.normal(size=(*shape, 3)).astype(np.float32),
        "action": rng.integers(0, ACTIONS, shape),
        "reward": (2 * rng.normal(size=shape)).astype(np.float32),
        "discount": np.ones(shape, np.float32),
        "first": np.zeros(shape, np.bool_),
        "last": np.zeros(shape, np.bool_),
        "valid": np.ones(shape, np.bool_),
        "q": rng.normal(size=shape).astype(np.float32),
        "v": rng.normal(size=shape).astype(np.float32),
    }
    for b in range(batch):
        begin = int(rng.integers(0, size)) if padded and rng.random() < 0.25 else 0
        end = int(rng.integers(begin + 1, size + 1)) if padded and rng.random() < 0.3 else size
        begins = begin > 0 or rng.random() < 0.2
        for t in range(begin, end):
            if begins:
                host["first"][b, t], host["reward"][b, t] = True, 0
            over, other = (not begins and rng.random() < 0.15), rng.random()
            host["last"][b, t] = begins = over
            host["discount"][b, t] = 0 if (over and other < 0.5) or (not over and other < 0.05) else 1
            if rng.random() < 0.04:
                host["valid"][b, t], host["obs"][b, t], host["reward"][b, t] = False, 0, 0
        host["valid"][b, :begin] = host["valid"][b, end:] = False
    starts = {name: rng.normal(size=(batch, of.lstm)).astype(np.float32) for name in (H, C)} if of.lstm else {}
    if of.lstm:
        starts[TAKEN] = np.eye(ACTIONS, dtype=np.float32)[rng.integers(0, ACTIONS, batch)]
    return Batch(host, starts, rng.uniform(0.2, 1, batch).astype(np.float32), CPU)


def copied(batch: Batch) -> Batch:
    return select(batch, np.arange(len(batch.weights)))


def network(of: R2D2, seed: int = 0, env: EnvSpec = ENV) -> RecurrentQ:
    """With larger weights than a new one has, so that everything matters."""
    torch.manual_seed(seed)
    net = of.network(env)
    assert isinstance(net, RecurrentQ)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.4 * torch.randn(p.shape))
    return net


def changed(net: RecurrentQ, by: float = 0.1) -> RecurrentQ:
    other, noise = copy.deepcopy(net), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(by * torch.randn(p.shape, generator=noise))
    return other


# Its definition, one window and one row at a time, in double precision


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.weight.double() @ x + layer.bias.double()


def dueling(head: Any, x: torch.Tensor) -> torch.Tensor:
    def stream(net: Any) -> torch.Tensor:
        return linear(net[2], torch.relu(linear(net[0], x))) if isinstance(net, torch.nn.Sequential) else linear(net, x)

    value, advantage = stream(head.value), stream(head.advantage)
    return torch.stack([value[0] + a - sum(advantage) / len(advantage) for a in advantage])


class Row(NamedTuple):
    q: torch.Tensor  # [actions]
    state: tuple[Any, ...]  # h, c and the last action before it


def rows_by_definition(
    of: R2D2, net: RecurrentQ, rows: Any, start: tuple[Any, ...], at: int, cut: int = -1
) -> dict[int, Row]:
    """The network's values of the rows `at` and later of rows [T, ...]. `start`: h, c and the last action before them.
    No gradient goes to what lies before the row `cut`."""
    out: dict[int, Row] = {}
    state = start
    for t in range(at, len(rows["first"])):
        if rows["first"][t]:
            state = tuple(torch.zeros_like(x) for x in state)
        if t == cut:
            state = tuple(x.detach() for x in state)
        before = state
        obs = seen_by_definition(rows["obs"], rows["first"], rows["valid"], t, of.history)
        x = torch.from_numpy(obs.reshape(-1)).double()
        for layer in net.torso.layers:  # type: ignore[union-attr]
            x = torch.relu(linear(layer, x))
        if net.core is not None:
            h, c, taken = state
            reward = float(rows["reward"][t])
            if of.clip_last_reward:
                reward = min(of.clip_last_reward, max(-of.clip_last_reward, reward))
            x, c = lstm_cell(torch.cat([x, taken, torch.tensor([reward]).double()]), h, c, net.core.cell)
            taken = torch.zeros(net.actions).double()
            taken[int(rows["action"][t])] = 1
            state = (x, c, taken)
        out[t] = Row(dueling(net.head, x), before)
    return out


def start_of(of: R2D2, batch: Batch, b: int) -> tuple[Any, ...]:
    if not of.lstm:
        return ()
    h, c, taken = (batch.starts[name][b].double() for name in (H, C, TAKEN))
    return (h, c, taken) if of.stored_state else (torch.zeros_like(h), torch.zeros_like(c), taken)


def return_by_definition(of: R2D2, rows: Any, t: int) -> tuple[float, float, int]:
    clip = of.clip_reward or math.inf
    reward = [min(clip, max(-clip, float(r))) for r in rows["reward"]]
    return n_step_by_definition(reward, rows["discount"], rows["last"], t, of.n, of.gamma)


def target_by_definition(of: R2D2, rows: Any, t: int, values: Any) -> float:
    """y of step t; values[k] is what the row k is bootstrapped with."""
    total, discount, m = return_by_definition(of, rows, t)
    if not of.rescaling:
        return total + discount * values(t + m)
    after = inverse_by_definition(values(t + m), of.h_epsilon)
    return h_by_definition(total + discount * after, of.h_epsilon)


def priority_by_definition(of: R2D2, errors: list[float]) -> float:
    return of.eta * max(errors) + (1 - of.eta) * sum(errors) / len(errors) if errors else 0.0


def loss_by_definition(
    of: R2D2, net: RecurrentQ, target: RecurrentQ, batch: Batch
) -> tuple[torch.Tensor, list[float], list[tuple[bool, int]]]:
    """The loss, the priorities, and of each step that trained whether its return bootstraps, and its m."""
    kinds: list[tuple[bool, int]] = []
    total, priorities = torch.zeros(()).double(), []
    at = of.history - 1
    for b in range(len(batch.weights)):
        rows, start = {name: x[b] for name, x in batch.host.items()}, start_of(of, batch, b)
        online = rows_by_definition(of, net, rows, start, at, at + of.burn_in)
        with torch.no_grad():
            other = rows_by_definition(of, target, rows, start, at)

        def value(k: int, online: Any = online, other: Any = other) -> float:
            return float(other[k].q[int(online[k].q.argmax())])

        errors = []
        for t in range(at + of.burn_in, at + of.burn_in + of.length):
            if trainable_by_definition(rows["valid"], rows["last"], t, of.n):
                error = target_by_definition(of, rows, t, value) - online[t].q[int(rows["action"][t])]
                total = total + float(batch.weights[b]) * 0.5 * error**2 / len(batch.weights)
                errors.append(abs(error.item()))
                _, discount, m = return_by_definition(of, rows, t)
                kinds.append((discount > 0, m))
        priorities.append(priority_by_definition(of, errors))
    return total, priorities, kinds


def gradient(loss: torch.Tensor, net: RecurrentQ) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True)
    return torch.cat([x.flatten() for x in parts])


CASES: dict[str, dict[str, Any]] = {
    "plain": {"burn_in": 3, "length": 4, "stride": 2, "n": 2},
    "no burn-in": {"burn_in": 0, "length": 5, "stride": 5, "n": 1},
    "no stored state": {"burn_in": 3, "length": 4, "stride": 4, "n": 2, "stored_state": False},
    "neither": {"burn_in": 0, "length": 6, "stride": 3, "n": 3, "stored_state": False},
    "not rescaled": {"burn_in": 2, "length": 4, "stride": 2, "n": 3, "rescaling": False},
    "history, n 5": {"burn_in": 2, "length": 5, "stride": 5, "n": 5, "history": 3},
    "history, no burn-in": {"burn_in": 0, "length": 4, "stride": 2, "n": 1, "history": 3},
    "n 5": {"burn_in": 1, "length": 6, "stride": 3, "n": 5, "h_epsilon": 0.1},
    "mean": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "eta": 0.0},
    "last reward clipped": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "clip_last_reward": 0.7},
    "largest": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "eta": 1.0},
    "epsilon 0": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "h_epsilon": 0.0},
    "clipped": {"burn_in": 2, "length": 4, "stride": 2, "n": 3, "clip_reward": 0.7},
    "small head": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "head": 0},
    "feed-forward": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "lstm": 0},
    "feed-forward, history": {"burn_in": 0, "length": 4, "stride": 2, "n": 2, "lstm": 0, "history": 3},
    "one step": {"burn_in": 0, "length": 1, "stride": 1, "n": 2},
    "two layers": {"burn_in": 2, "length": 3, "stride": 1, "n": 2, "hidden": (5, 4)},
}


def r2d2(**more: Any) -> R2D2:
    return R2D2(**(SMALL | more))


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_priorities_are_their_definition(case: str) -> None:
    of = r2d2(**CASES[case])
    net, target, batch = network(of, 1), network(of, 2), random_windows(of, 14, 3)
    expected, priorities, kinds = loss_by_definition(of, net, target, batch)
    assert len(kinds) > 7 and (batch.host["first"][:, of.history - 1 + of.burn_in + 1 :].any() or of.length == 1)
    assert {(True, of.n), (False, of.n)} <= set(kinds) and any(bootstraps and m < of.n for bootstraps, m in kinds) == (
        of.n > 1
    ), "they end in every way"
    found = of.loss(net, target, batch)
    assert set(found.losses) == {""} and found.priorities.shape == (14,) and not found.priorities.requires_grad
    torch.testing.assert_close(found.losses[""].double(), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.priorities, priorities, rtol=2e-4, atol=2e-5)
    one, other = gradient(found.losses[""], net).double(), gradient(expected, net).double()
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    assert other.abs().max() > 1e-3
    assert found.metrics["trained"].item() == pytest.approx(len(kinds) / (14 * of.length))
    assert not any(x.requires_grad for x in found.metrics.values())


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_any_window_is_learned_by_definition(
    burn_in: int, length: int, n: int, history: int, stored: bool, seed: int
) -> None:
    of = r2d2(burn_in=burn_in, length=length, stride=1, n=n, history=history, stored_state=stored)
    net, target, batch = network(of, 1), network(of, 2), random_windows(of, 4, seed)
    expected, priorities, _ = loss_by_definition(of, net, target, batch)
    found = of.loss(net, target, batch)
    torch.testing.assert_close(found.losses[""].double(), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.priorities, priorities, rtol=2e-4, atol=2e-5)


def test_the_settings_that_should_matter_do() -> None:
    base = r2d2(**CASES["plain"])
    net, target, batch = network(base, 1), network(base, 2), random_windows(base, 14, 3)
    plain = base.loss(net, target, batch)
    matter: dict[str, Any] = {"rescaling": False, "stored_state": False, "gamma": 0.5, "clip_last_reward": 1.0}
    for name, value in matter.items():
        other = replace(base, **{name: value})
        assert abs(other.loss(net, target, batch).losses[""] - plain.losses[""]) > 1e-4
    for eta in (0.0, 1.0):
        found = replace(base, eta=eta).loss(net, target, batch)
        assert found.losses[""] == plain.losses[""] and not torch.equal(found.priorities, plain.priorities)


def test_a_window_in_numbers() -> None:
    """A network that gives its observation as the values: what is learned can be worked out in one's head."""
    of = R2D2(gamma=0.5, n=2, burn_in=0, length=2, stride=2, lstm=0, head=0, hidden=(), h_epsilon=0.0, eta=0.9)
    env = EnvSpec("two", {"obs": spec((2,), np.float32)}, spec((), np.int64), spaces.Discrete(2))
    net = of.network(env)
    assert isinstance(net, RecurrentQ)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.head.advantage.weight.copy_(torch.eye(2))
        net.head.value.weight.fill_(0.5)  # type: ignore[union-attr]
    host: dict[str, Array] = {
        "obs": np.array([[[0, 1], [2, 0], [1, 3], [9, 9]]], np.float32),
        "action": np.array([[1, 0, 0, 0]]),
        "reward": np.array([[7, 2, 4, 8]], np.float32),
        "discount": np.array([[1, 1, 1, 0]], np.float32),
        "first": np.zeros((1, 4), np.bool_),
        "last": np.array([[False, False, False, True]]),
        "valid": np.ones((1, 4), np.bool_),
    }
    found = of.loss(net, copy.deepcopy(net), Batch(host, {}, np.array([0.5], np.float32), CPU))
    # 2 + 0.5 x 4 + 0.25 (4^2 - 1) = 7.75 under h against 1; 4 + 0.5 x 8 = 8, sqrt(9) - 1 = 2 against 2
    error = math.sqrt(8.75) - 1 - 1
    assert found.losses[""].item() == pytest.approx(0.5 * 0.5 * error**2, rel=1e-5)
    assert found.priorities.item() == pytest.approx(0.9 * error + 0.1 * error / 2, rel=1e-5)


# What crosses no border


def values_of(of: R2D2, net: RecurrentQ, batch: Batch) -> torch.Tensor:
    """Of all rows after the history, as the loss has them."""
    with torch.no_grad():
        return net(of.sequence(net, batch, batch.starts), of._initial_state(batch.starts))


def scrambled(batch: Batch, rows: Array, starts: Array, seed: int = 9, flags: bool = False) -> Batch:
    """Other observations, actions, rewards and discounts in these rows [B, T], and other states of these windows [B]."""
    rng, other = np.random.default_rng(seed), copied(batch)
    count = int(rows.sum())
    other.host["obs"][rows] = 3 * rng.normal(size=(count, 3))
    other.host["action"][rows] = rng.integers(0, ACTIONS, count)
    other.host["reward"][rows] = 5 * rng.normal(size=count)
    other.host["discount"][rows] = rng.integers(0, 2, count)
    if flags:
        for name in ("first", "last"):
            other.host[name][rows] = rng.integers(0, 2, count)
    for x in other._host_starts.values():
        x[starts] = rng.normal(size=x[starts].shape)
    return other


def same_loss(of: R2D2, net: RecurrentQ, target: RecurrentQ, one: Batch, other: Batch) -> None:
    a, b = of.loss(net, target, one), of.loss(net, target, other)
    torch.testing.assert_close(a.losses, b.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.priorities, b.priorities, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(a.losses[""], net), gradient(b.losses[""], net), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "no burn-in", "history, n 5", "history, no burn-in"])
def test_nothing_before_an_episode_is_known_in_it(case: str) -> None:
    """Values after it begins are the same whatever came before; and so is all that is learned, if nothing before trains."""
    of = r2d2(**CASES[case])
    net, target, at = network(of, 1), network(of, 2), of.history - 1
    batch = random_windows(of, 40, 4, padded=False)
    first = batch.host["first"]
    begins = np.array([np.flatnonzero(row[at:])[-1] + at if row[at:].any() else -1 for row in first])
    before = np.arange(first.shape[1]) < begins[:, None]
    assert (begins > at).sum() > 8
    other = scrambled(batch, before, begins >= 0)
    one, two = values_of(of, net, batch), values_of(of, net, other)
    after = ~before[:, at:]
    torch.testing.assert_close(one[after], two[after], rtol=0, atol=2e-6)
    assert (one - two).abs().amax(-1)[~after].max() > 0.1, "what lies before did change"
    for x in (batch, other):
        x.host["valid"][before] = False
    same_loss(of, net, target, batch, other)
    assert of.loss(net, target, batch).metrics["trained"] > 0.1


@pytest.mark.parametrize("case", ["plain", "no burn-in", "history, n 5", "feed-forward", "one step"])
def test_padding_and_the_action_of_a_last_row_do_not_matter(case: str) -> None:
    of = r2d2(**CASES[case])
    net, target, at = network(of, 1), network(of, 2), of.history - 1
    batch = random_windows(of, 40, 5)
    valid, first = batch.host["valid"], batch.host["first"]
    ends = np.array([np.flatnonzero(row)[-1] if row.any() else -1 for row in valid])
    tail = np.arange(valid.shape[1]) > ends[:, None]  # nothing valid follows
    begins = np.array([np.flatnonzero(row)[0] if row.any() else valid.shape[1] for row in valid])
    front = (np.arange(valid.shape[1]) < begins[:, None]) & (
        first[np.arange(len(first)), begins.clip(0, valid.shape[1] - 1)]
    )[:, None]
    assert tail.any() and front.any() and not valid[tail | front].any()
    same_loss(of, net, target, batch, scrambled(batch, tail, np.zeros(len(first), np.bool_), flags=True))
    same_loss(of, net, target, batch, scrambled(batch, front, front[:, at]))
    over = copied(batch)
    over.host["action"][batch.host["last"]] += 1
    over.host["action"] %= ACTIONS
    assert (over.host["action"] != batch.host["action"]).any()
    followed = np.pad(first[:, 1:], ((0, 0), (0, 1)), constant_values=True) | ~np.pad(valid[:, 1:], ((0, 0), (0, 1)))
    over.host["action"][~followed] = batch.host["action"][~followed]
    same_loss(of, net, target, batch, over)


@pytest.mark.parametrize("case", ["plain", "history, n 5", "feed-forward"])
def test_a_window_in_which_nothing_trains_has_priority_zero(case: str) -> None:
    of = r2d2(**CASES[case])
    net, target, batch = network(of, 1), network(of, 2), random_windows(of, 6, 6, padded=False)
    whole = of.loss(net, target, batch)
    batch.host["valid"][2] = False
    batch.host["last"][4] = True
    found = of.loss(net, target, batch)
    assert found.priorities[[2, 4]].tolist() == [0, 0] and whole.priorities[[2, 4]].min() > 0
    rest = [0, 1, 3, 5]
    torch.testing.assert_close(found.priorities[rest], whole.priorities[rest], rtol=1e-5, atol=1e-6)
    batch.host["valid"][:] = False
    found = of.loss(net, target, batch)
    assert found.losses[""] == 0 and not found.priorities.any() and not gradient(found.losses[""], net).any()
    assert all(x.isfinite() for x in found.metrics.values())


class Leaves(Batch):
    """A batch whose observations and states are leaves."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch.host, batch._host_starts, batch.weights.numpy(), CPU)
        self._moved["obs"] = torch.from_numpy(batch.host["obs"].copy()).requires_grad_()
        self.leaves = {name: x.clone().requires_grad_() for name, x in batch.starts.items()}

    @property
    def starts(self) -> dict[str, torch.Tensor]:
        return self.leaves


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("burn_in", [0, 1, 4])
def test_no_gradient_goes_into_the_burn_in(burn_in: int, history: int, stored: bool) -> None:
    of = r2d2(burn_in=burn_in, length=3, stride=3, n=2, history=history, stored_state=stored)
    net, target = network(of, 1), network(of, 2)
    plain = random_windows(of, 6, 7, padded=False)
    plain.host["first"][:] = plain.host["last"][:] = False
    plain.host["valid"][:] = True
    batch = Leaves(plain)
    of.loss(net, target, batch).losses[""].backward()
    slope = batch["obs"].grad
    assert slope is not None
    assert not slope[:, :burn_in].any(), "the rows that only the burn-in sees"
    trained = slope[:, of.history - 1 + burn_in : of.history - 1 + burn_in + of.length]
    assert trained.abs().amax((0, 2)).min() > 1e-4, "and every row that trains has one"
    for name, leaf in batch.leaves.items():
        reached = leaf.grad is not None and bool(leaf.grad.any())
        assert reached == (burn_in == 0 and (stored or name == TAKEN)), name


@pytest.mark.parametrize("case", ["plain", "no stored state", "history, n 5"])
def test_each_network_makes_its_own_state(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = r2d2(**CASES[case])
    net, target, batch = network(of, 1), network(of, 2), random_windows(of, 8, 8, padded=False)
    made: list[tuple[int, dict[str, torch.Tensor]]] = []
    plain = RecurrentQ.burn_in

    def burn_in(self: RecurrentQ, rows: Any, state: Any) -> Any:
        out = plain(self, rows, state)
        made.append((id(self), {name: x.clone() for name, x in out.items()}))
        return out

    monkeypatch.setattr(RecurrentQ, "burn_in", burn_in)

    def states(online: RecurrentQ, other: RecurrentQ) -> tuple[Any, Any, Any]:
        made.clear()
        found = of.loss(online, other, batch)
        by = dict(made)
        assert len(made) == 2 and set(by) == {id(online), id(other)}, "each is burnt in once"
        return by[id(online)], by[id(other)], found

    def same(one: Any, two: Any) -> bool:
        return all(torch.equal(one[name], two[name]) for name in (H, C))

    ours, theirs, found = states(net, target)
    assert not same(ours, theirs)
    ours_2, theirs_2, found_2 = states(net, changed(target))
    assert same(ours, ours_2) and not same(theirs, theirs_2), "the target changed alone"
    assert torch.equal(found.metrics["q_mean"], found_2.metrics["q_mean"]) and found.losses[""] != found_2.losses[""]
    ours_3, theirs_3, _ = states(changed(net), target)
    assert same(theirs, theirs_3) and not same(ours, ours_3), "the online network changed alone"


def test_the_bootstrap_is_the_targets_value_of_the_online_networks_choice() -> None:
    """A target that is shifted by a number shifts its values alone, whatever it would have chosen."""
    of = r2d2(burn_in=2, length=4, stride=2, n=1, rescaling=False, gamma=1.0, eta=0.0)
    net, batch = network(of, 1), random_windows(of, 6, 8, padded=False)
    batch.host["last"][:] = batch.host["first"][:] = False
    batch.host["valid"][:], batch.host["discount"][:] = True, 1
    best, worst = (values_of(of, net, batch)[:, of.burn_in :], -values_of(of, net, batch)[:, of.burn_in :])
    upside_down = copy.deepcopy(net)
    with torch.no_grad():
        for stream in (upside_down.head.advantage, upside_down.head.value):
            stream[2].weight.neg_(), stream[2].bias.neg_()  # type: ignore[index, union-attr]
    found = of.loss(net, upside_down, batch).priorities
    reward = batch["reward"][:, of.burn_in + 1 :]
    taken = best[:, :4].gather(2, batch["action"][:, of.burn_in : -1, None])[:, :, 0]
    choice = best[:, 1:].argmax(2, keepdim=True)
    expected = (reward + worst[:, 1:].gather(2, choice)[:, :, 0] - taken).abs().mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (worst.argmax(2) != best.argmax(2)).all()


# Acting


def test_the_state_moves_on_with_the_action_that_was_taken() -> None:
    """Exploration comes after the network's step: h and c are those of a greedy step, and only the action differs."""
    of, n, rng = r2d2(), 400, np.random.default_rng(0)
    net = network(of).requires_grad_(False)
    rows = {"obs": torch.randn(n, 1, 3), "reward": torch.randn(n, 1)}
    before = {H: torch.randn(n, 5), C: torch.randn(n, 5), TAKEN: torch.eye(3)[torch.randint(0, 3, (n,))]}
    kept = {name: x.clone() for name, x in before.items()}
    (greedy, state), (out, after) = (of.act(net, rows, before, np.full(n, amount), rng) for amount in (0.0, 1.0))
    assert all(torch.equal(before[name], kept[name]) for name in before), "the state before is recorded: it stays"
    assert set(after) == set(before) == set(of.state(ENV))
    for name in (H, C):
        torch.testing.assert_close(after[name], state[name], rtol=0, atol=0)
        assert not torch.equal(after[name], before[name])
    assert 0.2 < (out["action"] == greedy["action"]).mean() < 0.5
    for x, to in ((greedy, state), (out, after)):
        assert torch.equal(to[TAKEN], torch.eye(3)[torch.from_numpy(x["action"])])
        np.testing.assert_array_equal(x["v"], greedy["q"])
    for i in range(0, n, 40):
        seen = {"obs": rows["obs"][i].numpy(), "first": [False], "valid": [True], "action": out["action"][i : i + 1]}
        row = seen | {"reward": rows["reward"][i].numpy()}
        start = tuple(kept[name][i].double() for name in (H, C, TAKEN))
        q = rows_by_definition(of, net, row, start, 0)[0].q
        assert greedy["action"][i] == int(q.argmax()) and greedy["q"][i] == pytest.approx(float(q.max()), abs=1e-5)
        assert out["q"][i] == pytest.approx(float(q[out["action"][i]]), abs=1e-5)
        h, c = lstm_cell(
            torch.cat([torch.relu(linear(net.torso.layers[0], rows["obs"][i, 0].double())), start[2], row_reward(rows, i)]),
            *start[:2],
            net.core.cell,  # type: ignore[union-attr]
        )
        torch.testing.assert_close(after[H][i].double(), h, rtol=0, atol=1e-5)
        torch.testing.assert_close(after[C][i].double(), c, rtol=0, atol=1e-5)


def row_reward(rows: Any, i: int) -> torch.Tensor:
    return rows["reward"][i].double()


def test_without_an_lstm_nothing_but_the_observation_matters() -> None:
    of = r2d2(**CASES["feed-forward"])
    assert of.state(ENV) == {} and network(of).core is None
    net, batch = network(of), random_windows(of, 6, 1, padded=False)
    q = values_of(of, net, batch)
    other = copied(batch)
    other.host["reward"] += 5
    other.host["action"] = (other.host["action"] + 1) % ACTIONS
    other.host["first"] = ~other.host["first"]
    assert torch.equal(values_of(of, net, other), q)
    other.host["obs"][:, 3] += 1
    moved = (values_of(of, net, Batch(other.host, {}, other.weights.numpy(), CPU)) != q).any(-1)
    assert moved[:, 3].all() and not moved[:, [0, 1, 2, 4, 5]].any()
    out, state = of.act(net.requires_grad_(False), {"obs": batch["obs"][:, :1]}, {}, np.zeros(6), np.random.default_rng(0))
    assert state == {}
    np.testing.assert_allclose(out["v"], q[:, 0].amax(1), rtol=1e-5)


# An actor, a policy and a recorder


class Rig(NamedTuple):
    algorithm: R2D2
    net: RecurrentQ  # the one that acted
    blocks: list[tuple[Block, Array]]  # with their priorities, and the column `place`: stream, row and lane
    log: Log  # the streams
    batch: Batch  # windows that a store gave
    schema: Schema


class Keeping:
    """A store that also keeps what was put in."""

    def __init__(self, store: Replay) -> None:
        self.store = store
        self.blocks: list[tuple[Block, Array]] = []

    def insert(self, block: Block, priorities: Any) -> bool:
        self.blocks.append((block, priorities))
        return self.store.insert(block, priorities)


ENVS: dict[str, Any] = {
    "walk": lambda: Walk(spaces.Discrete(ACTIONS)),
    "maze": "veldt/TMaze-v0",
    "cart": "veldt/MaskedCartPole-v0",
}
WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {"burn_in": 3, "length": 4, "stride": 2, "n": 2},
    "no burn-in": {"burn_in": 0, "length": 3, "stride": 3, "n": 1},
    "history": {"burn_in": 2, "length": 4, "stride": 4, "n": 3, "history": 3},
    "history, overlapping": {"burn_in": 5, "length": 3, "stride": 1, "n": 5, "history": 2},
    "long burn-in": {"burn_in": 9, "length": 2, "stride": 2, "n": 1},
    "one step": {"burn_in": 0, "length": 1, "stride": 1, "n": 2, "history": 2},
    "zero state": {"burn_in": 2, "length": 4, "stride": 2, "n": 2, "stored_state": False},
    "zero state, no burn-in": {"burn_in": 0, "length": 4, "stride": 2, "n": 2, "stored_state": False},
}


@functools.cache
def rig(window: str = "plain", env: str = "walk", policy: str = "local") -> Rig:
    """Three lives of the environments: the first is dropped with what it had not sent, the others are cut. The weights do
    not change meanwhile."""
    of = r2d2(**WINDOWS[window])
    make = partial(make_env, ENVS[env])
    probe = make(1)
    rows = {**probe.spec.step, "action": probe.spec.action, **of.extras(probe.spec), "place": spec((3,), np.int64)}
    schema = Schema(rows, of.window, of.stride * (12 // of.stride), of.state(probe.spec))
    params, counters, net = LatestParams(), Counters(), network(of, 3, probe.spec)
    n, groups = 2, (0, 1)
    who: LocalPolicy | BatchedPolicy
    if policy != "batched":
        who = LocalPolicy(of, probe.spec, params, counters, 0.5, seed=1)
    else:
        who = BatchedPolicy(
            of, probe.spec, params, counters, np.full(4, 0.5), 1, groups=len(groups), n=n, batch=4, wait=0.0
        )
    params.publish(Weights(0, torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()))
    who.pull()
    log, store = Log(who), Keeping(Replay(schema, Uniform(10**4), MinSize(1), 10**4, 10**4 // schema.starts))
    recorder = Recorder(log, store, of, schema, max_age=0.0 if policy == "short blocks" else math.inf)  # type: ignore[arg-type]
    actor = Actor(make, n, recorder, counters, seed=3, groups=groups)
    for life, steps in enumerate((33, 40, 17)):
        if life:
            actor.resume(life)
        for _ in range(2 * steps if policy == "batched" else steps):
            actor.step()
        while life and not actor.cut():
            pass
    actor.close(), probe.close()
    sample = store.store.sample(300)
    assert sample is not None and isinstance(who.net, RecurrentQ)
    return Rig(of, who.net, store.blocks, log, Batch(sample.rows, sample.starts, np.ones(300, np.float32), CPU), schema)


class Lane(NamedTuple):
    rows: dict[str, Array]  # of one environment, a whole stream
    outputs: dict[int, Row]  # by definition


def lanes_of(of: R2D2, net: RecurrentQ, log: Log) -> dict[tuple[int, int], Lane]:
    """The values and states of every row that was acted on, from the beginning of its stream: by stream and lane."""
    out = {}
    for number, stream in enumerate(log.streams):
        for lane in range(len(stream.rows[0]["first"]) if stream.rows else 0):
            rows = {name: np.array(stream.lane(lane, name)) for name in stream.rows[0] if name not in (H, C, TAKEN)}
            assert rows["first"][0]
            zero = (torch.zeros(of.lstm).double(), torch.zeros(of.lstm).double(), torch.zeros(net.actions).double())
            with torch.no_grad():
                out[number, lane] = Lane(rows, rows_by_definition(of, net, rows, zero, 0))
    return out


def check_state(lane: Lane, position: int, start: dict[str, Array]) -> bool:
    """That the state is the one before this row of the stream; whether it is more than zeros."""
    if position < 0:  # padding
        assert not any(x.any() for x in start.values())
        return False
    for name, x in zip((H, C, TAKEN), lane.outputs[position].state, strict=True):
        np.testing.assert_allclose(start[name], x, rtol=0, atol=1e-5, err_msg=f"{name} of row {position}")
    began = bool(lane.rows["first"][position])
    assert not began or not any(x.any() for x in start.values())
    if not began:
        assert start[TAKEN].tolist() == np.eye(start[TAKEN].size)[lane.rows["action"][position - 1]].tolist()
    return not began


RIGS = [(window, "walk", "local") for window in WINDOWS] + [
    ("plain", "walk", "batched"),
    ("history", "walk", "batched"),
    ("plain", "walk", "short blocks"),
    ("history, overlapping", "cart", "short blocks"),
    ("plain", "maze", "local"),
    ("history", "maze", "batched"),
    ("history", "cart", "local"),
    ("plain", "cart", "batched"),
]


@pytest.mark.parametrize("how", RIGS, ids=lambda how: "/".join(how))
def test_the_stored_state_is_that_of_the_episode_so_far(how: tuple[str, str, str]) -> None:
    """At every start of a window in every block, and of what a store gives; worked out from the beginning of the stream
    with the weights that acted, one row at a time. So are the values that were recorded."""
    of, net, blocks, log, batch, schema = rig(*how)
    lanes, at, moved, starts = lanes_of(of, net, log), of.history - 1, 0, 0
    assert len({number for number, _ in lanes}) == 6, "two groups, three lives"
    for (number, _), lane in lanes.items():
        for t, row in lane.outputs.items():
            assert lane.rows["q"][t] == pytest.approx(float(row.q[lane.rows["action"][t]]), abs=2e-5), (number, t)
            assert lane.rows["v"][t] == pytest.approx(float(row.q.max()), abs=2e-5)
    for block, _ in blocks:
        columns = block.columns()
        states = schema.start_layout.columns(block.starts)
        known, end = np.flatnonzero(columns["valid"])[[0, -1]]
        number, position, lane_number = columns["place"][known].tolist()
        lane = lanes[number, lane_number]
        for s in range(schema.starts):
            row = position - known + s * of.stride + at
            if s * of.stride + at > end:  # not there when the block was made
                assert not block.items[s]
                continue
            moved += check_state(lane, row, {name: x[s] for name, x in states.items()})
            starts += 1
    assert moved > 30 and starts > moved + 3
    for b in range(len(batch.weights)):
        columns = {name: x[b] for name, x in batch.host.items()}
        known = np.flatnonzero(columns["valid"])[-1]
        number, position, lane_number = columns["place"][known].tolist()
        start = {name: x[b].numpy() for name, x in batch.starts.items()}
        check_state(lanes[number, lane_number], position - known + at, start)


@pytest.mark.parametrize("how", [how for how in RIGS if "zero" not in how[0]], ids=lambda how: "/".join(how))
def test_with_the_weights_that_acted_the_learner_finds_the_recorded_values(how: tuple[str, str, str]) -> None:
    """In every row that trains or is bootstrapped from, after the burn-in, whatever episodes begin within the window."""
    of, net, _, _, batch, _ = rig(*how)
    at = of.history - 1 + of.burn_in
    rows = of.sequence(net, batch, batch.starts)
    with torch.no_grad():
        state = net.burn_in(rows[:, : of.burn_in], of._initial_state(batch.starts))
        q = net(rows[:, of.burn_in :], state)
    valid = batch.host["valid"][:, at:]
    taken = q.gather(2, batch["action"][:, at:, None])[:, :, 0].numpy()
    np.testing.assert_allclose(taken[valid], batch.host["q"][:, at:][valid], atol=5e-5)
    np.testing.assert_allclose(q.amax(2).numpy()[valid], batch.host["v"][:, at:][valid], atol=5e-5)
    assert valid.sum() > 500 and batch.host["q"][:, at:][valid].std() > 0.02


def windows_of(block: Block, schema: Schema) -> Batch:
    """All windows of a block that are items."""
    which = np.flatnonzero(block.items)
    rows = which[:, None] * schema.window.stride + np.arange(schema.window.rows)
    starts = {name: x[which] for name, x in schema.start_layout.columns(block.starts).items()}
    return Batch({name: x[rows] for name, x in block.columns().items()}, starts, np.ones(len(which), np.float32), CPU)


@pytest.mark.parametrize(
    ("window", "clip_reward"), [*((window, 0.0) for window in WINDOWS), ("plain", 0.5), ("history", 0.5)]
)
def test_initial_priorities_are_their_definition(window: str, clip_reward: float) -> None:
    """From the recorded values, under h. They are what the loss gives with the weights that acted as network and target."""
    of, net, blocks, _, _, schema = rig(window)
    of = replace(of, clip_reward=clip_reward)
    checked = 0
    for block, recorded in blocks:
        columns = {name: x.copy() for name, x in block.columns().items()}
        priorities = of.priority(columns, schema)
        assert priorities is not None and priorities.shape == (schema.starts,) and np.isfinite(priorities).all()
        if not clip_reward:
            np.testing.assert_array_equal(priorities, recorded)
        for s in range(schema.starts):
            begin = schema.window.before + s * of.stride
            errors = [
                abs(target_by_definition(of, columns, t, lambda k: float(columns["v"][k])) - float(columns["q"][t]))  # noqa: B023
                for t in range(begin, begin + of.length)
                if trainable_by_definition(columns["valid"], columns["last"], t, of.n)
            ]
            assert priorities[s] == pytest.approx(priority_by_definition(of, errors), rel=1e-4, abs=1e-5)
            assert bool(errors) == block.items[s]
            checked += bool(errors)
        if of.stored_state:
            windows = windows_of(block, schema)
            found = of.loss(net, copy.deepcopy(net), windows).priorities
            np.testing.assert_allclose(priorities[block.items], found, rtol=1e-3, atol=1e-4)
    assert checked > 40


def test_initial_priorities_of_many_lanes_are_those_of_each() -> None:
    of, _, blocks, _, _, schema = rig("plain")
    columns = [block.columns() for block, _ in blocks]
    together = of.priority({name: np.stack([c[name] for c in columns]) for name in columns[0]}, schema)
    assert together is not None
    np.testing.assert_allclose(together, [priorities for _, priorities in blocks], rtol=1e-6)


# Delta-Q


def all_blocks(of: Rig) -> Batch:
    rows = [block.columns() for block, _ in of.blocks]
    starts = [of.schema.start_layout.columns(block.starts) for block, _ in of.blocks]
    host, first = ({name: np.stack([c[name] for c in columns]) for name in columns[0]} for columns in (rows, starts))
    return Batch(host, first, np.ones(len(rows), np.float32), CPU)


def delta_q_by_definition(of: R2D2, net: RecurrentQ, blocks: Batch, schema: Schema) -> tuple[list[float], int]:
    """The gap at the first and at the last step that a window trains, their mean over all windows that lie in one episode
    whose beginning is before them in the block; and how many these are."""
    at, span, gaps = of.history - 1, of.burn_in + of.length, []
    for b in range(len(blocks.host["first"])):
        rows = {name: x[b] for name, x in blocks.host.items()}
        zero = [torch.zeros(of.lstm).double(), torch.zeros(of.lstm).double(), torch.zeros(net.actions).double()]
        runs: dict[int, dict[int, Row]] = {}  # from every row where an episode begins
        for s in range(schema.starts):
            begin = s * of.stride + at  # the first row after the history
            if not rows["valid"][begin : begin + span].all() or rows["first"][begin : begin + span].any():
                continue
            started = np.flatnonzero(rows["first"][at:begin])
            if not len(started):
                continue
            began = at + int(started[-1])
            if began not in runs:
                runs[began] = rows_by_definition(of, net, rows, tuple(zero), began)
            true = runs[began]
            h, c, taken = (blocks.starts[name][b, s].double() for name in (H, C, TAKEN))
            start = (h, c, taken) if of.stored_state else (zero[0], zero[1], taken)
            part = {name: x[: begin + span] for name, x in rows.items()}
            used = rows_by_definition(of, net, part, start, begin)
            trained = range(begin + of.burn_in, begin + span)
            scale = max(float(true[t].q.abs().max()) for t in trained)
            gaps.append([float((used[t].q - true[t].q).square().sum().sqrt()) / scale for t in (trained[0], trained[-1])])
    return np.mean(gaps, axis=0).tolist() if gaps else [], len(gaps)


@pytest.mark.parametrize(
    ("window", "env"),
    [
        ("plain", "cart"),
        ("plain", "maze"),
        ("no burn-in", "cart"),
        ("history", "cart"),
        ("zero state", "cart"),
        ("zero state, no burn-in", "maze"),
    ],
)
def test_delta_q_is_its_definition(window: str, env: str) -> None:
    """With the weights that acted stored states are right; once the weights have changed they are stale."""
    made = rig(window, env)
    of, net, schema, blocks = made.algorithm, made.net, made.schema, all_blocks(made)
    same = of.diagnose(net, lambda: blocks, schema)
    later = changed(net, 0.3)
    stale = of.diagnose(later, lambda: blocks, schema)
    assert set(same) == set(stale) == {"delta_q_first", "delta_q_last"}
    for weights, found in ((net, same), (later, stale)):
        with torch.no_grad():
            expected, count = delta_q_by_definition(of, weights, blocks, schema)
        assert count > 5 and list(found.values()) == pytest.approx(expected, rel=1e-3, abs=2e-5)
    if of.stored_state:
        assert max(same.values()) < 2e-5
    else:
        assert same["delta_q_first"] > 1e-3
    assert stale["delta_q_first"] > 1e-3


def test_delta_q_leaves_out_windows_of_episodes_that_began_elsewhere() -> None:
    made = rig("plain", "cart")
    of, schema, blocks = made.algorithm, made.schema, all_blocks(made)
    blocks.host["first"][:] = False
    assert of.diagnose(made.net, lambda: blocks, schema) == {}, "their true state is unknown"
    blocks.host["first"][:, 0] = True
    blocks.host["valid"][:, schema.window.before] = False
    assert set(of.diagnose(made.net, lambda: blocks, schema)) <= {"delta_q_first", "delta_q_last"}
    assert r2d2(lstm=0).diagnose(network(r2d2(lstm=0)), lambda: blocks, schema) == {}, "there is no state"


# What can be asked for


def test_the_state_and_what_is_recorded() -> None:
    of = r2d2()
    assert {name: (c.shape, c.dtype) for name, c in of.state(ENV).items()} == {
        H: ((5,), np.float32),
        C: ((5,), np.float32),
        TAKEN: ((3,), np.float32),
    }
    assert {name: (c.shape, c.dtype) for name, c in of.extras(ENV).items()} == {
        "q": ((), np.float32),
        "v": ((), np.float32),
    }
    window = R2D2(history=4, burn_in=40, length=80, n=5, stride=40).window
    assert (window.rows, window.before, window.after, window.lookahead) == (3 + 40 + 80 + 5, 43, 45, 5)


def test_the_paper_settings_are_the_defaults() -> None:
    of = R2D2()
    assert (of.gamma, of.n, of.burn_in, of.length, of.stride, of.eta) == (0.997, 5, 40, 80, 40, 0.9)
    assert (of.h_epsilon, of.lstm, of.head, of.rescaling, of.stored_state) == (1e-3, 512, 512, True, True)
    assert of.clip_reward == of.clip_last_reward == 0


def test_the_network_for_atari_has_the_papers_layers() -> None:
    """Nature's convolutions and its 512; an LSTM of 512 over them, the last action and reward; two streams of 512."""
    screen = EnvSpec("atari", {"obs": spec((84, 84), np.uint8)}, spec((), np.int64), spaces.Discrete(18))
    torso = (4 * 8 * 8 * 32 + 32) + (32 * 4 * 4 * 64 + 64) + (64 * 3 * 3 * 64 + 64) + (64 * 7 * 7 * 512 + 512)
    lstm = 4 * 512 * ((512 + 18 + 1) + 512 + 2)
    streams = 2 * (512 * 512 + 512) + (512 * 18 + 18) + (512 + 1)
    net = R2D2(history=4).network(screen)
    assert sum(p.numel() for p in net.parameters()) == torso + lstm + streams


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"burn_in": -1}, "burn_in must not be negative, but it is -1"),
        ({"stride": 0}, "1 <= stride <= length"),
        ({"stride": 5, "length": 4}, "1 <= stride <= length, not 5 and 4"),
        ({"stride": 0, "length": 0}, "1 <= stride <= length"),
        ({"lstm": -1}, "lstm must not be negative, but it is -1"),
        ({"head": -1}, "head must not be negative, but it is -1"),
        ({"hidden": (8, 0)}, "hidden must be greater than 0, not 0"),
        ({"clip_last_reward": -1.0}, "clip_last_reward must not be negative"),
        ({"eta": 1.1}, "eta must be from 0 to 1"),
        ({"eta": float("nan")}, "eta must be from 0 to 1"),
        ({"h_epsilon": -0.1}, "0 <= h_epsilon < 1"),
        ({"h_epsilon": 1.0}, "0 <= h_epsilon < 1, not 1.0"),
        ({"n": 0}, r"algorithm\.n must be greater than 0, not 0"),
        ({"history": 0}, r"algorithm\.history must be greater than 0, not 0"),
        ({"gamma": 1.1}, r"algorithm\.gamma must be from 0 to 1, not 1\.1"),
        ({"stacked": ("a",)}, "no observation 'a' to stack"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_said(wrong: dict[str, Any], says: str) -> None:
    R2D2().check(ENV)
    with pytest.raises(UserError, match=says):
        R2D2(**wrong).check(ENV)


@pytest.mark.parametrize("wrong", [{"stride": 0}, {"stride": 500}, {"burn_in": -1}, {"length": 0}, {"history": 0}], ids=str)
def test_a_run_with_settings_that_cannot_work_is_refused_in_words(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r2d2 needs|algorithm\.(burn_in|history) must"):
        train(
            "r2d2",
            env="veldt/TMaze-v0",
            run=tmp_path / "r",
            quiet=True,
            steps=50,
            **{f"algorithm.{k}": v for k, v in wrong.items()},
        )


def test_actions_that_are_no_choice_are_refused_in_words() -> None:
    arm = EnvSpec("arm", ENV.observation, spec((2,), np.float32), spaces.Box(-1, 1, (2,)))
    with pytest.raises(UserError, match="r2d2 needs a Discrete action space, but arm has Box"):
        R2D2().check(arm)


class Viewing(torch.nn.Module):
    """A network that views what it sees in another shape."""

    def __init__(self, env: EnvSpec) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(len(x), -1))


def flat_network(env: EnvSpec) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Flatten(0))


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("lstm", [0, 4])
def test_a_network_of_ones_own_below_the_lstm(lstm: int, history: int) -> None:
    of = r2d2(lstm=lstm, history=history, burn_in=2, length=3, stride=3, n=2, network_from=name_of(Viewing))
    net, target, batch = network(of, 1), network(of, 2), random_windows(of, 5, 1)
    found = of.loss(net, target, batch)
    assert found.losses[""].isfinite() and gradient(found.losses[""], net).any()
    rows = {name: batch[name][:, :history] for name in ("obs", "first", "valid", "reward")}
    out, state = of.act(net.requires_grad_(False), rows, batch.starts, np.zeros(5), np.random.default_rng(0))
    assert out["action"].shape == (5,) and set(state) == set(of.state(ENV))
    with pytest.raises(UserError, match=r"to \[B, features\]; for B = 2 it gave \[4\]"):
        r2d2(network_from=name_of(flat_network)).network(ENV)


@pytest.mark.parametrize("lstm", [0, 4])
def test_a_dict_observation_reaches_the_network_stacked_by_key(lstm: int) -> None:
    columns = {"obs/a": spec((3,), np.float32), "obs/b": spec((2, 2), np.float32)}
    env = EnvSpec("d", columns, spec((), np.int64), spaces.Discrete(ACTIONS))
    of = r2d2(burn_in=2, length=3, stride=3, n=2, history=2, stacked=("b",), lstm=lstm)
    of.check(env)
    net, target, plain = network(of, 1, env), network(of, 2, env), random_windows(of, 5, 1)
    rng = np.random.default_rng(0)
    host = {name: x for name, x in plain.host.items() if name != "obs"}
    host |= {name: rng.normal(size=(5, of.window.rows, *c.shape)).astype(np.float32) for name, c in columns.items()}
    batch = Batch(host, {name: x.numpy() for name, x in plain.starts.items()}, np.ones(5, np.float32), CPU)
    assert of.loss(net, target, batch).losses[""].isfinite()
    rows = {name: torch.from_numpy(x[:, :2]) for name, x in host.items()}
    q = values_of(of, net, batch)[:, 0]
    began = host["first"][:, 1]
    out, _ = of.act(net.requires_grad_(False), rows, batch.starts, np.zeros(5), rng)
    np.testing.assert_allclose(out["v"][~began], q.amax(1)[~began], atol=1e-5)


def test_a_run_tells_delta_q_and_is_not_changed_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "algorithm.burn_in": 2,
        "algorithm.length": 4,
        "algorithm.stride": 2,
        "algorithm.lstm": 8,
        "algorithm.head": 0,
    }
    settings |= {
        "actor.block": 32,
        "store.min_size": 50,
        "steps": 2_000,
        "runtime": "inline",
        "eval.every": 0,
        "log.every": 1e-9,
    }
    told = []
    for every in (5, 10**9):
        monkeypatch.setattr("veldt.learning.learner.DIAGNOSE_EVERY", every)
        run = train("r2d2", env="veldt/TMaze-v0", run=tmp_path / str(every), quiet=True, **settings)
        told.append([line["delta_q_last"] for line in run.metrics if "delta_q_last" in line])
    assert told[0] and max(told[0]) > 0 and not told[1]
    assert Run(tmp_path / "5").weights_hash() == run.weights_hash()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_drawn_early_leaves_the_batch_that_is_learned_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether samples lie in memory that is used again or not makes no difference, in pinned memory either."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if device == "cpu":
        plain = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **other: plain(*shape, **other))
    of, weights = R2D2(burn_in=4, length=16, stride=8, n=3, lstm=16, head=0, hidden=(16,)), []
    for again in (True, False):
        learner = make_learner(VECTOR, of, 256, 60, device, fresh=64)
        learner.use_graph()
        buffers = learner.store._windows._buffers = Buffers(pinned=True)  # type: ignore[attr-defined]
        buffers.KEEP = Buffers.KEEP if again else 0
        for _ in range(12):
            assert learner.step()
        assert bool(next(iter(buffers._kept.values()))) is again, "large enough to be used again"
        weights.append(learner.vector.cpu())
    torch.testing.assert_close(*weights, rtol=0 if device == "cpu" else 1e-5, atol=0 if device == "cpu" else 1e-6)
