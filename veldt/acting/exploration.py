"""How much policies explore, and for how long: schedules, and random numbers that are held for several steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from veldt.records.tree import Array

Explore = Callable[[int], float | Array]  # env steps of the run -> one amount for all environments, or one for each


@dataclass(frozen=True)
class LinearDecay:
    """Falls linearly from `start` to `end` over `steps` env steps of the run, and stays there."""

    start: float
    end: float
    steps: int

    def __call__(self, env_steps: int) -> float:
        fraction = min(1.0, env_steps / max(1, self.steps))
        return self.start + fraction * (self.end - self.start)


class HeldRandom:
    """Random numbers of n environments. Each environment keeps its own for d steps, P(d >= k) = 1 / k up to `longest`.

    A policy that is given these instead of a generator explores in the same direction for a while: an epsilon-greedy one
    repeats its random action (ez-greedy, Dabney et al. 2021), Gaussian noise stays the same. The fraction of random actions
    does not change. Call `begin` once a step; all arrays drawn after it have one row for each of these environments.
    """

    def __init__(self, rng: np.random.Generator, n: int, longest: int) -> None:
        self.rng, self.longest = rng, longest
        self._left = np.zeros(n, np.int64)  # steps, by environment
        self._held: list[Array] = []  # [n, ...], one for each draw of a step
        self._draws = 0

    def begin(self, lanes: Array) -> None:
        """The next draws are for these environments."""
        self._left[lanes] -= 1
        self._lanes, self._ended, self._draws = lanes, self._left[lanes] < 0, 0
        ended = lanes[self._ended]
        self._left[ended] = np.minimum(1 / (1 - self.rng.random(len(ended))), self.longest).astype(np.int64) - 1

    def random(self, size: tuple[int, ...]) -> Array:
        return self._hold(self.rng.random(size))

    def standard_normal(self, size: tuple[int, ...]) -> Array:
        return self._hold(self.rng.standard_normal(size))

    def __getattr__(self, name: str) -> Any:
        """What else a generator can do: those numbers are new at each step."""
        return getattr(self.rng, name)

    def reset(self, lanes: slice) -> None:
        """New numbers for these environments in the next step."""
        self._left[lanes] = 0

    def _hold(self, drawn: Array) -> Array:
        if self._draws == len(self._held):
            self._held.append(np.zeros((len(self._left), *drawn.shape[1:])))
        held = self._held[self._draws]
        self._draws += 1
        held[self._lanes[self._ended]] = drawn[self._ended]
        return held[self._lanes]
