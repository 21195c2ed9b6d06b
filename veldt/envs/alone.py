"""Vector: what our own vectors have in common. Alone: one environment, at a fraction of the cost of Gymnasium's vectors."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate


class Vector(VectorEnv[Any, Any, Any]):
    """A vector of these environments. How it steps them is up to a subclass."""

    def __init__(self, envs: list[gym.Env[Any, Any]]) -> None:
        one = envs[0]
        self.envs, self.num_envs = envs, len(envs)
        self.metadata = {**one.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
        self.observation_space = batch_space(one.observation_space, self.num_envs)
        self.action_space = batch_space(one.action_space, self.num_envs)
        self.render_mode = one.render_mode
        self._box = isinstance(one.observation_space, spaces.Box)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()

    def _together(self, observations: Sequence[Any]) -> Any:
        """Copies of the observations, as one of the vector's space."""
        space = self.single_observation_space
        if self._box:
            return np.array(observations, space.dtype)
        out: Any = create_empty_array(space, len(observations))
        return concatenate(space, observations, out)


class Alone(Vector):
    """Resets in mode NEXT_STEP."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__([env])
        self.env = env
        self._choice = isinstance(env.action_space, spaces.Discrete)
        self._over = False
        self._no = np.zeros(1, np.bool_)

    def reset(self, *, seed: int | list[int | None] | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed[0] if isinstance(seed, list) else seed, options=options)
        self._over = False
        return self._together((obs,)), _arrays(info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._over:
            obs, info = self.reset()
            return obs, np.zeros(1), self._no, self._no, info
        action = actions[0] if self._choice else next(iter(iterate(self.action_space, actions)))
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._over = bool(terminated or truncated)
        flags = np.array((terminated, truncated), np.bool_)
        return self._together((obs,)), np.array((reward,), np.float64), flags[:1], flags[1:], _arrays(info)

    def render(self) -> Any:
        return (self.env.render(),)


def _arrays(info: dict[str, Any]) -> dict[str, Any]:
    return {key: np.array([x]) for key, x in info.items()} if info else info
