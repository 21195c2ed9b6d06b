"""Which items a store draws, and how likely each was.

Items are leaves: integers below `leaves`. A leaf that holds no item has no mass in any selector. Every selector keeps one
float64 number for each leaf, `mass`, and that alone is what a checkpoint saves.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import numba
import numpy as np

from veldt.records.tree import Array
from veldt.storing.slots import BlockMemory, PrivateMemory
from veldt.storing.sumtree import SumTree

FLOOR = 1e-6  # of priorities


class Draw(NamedTuple):
    leaves: Array  # int64 [n]
    probability: Array  # float64 [n]


class Selector(Protocol):
    once: bool  # an item is gone when drawn: the store is a queue
    prioritized: bool  # draws depend on priorities

    def insert(self, leaves: Array, priorities: Array | None) -> None: ...
    def remove(self, leaves: Array) -> None: ...
    def update(self, leaves: Array, priorities: Array) -> None: ...
    def draw(self, n: int, rng: np.random.Generator) -> Draw: ...
    def weights(self, draw: Draw, size: int) -> Array: ...
    def raw_weights(self, probability: Array, size: int) -> Array: ...
    def save(self) -> Array: ...
    def load(self, mass: Array, order: Array) -> None: ...
    def adopt(self, items: Array, order: Array) -> None: ...
    def check_valid(self, items: Array) -> None: ...


class Prioritized:
    """P(i) = p_i^alpha / sum_j p_j^alpha; w_i = (N P(i))^-beta, divided by the largest of the batch (Schaul et al. 2016).

    Draws are stratified: one from each of n equal segments of the total mass. A missing priority reads as the largest
    seen so far.
    """

    once = False
    prioritized = True

    def __init__(self, leaves: int, alpha: float = 0.6, beta: float = 0.4, memory: BlockMemory | None = None) -> None:
        self.alpha, self.beta = alpha, beta
        self.tree = SumTree(leaves, memory or PrivateMemory())
        self.largest = 1.0  # mass, that is p^alpha

    def insert(self, leaves: Array, priorities: Array | None) -> None:
        if priorities is None:
            self.tree.set(leaves, np.full(len(leaves), self.largest))
        else:
            self.update(leaves, priorities)

    def update(self, leaves: Array, priorities: Array) -> None:
        # Without a floor an item of priority zero would have no mass, and could never be drawn again.
        mass = np.maximum(check_priorities(priorities), FLOOR)
        np.power(mass, self.alpha, out=mass)
        self.tree.set(leaves, mass)
        self.largest = max(self.largest, mass.max(initial=0.0))

    def remove(self, leaves: Array) -> None:
        self.tree.set(leaves, np.zeros(len(leaves)))

    def draw(self, n: int, rng: np.random.Generator) -> Draw:
        leaves, mass = self.tree.draw((np.arange(n) + rng.random(n)) / n)
        return Draw(leaves, mass / self.tree.total)

    def weights(self, draw: Draw, size: int) -> Array:
        weights = self.raw_weights(draw.probability, size)
        weights /= weights.max()
        return weights.astype(np.float32)

    def raw_weights(self, probability: Array, size: int) -> Array:
        """Before the division, float64."""
        return np.asarray((size * probability) ** -self.beta)

    def save(self) -> Array:
        return np.append(self.tree[:], self.largest)

    def load(self, mass: Array, order: Array) -> None:
        self.tree.rebuild(mass[:-1])
        self.largest = float(mass[-1])

    def adopt(self, items: Array, order: Array) -> None:
        """Goes on with the masses that an earlier life left in the memory; only those of `items` are there to stay."""
        self.tree.rebuild(np.where(items, self.tree[:], 0.0))
        self.largest = max(1.0, float(self.tree[:].max()))

    def check_valid(self, items: Array) -> None:
        self.tree.check_valid()
        assert ((self.tree[:] > 0) == items).all()


class Uniform(Prioritized):
    """Every item equally likely: a mass of one each, whatever its priority."""

    prioritized = False

    def __init__(self, leaves: int, memory: BlockMemory | None = None) -> None:
        super().__init__(leaves, alpha=0.0, beta=0.0, memory=memory)

    def insert(self, leaves: Array, priorities: Array | None) -> None:
        if priorities is not None:
            check_priorities(priorities)
        super().insert(leaves, None)

    def update(self, leaves: Array, priorities: Array) -> None:
        check_priorities(priorities)

    def weights(self, draw: Draw, size: int) -> Array:
        return np.ones(len(draw.leaves), np.float32)


class Fifo:
    """Every item once, oldest first."""

    once = True
    prioritized = False

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.queue: deque[int] = deque()

    def insert(self, leaves: Array, priorities: Array | None) -> None:
        if priorities is not None:
            check_priorities(priorities)
        self.queue.extend(leaves.tolist())

    def update(self, leaves: Array, priorities: Array) -> None:
        check_priorities(priorities)

    def remove(self, leaves: Array) -> None:
        gone = set(leaves.tolist())
        self.queue = deque(leaf for leaf in self.queue if leaf not in gone)

    def draw(self, n: int, rng: np.random.Generator) -> Draw:
        assert n <= len(self.queue), (n, len(self.queue))
        probability = np.full(n, 1.0 / len(self.queue))
        return Draw(np.array([self.queue.popleft() for _ in range(n)], np.int64), probability)

    def weights(self, draw: Draw, size: int) -> Array:
        return np.ones(len(draw.leaves), np.float32)

    def raw_weights(self, probability: Array, size: int) -> Array:
        return np.ones(len(probability))

    def save(self) -> Array:
        mass = np.zeros(self.leaves)
        mass[list(self.queue)] = 1.0
        return mass

    def load(self, mass: Array, order: Array) -> None:
        """`order` lists all leaves, oldest first."""
        self.queue = deque(order[mass[order] > 0].tolist())

    def adopt(self, items: Array, order: Array) -> None:
        self.load(items, order)

    def check_valid(self, items: Array) -> None:
        assert sorted(self.queue) == np.flatnonzero(items).tolist()


def check_priorities(priorities: Array) -> Array:
    """The same as float64, if they are finite and not negative."""
    priorities = np.ascontiguousarray(priorities, np.float64)
    if not _well(priorities):
        raise ValueError(f"store: priorities must be finite and not negative, got {priorities}")
    return priorities


@numba.njit("b1(f8[::1])", cache=True)
def _well(x: Array) -> bool:
    well = True
    for i in range(len(x)):
        well &= (x[i] >= 0) & (x[i] < np.inf)
    return well
