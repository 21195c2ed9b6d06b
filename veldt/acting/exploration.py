"""How much each environment explores: an epsilon, or the standard deviation of noise; 0 is greedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def ladder(epsilon: float, alpha: float, first: int, n: int, total: int) -> Array:
    """epsilon^(1 + alpha i / (total - 1)) of environments i = first ... first + n - 1 (Horgan et al. 2018).

    A single environment is in the middle of the ladder.
    """
    rung = np.arange(first, first + n) / (total - 1) if total > 1 else np.full(n, 0.5)
    return epsilon ** (1 + alpha * rung)
