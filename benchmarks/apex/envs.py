"""Environments that take time without using a core, so that actors and not cores are what there is more or less of."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym


class Sleepy(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps for so many seconds in each step."""

    def __init__(self, env: gym.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return self.env.step(action)


def mountain_car() -> gym.Env[Any, Any]:
    return Sleepy(gym.make("MountainCar-v0"), 0.001)
