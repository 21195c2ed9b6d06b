"""Alone: one environment as a vector of one, at a fraction of the cost of Gymnasium's vectors."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate


class Alone(VectorEnv[Any, Any, Any]):
    """Resets in mode NEXT_STEP. Observations are copies."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env, self.envs, self.num_envs = env, [env], 1
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, 1)
        self.action_space = batch_space(env.action_space, 1)
        self.render_mode = env.render_mode
        self._plain = isinstance(env.observation_space, spaces.Box)
        self._choice = isinstance(env.action_space, spaces.Discrete)
        self._over = False
        self._no = np.zeros(1, np.bool_)

    def reset(self, *, seed: int | list[int | None] | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed[0] if isinstance(seed, list) else seed, options=options)
        self._over = False
        return self._batch(obs), _arrays(info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._over:
            obs, info = self.reset()
            return obs, np.zeros(1), self._no, self._no, info
        action = actions[0] if self._choice else next(iter(iterate(self.action_space, actions)))
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._over = bool(terminated or truncated)
        flags = np.array((terminated, truncated), np.bool_)
        return self._batch(obs), np.array((reward,), np.float64), flags[:1], flags[1:], _arrays(info)

    def render(self) -> Any:
        return (self.env.render(),)

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()

    def _batch(self, obs: Any) -> Any:
        space = self.single_observation_space
        if self._plain:
            return np.array(obs, space.dtype)[None]
        out: Any = create_empty_array(space, 1)
        return concatenate(space, (obs,), out)


def _arrays(info: dict[str, Any]) -> dict[str, Any]:
    return {key: np.array([x]) for key, x in info.items()} if info else info
