"""V-trace and IMPALA's loss: returns, loss and gradient from their definitions, and that a learner sees what acting saw."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Log, examples, lstm_cell, select, tensors
from oracles import n_step as n_step_by_definition
from oracles import stack_history as seen_by_definition
from oracles import trainable as trainable_by_definition
from oracles import vtrace as target_by_definition
from oracles import vtrace_advantage as advantage_by_definition

from veldt.acting.actor import Actor
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.actor_critic import PolicyAndValue
from veldt.algorithms.base import Batch
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.learning.distributions import Gaussian
from veldt.learning.params import LatestParams, Weights
from veldt.learning.returns import vtrace
from veldt.nets.networks import Rows
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec
from veldt.storing.limiters import MinSize
from veldt.storing.ring import UnrollQueue

CPU = torch.device("cpu")


# Returns


class Columns(NamedTuple):
    """Of B unrolls of T steps: value, reward and discount [B, T + 1]; trains and ratio [B, T]."""

    value: Array
    reward: Array
    discount: Array
    trains: Array
    ratio: Array

    def lane(self, b: int) -> list[Array]:
        return [x[b] for x in self]


def both(columns: Any, *how: Any) -> list[Any]:
    """vtrace in numpy and in torch, as numpy."""
    out = vtrace(*tensors(*columns), *how)
    return [vtrace(*columns, *how), type(out)(*(x.numpy() for x in out))]


def steps_that_train(valid: Any, last: Any) -> Array:
    return np.array(
        [[trainable_by_definition(v, e, t, 1) for t in range(len(v) - 1)] for v, e in zip(valid, last, strict=True)]
    )


@st.composite
def unrolls(draw: Any) -> Columns:
    """With ends, truncations, lives lost (terminal without an end) and rows that are not valid."""
    batch, size = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    shape = (batch, size + 1)

    def grid(values: Any, rows: int = size + 1) -> Array:
        return np.array(draw(st.lists(values, min_size=batch * rows, max_size=batch * rows))).reshape(batch, rows)

    kinds = grid(st.sampled_from(["on", "on", "on", "on", "life", "end", "limit", "bad"]))
    value, reward = (grid(st.integers(-20, 20)).astype(np.float32) / 4 for _ in range(2))
    discount = (~np.isin(kinds, ["life", "end"])).astype(np.float32)
    trains = steps_that_train(kinds != "bad", np.isin(kinds, ["end", "limit"]))
    ratio = grid(st.sampled_from([0.0, 0.03, 0.5, 0.9, 1.0, 1.3, 2.5, 30.0, 1e8]), size).astype(np.float32)
    assert value.shape == shape
    return Columns(value, reward, discount, trains, ratio)


HOW = st.tuples(
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),  # gamma
    st.sampled_from([0.0, 0.7, 1.0]),  # lambda
    st.sampled_from([0.5, 1.0, 3.0]),  # rho
    st.sampled_from([0.4, 1.0, 2.0]),  # c
    st.sampled_from([0.8, 1.0, 4.0]),  # pg
)


@settings(max_examples=examples(200), deadline=None)
@given(unrolls(), HOW)
def test_vtrace_is_the_sum_of_the_definition(case: Columns, how: Any) -> None:
    for out in both(case, *how):
        assert out.target.shape == out.advantage.shape == case.ratio.shape
        assert out.target.dtype == out.advantage.dtype == np.float32
        for b, t in np.ndindex(case.ratio.shape):
            lane = case.lane(b)
            target, advantage = target_by_definition(*lane, t, *how[:4]), advantage_by_definition(*lane, t, *how)
            assert out.target[b, t] == pytest.approx(target, rel=1e-4, abs=2e-3)
            assert out.advantage[b, t] == pytest.approx(advantage, rel=1e-4, abs=2e-3)
            if not case.trains[b, t]:
                assert (out.target[b, t], out.advantage[b, t]) == (case.value[b, t], 0)


def return_by_definition(value: Any, reward: Any, discount: Any, ends: Any, s: int, gamma: float) -> float:
    """Discounted rewards from step s to the end of the episode or of the unroll, and the value there if it goes on."""
    total, t = 0.0, s
    while True:
        t += 1
        total += gamma ** (t - s - 1) * float(reward[t])
        if discount[t] == 0:
            return total
        if ends[t] or t == len(reward) - 1:
            return total + gamma ** (t - s) * float(value[t])


@settings(max_examples=examples(100), deadline=None)
@given(unrolls(), st.sampled_from([0.5, 0.99, 1.0]), st.sampled_from([1.0, 5.0]))
def test_on_policy_the_target_is_the_return_to_the_end(case: Columns, gamma: float, clip: float) -> None:
    """And the advantage is that return less the value: ratio 1 and lambda 1, whatever is clipped above 1."""
    ends = np.concatenate([~case.trains, np.zeros((len(case.trains), 1), np.bool_)], 1)
    case = case._replace(ratio=np.ones_like(case.ratio))
    for out in both(case, gamma, 1.0, clip, clip, clip):
        for b, t in np.argwhere(case.trains):
            value, reward, discount, *_ = case.lane(b)
            expected = return_by_definition(value, reward, discount, ends[b], t, gamma)
            assert out.target[b, t] == pytest.approx(expected, rel=1e-5, abs=1e-4)
            assert out.advantage[b, t] == pytest.approx(expected - value[t], rel=1e-5, abs=1e-4)


def test_on_policy_the_target_is_the_n_step_return() -> None:
    """n being the whole unroll: the rows beyond the window are the ones that an n-step return would need."""
    rng, size = np.random.default_rng(0), 9
    last = np.zeros(size + 1, np.bool_)
    discount = np.ones(size + 1, np.float32)
    last[[3, 7]], discount[3] = True, 0
    value, reward = (rng.normal(size=size + 1).astype(np.float32) for _ in range(2))
    trains = steps_that_train([np.ones(size + 1, np.bool_)], [last])
    for out in both([value[None], reward[None], discount[None], trains, np.ones((1, size), np.float32)], 0.9):
        for t in np.flatnonzero(trains[0]):
            total, product, m = n_step_by_definition(reward, discount, last, t, size - t, 0.9)
            assert out.target[0, t] == pytest.approx(total + product * value[t + m], abs=1e-5)


def trajectory(rng: Any, size: int) -> Columns:
    """One episode of `size` steps that is truncated: its last row bootstraps, with a discount of 1."""
    value, reward = (rng.normal(size=(1, size + 1)).astype(np.float32) for _ in range(2))
    ratio = np.exp(rng.normal(size=(1, size))).astype(np.float32)
    return Columns(value, reward, np.ones_like(value), np.ones((1, size), np.bool_), ratio)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lambda_", [0.8, 1.0])
def test_nothing_is_passed_back_over_the_end_of_an_episode(seed: int, lambda_: float) -> None:
    """Two trajectories one after the other give what each gives alone, to the bit; the row between does not train."""
    rng = np.random.default_rng(seed)
    one, other = trajectory(rng, int(rng.integers(1, 6))), trajectory(rng, int(rng.integers(1, 6)))
    size = one.ratio.shape[1]
    between = {"trains": np.zeros((1, 1), np.bool_), "ratio": np.full((1, 1), 7, np.float32)}
    joined = Columns(
        *(
            np.concatenate([getattr(one, name), *([between[name]] if name in between else []), getattr(other, name)], 1)
            for name in Columns._fields
        )
    )
    how = (0.95, lambda_, 1.5, 1.2, 1.3)
    for whole, first, second in zip(both(joined, *how), both(one, *how), both(other, *how), strict=True):
        for w, a, b in zip(whole, first, second, strict=True):
            np.testing.assert_array_equal(w[:, :size], a)
            np.testing.assert_array_equal(w[:, size + 1 :], b)
        assert (whole.target[0, size], whole.advantage[0, size]) == (one.value[0, -1], 0)


def test_an_end_that_truncates_bootstraps_and_one_that_terminates_does_not() -> None:
    value, reward = np.array([[1, 2, 4]], np.float32), np.array([[9, 10, 9]], np.float32)
    trains, ratio = np.array([[True, False]]), np.ones((1, 2), np.float32)
    for over, target in ((1.0, 12.0), (0.0, 10.0)):
        discount = np.array([[1, over, 1]], np.float32)
        for out in both((value, reward, discount, trains, ratio), 1.0):
            assert out.target.tolist() == [[target, 2.0]] and out.advantage.tolist() == [[target - 1, 0.0]]


def test_a_step_that_does_not_train_is_worth_its_value_and_hides_what_lies_beyond() -> None:
    rng = np.random.default_rng(0)
    value, reward = (rng.normal(size=(1, 7)).astype(np.float32) for _ in range(2))
    trains, ratio = np.array([[1, 1, 0, 0, 1, 1]], np.bool_), np.ones((1, 6), np.float32)
    base = Columns(value, reward, np.ones_like(value), trains, ratio)
    other = Columns(*(x.copy() for x in base))
    other.value[:, 3:] += 5
    other.reward[:, 3:] += 5
    other.ratio[:, 2:] = 0.3
    for a, b in zip(both(base, 0.9), both(other, 0.9), strict=True):
        np.testing.assert_array_equal(a.target[:, :3], b.target[:, :3])
        np.testing.assert_array_equal(a.advantage[:, :4], b.advantage[:, :4])


GOLDEN_VALUE = [0.0, 0.6, -0.55, -1.78, -0.91, -1.98, 0.12, 2.68, -0.98, -1.24, 0.98, 0.71, 0.21]
GOLDEN_REWARD = [-0.93, -0.03, 0.7, -1.34, -0.46, -1.9, -1.29, -1.84, -0.24, -1.27, 0.27, 0.16, -0.19]
GOLDEN_RATIO = [0.08, 2.5, 0.95, 1.12, 1.3, 0.62, 3.1, 0.45, 2.89, 0.45, 1.6, 2.42]
NAN = float("nan")
GOLDEN = {  # gamma, lambda, largest rho, largest rho of the policy gradient: targets, advantages
    (0.9, 1.0, 1.0, 1.0): (
        [-0.03627, -0.47045, -1.3005, NAN, -3.78301, -2.09224, -0.96781, 0.9691, NAN, -0.49606, 0.1591, -0.001],
        [-0.03627, -1.07045, -0.7505, NAN, -2.87301, -0.11224, -1.08781, -1.7109, NAN, 0.74394, -0.8209, -0.711],
    ),
    (0.99, 1.0, 2.0, 1.5): (
        [-0.08413, -1.032, -1.3005, NAN, -4.45948, -1.69134, -0.22668, 0.92941, NAN, -0.81787, -0.57772, -0.6742],
        [-0.08413, -1.78124, -0.7505, NAN, -3.46375, 0.28866, -1.55983, -1.75059, NAN, 0.42213, -2.23119, -1.03815],
    ),
    (0.97, 0.8, 1.0, 1.0): (
        [-0.01891, -0.41589, -1.3005, NAN, -3.69845, -1.8226, -0.59201, 0.93823, NAN, -0.36726, 0.30837, 0.0137],
        None,  # with lambda < 1 rlax's advantage bootstraps from a mixture of target and value
    ),
}


@pytest.mark.parametrize("how", GOLDEN, ids=str)
def test_numbers_of_another_implementation(how: Any) -> None:
    """Of rlax 0.1.9 (vtrace, vtrace_td_error_and_advantage) on three pieces: the rows 0 to 3, the last being terminal; 4 to
    8, the last being a truncation; 9 to 12, cut by the end of the unroll. The largest c is 1 there."""
    gamma, lambda_, rho, pg = how
    value, reward, ratio = (np.array([x], np.float32) for x in (GOLDEN_VALUE, GOLDEN_REWARD, GOLDEN_RATIO))
    discount = np.ones((1, 13), np.float32)
    discount[0, 3] = 0
    last = np.isin(np.arange(13), [3, 8])[None]
    trains = steps_that_train(np.ones((1, 13), np.bool_), last)
    target, advantage = GOLDEN[how]
    for out in both((value, reward, discount, trains, ratio), gamma, lambda_, rho, 1.0, pg):
        np.testing.assert_allclose(out.target[trains], np.array(target)[trains[0]], atol=2e-5)
        if advantage is not None:
            np.testing.assert_allclose(out.advantage[trains], np.array(advantage)[trains[0]], atol=2e-5)


def test_leading_axes_may_be_any() -> None:
    rng = np.random.default_rng(0)
    value, reward = (rng.normal(size=(2, 3, 6)).astype(np.float32) for _ in range(2))
    ratio = np.exp(rng.normal(size=(2, 3, 5))).astype(np.float32)
    case = (value, reward, np.ones_like(value), rng.random((2, 3, 5)) < 0.8, ratio)
    for out in both(case, 0.9):
        for i in range(2):
            alone = vtrace(*(x[i] for x in case), 0.9)
            np.testing.assert_allclose(out.target[i], alone.target, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        vtrace(value, reward, np.ones_like(value), case[3][..., 1:], ratio, 0.9)
    with pytest.raises(AssertionError):
        vtrace(value[..., 1:], reward, np.ones_like(value), case[3], ratio, 0.9)


# An environment, and unrolls of it that went through a policy and a recorder


class Walk(gym.Env[Array, Any]):
    """Episodes of 1 to 7 steps, every second one truncated; observations, now and then one that is not finite, and
    rewards, some beyond 1, are random, but the last action shows in both."""

    def __init__(self, space: Any) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = space
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.left = int(self.np_random.integers(1, 8))
        return self._see(0.0), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.left -= 1
        over, whole = self.left == 0, self.episode % 2 == 0
        last = float(np.sum(action))
        obs = self._see(last)
        if self.np_random.random() < 0.06:
            obs = obs * np.nan
        return obs, float(self.np_random.normal()) * 2 + last / 4, over and whole, over and not whole, {}

    def _see(self, last: float) -> Array:
        seen: Array = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        seen[2] = np.tanh(last)
        return seen


ACTIONS = {
    "discrete": spaces.Discrete(3),
    "multi": spaces.MultiDiscrete([[2, 3], [1, 4]]),
    "box": spaces.Box(np.array([-3, 10], np.float32), np.array([5, 10.5], np.float32)),
}
KINDS: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "history": {"history": 4},
    "lstm": {"lstm": 6},
    "lstm and history": {"lstm": 5, "history": 3},
}


class Rig(NamedTuple):
    algorithm: VTraceActorCritic
    net: PolicyAndValue  # the one that acted
    batch: Batch  # all unrolls, with the column `place`: stream, row and lane
    log: Log  # the streams


@functools.cache
def rig(kind: str = "feed-forward", actions: str = "discrete", unroll: int = 5) -> Rig:
    """What an actor with random weights sent to a queue, in blocks of two unrolls. The weights do not change meanwhile."""
    algorithm = VTraceActorCritic(hidden=(8,), unroll=unroll, **KINDS[kind])
    make = lambda n=1: make_env(lambda: Walk(ACTIONS[actions]), n)  # noqa: E731
    envs = make()
    rows = {**envs.spec.step, "action": envs.spec.action, **algorithm.extras(envs.spec), "place": spec((3,), np.int64)}
    schema = Schema(rows, algorithm.window, 2 * unroll, algorithm.state(envs.spec))
    torch.manual_seed(1)
    params = LatestParams()
    policy = LocalPolicy(algorithm, envs.spec, params, Counters(), 1.0, seed=1)
    with torch.no_grad():
        policy.vector[: sum(p.numel() for p in policy.net.parameters())].normal_(0, 0.5)
    params.publish(Weights(0, policy.vector.numpy()))
    queue = UnrollQueue(schema, MinSize(1), 10**4 // schema.starts)
    log = Log(policy)
    actor = Actor(make, 2, Recorder(log, queue, algorithm, schema), Counters(), seed=3)
    for _ in range(60):
        actor.step()
    assert actor.cut()
    actor.close(), envs.close()
    sample = queue.sample(queue.size)
    assert sample is not None and isinstance(policy.net, PolicyAndValue)
    batch = Batch(sample.rows, sample.starts, sample.weights, CPU)
    return Rig(algorithm, policy.net.requires_grad_(True), batch, log)


def moved(net: PolicyAndValue, by: float = 0.1) -> PolicyAndValue:
    """The network, some updates later."""
    other, noise = copy.deepcopy(net), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(by * torch.randn(p.shape, generator=noise))
    return other


# Its definition, one unroll and one row at a time


def encoded(net: PolicyAndValue, taken: Any) -> torch.Tensor:
    """An action as the network sees it afterwards."""
    of = net.distribution
    if isinstance(of, Gaussian):
        return torch.from_numpy(np.tanh(taken))  # the actions of these tests have bounds
    out, at = torch.zeros(of.size), 0
    for count, a in zip(of.choices, np.ravel(taken), strict=True):  # type: ignore[attr-defined]
        out[at + int(a)] = 1
        at += count
    return out


class Row(NamedTuple):
    pi: torch.Tensor  # [P]
    value: torch.Tensor  # []
    h: torch.Tensor | None  # the state before it
    c: torch.Tensor | None


def rows_by_definition(of: VTraceActorCritic, net: PolicyAndValue, rows: Any, start: Any) -> list[Row]:
    """The network's output at every row from history - 1 on, of one unroll [T, ...]. `start`: h, c and the last action."""
    out = []
    h, c, taken = start
    for t in range(of.history - 1, len(rows["first"])):
        obs = seen_by_definition(rows["obs"], rows["first"], rows["valid"], t, of.history)
        features = net.torso(torch.from_numpy(obs if of.history > 1 else obs[0])[None])[0]
        before = (None, None)
        if net.core is not None:
            if rows["first"][t]:
                h, c, taken = (torch.zeros_like(x) for x in (h, c, taken))
            before = (h, c)
            x = torch.cat([features, taken, torch.tensor([max(-1.0, min(1.0, float(rows["reward"][t])))])])
            features, c = lstm_cell(x, h, c, net.core.cell)
            h, taken = features, encoded(net, rows[net.distribution.taken][t])
        raw = net.head(features)
        out.append(Row(net.distribution.normalize(raw[:-1]), raw[-1], *before))
    return out


def starts_of(batch: Batch, b: int) -> tuple[Any, Any, Any]:
    return tuple(batch.starts[name][b] if batch.starts else None for name in ("state/h", "state/c", "state/taken"))  # type: ignore[return-value]


def loss_by_definition(of: VTraceActorCritic, net: PolicyAndValue, batch: Batch) -> tuple[torch.Tensor, int]:
    """The sum over the steps that train of -A log pi + cost (v - V)^2 / 2 - cost H, and how many they are. A, v and the
    ratios are numbers, so that no gradient can flow through them. With `normalize` A, v and V are in units of a scale."""
    total, count, at = torch.zeros(()), 0, of.history - 1
    scale = max(1.0, net.square.item() ** 0.5) if of.normalize else 1.0
    distribution, taken = net.distribution, batch.host[net.distribution.taken]
    for b in range(len(batch.host["first"])):
        rows = {name: x[b] for name, x in batch.host.items()}
        outputs = rows_by_definition(of, net, rows, starts_of(batch, b))
        valid, last = rows["valid"][at:], rows["last"][at:]
        trains = [trainable_by_definition(valid, last, t, 1) for t in range(len(valid) - 1)]
        log_pi = [
            distribution.log_prob(outputs[t].pi, torch.from_numpy(np.array(taken[b, at + t]))) for t in range(of.unroll)
        ]
        mu = torch.from_numpy(np.array(rows["logits"][at:]))
        log_mu = [distribution.log_prob(mu[t], torch.from_numpy(np.array(taken[b, at + t]))) for t in range(of.unroll)]
        ratio = [torch.exp(log_pi[t] - log_mu[t]).item() for t in range(of.unroll)]
        reward = [max(-x, min(x, float(r))) if (x := of.clip_reward) else float(r) for r in rows["reward"][at:]]
        value = [scale * row.value.item() for row in outputs]
        trusted = ratio if of.correction == "vtrace" else [1.0] * of.unroll
        rho, c, pg = (of.clip_rho, of.clip_c, of.clip_pg) if of.correction == "vtrace" else (1.0, 1.0, 1.0)
        columns = (value, reward, rows["discount"][at:], trains, trusted)
        how = (of.gamma, of.trace, rho, c)
        for t in np.flatnonzero(trains):
            target = target_by_definition(*columns, t, *how)
            advantage = advantage_by_definition(*columns, t, *how, pg)
            if of.correction == "one-step":
                advantage *= min(of.clip_pg, ratio[t])
            total = total + of.baseline_cost * 0.5 * (target / scale - outputs[t].value) ** 2
            total = total - advantage / scale * log_pi[t] - of.entropy_cost * distribution.entropy(outputs[t].pi)
            count += 1
    return total, count


def gradient(loss: torch.Tensor, net: PolicyAndValue) -> torch.Tensor:
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(net.parameters()))])


def check_loss(of: VTraceActorCritic, net: PolicyAndValue, batch: Batch) -> None:
    expected, count = loss_by_definition(of, net, batch)
    found = of.loss(net, net, batch)
    assert set(found.losses) == {""} and found.priorities.shape == (len(batch.host["first"]),)
    assert count > 0
    if not of.sum_losses:
        expected = expected / count
    torch.testing.assert_close(found.losses[""], expected, rtol=2e-4, atol=2e-5)
    one, other = gradient(found.losses[""], net), gradient(expected, net)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


# The loss


def forward(of: VTraceActorCritic, net: PolicyAndValue, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters of the policy and values of all rows, as the loss has them."""
    parameters, value = net(of.sequence(net, batch, batch.starts), batch.starts)
    return parameters, value


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_their_definition(kind: str, actions: str) -> None:
    """With a network that has moved since the actions were drawn."""
    of, net, batch, _ = rig(kind, actions)
    check_loss(
        replace(of, gamma=0.9, entropy_cost=0.05), moved(net), select(batch, np.arange(0, len(batch.host["first"]), 3))
    )


HOWS: dict[str, dict[str, Any]] = {
    "sum": {"sum_losses": True},
    "clipped rewards": {"clip_reward": 0.5},
    "wide": {"clip_rho": 3.0, "clip_c": 2.0},
    "narrow": {"clip_rho": 0.7, "clip_c": 0.5},
    "wide policy gradient": {"clip_pg": 3.0},
    "narrow policy gradient": {"clip_rho": 3.0, "clip_pg": 0.5},
    "lambda": {"trace": 0.6},
    "none": {"correction": "none"},
    "none, narrow": {"correction": "none", "clip_rho": 0.6, "clip_c": 0.5},
    "one-step": {"correction": "one-step"},
    "one-step, wide": {"correction": "one-step", "clip_pg": 3.0},
    "one-step, narrow": {"correction": "one-step", "clip_rho": 3.0, "clip_pg": 0.6},
    "costs": {"baseline_cost": 2.0, "entropy_cost": 1.0},
    "unrolls of one step": {"unroll": 1},
}


@pytest.mark.parametrize("how", HOWS)
def test_every_setting_does_what_its_definition_does(how: str) -> None:
    plain, net, batch, _ = rig(unroll=HOWS[how].get("unroll", 5))
    of, net = replace(plain, **HOWS[how]), moved(net, 0.3)
    batch = select(batch, np.arange(0, len(batch.host["first"]), 2))
    check_loss(of, net, batch)
    if of != plain:
        assert not torch.allclose(of.loss(net, net, batch).losses[""], plain.loss(net, net, batch).losses[""])


def hand_made() -> tuple[EnvSpec, Batch]:
    """Two unrolls of an environment with three actions. The first has a terminal row 2, then an episode that is truncated
    in row 5; the second ends with padding from row 4 on."""
    env = EnvSpec("made up", {"obs": spec((3,), np.float32)}, spec((), np.int64), spaces.Discrete(3))
    rng, shape = np.random.default_rng(0), (2, 7)
    logits = torch.log_softmax(torch.from_numpy(rng.normal(size=(*shape, 3)).astype(np.float32)), -1).numpy()
    host: dict[str, Array] = {
        "obs": rng.normal(size=(*shape, 3)).astype(np.float32),
        "action": rng.integers(0, 3, shape),
        "logits": logits,
        "reward": rng.normal(size=shape).astype(np.float32),
        "discount": np.ones(shape, np.float32),
        "first": np.zeros(shape, np.bool_),
        "last": np.zeros(shape, np.bool_),
        "valid": np.ones(shape, np.bool_),
        "version": np.zeros(shape, np.int64),
    }
    host["last"][0, [2, 5]] = True
    host["first"][0, [3, 6]] = True
    host["discount"][0, 2] = 0
    host["reward"][0, [3, 6]] = 0
    host["valid"][1, 4:] = False
    return env, Batch(host, {}, np.ones(2, np.float32), CPU)


def with_states(batch: Batch, units: int) -> Batch:
    rng, n = np.random.default_rng(1), len(batch.host["first"])
    starts = {name: rng.normal(size=(n, units)).astype(np.float32) for name in ("state/h", "state/c")}
    starts["state/taken"] = np.eye(3, dtype=np.float32)[rng.integers(0, 3, n)]
    return Batch(batch.host, starts, np.ones(n, np.float32), CPU)


def made(lstm: int = 0, **more: Any) -> tuple[VTraceActorCritic, PolicyAndValue, Batch]:
    env, batch = hand_made()
    of = VTraceActorCritic(unroll=6, hidden=(8,), lstm=lstm, gamma=0.9, **more)
    torch.manual_seed(0)
    net = of.network(env)
    assert isinstance(net, PolicyAndValue)
    return of, moved(net, 0.5), with_states(batch, lstm) if lstm else batch


def changed(batch: Batch, name: str, rows: Any, to: Any) -> Batch:
    host = {key: x.copy() for key, x in batch.host.items()}
    host[name][rows] = to
    return Batch(host, {key: x.numpy() for key, x in batch.starts.items()}, np.ones(len(host["first"]), np.float32), CPU)


def loss_and_gradient(of: VTraceActorCritic, net: PolicyAndValue, batch: Batch) -> tuple[float, torch.Tensor]:
    loss = of.loss(net, net, batch).losses[""]
    return loss.item(), gradient(loss, net)


@pytest.mark.parametrize("lstm", [0, 4])
@pytest.mark.parametrize("correction", ["vtrace", "one-step", "none"])
def test_a_hand_made_batch(lstm: int, correction: Any) -> None:
    check_loss(*made(lstm, correction=correction))


@pytest.mark.parametrize("lstm", [0, 4])
def test_ends_and_padding_do_not_train(lstm: int) -> None:
    """Whatever lies there changes nothing. The last row of a truncated episode is bootstrapped from: only what it sees
    counts. Of the row after the last step that trains nothing but reward, discount and observation is read."""
    of, net, batch = made(lstm)
    loss, slope = loss_and_gradient(of, net, batch)
    far = np.log(np.array([0.98, 0.01, 0.01], np.float32))
    cases: list[tuple[str, Any, Any]] = [
        ("action", (0, [2, 5]), (batch.host["action"][0, [2, 5]] + 1) % 3),
        ("logits", (0, [2, 5]), far),
        ("obs", (0, 2), 3.0),
        ("reward", (0, [0, 3, 6]), 50.0 if not lstm else np.sign(batch.host["reward"][0, [0, 3, 6]]) * 1e-9),
        ("obs", (0, 6), 3.0),
        ("obs", (1, slice(4, None)), 3.0),
        ("action", (1, slice(3, None)), 0),
        ("logits", (1, slice(3, None)), far),
        ("reward", (1, slice(4, None)), 50.0),
        ("discount", (1, slice(4, None)), 0.0),
    ]
    for name, rows, to in cases:
        if lstm and name == "reward" and rows[0] == 0:
            continue  # the network sees it
        again, slope_again = loss_and_gradient(of, net, changed(batch, name, rows, to))
        assert again == loss and torch.equal(slope_again, slope), (name, rows)
    for name, rows, to in [("obs", (0, 5), 3.0), ("obs", (1, 3), 3.0), ("reward", (0, 2), 5.0), ("discount", (0, 2), 1.0)]:
        assert loss_and_gradient(of, net, changed(batch, name, rows, to))[0] != pytest.approx(loss, rel=1e-3), (name, rows)


def test_an_unroll_in_which_nothing_trains_gives_zero() -> None:
    of, net, batch = made()
    loss, slope = loss_and_gradient(of, net, changed(batch, "valid", slice(None), False))
    assert loss == 0 and not slope.any()


def test_the_row_after_the_unroll_is_bootstrapped_from() -> None:
    """One step, gamma 1: the target is the reward of arriving at row T and the value of what is seen there."""
    env, batch = hand_made()
    of = VTraceActorCritic(unroll=1, hidden=(), gamma=1.0, entropy_cost=0.0, baseline_cost=1.0, correction="none")
    net = of.network(env)
    assert isinstance(net, PolicyAndValue)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.head.weight[-1, 0] = 1  # the value is what is seen first
    rows = {"obs": np.array([[[2, 0, 0], [10, 0, 0]]], np.float32), "reward": np.array([[7, 3]], np.float32)}
    host = {name: x[1:, :2] for name, x in batch.host.items()} | rows
    loss = of.loss(net, net, Batch(host, {}, np.ones(1, np.float32), CPU)).losses[""]
    # 3 + 10 against a value of 2; each action has the probability 1/3
    assert loss.item() == pytest.approx(0.5 * 11**2 + 11 * np.log(3), rel=1e-5)


@pytest.mark.parametrize("lstm", [0, 4])
def test_the_ratio_is_to_the_recorded_policy(lstm: int) -> None:
    """What the actor's policy was decides, not what the learner's is now: another record gives another loss."""
    of, net, batch = made(lstm)
    loss, slope = loss_and_gradient(of, net, batch)
    likely = np.full(batch.host["logits"].shape, np.log(0.05), np.float32)
    np.put_along_axis(likely, batch.host["action"][..., None], np.log(0.9), -1)
    again, slope_again = loss_and_gradient(of, net, changed(batch, "logits", slice(None), likely))
    assert again != pytest.approx(loss, rel=1e-2) and not torch.allclose(slope, slope_again, rtol=1e-2)
    of, net, batch = made(lstm, correction="none")
    one, other = (loss_and_gradient(of, net, x) for x in (batch, changed(batch, "logits", slice(None), likely)))
    assert one[0] == other[0] and torch.equal(one[1], other[1]), "unless nothing is corrected"


def test_metrics_tell_how_far_the_policy_has_moved() -> None:
    of, net, batch, _ = rig()
    same = of.loss(net, net, batch).metrics
    assert same["kl"] == pytest.approx(0, abs=1e-6)
    later = moved(net, 0.3)
    metrics = of.loss(later, later, batch).metrics
    assert metrics["kl"] > 1e-3 and 0 < metrics["ratio_clipped"] < 1
    total, count, kls, clipped = 0.0, 0, 0.0, 0
    for b in range(len(batch.host["first"])):
        rows = {name: x[b] for name, x in batch.host.items()}
        outputs = rows_by_definition(of, later, rows, starts_of(batch, b))
        for t in range(of.unroll):
            if trainable_by_definition(rows["valid"], rows["last"], t, 1):
                p, q = (x.detach().double().exp() for x in (torch.from_numpy(rows["logits"][t].copy()), outputs[t].pi))
                total += float(-(q * q.log()).sum())
                kls += float((p * (p / q).log()).sum())
                action = rows["action"][t]
                clipped += bool(q[action] / p[action] > 1)
                count += 1
    assert metrics["entropy"].item() == pytest.approx(total / count, rel=1e-4)
    assert metrics["kl"].item() == pytest.approx(kls / count, rel=1e-3)
    assert metrics["ratio_clipped"].item() == pytest.approx(clipped / count, abs=1.5 / count)


@pytest.mark.parametrize("square", [0.0, 0.25, 16.0])
@pytest.mark.parametrize("lstm", [0, 4])
def test_values_may_be_learned_in_units_of_their_size(square: float, lstm: int) -> None:
    """Of the root mean square of the targets so far, where that is more than 1."""
    of, net, batch = made(lstm, normalize=True)
    plain, *_ = made(lstm)
    unscaled = plain.loss(net, net, batch)
    assert unscaled.after is None, "it is not used"
    net.square.fill_(square)
    check_loss(of, copy.deepcopy(net), batch)
    scaled = of.loss(copy.deepcopy(net), net, batch).losses[""]
    assert torch.equal(unscaled.losses[""], scaled) == (square < 1)


@pytest.mark.parametrize(("batches", "part"), [(0, 1.0), (3, 0.25), (1000, 0.01)])
def test_the_size_of_values_is_a_mean_that_forgets_slowly(batches: int, part: float) -> None:
    """Of all batches at first, each counting the same, and of about the last hundred later; only steps that train count."""
    of, net, batch = made(normalize=True, correction="none")
    net.square.fill_(16.0 if batches else 0.0)
    net.batches.fill_(batches)
    rows, value = batch.host, forward(of, net, batch)[1].detach()
    trains = steps_that_train(rows["valid"], rows["last"])
    ones, how = np.ones(6), (of.gamma, 1.0, 1.0, 1.0)
    targets = [
        target_by_definition(value[b], rows["reward"][b], rows["discount"][b], trains[b], ones, t, *how)
        for b, t in np.argwhere(trains)
    ]
    expected = (1 - part) * net.square.item() + part * float(np.mean(np.square(targets)))
    after = of.loss(net, net, batch).after
    assert after is not None and net.batches == batches, "not before the update was made"
    after()
    assert net.square.item() == pytest.approx(expected, rel=1e-4) and net.batches == batches + 1
    assert net.scale.item() == pytest.approx(max(1.0, expected**0.5), rel=1e-4)
    torch.testing.assert_close(forward(of, net, batch)[1].detach(), value)


def test_the_size_of_values_stays_finite_where_their_squares_are_not() -> None:
    """One absurd observation makes such values, in rows that train and in rows that do not. An infinite size would make
    the weights infinite, which ends the run."""
    of, net, batch = made(normalize=True)
    with torch.no_grad():
        net.square.fill_(1e20)
        net.head.bias[-1] = 1e12  # in units of 1e10
    loss = of.loss(net, net, batch)
    assert np.isfinite(loss.losses[""].item()) and loss.after is not None
    loss.after()
    assert 1 < net.scale.item() < math.inf and all(x.isfinite().all() for x in net.state_dict().values())


@pytest.mark.parametrize("clip_rho", [1.0, float("inf")])
def test_a_ratio_that_no_float_holds_does_no_harm(clip_rho: float) -> None:
    of, net, batch = made(clip_rho=clip_rho)
    unlikely = np.full(batch.host["logits"].shape, -1e4, np.float32)
    for mu in (unlikely, unlikely + 2e4):
        loss, slope = loss_and_gradient(of, net, changed(batch, "logits", slice(None), mu))
        assert np.isfinite(loss) and slope.isfinite().all()


# What the learner sees is what the actor saw


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_weights_that_acted_the_learner_finds_the_recorded_policy(kind: str, actions: str) -> None:
    """In every row of every unroll, the bootstrap's too, whatever episodes begin within it."""
    of, net, batch, _ = rig(kind, actions)
    at = of.history - 1
    with torch.no_grad():
        parameters, value = forward(of, net, batch)
    valid = batch.host["valid"][:, at:]
    assert parameters.shape[:2] == value.shape == valid.shape == (len(valid), of.unroll + 1)
    inside = batch.host["first"][:, at + 1 :].any(1)
    assert len(valid) > 15 and inside.any() and not valid.all() and valid[:, -1].any()
    assert batch.host["first"][:, at].any() and not batch.host["first"][:, at].all(), "some begin with an episode"
    np.testing.assert_allclose(parameters.numpy()[valid], batch.host["logits"][:, at:][valid], atol=1e-5)
    assert abs(batch.host["logits"][:, at:][valid].std(0)).max() > 0.05, "and it depends on what is seen"


@pytest.mark.parametrize("kind", ["lstm", "lstm and history"])
def test_the_recorded_state_is_that_of_the_episode_so_far(kind: str) -> None:
    """Worked out from the stream's first row with the weights that acted, one row at a time."""
    of, net, batch, log = rig(kind)
    at = of.history - 1
    (stream,) = [stream for stream in log.streams if stream.rows]
    lanes = {}
    for lane in range(2):
        names = ("obs", "first", "valid", "reward", "action")
        padding = {
            "obs": np.zeros((at, 3), np.float32),
            "reward": np.zeros(at, np.float32),
            "action": np.zeros(at, np.int64),
        }
        rows = {}
        for name in names:
            before = padding.get(name, np.zeros(at, np.bool_))
            rows[name] = np.concatenate([before, np.array(stream.lane(lane, name))])
        zero = (torch.zeros(of.lstm), torch.zeros(of.lstm), torch.zeros(3))
        with torch.no_grad():
            lanes[lane] = (rows, rows_by_definition(of, net, rows, zero))
    nonzero = 0
    for b in range(len(batch.host["first"])):
        _, position, lane = batch.host["place"][b, at]
        rows, outputs = lanes[int(lane)]
        row = outputs[position]
        h, c, taken = (x.numpy() for x in starts_of(batch, b))
        np.testing.assert_allclose(h, row.h, atol=1e-5)
        np.testing.assert_allclose(c, row.c, atol=1e-5)
        if rows["first"][at + position]:
            assert not h.any() and not c.any() and not taken.any()
        else:
            np.testing.assert_array_equal(taken, np.eye(3)[rows["action"][at + position - 1]])
            nonzero += 1
    assert nonzero > 5


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_that_begins_knows_nothing_of_the_one_before(kind: str) -> None:
    """Not its observations, actions or rewards, and not the state of the unroll's start."""
    of, net, batch, _ = rig(kind)
    at = of.history - 1
    first = batch.host["first"]
    rng = np.random.default_rng(0)
    begins = np.array([np.flatnonzero(row[at:])[-1] + at if row[at:].any() else -1 for row in first])
    before = np.arange(first.shape[1]) < begins[:, None]
    host = {name: x.copy() for name, x in batch.host.items()}
    host["obs"][before] = rng.uniform(-1, 1, (before.sum(), 3))
    host["reward"][before] = rng.normal(size=before.sum())
    host["action"][before] = rng.integers(0, 3, before.sum())
    starts = {name: x.numpy().copy() for name, x in batch.starts.items()}
    for x in starts.values():
        x[begins >= 0] = rng.normal(size=(int((begins >= 0).sum()), x.shape[1]))
    other = Batch(host, starts, np.ones(len(first), np.float32), CPU)
    with torch.no_grad():
        (pi, v), (pi_2, v_2) = forward(of, net, batch), forward(of, net, other)
    after = ~before[:, at:]
    assert after[begins >= at].any() and (begins > at).sum() > 5
    torch.testing.assert_close(pi[after], pi_2[after], rtol=0, atol=1e-6)
    torch.testing.assert_close(v[after], v_2[after], rtol=0, atol=1e-6)
    changes = (pi - pi_2).abs().amax(-1)[before[:, at:]]
    assert changes.max() > 0.01, "what lies before did change"


def test_what_an_lstm_sees_beside_the_features() -> None:
    """The action before, shifted by one row and none where an episode begins, and the reward on arriving, within 1."""
    of, net, batch = made(4)
    assert net.core is not None
    seen: list[torch.Tensor] = []
    outputs = net.core.outputs
    net.core.outputs = lambda x, *more: seen.append(x) or outputs(x, *more)  # type: ignore[method-assign, func-returns-value]
    batch = changed(batch, "reward", (1, [1, 2]), [5.0, -5.0])
    forward(of, net, batch)
    extra = seen[0][:, :, 8:].detach().numpy()
    for b, t in np.ndindex(2, 7):
        taken = np.zeros(3) if batch.host["first"][b, t] else np.eye(3)[batch.host["action"][b, t - 1]]
        if t == 0:
            taken = batch.starts["state/taken"][b].numpy()
        np.testing.assert_array_equal(extra[b, t, :3], taken)
        assert extra[b, t, 3] == np.clip(batch.host["reward"][b, t], -1, 1)


# Acting, and what can be asked for


@pytest.mark.parametrize("actions", ACTIONS)
def test_acting_records_the_policy_that_drew_the_action(actions: str) -> None:
    envs = make_env(lambda: Walk(ACTIONS[actions]))
    of = VTraceActorCritic(hidden=(8,))
    torch.manual_seed(0)
    net = of.network(envs.spec).requires_grad_(False)
    assert isinstance(net, PolicyAndValue)
    obs = torch.randn(500, 1, 3)
    out, state = of.act(net, {"obs": obs}, {}, np.ones(500), np.random.default_rng(0))
    assert state == {} and set(out) | {"version"} == set(of.extras(envs.spec)) | {"action"}
    for name, column in (of.extras(envs.spec) | {"action": envs.spec.action}).items():
        if name != "version":
            assert out[name].shape == (500, *column.shape) and out[name].dtype == column.dtype, name
    np.testing.assert_allclose(out["logits"], net(Rows(obs, obs, obs[:, :, 0], None), {})[0][:, 0].numpy(), atol=1e-6)
    greedy, _ = of.act(net, {"obs": obs}, {}, np.zeros(500), np.random.default_rng(0))
    likeliest = net.distribution.log_prob(
        torch.from_numpy(greedy["logits"]), torch.from_numpy(greedy[net.distribution.taken])
    )
    drawn = net.distribution.log_prob(torch.from_numpy(out["logits"]), torch.from_numpy(out[net.distribution.taken]))
    assert (likeliest >= drawn - 1e-5).all() and (likeliest > drawn + 1e-3).any()
    envs.close()


def test_a_policy_begins_near_uniform() -> None:
    env, batch = hand_made()
    torch.manual_seed(0)
    net = VTraceActorCritic().network(env)
    parameters, _ = forward(VTraceActorCritic(), net, batch)  # type: ignore[arg-type]
    assert (parameters.exp() - 1 / 3).abs().max() < 0.1


def test_a_dict_observation_reaches_the_network_stacked_by_key() -> None:
    columns = {"obs/a": spec((3,), np.float32), "obs/b": spec((2, 2), np.float32)}
    env = EnvSpec("d", columns, spec((), np.int64), spaces.Discrete(3))
    for lstm in (0, 4):
        of = VTraceActorCritic(unroll=5, hidden=(8,), history=2, stacked=("b",), lstm=lstm)
        net = of.network(env)
        assert isinstance(net, PolicyAndValue)
        _, batch = hand_made()
        rng = np.random.default_rng(0)
        host = {name: x for name, x in batch.host.items() if name != "obs"}
        host |= {name: rng.normal(size=(2, 7, *c.shape)).astype(np.float32) for name, c in columns.items()}
        batch = with_states(Batch(host, {}, np.ones(2, np.float32), CPU), 4)
        assert of.loss(net, net, batch).losses[""].isfinite()
        rows = {name: torch.from_numpy(x[:, :2]) for name, x in host.items()}
        out, _ = of.act(net.requires_grad_(False), rows, batch.starts, np.ones(2), rng)
        parameters, _ = forward(of, net, batch)
        if not lstm:
            np.testing.assert_allclose(out["logits"], parameters[:, 0].numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"unroll": 0},
        {"history": 0},
        {"lstm": -1},
        {"hidden": (8, 0)},
        {"gamma": 1.5},
        {"trace": -0.1},
        {"clip_rho": -1.0},
        {"clip_pg": -1.0},
        {"clip_reward": float("nan")},
        {"entropy_cost": -0.01},
        {"baseline_cost": -0.5},
        {"clip_rho": 0.5, "clip_c": 1.0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_said(wrong: dict[str, Any]) -> None:
    env, _ = hand_made()
    VTraceActorCritic().check(env)
    with pytest.raises(UserError, match=r"impala|algorithm\."):
        VTraceActorCritic(**wrong).check(env)


def test_actions_that_cannot_be_drawn_are_refused_in_words() -> None:
    env, _ = hand_made()
    with pytest.raises(UserError, match=r"impala needs Discrete, MultiDiscrete or Box actions of floats"):
        VTraceActorCritic().check(EnvSpec("e", env.observation, env.action, spaces.MultiBinary(3)))


def test_the_state_and_what_is_recorded() -> None:
    env, _ = hand_made()
    of = VTraceActorCritic(lstm=7)
    assert of.extras(env) == {"logits": spec((3,), np.float32), "version": spec((), np.int64)}
    widths = {"state/h": 7, "state/c": 7, "state/taken": 3}
    assert of.state(env) == {name: spec((width,), np.float32) for name, width in widths.items()}
    assert VTraceActorCritic().state(env) == {}
    window = VTraceActorCritic(unroll=20, history=4).window
    assert (window.rows, window.before, window.stride) == (3 + 20 + 1, 3, 20), "every step is trained once"
