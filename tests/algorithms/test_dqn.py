"""DQN: its targets, gradients and priorities against numbers worked out by hand, and how it acts."""

from __future__ import annotations

import copy
import re
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from oracles import chi_square, earlier_episode
from oracles import n_step as n_step_by_definition
from torch import nn
from torch.nn import functional as F

from veldt.acting.actor import Actor
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Batch
from veldt.algorithms.dqn import DQN
from veldt.callables import name_of
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.experiment.run import train
from veldt.learning.params import LatestParams, Weights, flatten
from veldt.records.block import Schema
from veldt.records.step import EnvSpec, is_observation
from veldt.records.tree import spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Uniform

CPU = torch.device("cpu")
JUNK = -1e4  # what lies in rows that must not be read


class Table(nn.Module):
    """Q(s, .) is row s of a table; the observation is the number s."""

    def __init__(self, rows):
        super().__init__()
        self.q = nn.Parameter(torch.tensor(rows, dtype=torch.float32))

    def forward(self, obs):
        return self.q[obs.reshape(-1).long()]


class Digits(nn.Module):
    """Q(s, 0) has the stacked observations as its decimal digits, the oldest first; Q(s, 1) is lower."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, obs):
        assert obs.ndim == 2, "[B, history] of single numbers"
        places = 10.0 ** torch.arange(obs.shape[1] - 1, -1, -1)
        number = (obs * places).sum(1)
        return self.scale * torch.stack([number, number - 1], 1)


def make_batch(obs, reward, discount=None, last=None, first=None, valid=None, action=None, weights=None, history=1):
    """Windows [B, T] from nested lists; by default nothing ends, all is valid, every action is 0."""
    obs = obs if isinstance(obs, dict) else {"obs": obs}
    host = {name: np.array(x, np.float32) for name, x in obs.items()}
    host["reward"] = np.array(reward, np.float32)
    shape = host["reward"].shape
    for name, value, dtype, default in (
        ("discount", discount, np.float32, 1),
        ("last", last, np.bool_, 0),
        ("first", first, np.bool_, 0),
        ("valid", valid, np.bool_, 1),
        ("action", action, np.int64, 0),
    ):
        host[name] = np.full(shape, default, dtype) if value is None else np.array(value, dtype)
        assert host[name].shape == shape, (name, host[name].shape)
    weights = np.ones(shape[0], np.float32) if weights is None else np.array(weights, np.float32)
    blank(host, history - 1)
    return Batch(host, {}, weights, CPU)


# Targets


def test_the_target_is_the_reward_and_the_discounted_largest_value_of_the_target_network():
    net, target = Table([[1, 2], [50, 60], [0, 0]]), Table([[9, 9], [4, 8], [9, 9]])
    batch = make_batch([[0, 1]], reward=[[JUNK, 3]], action=[[1, 0]])
    loss = DQN(gamma=0.5, huber=False).loss(net, target, batch)
    # y = 3 + 0.5 * 8 = 7, Q(0, 1) = 2
    assert loss.priorities.tolist() == [5.0]
    assert loss.losses[""].item() == 0.5 * 5**2
    assert loss.metrics["q_mean"].tolist() == [2.0]


def test_double_takes_the_online_networks_action_at_the_target_networks_value():
    net, target = Table([[1, 2], [60, 50]]), Table([[9, 9], [4, 8]])
    batch = make_batch([[0, 1]], reward=[[JUNK, 3]], action=[[1, 0]])
    single = DQN(gamma=0.5).loss(net, target, batch).priorities.item()
    double = DQN(gamma=0.5, double=True).loss(net, target, batch).priorities.item()
    assert single == 3 + 0.5 * 8 - 2
    assert double == 3 + 0.5 * 4 - 2


# Rewards of arriving at rows 1, 2, 3 are 1, 2, 4. Then the return: its rewards, and what the value of which row is
# multiplied by.
ALL = 1 + 0.5 * 2 + 0.25 * 4
N_STEP = {
    "nothing ends": ([1, 1, 1, 1], [0, 0, 0, 0], ALL, 0.125, 3),
    "terminal at 1": ([1, 0, 1, 1], [0, 1, 0, 0], 1, 0, 0),
    "terminal at 2": ([1, 1, 0, 1], [0, 0, 1, 0], 1 + 0.5 * 2, 0, 0),
    "terminal at 3": ([1, 1, 1, 0], [0, 0, 0, 1], ALL, 0, 0),
    "truncated at 1": ([1, 1, 1, 1], [0, 1, 0, 0], 1, 0.5, 1),
    "truncated at 2": ([1, 1, 1, 1], [0, 0, 1, 0], 1 + 0.5 * 2, 0.25, 2),
    "truncated at 3": ([1, 1, 1, 1], [0, 0, 0, 1], ALL, 0.125, 3),
    "life lost at 1": ([1, 0, 1, 1], [0, 0, 0, 0], 1, 0, 0),
    "life lost at 2": ([1, 1, 0, 1], [0, 0, 0, 0], 1 + 0.5 * 2, 0, 0),
    "life lost at 1, truncated at 2": ([1, 0, 1, 1], [0, 0, 1, 0], 1, 0, 0),
    "truncated at 1, as another": ([1, 1, 1, 1], [0, 1, 0, 0], 1, 0.5, 1),
}


def worth(window, row):
    """No two rows of a batch have states of the same value."""
    return 128.0 * (1 + 4 * window + row)


def n_step_windows(names):
    """One window for each case, and a table of the states' values. What lies beyond an episode's end is junk."""
    columns = {"obs": [], "reward": [], "discount": [], "last": [], "valid": []}
    junk = 4 * len(names)
    for window, name in enumerate(names):
        discount, last, *_ = N_STEP[name]
        end = last.index(1) if 1 in last else 3
        columns["obs"].append([4 * window + k if k <= end else junk for k in range(4)])
        columns["reward"].append([JUNK, *[(1, 2, 4)[k - 1] if k <= end else JUNK for k in (1, 2, 3)]])
        columns["discount"].append(discount)
        columns["last"].append(last)
        columns["valid"].append([k <= end for k in range(4)])
    values = [[worth(window, row), 0.0] for window in range(len(names)) for row in range(4)]
    return make_batch(**columns), Table([*values, [JUNK, JUNK]])


@pytest.mark.parametrize("names", [*[[name] for name in N_STEP], list(N_STEP)], ids=[*N_STEP, "all in one batch"])
def test_n_step_target_by_hand(names):
    batch, target = n_step_windows(names)
    loss = DQN(gamma=0.5, n=3).loss(Table([[0.0, 0.0]] * (4 * len(names) + 1)), target, batch)
    expected = []
    for window, name in enumerate(names):
        *_, rewards, factor, row = N_STEP[name]
        expected.append(rewards + factor * worth(window, row))
    assert loss.priorities.tolist() == expected


def test_n_step_double_chooses_at_the_row_where_the_episode_was_truncated():
    batch, _ = n_step_windows(["truncated at 2", "nothing ends"])
    net = Table([[0, 0], [0, 0], [0, 1], [1, 0], [0, 1], [0, 1], [0, 1], [1, 0], [1, 0]])  # action 1 at row 2, 0 at row 3
    target = Table([[0, 0], [0, 0], [400, 40], [JUNK, JUNK], [0, 0], [0, 0], [0, 0], [800, 80], [JUNK, JUNK]])
    loss = DQN(gamma=0.5, n=3, double=True).loss(net, target, batch)
    assert loss.priorities.tolist() == [1 + 0.5 * 2 + 0.25 * 40, ALL + 0.125 * 800]


@pytest.mark.parametrize(
    ("last", "first", "digits"),
    [
        ([0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], 4567),  # rows 3 4 5 6 are seen at row 3 + 3
        ([0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0], 2345),  # truncated one step on: rows 1 2 3 4
        ([0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], 3456),
        ([0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0], 4567),
        ([0, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0], 345),  # the episode began at row 2: zeros before it
        ([0, 0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0], 456),
        ([0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0], 4567),
        ([0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0], 45),
    ],
)
def test_bootstrap_sees_the_history_of_its_own_row(last, first, digits):
    """Row k shows the digit k + 1."""
    m = next((k for k in (1, 2, 3) if last[3 + k]), 3)
    valid = [k <= 3 + m for k in range(7)]
    obs = [k + 1 if valid[k] else JUNK for k in range(7)]
    batch = make_batch([obs], reward=[[0.0] * 7], last=[last], first=[first], valid=[valid], history=4)
    loss = DQN(gamma=0.5, n=3, history=4).loss(Digits(0.0), Digits(), batch)
    assert loss.priorities.tolist() == [0.5**m * digits]


@pytest.mark.parametrize(
    ("first", "valid", "digits"),
    [
        ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1], 1234),
        ([0, 0, 1, 0, 0], [1, 1, 1, 1, 1], 34),
        ([0, 0, 0, 1, 0], [1, 1, 1, 1, 1], 4),
        ([0, 0, 0, 0, 0], [0, 1, 1, 1, 1], 234),  # padding, or an observation that was lost
        ([0, 0, 0, 0, 0], [1, 1, 0, 1, 1], 4),
    ],
)
def test_the_action_was_chosen_with_the_history_that_the_loss_sees(first, valid, digits):
    batch = make_batch([[1, 2, 3, 4, 5]], reward=[[0.0] * 5], first=[first], valid=[valid], history=4)
    assert DQN(gamma=0.5, history=4).loss(Digits(), Digits(0.0), batch).metrics["q_mean"].tolist() == [digits]


def blank(host, at):
    """Zeros where a store gives zeros: before the episode of row `at`."""
    for i, j in np.ndindex(len(host["first"]), at):
        if earlier_episode(host["first"][i], host["valid"][i], j, at):
            for name in host:
                if is_observation(name):
                    host[name][i, j] = 0


class DictDigits(nn.Module):
    """Q(s, 0) is the digits of the stacked `old` and `now` times 1000."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, obs):
        assert set(obs) == {"old", "now"} and obs["old"].shape[1:] == (2, 1) and obs["now"].shape[1:] == (1,)
        number = 10 * obs["old"][:, 0, 0] + obs["old"][:, 1, 0] + 1000 * obs["now"][:, 0]
        return self.scale * torch.stack([number, number - 1], 1)


def test_dict_observations_stack_only_the_keys_named():
    rows = [[[k + 1.0] for k in range(5)], [[k + 4.0] for k in range(5)]]  # [B, T, 1]
    batch = make_batch(
        {"obs/old": rows, "obs/now": rows},
        reward=np.zeros((2, 5)),
        last=[[0, 0, 0, 0, 0], [0, 0, 1, 0, 0]],
    )
    dqn = DQN(gamma=0.5, n=3, history=2, stacked=("old",))
    acted = dqn.loss(DictDigits(), DictDigits(0.0), batch).metrics["q_mean"]
    assert acted.tolist() == [2012, 5045]
    bootstrapped = dqn.loss(DictDigits(0.0), DictDigits(), batch).priorities
    assert bootstrapped.tolist() == [5045 / 8, 6056 / 2], "row 1 + 3, and row 1 + 1 where the episode was truncated"


def test_dict_observations_stack_all_keys_when_none_is_named():
    rows = [[[1.0], [2.0], [3.0]]]
    seen = DQN(history=2).observe(make_batch({"obs/a": rows, "obs/b": rows}, reward=[[0, 0, 0]]), 1)
    assert {name: x.tolist() for name, x in seen.items()} == {"a": [[[1.0], [2.0]]], "b": [[[1.0], [2.0]]]}


@pytest.mark.parametrize("n", [1, 2])
def test_rewards_are_clipped_one_by_one_and_only_in_the_loss(n):
    batch = make_batch([[0, 0, 0]], reward=[[0, 5, -3]])
    before = batch.host["reward"].copy()
    zero = Table([[0, 0]])
    loss = DQN(gamma=0.5, n=n, clip_reward=2).loss(zero, zero, batch)
    assert loss.priorities.tolist() == [2.0 if n == 1 else 2 - 0.5 * 2]
    assert (batch.host["reward"] == before).all()
    assert DQN(gamma=0.5, n=n).loss(zero, zero, batch).priorities.tolist() == [5.0 if n == 1 else 5 - 0.5 * 3]


# Gradients


def gradient(dqn, errors, weights=None):
    """dL/dQ of B states, the i-th of which has y - Q = errors[i]; states B ... 2B - 1 are where it is bootstrapped."""
    b = len(errors)
    net = Table([[0.0, 7.0]] * (2 * b))
    target = Table([[0.0, 0.0]] * (2 * b))
    batch = make_batch([[i, b + i] for i in range(b)], reward=[[0, e] for e in errors], weights=weights)
    loss = dqn.loss(net, target, batch)
    assert not loss.priorities.requires_grad and not any(x.requires_grad for x in loss.metrics.values())
    loss.losses[""].backward()
    assert target.q.grad is None
    assert (net.q.grad[b:] == 0).all(), "no gradient through the bootstrap"
    assert (net.q.grad[:, 1] == 0).all(), "none to an action that was not taken"
    return net.q.grad[:b, 0].tolist(), loss


def test_squared_error_has_the_error_as_its_gradient():
    assert gradient(DQN(huber=False), [0.5, -3.0, 8.0, 0.0])[0] == [-0.5 / 4, 3.0 / 4, -8.0 / 4, 0.0]


@pytest.mark.parametrize("double", [False, True])
def test_huber_clips_the_error_in_the_gradient_to_one(double):
    assert gradient(DQN(huber=True, double=double), [0.5, -3.0, 8.0, 0.0])[0] == [-0.5 / 4, 1.0 / 4, -1.0 / 4, 0.0]


@pytest.mark.parametrize("huber", [False, True])
def test_importance_weights_multiply_each_samples_loss(huber):
    errors, weights = [0.5, 0.25, -1.0, 1.0], [1.0, 0.25, 0.5, 0.0]
    grad, loss = gradient(DQN(huber=huber), errors, weights)
    assert grad == [-w * e / 4 for w, e in zip(weights, errors, strict=True)]
    assert loss.losses[""].item() == sum(0.5 * w * e**2 for w, e in zip(weights, errors, strict=True)) / 4
    assert loss.priorities.tolist() == [abs(e) for e in errors], "priorities are not weighted"


# Acting

ROWS = {
    "obs": torch.zeros(1, 1, 1),
    "first": torch.zeros(1, 1, dtype=torch.bool),
    "valid": torch.ones(1, 1, dtype=torch.bool),
}
FOUR = Table([[0.0, 1.0, 3.0, 2.0]])  # greedy: action 2


def act(explore, n, seed=0, net=FOUR):
    rows = {name: x.expand(n, *x.shape[1:]) for name, x in ROWS.items()}
    with torch.inference_mode():
        return DQN().act(net, rows, {}, np.broadcast_to(explore, (n,)), np.random.default_rng(seed))[0]


@pytest.mark.parametrize("epsilon", [0.05, 0.3, 0.9])
def test_epsilon_is_the_part_of_uniformly_random_actions(epsilon):
    n = 200_000
    counts = np.bincount(act(epsilon, n)["action"], minlength=4)
    expected = n * (epsilon / 4 + (1 - epsilon) * np.array([0, 0, 1, 0]))
    assert chi_square(counts, expected) > 1e-4, counts / n


def test_greedy_is_deterministic():
    for seed in range(20):
        assert (act(0.0, 500, seed)["action"] == 2).all()


def test_each_environment_explores_as_much_as_it_is_told():
    n = 40_000
    epsilon = np.where(np.arange(n) < n // 2, 0.0, 1.0)
    action = act(epsilon, n)["action"]
    assert (action[: n // 2] == 2).all()
    assert chi_square(np.bincount(action[n // 2 :], minlength=4), np.full(4, n / 8)) > 1e-4


def test_it_is_independent_from_one_environment_to_the_next():
    greedy = act(0.5, 100_000)["action"] == 2  # with probability 0.625
    pairs = np.bincount(2 * greedy[::2] + greedy[1::2], minlength=4)
    p = np.array([0.375, 0.625])
    assert chi_square(pairs, 50_000 * np.outer(p, p).ravel()) > 1e-4


def test_acting_records_the_value_of_the_action_taken_and_the_largest():
    out = act(1.0, 1000)
    assert (out["q"] == np.array([0.0, 1.0, 3.0, 2.0])[out["action"]]).all() and set(out["action"]) == {0, 1, 2, 3}
    assert (out["v"] == 3.0).all()


# Initial priorities, through actor, policy and recorder


class Ending(gym.Env):
    """Random observations and rewards; one step in five ends the episode, in either way."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def see(self):
        return self.np_random.normal(size=3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.see(), {}

    def step(self, action):
        end = self.np_random.random()
        return self.see(), float(3 * self.np_random.normal() + action), end < 0.1, 0.1 <= end < 0.2, {}


class Taking:
    """A store that takes everything."""

    def __init__(self):
        self.taken = []

    def insert(self, block, priorities):
        self.taken.append((block, priorities))
        return True


def fill(dqn, steps=50, store=None, env=Ending, seed=1):
    """Acts with fixed random weights; returns the store, the network, the actor and the schema."""
    envs = make_env(env)
    spec_ = envs.spec
    envs.close()
    torch.manual_seed(seed)
    net, params, counters = dqn.network(spec_), LatestParams(), Counters()
    params.publish(Weights(0, flatten(net).numpy()))
    schema = Schema({**spec_.step, "action": spec_.action, **dqn.extras(spec_)}, dqn.window, fresh=8)
    store = store or Taking()
    policy = LocalPolicy(dqn, spec_, params, counters, lambda _: 0.5, seed=seed)
    recorder = Recorder(policy, store, dqn, schema)
    actor = Actor(partial(make_env, env), 3, recorder, counters, seed=seed)
    for _ in range(steps):
        assert actor.step()
    while not actor.cut():
        pass
    actor.close()
    return store, net, actor, schema


@pytest.mark.parametrize(
    "dqn",
    [
        DQN(gamma=0.9),
        DQN(gamma=0.9, n=3, double=True),
        DQN(gamma=0.8, n=2, history=3, dueling=True),
        DQN(gamma=0.9, n=5, clip_reward=1.0),
    ],
    ids=["n=1", "n=3, double", "n=2, history, dueling", "n=5, clipped"],
)
def test_initial_priorities_are_the_error_of_the_weights_that_acted(dqn):
    """|y - Q| from the definition; the same as the loss would give with these weights as network and as target."""
    store, net, _, schema = fill(dqn)
    before, checked, ends = schema.window.before, 0, set()
    for block, priorities in store.taken:
        assert priorities.shape == (schema.fresh,)
        c = block.columns()
        clip = dqn.clip_reward or np.inf
        reward = np.clip(c["reward"], -clip, clip)
        rows = {name: torch.from_numpy(np.ascontiguousarray(c[name]))[None] for name in ("obs", "first", "valid")}
        for s in np.flatnonzero(block.items):
            at = before + s
            total, discount, m = n_step_by_definition(reward, c["discount"], c["last"], at, dqn.n, dqn.gamma)
            with torch.no_grad():
                q = net(dqn.observe(rows, at))[0, c["action"][at]].item()
                v = net(dqn.observe(rows, at + m)).max().item()
            assert priorities[s] == pytest.approx(abs(total + discount * v - q), abs=2e-5)
            checked += 1
            ends.add((m, discount == 0))
        windows = np.flatnonzero(block.items)[:, None] + np.arange(schema.window.rows)
        host = {name: x[windows] for name, x in c.items()}
        blank(host, before)
        batch = Batch(host, {}, np.ones(len(windows), np.float32), CPU)
        loss = dqn.loss(net, copy.deepcopy(net), batch)
        np.testing.assert_allclose(priorities[block.items], loss.priorities, atol=2e-5)
    assert checked > 100 and {(m, dead) for m in range(1, dqn.n + 1) for dead in (False, True)} <= ends


def test_returns_and_the_store_keep_raw_rewards_when_the_loss_clips_them():
    envs = make_env(Ending)
    dqn = DQN(clip_reward=0.5)
    schema = Schema({**envs.spec.step, "action": envs.spec.action, **dqn.extras(envs.spec)}, dqn.window, fresh=8)
    envs.close()
    store = Replay(schema, Uniform(100 * 8), MinSize(1), 800, 100)
    store, _, actor, _ = fill(dqn, store=store)
    sample = store.sample(200)
    assert np.abs(sample.rows["reward"][:, 1]).max() > 2
    assert max(map(abs, actor.returns)) > 2


# Networks that the user brings, and what DQN refuses

VECTOR = EnvSpec("vector", {"obs": spec((3,), np.float32)}, spec((), np.int64), spaces.Discrete(2))
seen_shapes = []


class Recording(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.linear = nn.Linear(1, env.n_actions)

    def forward(self, obs):
        seen_shapes.append(tuple(obs.shape))
        return self.linear(obs.flatten(1)[:, :1])


def flat_network(env):
    return nn.Sequential(nn.Linear(3, 2), nn.Flatten(0))


def deep_network(env):
    return nn.Sequential(nn.Linear(3, 5), nn.Unflatten(1, (1, 5)))


@pytest.mark.parametrize(("history", "shape"), [(1, (2, 3)), (4, (2, 4, 3))])
def test_a_custom_network_gets_observations_with_their_history(history, shape):
    seen_shapes.clear()
    net = DQN(history=history, network_from=name_of(Recording)).network(VECTOR)
    assert isinstance(net.torso, Recording) and seen_shapes == [shape]
    assert net(torch.zeros(shape)).shape == (2, 2)


@pytest.mark.parametrize(("make", "got"), [(flat_network, "[4]"), (deep_network, "[2, 1, 5]")])
def test_a_custom_network_of_the_wrong_shape_is_refused_by_name(make, got):
    message = f"The network of {name_of(make)} must map [B, ...] observations to [B, features]; for B = 2 it gave {got}"
    with pytest.raises(UserError, match=re.escape(message)):
        DQN(network_from=name_of(make)).network(VECTOR)


def test_a_custom_network_that_is_not_there_is_named():
    with pytest.raises(UserError, match="test_dqn:nothing_like_it"):
        DQN(network_from=f"{__name__}:nothing_like_it").network(VECTOR)


def size_of(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_a_dueling_mlp_has_its_last_hidden_layer_twice():
    """One for the value and one for the advantages, on the layer below, or on the observation."""
    value, advantages = 8 + 1, 8 * 2 + 2
    assert size_of(DQN(hidden=(8,)).network(VECTOR)) == 3 * 8 + 8 + advantages
    assert size_of(DQN(hidden=(8,), dueling=True).network(VECTOR)) == 2 * (3 * 8 + 8) + value + advantages
    deep = DQN(hidden=(5, 8), dueling=True).network(VECTOR)
    assert size_of(deep) == 3 * 5 + 5 + 2 * (5 * 8 + 8) + value + advantages
    assert size_of(DQN(hidden=(), dueling=True).network(VECTOR)) == (3 + 1) + (3 * 2 + 2), "two linear streams"


def test_the_dueling_network_for_atari_is_wang_et_als():
    """Nature's convolutions [4, 84, 84] -> 64 * 7 * 7; on them two streams of 512 (Wang et al. 2016, section 4.2)."""
    screen = EnvSpec("atari", {"obs": spec((84, 84), np.uint8)}, spec((), np.int64), spaces.Discrete(18))
    torch.manual_seed(0)
    net = DQN(history=4, dueling=True).network(screen)
    convolutions = (4 * 8 * 8 * 32 + 32) + (32 * 4 * 4 * 64 + 64) + (64 * 3 * 3 * 64 + 64)
    two = 2 * (64 * 7 * 7 * 512 + 512) + (512 * 18 + 18) + (512 + 1)
    assert size_of(net) == convolutions + two == 3_300_019
    screens = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    x = screens / 255
    for layer, stride in ((net.torso.conv1, 4), (net.torso.conv2, 2), (net.torso.conv3, 1)):
        x = F.conv2d(x, layer.weight, layer.bias, stride).clamp(min=0)
    x = x.reshape(3, 64 * 7 * 7)
    streams = (net.head.value, net.head.advantage)
    v, a = ((x @ s[0].weight.T + s[0].bias).clamp(min=0) @ s[2].weight.T + s[2].bias for s in streams)
    for q, v_s, a_s in zip(net(screens), v, a, strict=True):
        torch.testing.assert_close(q, torch.stack([v_s[0] + one - sum(a_s) / 18 for one in a_s]), rtol=1e-4, atol=1e-5)


def test_a_dueling_network_for_a_dict_has_streams_on_all_of_it():
    both = EnvSpec(
        "both",
        {"obs/screen": spec((10, 10, 4), np.bool_), "obs/speed": spec((3,), np.float32)},
        spec((), np.int64),
        spaces.Discrete(6),
    )
    net = DQN(hidden=(8,), dueling=True).network(both)
    below, width = 16 * 8 * 8 + 3, 128 + 8
    assert size_of(net) == (4 * 3 * 3 * 16 + 16) + 2 * (below * width + width) + (width * 6 + 6) + (width + 1)
    screen, speed = torch.zeros(2, 10, 10, 4, dtype=torch.bool), torch.zeros(2, 3)
    assert net({"screen": screen, "speed": speed}).shape == (2, 6)


def test_dqn_refuses_what_it_cannot_learn():
    continuous = EnvSpec("arm", VECTOR.observation, spec((2,), np.float32), spaces.Box(-1, 1, (2,)))
    with pytest.raises(UserError, match="arm has Box"):
        DQN().check(continuous)
    for bad in (DQN(n=0), DQN(history=0), DQN(gamma=1.01), DQN(gamma=-0.1)):
        with pytest.raises(UserError, match=r"algorithm\.(n|history) must be greater than|algorithm\.gamma must be from 0"):
            bad.check(VECTOR)
    pair = EnvSpec(
        "pair", {"obs/a": spec((3,), np.float32), "obs/b": spec((3,), np.float32)}, VECTOR.action, spaces.Discrete(2)
    )
    DQN(history=2, stacked=("a",)).check(pair)
    with pytest.raises(UserError, match="no observation 'c' to stack, only a, b"):
        DQN(history=2, stacked=("c",)).check(pair)


def test_a_network_of_ones_own_gets_observations_that_it_can_view(tmp_path):
    class Viewing(nn.Module):
        def __init__(self, env):
            super().__init__()
            self.layer = nn.Linear(8, env.n_actions)

        def forward(self, x):
            return self.layer(x.view(len(x), -1))

    small = {"store.min_size": 100, "store.capacity": 500, "eval.every": 0, "algorithm.history": 2}
    run = train("dqn", env="CartPole-v1", run=tmp_path / "r", network=Viewing, quiet=True, steps=300, **small)
    assert run.metrics[-1]["learner_steps"] > 10
