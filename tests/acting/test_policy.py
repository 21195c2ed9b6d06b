"""LocalPolicy: weights, exploration, history and recurrent state of groups of environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from veldt.acting.policy import LocalPolicy
from veldt.algorithms.dqn import DQN
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.learning.params import LatestParams, Weights, flatten
from veldt.records.block import Window
from veldt.records.history import History, observation
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec

ENV = make_env("veldt/Chain-v0").spec


def record(n: int, obs: Any = 0.0, first: bool = False) -> dict[str, Array]:
    return {
        "obs": np.full((n, 8), obs, np.float32),
        "reward": np.zeros(n, np.float32),
        "discount": np.ones(n, np.float32),
        "first": np.full(n, first),
        "last": np.zeros(n, np.bool_),
        "valid": np.ones(n, np.bool_),
    }


def policy(params: LatestParams | None = None, explore: Any = lambda steps: 0.0, **more: Any) -> LocalPolicy:
    algorithm = more.pop("algorithm", DQN(hidden=(16,)))
    return LocalPolicy(algorithm, ENV, params or LatestParams(), Counters(), explore, seed=1, **more)


def ask(who: LocalPolicy, step: dict[str, Array], group: int = 0) -> dict[str, Array]:
    assert who.send(group, step)
    out = who.recv(group)
    assert out is not None
    return out


def test_an_answer_comes_once() -> None:
    who = policy()
    assert who.recv(0) is None
    out = ask(who, record(3))
    assert out["action"].shape == out["q"].shape == out["v"].shape == (3,)
    assert who.recv(0) is None
    assert who.flush(0)


def test_greedy_takes_the_best_action_and_says_its_value() -> None:
    who, rng = policy(), np.random.default_rng(0)
    step = record(32)
    step["obs"] = rng.random((32, 8), np.float32)
    out = ask(who, step)
    with torch.no_grad():
        q = who.net(torch.from_numpy(step["obs"])).numpy()
    np.testing.assert_array_equal(out["action"], q.argmax(1))
    np.testing.assert_allclose(out["q"], q.max(1), rtol=1e-6)
    np.testing.assert_allclose(out["v"], q.max(1), rtol=1e-6)


def test_exploration_is_by_environment() -> None:
    who = policy(explore=lambda steps: np.array([0.0] * 50 + [1.0] * 50))
    step = record(100)
    best = policy()
    best.vector.copy_(who.vector)
    greedy = ask(best, step)["action"][0]
    actions = np.stack([ask(who, step)["action"] for _ in range(40)])
    assert (actions[:, :50] == greedy).all()
    assert 0.4 < (actions[:, 50:] == greedy).mean() < 0.6
    assert who.metrics() == {"epsilon": 0.5, "lag_updates": 0.0}


def test_exploration_follows_the_env_steps_of_the_run() -> None:
    seen: list[int] = []
    who = policy(explore=lambda steps: seen.append(steps) or 0.25)
    ask(who, record(2))
    who.counters.add("env_steps", 77)
    ask(who, record(2))
    assert seen == [0, 77]
    assert who.metrics() == {"epsilon": 0.25, "lag_updates": 0.0}
    who.params.publish(Weights(30, who.vector.numpy().copy()))
    who.pull()
    who.counters.add("learner_steps", 37)
    assert who.metrics()["lag_updates"] == 7


def test_newer_weights_are_taken_and_older_ones_never() -> None:
    params = LatestParams()
    who = policy(params)
    size = len(who.vector)
    params.publish(Weights(4, np.full(size, 0.25, np.float32)))
    ask(who, record(1))
    assert who.version == 4 and (who.vector == 0.25).all()
    params.publish(Weights(4, np.ones(size, np.float32)))
    ask(who, record(1))
    assert (who.vector == 0.25).all()
    params.publish(Weights(5, np.ones(size, np.float32)))
    ask(who, record(1))
    assert who.version == 5 and (who.vector == 1).all()
    for p in who.net.parameters():
        assert (p == 1).all() and not p.requires_grad


def test_weights_are_looked_for_every_so_often() -> None:
    params = LatestParams()
    who = policy(params, refresh=3)
    size = len(who.vector)
    versions = []
    for version in range(7):
        params.publish(Weights(version, np.zeros(size, np.float32)))
        ask(who, record(1))
        versions.append(who.version)
    assert versions == [0, 0, 0, 3, 3, 3, 6]
    who.reset(0)
    assert who.version == 6


def test_groups_do_not_mix() -> None:
    who = policy(algorithm=DQN(hidden=(16,), history=2))
    rng = np.random.default_rng(0)
    steps = [[record(2, rng.random()) for _ in range(5)] for _ in range(2)]
    together = [ask(who, steps[group][t], group)["q"] for t in range(5) for group in range(2)]
    alone = policy(algorithm=DQN(hidden=(16,), history=2))
    alone.vector.copy_(who.vector)
    for group in range(2):
        for t in range(5):
            np.testing.assert_allclose(together[2 * t + group], ask(alone, steps[group][t], group)["q"], rtol=1e-5)


@pytest.mark.parametrize("history", [2, 3, 4])
def test_history_is_what_a_window_of_the_same_rows_reads(history: int) -> None:
    """Long enough to wrap several times, with episodes that begin and rows that are not valid."""
    rng, n, length = np.random.default_rng(history), 3, 100
    rows = {
        "obs": rng.random((n, length, 8), np.float32),
        "first": rng.random((n, length)) < 0.15,
        "valid": rng.random((n, length)) < 0.9,
    }
    rows["first"][:, 0] = True
    kept = History(ENV, history, n)
    for t in range(length):
        step = record(n) | {name: x[:, t] for name, x in rows.items()}
        seen = observation(kept.append(step), history - 1, history)
        padded = {
            name: np.concatenate([np.zeros((n, history - 1, *x.shape[2:]), x.dtype), x[:, : t + 1]], axis=1)
            for name, x in rows.items()
        }
        np.testing.assert_array_equal(seen, observation(padded, t + history - 1, history), err_msg=str(t))


def test_a_reset_forgets_the_history() -> None:
    who = policy(algorithm=DQN(hidden=(16,), history=3))
    fresh = ask(who, record(1, 0.5))["q"]
    assert ask(who, record(1, 0.5))["q"] != fresh
    who.reset(0)
    assert ask(who, record(1, 0.5))["q"] == fresh


class Recurrent:
    """Its state counts the steps of the episode, and its action says what the state was before."""

    window = Window(history=1)

    def extras(self, env: EnvSpec) -> Any:
        return {}

    def state(self, env: EnvSpec) -> Any:
        return {"h": spec((1,), np.float32)}

    def network(self, env: EnvSpec) -> nn.Module:
        return nn.Linear(1, 1)

    def act(self, net: Any, rows: Any, state: Any, explore: Any, rng: Any) -> Any:
        before = state["h"].clone()
        return {"action": before[:, 0].numpy().copy()}, {"h": before + 1}


def test_recurrent_state_starts_at_zero_with_every_episode() -> None:
    who = policy(algorithm=Recurrent())
    begins = np.array([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]], np.bool_)
    seen = []
    for t in range(6):
        step = record(2)
        step["first"] = begins[:, t]
        seen.append(ask(who, step)["action"])
    assert np.array(seen).T.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
    who.reset(0)
    assert ask(who, record(2))["action"].tolist() == [0, 0]


def test_the_state_that_is_recorded_is_the_one_before_the_step() -> None:
    """Zero where an episode begins; and what was handed out does not change afterwards."""
    who = policy(algorithm=Recurrent())
    begins = np.array([[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]], np.bool_)
    told = []
    for t in range(5):
        step = record(2)
        step["first"] = begins[:, t]
        told.append(ask(who, step))
    for t, out in enumerate(told):
        assert out["h"].shape == (2, 1)
        np.testing.assert_array_equal(out["h"][:, 0], out["action"], err_msg=str(t))
    assert np.array([out["h"][:, 0] for out in told]).T.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]


def test_a_recurrent_network_sees_the_reward() -> None:
    """And nobody else is given it."""
    for lstm in (0, 4):
        for history in (1, 3):
            who = policy(algorithm=VTraceActorCritic(hidden=(8,), lstm=lstm, history=history))
            with torch.no_grad():
                who.vector.normal_(generator=torch.Generator().manual_seed(0))
            told = []
            for reward in (0.0, 0.7):
                who.reset(0)
                told.append(ask(who, record(1, 0.5, first=True) | {"reward": np.full(1, reward, np.float32)})["logits"])
            assert np.allclose(*told) == (lstm == 0)


def test_a_policy_that_is_asked_to_says_which_weights_it_acted_with() -> None:
    params = LatestParams()
    who = policy(params, algorithm=VTraceActorCritic(hidden=(8,)), refresh=2)
    size, versions = len(who.vector), []
    for version in (3, 5, 9, 11):
        params.publish(Weights(version, np.full(size, 0.01 * version, np.float32)))
        out = ask(who, record(3))
        assert out["version"].dtype == np.int64 and out["version"].shape == (3,)
        versions.append(out["version"].tolist())
    assert versions == [[3] * 3, [3] * 3, [9] * 3, [9] * 3], "not which are the newest"
    assert "version" not in ask(policy(), record(3))


def test_a_policy_that_explores_by_itself_tells_no_amount() -> None:
    who = policy(algorithm=VTraceActorCritic(hidden=(8,)), explore=np.ones(2))
    ask(who, record(2))
    assert who.metrics() == {"lag_updates": 0.0}
    who.counters.add("learner_steps", 7)
    assert who.metrics() == {"lag_updates": 7.0}


def test_a_restored_policy_draws_the_same() -> None:
    one, other = policy(explore=lambda steps: 0.5), policy(explore=lambda steps: 0.5)
    other.vector.copy_(one.vector)
    for _ in range(5):
        ask(one, record(4))
    other.load_state(one.state())
    for _ in range(5):
        np.testing.assert_array_equal(ask(one, record(4))["action"], ask(other, record(4))["action"])


def test_a_dict_observation_reaches_the_network() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 1, (3,), np.float32), "b": spaces.Box(0, 255, (4,), np.uint8)})
    env = EnvSpec(
        "x", {"obs/a": spec((3,), np.float32), "obs/b": spec((4,), np.uint8)}, spec((), np.int64), spaces.Discrete(2)
    )
    who = LocalPolicy(DQN(hidden=(16,), history=2), env, LatestParams(), Counters(), lambda steps: 0.0, seed=1)
    step = {name: x for name, x in record(2, first=True).items() if name != "obs"}
    step |= {"obs/a": np.ones((2, 3), np.float32), "obs/b": np.ones((2, 4), np.uint8)}
    assert space.contains({"a": step["obs/a"][0], "b": step["obs/b"][0]})
    assert ask(who, step)["action"].shape == (2,)
    assert flatten(who.net).shape == who.vector.shape


def test_acting_is_in_eval_mode() -> None:
    """Dropout is off and running averages stand still: an evaluation can be repeated."""
    env = make_env("CartPole-v1").spec
    policy = LocalPolicy(DQN(), env, LatestParams(), Counters(), 0.0, seed=0)
    assert not any(module.training for module in policy.net.modules())
    assert policy.metrics() == {}


def test_newer_weights_are_looked_for_in_step_with_the_blocks_that_follow_a_reset() -> None:
    who = policy()
    who.refresh = 4
    looks: list[int] = []
    who.pull = lambda: looks.append(who.steps)  # type: ignore[method-assign]
    for _ in range(2):
        ask(who, record(4))
    who.reset(0)
    looks.clear()
    for _ in range(8):
        ask(who, record(4))
    assert looks == [0, 4]
