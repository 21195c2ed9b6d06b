"""Environments for the points of Salimans et al. 2017."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


class Delayed(gym.Wrapper[Any, Any, Any, Any]):
    """All reward comes with the last step of an episode; its return stays the same."""

    total = 0.0

    def reset(self, **options: Any) -> Any:
        self.total = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        return obs, self.total if terminated or truncated else 0.0, terminated, truncated, info


def cart_pole() -> gym.Env[Any, Any]:
    """CartPole whose reward comes at the end."""
    return Delayed(gym.make("CartPole-v1"))


def cart_pole_again() -> gym.Env[Any, Any]:
    """CartPole as it is, in the same kind of vector as `cart_pole`."""
    return gym.make("CartPole-v1")
