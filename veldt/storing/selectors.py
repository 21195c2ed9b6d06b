"""Which items a replay draws, and how likely each was.

Items are leaves: integers below `leaves`. A leaf that holds no item has no mass. The masses, one float64 for each leaf, and
the largest so far are what a checkpoint saves.
"""

from __future__ import annotations

import numba
import numpy as np

from veldt.records.tree import Array
from veldt.storing.slots import BlockMemory
from veldt.storing.sumtree import SumTree

FLOOR = 1e-6  # the smallest priority


class Prioritized:
    """P(i) = p_i^alpha / sum_j p_j^alpha; w_i = (N P(i))^-beta, divided by the largest of the batch (Schaul et al. 2016).

    A missing priority reads as the largest seen so far.
    """

    def __init__(self, leaves: int, alpha: float = 0.6, beta: float = 0.4, memory: BlockMemory | None = None) -> None:
        self.alpha, self.beta = alpha, beta
        self.tree = SumTree(leaves, memory)
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

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """One leaf from each of n equal segments of the total mass; and how likely each leaf was, float64."""
        leaves, mass = self.tree.draw((np.arange(n) + rng.random(n)) / n)
        return leaves, mass / self.tree.total

    def weights(self, probability: Array, size: int) -> Array:
        """Importance weights of a batch, float32 [n]; `size` is the number of items in the store."""
        weights = self.raw_weights(probability, size)
        weights /= weights.max()
        return weights.astype(np.float32)

    def raw_weights(self, probability: Array, size: int) -> Array:
        return np.asarray((size * probability) ** -self.beta)

    def save(self) -> Array:
        return np.append(self.tree[:], self.largest)

    def load(self, saved: Array) -> None:
        self.tree.rebuild(saved[:-1])
        self.largest = float(saved[-1])

    def adopt(self, items: Array) -> None:
        """Continues with the masses of these, as an earlier process left them in block memory."""
        self.tree.rebuild(np.where(items, self.tree[:], 0.0))
        self.largest = max(1.0, float(self.tree[:].max()))

    def check_valid(self, items: Array) -> None:
        self.tree.check_valid()
        assert ((self.tree[:] > 0) == items).all()


class Uniform(Prioritized):
    """Every item is equally likely, as with an alpha and a beta of 0: priorities are checked and have no effect."""

    def __init__(self, leaves: int, memory: BlockMemory | None = None) -> None:
        super().__init__(leaves, 0.0, 0.0, memory)

    def insert(self, leaves: Array, priorities: Array | None) -> None:
        if priorities is not None:
            check_priorities(priorities)
        super().insert(leaves, None)

    def update(self, leaves: Array, priorities: Array) -> None:
        check_priorities(priorities)

    def raw_weights(self, probability: Array, size: int) -> Array:
        return np.ones(len(probability))


def writeable(x: Array) -> Array:
    """The same, or a copy: what came in a message is read-only, and compiled functions take no such arrays."""
    return x if x.flags.writeable else x.copy()


def check_priorities(priorities: Array) -> Array:
    """The same as float64, if they are finite and not negative."""
    priorities = writeable(np.ascontiguousarray(priorities, np.float64))
    if not _well(priorities):
        raise ValueError(f"store: priorities must be finite and not negative, got {priorities}")
    return priorities


@numba.njit(["b1(f8[::1])", "b1(Array(f8, 1, 'C', readonly=True))"], cache=True)  # priorities from a ring are read-only
def _well(x: Array) -> bool:
    well = True
    for i in range(len(x)):
        well &= (x[i] >= 0) & (x[i] < np.inf)
    return well
