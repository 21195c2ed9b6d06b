"""How actors explore, record and refresh their weights: one dataclass a method; `Config.actor` is one of them.

block                    fresh steps in a block; 0: one unroll
refresh                  steps of an actor between two looks for newer weights; 0: once a block
explore(first, n, own)   the exploration of environments first ... first + n - 1; the run's own are 0 ... own - 1, and
                         those of actors that join come after them
hold                     steps for which an environment keeps its random numbers, at most
str()                    says in a few words how it explores
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from veldt.acting.exploration import Explore, LinearDecay
from veldt.bounds import above, at_least, between
from veldt.records.tree import Array
from veldt.seeds import derive


@dataclass(frozen=True)
class ActorConfig:
    """One epsilon for all environments, which falls linearly. The policy looks for newer weights at each step."""

    block: Annotated[int, above(0)] = 8
    """New steps in a block: an environment collects this many before they enter the store."""
    epsilon: Annotated[float, between(0, 1)] = 1.0
    """Fraction of random actions at the start."""
    epsilon_end: Annotated[float, between(0, 1)] = 0.05
    """Fraction of random actions at the end of the decay."""
    epsilon_steps: Annotated[int, at_least(0)] = 10_000
    """Env steps over which epsilon falls linearly."""
    hold: Annotated[int, above(0)] = 1
    """Steps for which an environment repeats a random action, at most: P(k or more) = 1 / k. 1: as in the papers."""

    refresh: ClassVar[int] = 1

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return LinearDecay(self.epsilon, self.epsilon_end, self.epsilon_steps)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon_end:g} in {self.epsilon_steps:,} steps"


@dataclass(frozen=True)
class LadderConfig:
    """Every environment has its own epsilon (Horgan et al. 2018): epsilon^(1 + alpha i / (N - 1)), the i-th of N.

    N are the environments of the run's own actors. Environments of actors that join get values in between, whether or
    not all seats are taken: 1/2, 1/4, 3/4, 1/8, ... of the way down (a van der Corput sequence) instead of i / (N - 1).
    """

    block: Annotated[int, above(0)] = 64
    """New steps in a block: an environment collects this many before they enter the store."""
    refresh: Annotated[int, above(0)] = 8
    """Steps of an actor between two checks for newer weights."""
    epsilon: Annotated[float, between(0, 1)] = 0.4
    """Fraction of random actions of the environment that explores most."""
    alpha: Annotated[float, at_least(0)] = 7.0
    """How steeply epsilon falls from one environment to the next."""
    hold: Annotated[int, above(0)] = 1
    """Steps for which an environment repeats a random action, at most: P(k or more) = 1 / k. 1: as in the papers."""

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        """A single environment of the run's own is in the middle."""
        i = np.arange(first, first + n)
        down = i / (own - 1) if own > 1 else np.full(n, 0.5)
        down[i >= own] = [van_der_corput(k) for k in (i[i >= own] - own + 1).tolist()]
        return self.epsilon ** (1 + self.alpha * down)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon ** (1 + self.alpha):.2g}, one for each environment"


def van_der_corput(k: int) -> float:
    """1/2, 1/4, 3/4, 1/8, 5/8, ... for k = 1, 2, 3, ...: the binary digits of k, mirrored at the point."""
    return int(f"{k:b}"[::-1], 2) / (1 << k.bit_length())


@dataclass(frozen=True)
class GaussianConfig:
    """Gaussian noise on continuous actions, the same in every environment (Horgan et al. 2018)."""

    block: Annotated[int, above(0)] = 32
    """New steps in a block: an environment collects this many before they enter the store."""
    refresh: Annotated[int, above(0)] = 8
    """Steps of an actor between two checks for newer weights."""
    sigma: Annotated[float, at_least(0)] = 0.3
    """Standard deviation of the noise, where half of an action's range is 1."""
    hold: Annotated[int, above(0)] = 1
    """Steps for which an environment keeps its noise, at most: P(k or more) = 1 / k. 1: as in the paper."""

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return np.full(n, self.sigma)

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}"


@dataclass(frozen=True)
class UnrollConfig:
    """Actions are sampled from the policy itself, and sent an unroll at a time (Espeholt et al. 2018)."""

    refresh: Annotated[int, at_least(0)] = 0
    """Steps of an actor between two checks for newer weights; 0: at the start of each unroll."""

    block: ClassVar[int] = 0  # one unroll
    hold: ClassVar[int] = 1  # what is recorded is the probability of independent draws

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return np.ones(n)

    def __str__(self) -> str:
        return "sampling from the policy"


@dataclass(frozen=True)
class DrawnConfig:
    """Epsilon falls linearly, in each worker to a value of its own that is drawn from a few (Mnih et al. 2016)."""

    epsilon: Annotated[float, between(0, 1)] = 1.0
    """Fraction of random actions at the start."""
    epsilon_ends: Annotated[tuple[float, ...], between(0, 1)] = (0.1, 0.01, 0.5)
    """Fractions of random actions at the end of the decay, of which each worker draws one."""
    epsilon_odds: Annotated[tuple[float, ...], between(0, 1)] = (0.4, 0.3, 0.3)
    """Probabilities of these."""
    epsilon_steps: Annotated[int, at_least(0)] = 1_000_000
    """Env steps of all workers over which epsilon falls."""

    block: ClassVar[int] = 0  # one unroll
    refresh: ClassVar[int] = 0  # at the start of each unroll
    hold: ClassVar[int] = 1

    def explore(self, first: int, n: int, own: int, seed: int = 0) -> Explore | Array:
        assert n == 1, n
        end = np.random.default_rng(derive(seed, "epsilon", first)).choice(self.epsilon_ends, p=self.epsilon_odds)
        return LinearDecay(self.epsilon, float(end), self.epsilon_steps)

    def __str__(self) -> str:
        ends = ", ".join(f"{x:g}" for x in self.epsilon_ends)
        return f"epsilon {self.epsilon:g} to one of {ends} in {self.epsilon_steps:,} steps"


@dataclass(frozen=True)
class EpisodesConfig:
    """Whole episodes of perturbed weights (Salimans et al. 2017)."""

    noise: Annotated[float, at_least(0)] = 0.0
    """Noise on actions: its standard deviation, where half of an action's range is 1; of choices, the fraction that is
    sampled from the softmax of the outputs instead of being the largest."""

    refresh: ClassVar[int] = 1
    block: ClassVar[int] = 0
    hold: ClassVar[int] = 1

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return np.full(n, self.noise)

    def __str__(self) -> str:
        return "each with perturbed weights" + (f", noise {self.noise:g} on actions" if self.noise else "")
