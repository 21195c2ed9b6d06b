"""TrainedPolicy: the same actions as inside a run, from observations alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from veldt.acting.policy import LocalPolicy
from veldt.acting.trained import TrainedPolicy
from veldt.algorithms.dpg import DPG
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.learning import params
from veldt.learning.params import LatestParams
from veldt.records.adapter import Adapter
from veldt.records.step import EnvSpec
from veldt.records.tree import spec

SMALL = {"hidden": (16,)}
KINDS = {
    "dqn": (DQN(**SMALL), "CartPole-v1"),
    "dqn, history": (DQN(history=3, **SMALL), "CartPole-v1"),
    "r2d2": (R2D2(lstm=8, head=8, **SMALL), "CartPole-v1"),
    "r2d2, history": (R2D2(lstm=8, head=8, history=2, **SMALL), "CartPole-v1"),
    "impala": (VTraceActorCritic(lstm=8, **SMALL), "CartPole-v1"),
    "dpg": (DPG(critic=(8,), actor=(8,)), "Pendulum-v1"),
}
STATES = [name for name in KINDS if name not in ("dqn", "dpg")]


def trained(algorithm, env: EnvSpec) -> TrainedPolicy:
    torch.manual_seed(3)
    policy = TrainedPolicy(algorithm, env)
    for parameter in policy.net.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return policy


def cartpole() -> EnvSpec:
    with_envs = make_env("CartPole-v1")
    with_envs.close()
    return with_envs.spec


@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_as_the_policy_of_an_actor_over_many_episodes(kind: str) -> None:
    algorithm, name = KINDS[kind]
    envs = make_env(name, 3)
    policy = trained(algorithm, envs.spec)
    local = LocalPolicy(algorithm, envs.spec, LatestParams(), Counters(), 0.0, seed=0)
    params.restore(local.net, params.export(policy.net))
    step, state, episodes = envs.reset(1), None, 0
    for _ in range(80):
        local.send(0, step)
        expected = local.recv(0)
        action, state = policy(step["obs"], state, first=step["first"], reward=step["reward"])
        np.testing.assert_allclose(action, expected["action"], rtol=1e-6)
        episodes += int(step["first"].sum())
        step = envs.step(expected["action"])
    envs.close()
    assert episodes > 6 or name == "Pendulum-v1"


@pytest.mark.parametrize("kind", STATES)
def test_the_state_matters_and_no_call_changes_it(kind: str) -> None:
    policy = trained(KINDS[kind][0], cartpole())
    rng = np.random.default_rng(0)
    values = policy.value
    state = None
    for _ in range(4):
        _, state = policy(rng.normal(size=4), state, reward=1.0)
    obs = rng.normal(size=4)
    first, again = values(obs, state, reward=1.0), values(obs, state, reward=1.0)
    policy(obs, state, reward=1.0)
    assert first == again == values(obs, state, reward=1.0)
    assert first != values(obs) and values(obs, state, first=True) == pytest.approx(values(obs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_observation_is_a_batch_of_one_without_the_axis(kind: str) -> None:
    algorithm, name = KINDS[kind]
    envs = make_env(name)
    envs.close()
    policy, obs = trained(algorithm, envs.spec), np.linspace(-0.5, 0.5, envs.spec.observation["obs"].shape[0])
    one, _ = policy(obs)
    many, _ = policy(np.stack([obs, obs]))
    np.testing.assert_allclose(many, [one, one], rtol=1e-6)
    assert envs.spec.action_space.contains(one)
    assert policy.value(obs).shape == () and policy.value([obs, obs]).shape == (2,)


def test_values_are_those_of_the_actions() -> None:
    policy, obs = trained(KINDS["r2d2"][0], cartpole()), np.full(4, 0.3)
    q, action = policy.q(obs), policy(obs)[0]
    assert q.shape == (2,) and action == q.argmax() and policy.value(obs) == q.max()
    assert policy.q(obs, action=1) == q[1]
    heads = policy.algorithm.forward(policy.net, *policy._rows(policy._record(obs, None, None, None, None)[0], None)[1:])[
        0
    ]["q"]
    np.testing.assert_allclose(policy.algorithm.h(q), heads[0].numpy(), rtol=1e-4)
    with pytest.raises(UserError, match="VTraceActorCritic has no q; it has value"):
        trained(KINDS["impala"][0], cartpole()).q(obs)


def test_values_of_continuous_actions() -> None:
    algorithm, name = KINDS["dpg"]
    envs = make_env(name)
    envs.close()
    policy, obs = trained(algorithm, envs.spec), np.array([0.1, 0.9, -0.3])
    own, _ = policy(obs)
    assert policy.q(obs, action=own) == pytest.approx(policy.value(obs), rel=1e-5) == policy.q(obs)
    assert policy.q(obs, action=-own) != policy.value(obs)


NESTED = {
    "dqn": (DQN(**SMALL), spaces.Dict({"a": spaces.Discrete(3, start=5), "b": spaces.Box(-1, 1, (2,), np.int32)})),
    "impala": (VTraceActorCritic(**SMALL), spaces.Tuple([spaces.MultiBinary((2, 2)), spaces.Discrete(2, start=-1)])),
    "dpg": (
        DPG(critic=(8,), actor=(8,)),
        spaces.Tuple([spaces.Box(-2, 0, (), np.float32), spaces.Box(0, 9, (2,), np.float64)]),
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_one_observation_gets_one_action_of_any_space(kind: str) -> None:
    algorithm, taken = NESTED[kind]
    adapter = Adapter(spaces.Box(-1, 1, (2,)), taken, "e", combine=algorithm.one_choice)
    policy, obs = trained(algorithm, EnvSpec.of("e", adapter)), np.array([0.3, -0.8], np.float32)
    (one, _), (many, _) = policy(obs), policy([obs, obs])
    assert taken.contains(one), one
    first = {key: x[0] for key, x in many.items()} if isinstance(many, dict) else tuple(x[0] for x in many)
    np.testing.assert_allclose(adapter.recorded(one), adapter.recorded(first), rtol=1e-5)
    if kind == "impala":
        return
    assert policy.q(obs, action=one) == pytest.approx(policy.value(obs), rel=1e-4)
    np.testing.assert_allclose(policy.q([obs, obs], action=many), policy.value([obs, obs]), rtol=1e-4)


def test_an_action_that_is_none_has_no_value() -> None:
    policy, obs = trained(KINDS["dqn"][0], cartpole()), np.full(4, 0.3)
    for wrong in (2, -1, [0, 1], "left"):
        with pytest.raises(UserError, match=r"no 1 actions of Discrete\(2\)"):
            policy.q(obs, action=wrong)


@pytest.mark.parametrize("observation", [spaces.Box(-1, 1, ()), spaces.Dict({"a": spaces.Box(-1, 1, ())})], ids=str)
def test_dpg_sees_and_takes_numbers_without_an_axis(observation: spaces.Space[Any]) -> None:
    env = EnvSpec.of("e", Adapter(observation, spaces.Box(-1, 1, (), np.float32), "e"))
    policy, obs = trained(KINDS["dpg"][0], env), observation.sample()
    action, _ = policy(obs)
    assert np.shape(action) == ()
    assert policy.q(obs, action=action) == pytest.approx(policy.value(obs), rel=1e-5)


def test_predict_follows_stable_baselines() -> None:
    policy = trained(KINDS["r2d2"][0], cartpole())
    policy.trained_explore = 1.0
    obs = np.random.default_rng(0).normal(size=(5, 4))
    action, state = policy.predict(obs)
    assert action.shape == (5,) and (action == policy(obs)[0]).all()
    starts = np.array([True, False, False, False, True])
    with pytest.warns(UserWarning, match="sees the last reward"):
        _, after = policy.predict(obs, state, episode_start=starts)
    _, fresh = policy.predict(obs)
    same = (after.recurrent["state/h"] == fresh.recurrent["state/h"]).all(1).numpy()
    assert (same == starts).all()
    several = {int(policy.predict(obs[0], deterministic=False)[0]) for _ in range(30)}
    assert several == {0, 1}, "all of its actions are random"
    assert len({int(policy(obs[0])[0]) for _ in range(30)}) == 1


def test_a_dict_observation_is_given_as_a_dict() -> None:
    columns = {"obs/near": spec((2,), np.float32), "obs/far": spec((3,), np.float32)}
    env = EnvSpec("pair", columns, spec((), np.int64), spaces.Discrete(2, start=-1))
    policy = trained(DQN(history=2, stacked=("near",), **SMALL), env)
    obs = {"near": np.zeros(2), "far": np.ones(3)}
    action, state = policy(obs)
    assert action in (-1, 0), "actions start at -1"
    assert action - -1 == policy.q(obs).argmax() and policy.q(obs, action=action) == policy.q(obs).max()
    batch, _ = policy({name: np.stack([x, x]) for name, x in obs.items()})
    assert batch.tolist() == [action, action]
    for bad, words in (
        ({"near": np.zeros(2)}, "is a dict of near, far"),
        (np.zeros(5), "is a dict of near, far"),
        ({"near": np.zeros(2), "far": np.ones(4)}, r"obs/(near|far) has the shape .* takes"),
    ):
        with pytest.raises(UserError, match=words):
            policy(bad, state)


def test_what_is_no_observation_is_refused() -> None:
    policy = trained(KINDS["dqn, history"][0], cartpole())
    for bad, words in (
        (np.zeros(3), r"obs has the shape \[3\]; the policy takes \[4\], or a batch"),
        (np.full(4, np.nan), "not finite"),
        ({"a": np.zeros(4)}, "is an array, not a dict of a"),
    ):
        with pytest.raises(UserError, match=words):
            policy(bad)
    _, state = policy(np.zeros((3, 4)))
    with pytest.raises(UserError, match="that of 3 environments, but there are 2 observations"):
        policy(np.zeros((2, 4)), state)


def test_observations_are_clipped_where_they_were_in_training() -> None:
    space = spaces.Dict({"at": spaces.Box(-1, 1, (2,)), "eye": spaces.Box(0, 9, (1,), np.uint16)})
    policy = trained(DQN(**SMALL), EnvSpec.of("e", Adapter(space, spaces.Discrete(3), "e")))
    far, near = ({"at": [x, 0.5], "eye": [y]} for x, y in ((7.0, 60_000), (1.0, 9)))
    assert policy.q(far).tolist() != policy.q(near).tolist()
    policy.clip = True
    assert policy.q(far).tolist() == policy.q(near).tolist()


@pytest.mark.parametrize("wrong", [3, -1, 65_536])
def test_a_number_that_is_no_choice_is_no_observation(wrong: int) -> None:
    policy = trained(DQN(**SMALL), EnvSpec.of("e", Adapter(spaces.Discrete(3), spaces.Discrete(2), "e")))
    assert policy(2)[0] in (0, 1)
    with pytest.raises(UserError, match=r"no observation of e: obs is none of the choices of Discrete\(3\)"):
        policy(wrong)


def test_every_recipe_can_say_how_much_it_explores() -> None:
    amounts = {name: recipes.make(name).actor.explore(0, 1, 1) for name in recipes.RECIPES}
    found = {name: float(x(60_000) if callable(x) else x[0]) for name, x in amounts.items()}
    assert found["dqn"] == pytest.approx(0.01) and found["impala"] == 1.0 and 0 < found["apex-dqn"] < 0.4
