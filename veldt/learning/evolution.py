"""Evolution Strategies (Salimans et al. 2017): the mathematics, and what master and workers derive from the seed alike.

    theta <- theta + lr * optimizer(g - weight_decay * theta)
    g = 1 / 2n * sum over pairs i of (y_i+ - y_i-) eps_i             (mirrored: each eps_i is evaluated with both signs)

y are the centered ranks of the 2n returns, in [-1/2, 1/2]; their scale, and 1 / sigma, are the optimizer's to absorb.

paper, authors' code                        here                                      theirs
noise table of 250M normals, shared         `fill_noise`; a program.array             `table`
noise index drawn by the worker and sent    `noise_index`: follows from the seed
centered ranks; ties in any order           `centered_ranks`; ties averaged
sigma                                       `sigma`                                   0.02
Adam, or SGD with momentum 0.9              `optimizer`, `sgd_momentum`               Adam, 0.01
weight decay (l2coeff)                      `weight_decay`                            0.005
episodes in a batch 10,000                  `pairs`, two episodes each                5,000
evaluations without noise, 0.003            `noiseless`
episodes whose observations count, 0.01     `observe`
adaptive episode cap                        `cap`, `cap_fraction`, `cap_growth`
a batch also has 100,000 steps at least     -
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import numpy as np

from veldt.bounds import above, at_least, between
from veldt.records.tree import Array
from veldt.seeds import derive, nth

CHUNK = 1 << 20  # numbers of the table that are drawn at a time
ALIGN = 16  # numbers: noise begins at multiples of this many in the table


@dataclass(frozen=True)
class EvolutionConfig:
    pairs: Annotated[int, above(0)] = 32
    """Pairs of episodes in a generation: each perturbation of the weights is evaluated with both signs."""
    mode: Literal["exact", "first"] = "exact"
    """exact: a generation is its first pairs by number, so that a run does not depend on how many actors there are, or on
    restarts; first: it is the pairs that arrive first, and later ones are dropped."""
    sigma: Annotated[float, above(0)] = 0.1
    """Standard deviation of the perturbation of each weight."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """sgd has a momentum."""
    lr: Annotated[float, above(0)] = 0.05
    """Learning rate."""
    anneal: bool = False
    """Anneal the learning rate linearly to 0 over the run."""
    eps: Annotated[float, at_least(0)] = 1e-8
    """Epsilon of the optimizer."""
    sgd_momentum: Annotated[float, between(0, 1)] = 0.9
    """Momentum of sgd: the fraction of the last step in the next one."""
    weight_decay: Annotated[float, at_least(0)] = 0.005
    """The gradient of weight_decay / 2 * |theta|^2 is subtracted from that of the returns."""
    noiseless: Annotated[float, between(0, 1)] = 0.02
    """Episodes of the unperturbed weights, as a fraction of the perturbed ones: they only report their return."""
    observe: Annotated[float, between(0, 1)] = 1.0
    """Fraction of the pairs whose observations count in the statistics of algorithm.normalize_obs."""
    cap: Annotated[int, at_least(0)] = 0
    """Steps after which an episode is cut off in the first generation; 0: never."""
    cap_fraction: Annotated[float, between(0, 1)] = 0.5
    """The cap grows after a generation in which at least this fraction of the episodes was cut off."""
    cap_growth: Annotated[float, at_least(1)] = 1.5
    """Factor by which the cap grows."""
    seeds: Literal["own", "pair", "generation"] = "pair"
    """Which episodes begin with the same seed of the environment, so that their returns differ by the weights alone: none
    (own), both of a pair, or all of a generation."""
    reference: Annotated[int, above(1)] = 128
    """Observations in the reference batch of algorithm.batch_norm."""
    table: Annotated[int, above(0)] = 4_000_000
    """Normally distributed numbers in the table that perturbations are taken from; 4 bytes each."""


class Generation(NamedTuple):
    """What workers evaluate."""

    version: int  # no two are alike, also where a generation is begun again
    number: int  # updates before it; -1: there is nothing to do
    cap: int  # steps of an episode; 0: no cap
    vector: Array  # float32, the parameters and then the float buffers of the network


def centered_ranks(returns: Array) -> Array:
    """Ranks of all elements, from -1/2 for the least to 1/2 for the largest. Equal ones get the mean of their ranks."""
    flat = returns.ravel()
    if len(flat) < 2:
        return np.zeros(returns.shape)
    _, place, count = np.unique(flat, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count + 1) / 2  # of each distinct value
    return np.asarray((rank[place] / (len(flat) - 1) - 0.5).reshape(returns.shape))


def estimate(returns: Array, noise: list[Array], out: Array) -> None:
    """Writes g of returns [n, 2] and the perturbations of the n pairs to `out`; sums in the order of the pairs."""
    ranks = centered_ranks(returns)
    weights = ((ranks[:, 0] - ranks[:, 1]) / returns.size).astype(np.float32)
    out[...] = 0
    for weight, eps in zip(weights, noise, strict=True):
        if weight:
            out += weight * eps


def fill_noise(table: Array, seed: int) -> None:
    """Fills the table. Whoever fills it again writes the same bytes."""
    rng = np.random.Generator(np.random.SFC64(derive(seed, "noise")))
    for at in range(0, len(table), CHUNK):
        rng.standard_normal(dtype=np.float32, out=table[at : at + CHUNK])


@lru_cache(64)
def _stream(seed: int, what: str, generation: int) -> int:
    """From which the seeds of this generation's pairs follow."""
    return derive(seed, what, generation)


def noise_index(seed: int, generation: int, pair: int, table: int, size: int) -> int:
    """Where the perturbation of a pair begins in a table of so many numbers; it has `size` of them."""
    return ALIGN * (nth(_stream(seed, "pair", generation), pair) % ((table - size) // ALIGN + 1))


def episode_seed(config: EvolutionConfig, seed: int, generation: int, pair: int, sign: int) -> int:
    """Of the environment. `pair` is below 0 for episodes without noise."""
    if pair < 0:
        return nth(_stream(seed, "noiseless", generation), -pair)
    i = {"own": 3 * pair + 1 + sign, "pair": pair, "generation": 0}[config.seeds]
    return nth(_stream(seed, "episode", generation), i)


def observes(config: EvolutionConfig, seed: int, generation: int, pair: int) -> bool:
    """Whether the observations of a pair count in the statistics."""
    return pair >= 0 and nth(_stream(seed, "observe", generation), pair) < config.observe * 2.0**63


def noiseless_episodes(config: EvolutionConfig, generation: int) -> int:
    """In this generation: as many as whole ones have come together."""
    each = config.noiseless * 2 * config.pairs
    return int((generation + 1) * each) - int(generation * each)
