"""Environments as vectors of step records: every space, every way to go wrong, and what a run does about it."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from invariants import check_valid
from test_run import TINY, tiny

from veldt import callables
from veldt.envs import EnvError, Envs, make_env
from veldt.envs.small import BlindCliffwalk, Catch, Chain, Counter, DeepSea
from veldt.envs.vector import BAD_IN_A_ROW, RETURN_ENDS
from veldt.errors import UserError
from veldt.experiment.run import Run, train
from veldt.storing.replay import Replay


class Any_(gym.Env[Any, Any]):  # noqa: N801
    """Any spaces; observations are drawn from theirs, and it notes its actions."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any], length: int = 5) -> None:
        self.observation_space, self.action_space, self.length, self.t = observation, action, length, 0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def see(self) -> Any:
        return self.observation_space.sample()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), (action, self.action_space)
        self.actions.append(action)
        self.t += 1
        return self.see(), 1.0, self.t == self.length, False, {}


BOX = spaces.Box(-1, 1, (3,), np.float32)


def box_env(**changes: Any) -> Any_:
    return Any_(BOX, spaces.Discrete(2), **changes)


# Spaces.


@pytest.mark.parametrize(
    ("space", "columns"),
    [
        (BOX, {"obs": ((3,), "float32")}),
        (spaces.Box(0, 255, (4, 5), np.uint8), {"obs": ((4, 5), "uint8")}),
        (spaces.Box(-np.inf, np.inf, (), np.float64), {"obs": ((), "float32")}),
        (spaces.Box(-5, 5, (2,), np.int16), {"obs": ((2,), "int16")}),
        (
            spaces.Dict({"image": spaces.Box(0, 255, (6, 6, 1), np.uint8), "speed": spaces.Box(0, 1, (2,), np.float64)}),
            {"obs/image": ((6, 6, 1), "uint8"), "obs/speed": ((2,), "float32")},
        ),
    ],
    ids=str,
)
def test_observation_spaces_become_columns(space: spaces.Space[Any], columns: dict[str, Any]) -> None:
    envs = make_env(lambda: Any_(space, spaces.Discrete(2)), 3)
    assert {name: (c.shape, c.dtype.name) for name, c in envs.spec.observation.items()} == columns
    record = envs.reset(0)
    for _ in range(12):
        for name, column in envs.spec.step.items():
            assert record[name].shape == (3, *column.shape) and record[name].dtype == column.dtype, name
        assert record["valid"].all()
        record = envs.step(np.zeros(3, np.int64))
    assert envs.bad == 0


def test_what_a_dict_observation_holds_is_in_its_columns() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 9, (2,), np.float32), "b": spaces.Box(0, 9, (), np.int64)})

    class Known(Any_):
        def see(self) -> Any:
            return {"a": np.array([self.t, self.t + 1], np.float32), "b": np.array(self.t)}

    envs = make_env(lambda: Known(space, spaces.Discrete(2)), 2)
    record = envs.reset(0)
    record = envs.step(np.zeros(2, np.int64))
    np.testing.assert_array_equal(record["obs/a"], [[1, 2], [1, 2]])
    np.testing.assert_array_equal(record["obs/b"], [1, 1])


@pytest.mark.parametrize(
    ("space", "shape", "given", "arrives"),
    [
        (spaces.Discrete(4), (), [0, 3], [0, 3]),
        (spaces.Discrete(4, start=3), (), [0, 3], [3, 6]),
        (spaces.Discrete(4, start=-1), (), [0, 3], [-1, 2]),
        (spaces.MultiDiscrete([3, 5]), (2,), [[0, 4], [2, 1]], [[0, 4], [2, 1]]),
        (spaces.MultiDiscrete([3, 5], start=[1, 10]), (2,), [[0, 4], [2, 1]], [[1, 14], [3, 11]]),
        (spaces.Box(-2, 2, (2,), np.float32), (2,), [[0.5, 9], [-9, 1]], [[0.5, 2], [-2, 1]]),
    ],
    ids=str,
)
def test_actions_start_at_zero_and_stay_inside(space: spaces.Space[Any], shape: Any, given: Any, arrives: Any) -> None:
    envs = make_env(lambda: Any_(BOX, space), 2)
    assert envs.spec.action.shape == shape
    envs.reset(0)
    envs.step(np.array(given, envs.spec.action.dtype))
    assert isinstance(envs.env, SyncVectorEnv)
    for env, expected in zip(envs.env.envs, arrives, strict=True):
        np.testing.assert_allclose(env.unwrapped.actions[0], expected)


def test_actions_from_another_start_train(tmp_path: Path) -> None:
    """Chain, but its actions are called 3 and 4."""

    class Shifted(Chain):
        def __init__(self) -> None:
            super().__init__(5)
            self.action_space = spaces.Discrete(2, start=3)

        def step(self, action: Any) -> Any:
            assert action in (3, 4), action
            return super().step(action - 3)

    run = tiny(tmp_path / "r", env=Shifted, steps=300)
    assert run.metrics[-1]["env_steps"] >= 300


@pytest.mark.parametrize(
    ("observation", "action", "names"),
    [
        (spaces.Text(5), spaces.Discrete(2), r"no observations that a network can take.*Text"),
        (spaces.Dict({}), spaces.Discrete(2), r"no observations that a network can take"),
        (spaces.Sequence(BOX), spaces.Discrete(2), r"observation space Sequence"),
        (spaces.Discrete(10**6), spaces.Discrete(2), r"observation Discrete\(1000000\)"),
        (BOX, spaces.Text(3), r"action space Text"),
        (BOX, spaces.Dict({"a": spaces.Discrete(2), "b": BOX}), r"both discrete and continuous"),
        (BOX, spaces.Box(0, 10**6, (2,), np.int64), r"integers in a wide range"),
    ],
    ids=str,
)
def test_other_spaces_are_refused_by_name(observation: Any, action: Any, names: str) -> None:
    with pytest.raises(UserError, match=names) as caught:
        make_env(lambda: Any_(observation, action))
    assert "\n" not in str(caught.value)


def test_an_algorithm_refuses_an_action_space_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dqn needs a Discrete action space, but .* has Box"):
        tiny(tmp_path / "r", env=lambda: Any_(BOX, spaces.Box(-1, 1, (2,), np.float32)))
    assert not (tmp_path / "r").exists()


# Contracts.


def test_any_environment_may_end_a_return_within_an_episode() -> None:
    class Lives(Chain):
        def step(self, action: Any) -> Any:
            *step, info = super().step(action)
            return *step, info | {RETURN_ENDS: self.state == 2}

    envs = make_env(Lives, 2)
    envs.reset(0)
    records = [envs.step(np.array([1, t % 2])) for t in range(4)]
    assert [record["discount"].tolist() for record in records] == [[1, 1], [0, 1], [1, 1], [1, 1]]
    assert not any(record["last"].any() for record in records)


# Names.


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("CartPole-v7", "Did you mean CartPole-v1"),
        ("CartPol-v1", "Did you mean CartPole-v1"),
        ("veldt/Chian-v0", "Did you mean veldt/Chain-v0"),
        ("Zzzzzzzzz", "Give a Gymnasium id, module:id or module:callable"),
        ("no_such_module:make", "no_such_module cannot be imported"),
        ("veldt.envs.small:Chian", "There is no environment 'veldt.envs.small:Chian'"),
        (":make", "':make'"),
        ("", "''"),
    ],
)
def test_an_unknown_name_gets_one_sentence(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        make_env(name)
    assert "\n" not in str(caught.value)


def test_module_and_callable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs.py").write_text(
        "from veldt.envs.small import Chain\nclass Group:\n    @staticmethod\n    def make():\n        return Chain(6)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert make_env("my_envs:Group.make", 2).spec.observation["obs"].shape == (6,)
    finally:
        sys.modules.pop("my_envs", None)
    assert make_env("veldt.envs.small:DeepSea").spec.observation["obs"].shape == (100,)


class Maker:
    """A callable object."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self) -> Chain:
        return Chain(self.n)

    def method(self) -> Chain:
        return Chain(self.n)


@pytest.mark.parametrize(
    "make",
    [lambda: Chain(5), functools.partial(Chain, 5), Maker(5), Maker(5).method, functools.partial(Chain, n=5)],
    ids=["lambda", "partial", "object", "method", "partial-by-name"],
)
def test_a_callable_keeps_what_it_was_given_through_its_name(make: Any) -> None:
    found = callables.find(callables.name_of(make))
    assert found is not None
    env = found()
    assert isinstance(env, Chain) and env.n == 5


def test_functions_of_modules_are_known_by_name() -> None:
    assert callables.name_of(Chain) == "veldt.envs.small:Chain"
    assert callables.find("veldt.envs.small:Chain") is Chain
    with pytest.raises(UserError, match="was passed from Python and cannot be imported"):
        callables.find("local:nobody.<locals>.knows")


def test_an_environment_that_cannot_be_made_is_named() -> None:
    def broken() -> Any:
        raise RuntimeError("no licence")

    with pytest.raises(UserError, match="broken could not be made: RuntimeError: no licence"):
        make_env(broken)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_are_refused(mode: AutoresetMode) -> None:
    with pytest.raises(UserError, match=f"my-env resets in mode .*{mode.name}.*NEXT_STEP"):
        Envs(SyncVectorEnv([box_env] * 2, autoreset_mode=mode), "my-env")


# Records.


def check_records(name: str, steps: int, n: int = 3) -> None:
    """The vector environment against single ones of Gymnasium, stepped by hand."""
    envs, rng = make_env(name, n), np.random.default_rng(0)
    singles = [gym.make(name).unwrapped for _ in range(n)]
    limit = gym.spec(name).max_episode_steps or 10**9
    record = envs.reset(5)
    assert record["first"].all() and not record["last"].any() and not record["reward"].any()
    length = np.zeros(n, int)
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(steps):
        previous = {key: x.copy() for key, x in record.items()}
        action = rng.integers(0, envs.spec.n_actions, n)
        record = envs.step(action)
        for i, single in enumerate(singles):
            if previous["last"][i]:
                assert (
                    record["first"][i] and record["reward"][i] == 0 and record["discount"][i] == 1 and not record["last"][i]
                )
                length[i] = 0
                continue
            length[i] += 1
            assert not record["first"][i]
            if hasattr(single, "state"):  # continue from the very observation
                if previous["first"][i]:
                    single.reset(seed=0)
                single.state = tuple(previous["obs"][i].astype(np.float64)) if name.startswith("CartPole") else single.state
            obs, reward, terminated, _, _ = single.step(action[i])
            if name.startswith("CartPole"):
                np.testing.assert_allclose(record["obs"][i], obs, rtol=1e-4, atol=1e-4)
            assert record["reward"][i] == reward
            truncated = length[i] == limit
            assert record["discount"][i] == (0.0 if record["last"][i] and not truncated else 1.0)
            if name.startswith("CartPole") and abs(abs(obs[0]) - 2.4) > 0.01 and abs(abs(obs[2]) - 0.2095) > 0.001:
                assert record["last"][i] == (terminated or truncated)
            if record["last"][i]:
                ends["terminated" if record["discount"][i] == 0 else "truncated"] += 1
                single.reset(seed=0)
    assert ends["terminated"] > 3
    envs.close()


def test_the_native_vector_cartpole_emits_what_next_step_promises() -> None:
    assert type(make_env("CartPole-v1", 2).env).__name__ == "CartPoleVectorEnv"
    check_records("CartPole-v1", 400)


def test_truncation_keeps_its_discount() -> None:
    envs = make_env("veldt/Chain-v0", 2)
    envs.reset(0)
    for _ in range(99):
        assert not envs.step(np.zeros(2, np.int64))["last"].any()
    record = envs.step(np.zeros(2, np.int64))
    assert record["last"].all() and (record["discount"] == 1).all() and not record["first"].any()
    record = envs.step(np.ones(2, np.int64))
    assert record["first"].all() and (record["obs"] == np.eye(8)[0]).all(), "the action after the end is ignored"


def test_a_reset_begins_everywhere_anew_in_the_middle_of_an_episode() -> None:
    envs = make_env("CartPole-v1", 2)
    first = envs.reset(3)["obs"].copy()
    for _ in range(60):
        envs.step(np.ones(2, np.int64))
    record = envs.reset(3)
    assert record["first"].all() and not record["last"].any()
    np.testing.assert_array_equal(record["obs"], first)
    assert not envs.step(np.ones(2, np.int64))["first"].any()
    assert not np.array_equal(envs.reset(4)["obs"], first)
    assert not np.array_equal(first[0], first[1]), "the environments have seeds of their own"


@pytest.mark.parametrize("env", [Chain, DeepSea, Catch, BlindCliffwalk, Counter])
def test_built_in_environments_keep_to_their_spaces(env: type[gym.Env[Any, Any]]) -> None:
    envs, rng = make_env(env, 4), np.random.default_rng(0)
    envs.reset(1)
    for _ in range(300):
        assert envs.step(rng.integers(0, envs.spec.n_actions, 4))["valid"].all()
    assert envs.bad == 0


def test_optimal_play_of_the_built_in_environments() -> None:
    def play(env: Any, policy: Any) -> float:
        env.reset(seed=0)
        total, done = 0.0, False
        while not done:
            _, reward, done, _, _ = env.step(policy(env))
            total += reward
        return total

    assert play(Chain(8), lambda env: 1) == 1.0
    assert play(BlindCliffwalk(12), lambda env: env.right(env.state)) == 1.0
    assert play(BlindCliffwalk(12), lambda env: 1 - env.right(env.state)) == 0.0
    assert play(DeepSea(10), lambda env: env.right[env.row, env.column]) == pytest.approx(0.99)
    assert play(DeepSea(10), lambda env: 1 - env.right[env.row, env.column]) == 0.0
    assert play(Catch(), lambda env: 1 + np.sign(env.ball - env.paddle)) == 1.0


# Errors.


class Failing(Chain):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.where == "reset":
            raise KeyError("no map")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.where == "step":
            raise KeyError("no map")
        return (np.zeros(5, np.float32), *super().step(action)[1:]) if self.where == "shape" else super().step(action)


def test_an_error_in_step_or_reset_names_the_environment_and_keeps_its_cause() -> None:
    def my_env() -> Failing:
        return Failing(where)

    where = "step"
    envs = make_env(my_env)
    envs.reset(0)
    with pytest.raises(EnvError, match="my_env: step raised KeyError: 'no map'") as caught:
        envs.step(np.zeros(1, np.int64))
    assert isinstance(caught.value.__cause__, KeyError)
    where = "reset"
    with pytest.raises(EnvError, match="my_env: reset raised KeyError: 'no map'"):
        make_env(my_env).reset(0)
    where = "shape"
    envs = make_env(my_env)
    envs.reset(0)
    with pytest.raises(UserError, match=r"my_env: an observation of step does not fit its space: space \(8,\), got \(5,\)"):
        envs.step(np.zeros(1, np.int64))


# Bad observations.


class Sometimes(Any_):
    """Every observation is well but some; each says which it is."""

    def __init__(self, bad: Any, reward: float | None = None, space: spaces.Space[Any] = BOX) -> None:
        super().__init__(space, spaces.Discrete(2), length=50)
        self.bad, self.bad_reward, self.now = bad, reward, False

    def see(self) -> Any:
        good = 0.5 if self.observation_space.dtype.kind == "f" else 5
        return np.full(3, self.bad if self.now else good, self.observation_space.dtype)

    def step(self, action: Any) -> Any:
        self.now = self.t % 4 == 3
        obs, reward, *rest = super().step(action)
        if self.bad_reward is not None:
            obs, reward = np.full(3, 0.5, np.float32), self.bad_reward if self.now else reward
        self.now = False
        return obs, reward, *rest


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Sometimes(np.nan), "is not finite (obs[0] = nan)"),
        (lambda: Sometimes(-np.inf), "is not finite (obs[0] = -inf)"),
        (lambda: Sometimes(np.nan, space=spaces.Box(-np.inf, np.inf, (3,), np.float32)), "is not finite"),
        (lambda: Sometimes(np.inf, space=spaces.Box(-np.inf, np.inf, (3,), np.float32)), "is not finite"),
        (lambda: Sometimes(0, reward=np.nan), "came with the reward"),
        (lambda: Sometimes(0, reward=np.inf), "came with the reward"),
    ],
    ids=["nan", "inf", "nan-unbounded", "inf-unbounded", "nan-reward", "inf-reward"],
)
def test_a_bad_observation_is_blanked_counted_and_named_once(make: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    envs = make_env(make, 2)
    envs.reset(0)
    bad = 0
    for step in range(1, 41):
        record = envs.step(np.zeros(2, np.int64))
        if step % 4 == 0:
            bad += 2
            assert not record["valid"].any() and not record["obs"].any()
            assert record["reward"].tolist() == ([0, 0] if "reward" in why else [1, 1]), "a finite reward stays"
        else:
            assert record["valid"].all() and record["obs"].all()
        assert np.isfinite(record["obs"]).all() and np.isfinite(record["reward"]).all()
    assert envs.bad == bad == 20
    assert caplog.text.count("it is dropped") == 1 and why in caplog.text


def test_only_the_environment_with_the_bad_observation_is_blanked() -> None:
    number = iter((np.nan, 0.25, -np.inf))
    envs = make_env(lambda: Sometimes(next(number)), 3)
    envs.reset(0)
    for step in range(1, 9):
        record = envs.step(np.zeros(3, np.int64))
        assert record["valid"].tolist() == ([False, True, False] if step % 4 == 0 else [True] * 3)
        if step % 4 == 0:
            assert (record["obs"][1] == 0.25).all() and record["reward"].tolist() == [1, 1, 1]
    assert envs.bad == 4


# Observations outside their space.

BYTES = spaces.Box(0, 100, (3,), np.uint8)


@pytest.mark.parametrize(
    ("value", "space", "clipped", "told"),
    [
        (1.5, BOX, 1, "obs[0] = 1.5 is outside its space, -1 to 1"),
        (-7, BOX, -1, "obs[0] = -7 is outside its space, -1 to 1"),
        (200, BYTES, 100, "obs[0] = 200 is outside its space, 0 to 100"),
    ],
    ids=["above", "below", "integer"],
)
@pytest.mark.parametrize("clip", [False, True])
def test_an_observation_outside_its_space_is_kept_or_clipped_and_named_once(
    value: float, space: spaces.Box, clipped: float, told: str, clip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    envs = make_env(lambda: Sometimes(value, space=space), 2, clip=clip)
    envs.reset(0)
    for step in range(1, 41):
        record = envs.step(np.zeros(2, np.int64))
        assert record["valid"].all() and record["obs"].dtype == space.dtype
        if step % 4 == 0:
            assert (record["obs"] == (clipped if clip else value)).all()
    assert envs.bad == 0
    assert len(caplog.records) == 1 and told in caplog.text and ("are clipped" if clip else "are kept") in caplog.text


@pytest.mark.parametrize("clip", [False, True])
def test_what_is_not_finite_is_dropped_beside_and_after_what_is_outside(clip: bool) -> None:
    number = iter((np.nan, 9.0, np.inf))
    envs = make_env(lambda: Sometimes(next(number)), 3, clip=clip)
    envs.reset(0)
    for step in range(1, 13):
        record = envs.step(np.zeros(3, np.int64))
        assert record["valid"].tolist() == ([False, True, False] if step % 4 == 0 else [True] * 3)
        if step % 4 == 0:
            assert (record["obs"][1] == (1 if clip else 9)).all() and not record["obs"][[0, 2]].any()
    assert envs.bad == 6


class Leaving(Chain):
    """It leaves its space at once and never comes back."""

    def step(self, action: Any) -> Any:
        _, _, _, _, info = super().step(action)
        return np.full(8, 2.5, np.float32), 1.0, False, False, info


@pytest.mark.parametrize("recipe", ["dqn", "impala"])
def test_a_run_goes_on_where_the_environment_has_left_its_space(tmp_path: Path, recipe: str) -> None:
    config = {"steps": 2_000, "runtime": "inline", "eval.every": 0, "checkpoint.every": 0, "algorithm.hidden": (8,)}
    run = train(recipe, env=Leaving, run=tmp_path / "r", quiet=True, **config)
    last = run.metrics[-1]
    assert last["env_steps"] >= 2_000 and last["bad_observations"] == 0
    told = (run.path / "log.txt").read_text().count("obs[0] = 2.5 is outside its space, 0 to 1")
    assert told == run.config.actors, "once for the environments of each actor"


def test_rounding_at_the_bounds_is_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    envs = make_env(lambda: Sometimes(1.00001))
    envs.reset(0)
    for _ in range(8):
        assert envs.step(np.zeros(1, np.int64))["valid"].all()
    assert not caplog.records


def test_bounds_as_large_as_a_float_can_be_are_no_bounds() -> None:
    most = np.finfo(np.float32).max
    envs = make_env(lambda: Sometimes(np.nan, space=spaces.Box(-most, most, (3,), np.float32)))
    envs.reset(0)
    found = [envs.step(np.zeros(1, np.int64))["valid"][0] for _ in range(4)]
    assert found == [True, True, True, False]


def test_a_hundred_in_a_row_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Chain):
        def step(self, action: Any) -> Any:
            return np.full(8, np.nan, np.float32), 0.0, False, False, {}

    envs = make_env(Gone, 2)
    envs.reset(0)
    for _ in range(BAD_IN_A_ROW - 1):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(UserError, match=r"Gone: 100 observations in a row were bad, the last one is not finite"):
        envs.step(np.zeros(2, np.int64))


class Brief(Chain):
    """Episodes of two steps; every observation is bad but those after resets."""

    def step(self, action: Any) -> Any:
        _, _, _, _, info = super().step(action)
        self.t = getattr(self, "t", 0) + 1
        return np.full(8, np.nan, np.float32), 1.0, self.t % 2 == 0, False, info


def test_good_observations_after_resets_do_not_hide_an_environment_that_is_broken() -> None:
    for again in (False, True):  # resets of the environments themselves, and of all at once
        envs = make_env(Brief, 2)
        envs.reset(0)

        def play(envs: Envs = envs, again: bool = again) -> None:
            for number in range(1_200):
                if envs.step(np.zeros(2, np.int64))["last"].all() and again:
                    envs.reset(number)

        with pytest.raises(UserError, match="100 observations in a row were bad"):
            play()
        assert envs.bad == 2 * BAD_IN_A_ROW


def test_a_good_one_between_starts_the_count_again() -> None:
    envs = make_env(lambda: Sometimes(np.nan))
    envs.reset(0)
    for _ in range(600):
        envs.step(np.zeros(1, np.int64))
    assert envs.bad > BAD_IN_A_ROW


def test_an_environment_that_begins_with_a_bad_observation_is_refused_at_once() -> None:
    class Bad(Chain):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.full(8, np.nan, np.float32), {}

    with pytest.raises(UserError, match=r"Bad: the observation after reset is not finite \(obs\[0\] = nan\)"):
        make_env(Bad, 2).reset(0)


class Noisy(Chain):
    """With probability 0.05 a sensor fails: half of the time NaN, half of the time infinite."""

    def _noise(self, obs: Any) -> Any:
        if self.np_random.random() < 0.05:
            return np.full_like(obs, np.nan if self.np_random.random() < 0.5 else np.inf)
        return obs

    def step(self, action: Any) -> Any:
        obs, reward, done, _, info = super().step(action)
        if self.np_random.random() < 0.01:
            reward = float("nan")
        return (self._noise(obs), reward, done, self.np_random.random() < 0.05, info)


class NoisyFromTheStart(Noisy):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        return self._noise(obs), info


@pytest.mark.parametrize("history", [1, 3])
def test_bad_observations_never_reach_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: int) -> None:
    stores: list[Replay] = []
    made = Replay.__init__

    def keep(self: Replay, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        stores.append(self)

    monkeypatch.setattr(Replay, "__init__", keep)
    changes = {"store.capacity": "5000", "eval.every": 0, "algorithm.history": history, "algorithm.n": 3, "steps": 900}
    run = tiny(tmp_path / "r", env=Noisy, **changes)
    (store,) = stores
    check_valid(store)
    assert store.size > 200
    columns = store.schema.layout.columns(store.rows)
    for name in ("obs", "reward", "discount", "q", "v"):
        assert np.isfinite(columns[name]).all(), name
    assert columns["obs"].max() <= 1 and columns["obs"].min() >= 0
    # Every item reads valid rows alone, up to the end of its episode.
    before, lookahead = store.schema.window.before, store.schema.window.lookahead
    for slot, offset in np.argwhere(store.items):
        at = slot * store.schema.rows + offset + before
        for k in range(lookahead + 1):
            assert columns["valid"][at + k], (slot, offset, k)
            if columns["last"][at + k]:
                break
    counted = run.metrics[-1]["bad_observations"]
    assert 10 < counted < 200
    text = (run.path / "log.txt").read_text()
    assert text.count("it is dropped and counted in bad_observations") == 1 and "Noisy" in text
    assert all(line.get("train_return") is None or np.isfinite(line["train_return"]) for line in run.metrics)
    assert 0 < run.metrics[-1]["bad_episodes"] <= min(counted, run.metrics[-1]["episodes"])


def test_a_bad_observation_at_the_start_of_an_episode_is_blanked_too_wherever_the_episode_begins(tmp_path: Path) -> None:
    """A checkpoint begins new episodes as well: it must not stop a run that goes on elsewhere."""
    changes = {"steps": 900, "checkpoint.every": 30, "eval.every": 0, "envs_per_actor": 8}
    run = tiny(tmp_path / "r", env=NoisyFromTheStart, **changes)
    assert run.metrics[-1]["env_steps"] >= 900
    assert run.metrics[-1]["bad_observations"] > 10


def test_a_broken_environment_stops_a_run_with_one_sentence(tmp_path: Path) -> None:
    class Breaks(Chain):
        def step(self, action: Any) -> Any:
            return np.full(8, np.nan, np.float32), 0.0, False, False, {}

    with pytest.raises(UserError, match=r"100 observations in a row were bad.*fix the environment"):
        tiny(tmp_path / "r", env=Breaks)
    assert TINY["steps"] > 100
    assert "100 observations in a row" in (tmp_path / "r" / "log.txt").read_text()


def test_bad_observations_are_counted_across_a_resume(tmp_path: Path) -> None:
    first = tiny(tmp_path / "r", env=Noisy, steps=600, **{"eval.every": 0}).metrics[-1]["bad_observations"]
    assert first > 0
    again = Run(tmp_path / "r")
    tiny(tmp_path / "r", env=Noisy, steps=900, **{"eval.every": 0})
    assert again.metrics[-1]["bad_observations"] > first


class Rewarding(Chain):
    """Episodes of 20 steps with a reward of 1 each; `bad` steps have no observation, `poor` ones no finite reward."""

    bad: tuple[int, ...] = ()
    poor: tuple[int, ...] = ()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        obs, _, _, _, info = super().step(0)
        self.t += 1
        obs = np.full(8, np.nan, np.float32) if self.t in self.bad else obs
        return obs, np.nan if self.t in self.poor else 1.0, self.t == 20, False, info


class Blinking(Rewarding):
    bad = (3, 4, 5, 9, 12, 15, 20)


class Poor(Rewarding):
    poor = (2, 20)


@pytest.mark.parametrize(("env", "total"), [(Rewarding, 20.0), (Blinking, 20.0), (Poor, 18.0)])
def test_a_finite_reward_counts_in_every_return_and_episodes_with_bad_rows_are_counted(
    env: Any, total: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from veldt.cli import eval as command

    run = tiny(tmp_path / "r", env=env, steps=600)
    lines = run.metrics
    bad = env is not Rewarding
    assert {line["train_return"] for line in lines if "train_return" in line} == {total}
    assert lines[-1]["episodes"] >= 20 and lines[-1]["bad_episodes"] == (lines[-1]["episodes"] if bad else 0)
    evaluated = [line for line in lines if "eval_return" in line]
    assert evaluated and all(x["eval_return"] == total and x["eval_bad_episodes"] == 2 * bad for x in evaluated)
    found = run.evaluate(5)
    assert found.returns == [total] * 5 and found.bad_episodes == 5 * bad
    capsys.readouterr()
    assert command.run([str(run.path), "--episodes", "3", "--json", "--trust"]) == 0
    out = capsys.readouterr().out
    assert ("3 of these had observations or rewards that are not finite" in out) == bad
    assert json.loads(out.splitlines()[-1])["bad_episodes"] == 3 * bad


def test_the_log_of_a_good_environment_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    envs = make_env("CartPole-v1", 2)
    envs.reset(0)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            envs.step(np.ones(2, np.int64))
    assert caplog.text == ""


def test_two_functions_of_one_name_stay_apart() -> None:
    """Lambdas and partials share their names; a run must find its own."""
    makers = [functools.partial(Chain, n) for n in (3, 5)]
    names = [callables.name_of(make) for make in makers]
    assert names[0] != names[1] and [callables.name_of(make) for make in makers] == names
    assert [callables.find(name) for name in names] == makers


def test_a_box_of_truth_values_is_an_observation() -> None:
    class Switches(Chain):
        def __init__(self) -> None:
            super().__init__(4)
            self.observation_space = spaces.Box(0, 1, (4,), np.bool_)

        def _observe(self) -> Any:
            return super()._observe() > 0

    step = make_env(Switches, 2).reset(0)
    assert step["obs"].dtype == np.bool_ and step["valid"].all()


class Broken(Chain):
    """Two of three observations are not finite."""

    def step(self, action: Any) -> Any:
        obs, reward, done, truncated, info = super().step(action)
        self.t = getattr(self, "t", 0) + 1
        return (obs if self.t % 3 == 0 else np.full(8, np.nan, np.float32)), reward, done, truncated, info


BROKEN = {"steps": 4_000, "eval.every": 0, "checkpoint.every": 0, "envs_per_actor": 8}


def test_a_run_ends_when_too_many_of_its_observations_are_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"Broken: 6\d\d of the last 1,0\d\d observations were not .* max_bad \(0.1\)"):
        train("dqn", env=Broken, run=tmp_path / "r", **TINY | BROKEN | {"log.every": 0.01})
    lines = Run(tmp_path / "r").metrics
    assert lines[-1]["env_steps"] < 1_200 and 0.6 < lines[-1]["bad_fraction"] < 0.7
    assert re.search(r"bad observations [67]\d", capsys.readouterr().out)


def test_a_run_goes_on_with_as_many_bad_observations_as_it_may_have(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", env=Broken, **BROKEN | {"max_bad": 0.7})
    assert run.metrics[-1]["env_steps"] >= 4_000
    with pytest.raises(UserError, match=r"max_bad \(0.5\)"):  # a resume may change it
        tiny(tmp_path / "r", env=Broken, **BROKEN | {"max_bad": 0.5, "steps": 8_000})


def test_good_observations_have_no_fraction(tmp_path: Path) -> None:
    assert not any("bad_fraction" in line for line in tiny(tmp_path / "r", env=Chain, steps=300).metrics)
