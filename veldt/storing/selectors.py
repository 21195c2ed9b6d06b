"""Which items a replay draws, and how likely each was; and the sum tree that they are drawn from.

Items are leaves: integers below `leaves`. A leaf that holds no item has no mass. The masses, one float64 for each leaf, and
the largest so far are what a checkpoint saves.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from veldt.compiled import njit
from veldt.records.tree import Array
from veldt.storing.slots import BlockMemory, PrivateMemory

FLOOR = 1e-6  # the smallest priority
FAN = 8  # children of a node
Beta = float | Callable[[], float]  # constant, or the present value


class Leaves(Protocol):
    """Leaves with a value each, drawn by these; a leaf without an item has the value 0. `SumTree` is one."""

    @property
    def total(self) -> float: ...  # mass
    def __getitem__(self, index: Array | slice) -> Array: ...
    def set(self, index: Array, values: Array, /) -> None: ...
    def draw(self, points: Array) -> tuple[Array, Array]: ...
    def rebuild(self, values: Array, /) -> None: ...


class Prioritized:
    """P(i) = p_i^alpha / sum_j p_j^alpha; w_i = (N P(i))^-beta, divided by the largest of the batch (Schaul et al. 2016).

    A missing priority reads as the largest seen so far. Priorities are those that `check_priorities` returned.
    """

    def __init__(self, leaves: int, alpha: float = 0.6, beta: Beta = 0.4, memory: BlockMemory | None = None) -> None:
        self.alpha, self._beta = alpha, beta
        self.tree: Leaves = self._make_tree(leaves, memory)
        self.largest = 1.0  # mass, that is p^alpha

    def _make_tree(self, leaves: int, memory: BlockMemory | None) -> Leaves:
        return SumTree(leaves, memory)

    @property
    def beta(self) -> float:
        """Now: it may be annealed."""
        return self._beta() if callable(self._beta) else self._beta

    def insert(self, leaves: Array, priorities: Array | None) -> None:
        if priorities is None:
            self.tree.set(leaves, np.full(len(leaves), self.largest))
        else:
            self.update(leaves, priorities)

    def update(self, leaves: Array, priorities: Array) -> None:
        # Without a floor an item of priority zero would have no mass, and could never be drawn again.
        mass = np.maximum(priorities, FLOOR)
        np.power(mass, self.alpha, out=mass)
        self.tree.set(leaves, mass)
        self.largest = max(self.largest, mass.max(initial=0.0))

    def remove(self, leaves: Array) -> None:
        self.tree.set(leaves, np.zeros(len(leaves)))

    def move(self, leaves: Array, to: Array) -> None:
        self.tree.set(to, self.tree[leaves])
        self.remove(leaves)

    def priorities(self, leaves: Array) -> Array:
        """Of these items; all 1 where alpha is 0, because then they have no effect."""
        return np.asarray(self.tree[leaves] ** (1 / self.alpha if self.alpha else 0.0))

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


class Uniform(Prioritized):
    """Every item is equally likely, as with an alpha and a beta of 0: priorities have no effect."""

    def __init__(self, leaves: int, memory: BlockMemory | None = None) -> None:
        super().__init__(leaves, 0.0, 0.0, memory)

    def insert(self, leaves: Array, priorities: Array | None) -> None:
        super().insert(leaves, None)

    def update(self, leaves: Array, priorities: Array) -> None:
        """The masses stay as they are."""

    def weights(self, probability: Array, size: int) -> Array:
        return np.ones(len(probability), np.float32)

    def raw_weights(self, probability: Array, size: int) -> Array:
        return np.ones(len(probability))


def check_priorities(priorities: Array) -> Array:
    """A copy as float64, if they are finite and not negative. (Compiled functions take no read-only array of a message.)"""
    priorities = np.array(priorities, np.float64)
    if not all_valid(priorities):
        raise ValueError(f"store: priorities must be finite and not negative, got {priorities}")
    return priorities


@njit("b1(f8[::1])")
def all_valid(x: Array) -> bool:
    well = True
    for i in range(len(x)):
        well &= (x[i] >= 0) & (x[i] < np.inf)
    return well


class SumTree:
    """Leaves with non-negative mass, drawn in proportion to it.

    Every parent is the sum of its children, recomputed and never adjusted by a difference: there is no drift, and a tree
    rebuilt from its leaves is bit-identical. A node has eight children, which share a cache line.

    `nodes` holds the levels one after the other, the leaves first; levels[k] is where level k begins. The parent of node i
    of a level is node i // 8 of the next; the last level is a single group of eight.
    """

    def __init__(self, leaves: int, memory: BlockMemory | None = None) -> None:
        assert leaves >= 1, leaves
        self.leaves = leaves
        sizes = [-(-leaves // FAN)]  # in groups of eight
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // FAN))
        self.levels = FAN * np.concatenate([[0], np.cumsum(sizes)])
        room = (memory or PrivateMemory()).zeros(int(self.levels[-1]) + FAN, np.float64)
        aligned = -room.ctypes.data // room.itemsize % FAN
        self.nodes = room[aligned : aligned + self.levels[-1]]

    @property
    def total(self) -> float:
        return float(_sum(self.nodes, np.uint64(len(self.nodes) - FAN)))

    def __getitem__(self, index: Array | slice) -> Array:
        values: Array = self.nodes[: self.leaves][index]
        return values

    def set(self, index: Array, mass: Array) -> None:
        """Sets leaves; of two equal indices the later wins. Fastest where the indices ascend."""
        if not _set(self.nodes, self.levels, index, mass):
            raise ValueError(f"sum tree: masses must be finite and not negative, got {mass}")

    def draw(self, points: Array) -> tuple[Array, Array]:
        """The leaf below each point of [0, 1) times the total, and its mass; never one without mass."""
        assert self.total > 0, "sum tree: nothing to draw"
        leaves, mass = _draw(self.nodes, self.levels, points)
        return leaves, mass

    def rebuild(self, leaves: Array) -> None:
        self.nodes[: len(leaves)] = leaves  # nothing is zeroed that stays: whoever is killed here leaves the leaves
        self.nodes[len(leaves) :] = 0
        _rebuild(self.nodes, self.levels)


@njit("f8(f8[::1], u8)", inline="always")
def _sum(nodes: Array, at: np.uint64) -> Any:
    """The sum of eight nodes, always in the same order. (Unsigned indices spare numba the test for negative ones.)"""
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    left = (nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + three])
    at += four
    return left + ((nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + three]))


@njit("b1(f8[::1], i8[::1], i8[::1], f8[::1])")
def _set(nodes: Array, levels: Array, index: Array, mass: Array) -> bool:
    """Level by level, every parent once as long as the indices ascend. False: a mass is bad, and nothing was changed."""
    if not all_valid(mass):
        return False
    changed = np.empty(len(index), np.uint64)  # nodes of the level below
    for i in range(len(index)):
        changed[i] = np.uint64(index[i])
        nodes[changed[i]] = mass[i]
    count = len(index)
    for level in range(1, len(levels) - 1):
        below, here = np.uint64(levels[level - 1]), np.uint64(levels[level])
        parents = 0
        last = np.uint64(0xFFFFFFFFFFFFFFFF)
        for i in range(count):
            parent = changed[i] >> np.uint64(3)
            if parent != last:
                nodes[here + parent] = _sum(nodes, below + (parent << np.uint64(3)))
                changed[parents] = parent
                parents += 1
                last = parent
        count = parents
    return True


@njit("void(f8[::1], i8[::1])")
def _rebuild(nodes: Array, levels: Array) -> None:
    for level in range(1, len(levels) - 1):
        for parent in range((levels[level] - levels[level - 1]) // FAN):
            nodes[levels[level] + parent] = _sum(nodes, np.uint64(levels[level - 1] + FAN * parent))


@njit("Tuple((i8[::1], f8[::1]))(f8[::1], i8[::1], f8[::1])")
def _draw(nodes: Array, levels: Array, points: Array) -> Any:
    """From the top level down, all points together: they do not depend on one another, so the processor overlaps them."""
    top = len(levels) - 2
    total = _sum(nodes, np.uint64(levels[top]))
    mass = points * total
    at = np.zeros(len(points), np.int64)  # the group of children
    front = np.empty(len(points), np.float64)  # their first
    for level in range(top, -1, -1):
        for i in range(len(points)):  # a loop of nothing but loads has many cache lines on their way at once
            front[i] = nodes[np.uint64(levels[level] + FAN * at[i])]
        for i in range(len(points)):
            group = np.uint64(levels[level] + FAN * at[i])
            left, child = mass[i], 0
            before = 0.0  # the mass of the children before `child`
            upto = 0.0
            for c in range(FAN):
                upto += nodes[group + np.uint64(c)] if c else front[i]
                passed = left >= upto
                child += passed
                before = upto if passed else before
            if child == FAN:  # round-off left mass beyond the last child: the last one that has any
                child = FAN - 1
                while nodes[group + np.uint64(child)] == 0:
                    child -= 1
                before = 0.0
            mass[i] = left - before if level else nodes[group + np.uint64(child)]
            at[i] = FAN * at[i] + child
    return at, mass
