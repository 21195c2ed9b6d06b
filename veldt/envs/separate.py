"""Separate: a vector of environments whose episodes begin one by one, each with a seed of its own. Repeat: frame-skip."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from veldt.envs.alone import Vector
from veldt.records.tree import Array


class Separate(Vector):
    """An episode begins with the first step after `begin`, which ignores the action, as in mode NEXT_STEP. What follows
    from a seed does not depend on what was played before, or on the other environments.

    After an episode its environment rests: it is not stepped, and its last observation stays.
    """

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], n: int) -> None:
        super().__init__([make() for _ in range(n)])
        one = self.envs[0]
        self._seeds: list[int | None] = [None] * n  # of the episodes that begin with the next step
        self._playing = [False] * n
        blank = create_empty_array(one.observation_space, n=1, fn=np.zeros)
        self._newest = [next(iter(iterate(batch_space(one.observation_space, 1), blank)))] * n
        self._indexed = isinstance(one.action_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete)

    def begin(self, lane: int, seed: int) -> None:
        self._seeds[lane] = seed

    def rest(self, lane: int) -> None:
        self._seeds[lane], self._playing[lane] = None, False

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode everywhere."""
        for i, env in enumerate(self.envs):
            self._newest[i] = env.reset(seed=None if seed is None else seed + i)[0]
            self._seeds[i], self._playing[i] = None, True
        return self._together(self._newest), {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        reward = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        each: Any = actions if self._indexed else list(iterate(self.action_space, actions))
        newest, playing = self._newest, self._playing
        for i, env in enumerate(self.envs):
            seed = self._seeds[i]
            if seed is not None:
                newest[i] = env.reset(seed=seed)[0]
                self._seeds[i], playing[i] = None, True
            elif playing[i]:
                newest[i], reward[i], ended, cut, _ = env.step(each[i])
                if ended or cut:
                    terminated[i], truncated[i], playing[i] = ended, cut, False
            else:
                truncated[i] = True
        return self._together(self._newest), reward, terminated, truncated, {}


class Repeat(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action n times, or until the episode ends; the reward is the sum."""

    def __init__(self, env: gym.Env[Any, Any], n: int) -> None:
        super().__init__(env)
        self.n = n

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.n):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info
