"""Environments that obey files in a directory. Light to import: actors of every kind do."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

LEAKS = 2_000  # so that no leak takes the whole machine
SLOW = 200  # steps


class Orders:
    """Each file is an order to the one environment that takes it first, which renames it to order-pid.

    hang: for ever; raise: once; slow: 100 ms a step for a while; leak: 2 MB a step from now on; nan: one bad observation;
    spawn: a process in a session of its own, whose pid and whose parent's are in the name of another file.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.slow = 0
        self.leaks: list[bytes] | None = None

    def obey(self) -> bool:
        """Before a step; whether its observation is to be bad."""
        taken = [name for name in os.listdir(self.directory) if "-" not in name and self._take(name)]
        if "hang" in taken:
            hang_for_ever()
        if "raise" in taken:
            raise RuntimeError("as ordered")
        if "slow" in taken:
            self.slow = SLOW
        if "spawn" in taken:
            pid = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
            Path(f"{self.directory}/started-{pid}-{os.getpid()}").touch()
        if "leak" in taken:
            self.leaks = []
        if self.leaks is not None and len(self.leaks) < LEAKS:
            self.leaks.append(b"x" * 2_000_000)
        if self.slow:
            self.slow -= 1
            time.sleep(0.1)
        return "nan" in taken

    def _take(self, name: str) -> bool:
        try:
            os.rename(f"{self.directory}/{name}", f"{self.directory}/{name}-{os.getpid()}")
        except FileNotFoundError:
            return False
        return True


def hang_for_ever() -> None:
    while True:
        pass


class Pole(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that obeys the files in the directory that the environment variable CHAOS names."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.orders = Orders(os.environ["CHAOS"])

    def step(self, action: Any) -> Any:
        bad = self.orders.obey()
        obs, *rest = super().step(action)
        return (np.full_like(obs, np.nan) if bad else obs, *rest)


def broken_pole(rows: dict[str, Any]) -> Any:
    """Which of n windows [n, T] of CartPole are not what physics and the rules make of their actions: bool [n].

    The equations are those of Barto, Sutton and Anderson (1983), stepped with Euler's method.
    """
    x, v, angle, turn = np.moveaxis(rows["obs"].astype(np.float64), -1, 0)
    first, last, valid = rows["first"], rows["last"], rows["valid"]
    force, sine, cosine = np.where(rows["action"] == 1, 10.0, -10.0), np.sin(angle), np.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    then = np.stack(
        [x + 0.02 * v, v + 0.02 * (push - 0.05 * bend * cosine / 1.1), angle + 0.02 * turn, turn + 0.02 * bend], -1
    )
    before, after = np.s_[:, :-1], np.s_[:, 1:]
    both = valid[before] & valid[after]
    follows = np.isclose(rows["obs"][after], then[before], rtol=1e-4, atol=1e-4).all(-1) & ~first[after]
    wrong = both & ~np.where(last[before], first[after], follows)
    edge = np.minimum(np.abs(np.abs(x) - 2.4), np.abs(np.abs(angle) - np.radians(12))) < 1e-4  # float32 cannot tell
    fallen = (np.abs(x) > 2.4) | (np.abs(angle) > np.radians(12))
    bad = (rows["reward"] != np.where(first, 0.0, 1.0)) | (first & (np.abs(rows["obs"]) > 0.05).any(-1))
    bad |= ~edge & ((rows["discount"] == 0) != fallen) | (fallen & ~edge & ~last)
    return wrong.any(1) | (bad & valid).any(1)
