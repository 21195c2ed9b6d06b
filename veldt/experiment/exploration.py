"""How actors explore, record and refresh their weights: one dataclass a method. `Config.actor` is one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import numpy as np

from veldt.acting.policy import Explore, LinearDecay, ladder
from veldt.bounds import above, at_least, between
from veldt.records.tree import Array


class Exploration(Protocol):
    """A frozen dataclass; str() says in a few words how it explores."""

    @property
    def block(self) -> int: ...  # fresh steps in a block; 0: one unroll
    @property
    def refresh(self) -> int: ...  # steps of an actor between two looks for newer weights; 0: once a block

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        """The exploration of environments first ... first + n - 1 out of `total` in the run."""


@dataclass(frozen=True)
class ActorConfig:
    """One epsilon for all environments, which falls linearly. The policy looks for newer weights at each step."""

    block: Annotated[int, above(0)] = 8
    """Fresh steps in a block: an environment collects this many before they enter the store."""
    epsilon: Annotated[float, between(0, 1)] = 1.0
    """Fraction of random actions at the start."""
    epsilon_end: Annotated[float, between(0, 1)] = 0.05
    """Fraction of random actions at the end of the decay."""
    epsilon_steps: Annotated[int, at_least(0)] = 10_000
    """Env steps over which epsilon falls linearly."""

    refresh: ClassVar[int] = 1

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        return LinearDecay(self.epsilon, self.epsilon_end, self.epsilon_steps)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon_end:g} in {self.epsilon_steps:,} steps"


@dataclass(frozen=True)
class LadderConfig:
    """Every environment has an epsilon of its own (Horgan et al. 2018): epsilon^(1 + alpha i / (N - 1)), the i-th of N."""

    block: Annotated[int, above(0)] = 64
    """Fresh steps in a block: an environment collects this many before they enter the store."""
    refresh: Annotated[int, above(0)] = 8
    """Steps of an actor between two looks for newer weights."""
    epsilon: Annotated[float, between(0, 1)] = 0.4
    """Fraction of random actions of the environment that explores most."""
    alpha: Annotated[float, at_least(0)] = 7.0
    """How steeply epsilon falls from one environment to the next."""

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        return ladder(self.epsilon, self.alpha, first, n, total)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon ** (1 + self.alpha):.2g}, one for each environment"


@dataclass(frozen=True)
class GaussianConfig:
    """Gaussian noise on continuous actions, the same in every environment (Horgan et al. 2018)."""

    block: Annotated[int, above(0)] = 32
    """Fresh steps in a block: an environment collects this many before they enter the store."""
    refresh: Annotated[int, above(0)] = 8
    """Steps of an actor between two looks for newer weights."""
    sigma: Annotated[float, at_least(0)] = 0.3
    """Standard deviation of the noise, where half of an action's range is 1."""

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        return np.full(n, self.sigma)

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}"


@dataclass(frozen=True)
class UnrollConfig:
    """Actions are sampled from the policy itself, and sent an unroll at a time (Espeholt et al. 2018)."""

    refresh: Annotated[int, at_least(0)] = 0
    """Steps of an actor between two looks for newer weights; 0: at the start of each unroll."""

    block: ClassVar[int] = 0  # one unroll

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        return np.ones(n)

    def __str__(self) -> str:
        return "sampling from the policy"
