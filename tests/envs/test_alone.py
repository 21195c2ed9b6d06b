"""One environment without a vector gives the records that it gives in Gymnasium's vector of one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from veldt.envs import make_env
from veldt.envs.vector import RETURN_ENDS


class Parts(gym.Env[Any, Any]):
    """Dict observations in arrays that are used again, MultiDiscrete actions, and returns that end within an episode."""

    observation_space = spaces.Dict({"x": spaces.Box(-9, 9, (2,), np.float32), "kind": spaces.Discrete(3)})
    action_space = spaces.MultiDiscrete([3, 2])

    def __init__(self) -> None:
        self.x = np.zeros(2, np.float32)

    def seen(self) -> dict[str, Any]:
        return {"x": self.x, "kind": int(self.x[0]) % 3}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x[:] = self.np_random.integers(0, 3, 2)
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.x[:] = np.clip(self.x + action - self.np_random.integers(0, 3, 2), -9, 9)
        sums = float(self.x.sum())
        return (
            self.seen(),
            sums,
            sums > 6,
            self.np_random.random() < 0.1,
            {RETURN_ENDS: bool(self.x[1] == 1), "other": "text"},
        )


class Continuous(Parts):
    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def seen(self) -> Any:
        return self.x


@pytest.mark.parametrize("env", [Parts, Continuous, "CartPole-v1", "veldt/Catch-v0", "Taxi-v4"])
def test_the_records_are_those_of_a_vector_of_one(env: Any) -> None:
    wrap: Any = [lambda made: made]  # so that no vector entry point is used
    one, other = make_env(env, alone=True), make_env(env, 1, wrappers=wrap)
    assert one.spec == other.spec
    records, expected = [one.reset(5)], [other.reset(5)]
    one.env.action_space.seed(1)
    for i in range(900):
        action = one.adapter.recorded(one.env.action_space.sample(), 1)
        records.append(one.step(action))
        expected.append(other.step(action))
        if i == 300:  # in the middle of an episode
            records.append(one.reset(7)), expected.append(other.reset(7))
    assert sum(bool(x["last"][0]) for x in records) > 2
    for found, wanted in zip(records, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert found[name].dtype == x.dtype and found[name].shape == x.shape, name
            np.testing.assert_array_equal(found[name], x, err_msg=name)
    one.close(), other.close()


def test_it_is_for_one_environment() -> None:
    with pytest.raises(AssertionError):
        make_env("CartPole-v1", 2, alone=True)
