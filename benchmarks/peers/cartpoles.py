"""What the scripts of peers share: the age of the process, greedy episodes of CartPole, and Ray without its messages."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import gymnasium as gym
import numpy as np
import psutil

EPISODES = 20


def process_age() -> float:
    """Seconds since the process began, to 10 ms (the kernel gives the start in ticks since boot)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time() - psutil.Process().create_time()


class CartPoles:
    """20 CartPoles that are stepped as one."""

    def __init__(self, seed: int) -> None:
        self.env = gym.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="vector_entry_point")
        self.env.reset(seed=seed)
        self.seconds = 0.0  # that were spent here

    def play(self, act: Callable[[np.ndarray], np.ndarray]) -> float:
        """The mean return of the first episode of each environment."""
        began = time.perf_counter()
        obs, _ = self.env.reset()
        running = np.ones(EPISODES, dtype=bool)
        total = np.zeros(EPISODES)
        while running.any():
            obs, reward, terminated, truncated, _ = self.env.step(act(obs))
            total += reward * running
            running &= ~(terminated | truncated)
        self.seconds += time.perf_counter() - began
        return float(total.mean())


def start_ray(cpus: int) -> None:
    import ray

    warnings.filterwarnings("ignore")
    ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.CRITICAL, log_to_driver=False)
    logging.disable(logging.CRITICAL)
