"""Environments that take time without using a core, so that throughput depends on the number of actors and not of cores."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym


class Sleepy(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps for this many seconds in each step."""

    def __init__(self, env: gym.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return self.env.step(action)


def mountain_car() -> gym.Env[Any, Any]:
    return Sleepy(gym.make("MountainCar-v0"), 0.001)
