"""A policy that counts, and an environment that knows what it must be told: a wrong or doubled action is seen at once.

Light to import: actors without torch import this module.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from veldt.envs.small import Counter

ACTIONS = 1 << 20


def expected(obs: Any) -> Any:
    """The one right action for observations [..., 3]: who, which episode, which step."""
    who, episode, t = np.moveaxis(np.asarray(obs, np.int64), -1, 0)
    return (who * 1_000_003 + episode * 7_919 + t * 31) % ACTIONS


class Routed(gym.Env[Any, Any]):
    """Raises when it is given any action but the one for its own present state."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, ACTIONS, (3,), np.int64)
        self.action_space = spaces.Discrete(ACTIONS)
        self.state = np.zeros(3, np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.state = np.array([Counter.mix(seed) % 100_003, 0, 0])
        self.state = np.array([self.state[0], self.state[1] + 1, 0])
        return self.state.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action != expected(self.state):
            raise RuntimeError(f"misrouted: {action} came where {expected(self.state)} was due, at {self.state.tolist()}")
        self.state[2] += 1
        return self.state.copy(), 0.0, bool(self.state[2] > self.state[0] % 23), False, {}
