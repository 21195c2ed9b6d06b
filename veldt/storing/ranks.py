"""The rank-based variant of prioritized replay (Schaul et al. 2016, section 3.3 and appendix B.2.1), and its heap."""

import numpy as np

from veldt.compiled import njit
from veldt.records.tree import Array
from veldt.storing.selectors import Prioritized, all_valid
from veldt.storing.slots import BlockMemory, PrivateMemory

SORTED = 8  # the heap is sorted when one in this many items has changed


class Ranked(Prioritized):
    """P(i) = rank(i)^-alpha / sum_k k^-alpha: the largest priority has rank 1. Weights are those of `Prioritized`."""

    def _make_tree(self, leaves: int, memory: BlockMemory | None) -> "RankHeap":
        return RankHeap(leaves, self.alpha, memory)

    def save(self) -> Array:
        """A rebuilt heap is sorted, so this one is sorted too: a resumed run continues with the same ranks."""
        self.tree.rebuild(self.tree[:])
        return super().save()


class RankHeap:
    """Leaves with a key, drawn in proportion to rank^-alpha; used as a `SumTree` whose masses are the keys. 0: no item.

    The rank of an item is its place in a binary heap of the keys, which is an approximation: a parent is never smaller than
    its children, but a left child may be smaller than a right child's children. Sorted, the heap has the exact ranks; it is
    sorted after a number of changes. Every place is held by one item at any time, so the probabilities that `draw`
    returns are exact.
    """

    def __init__(self, leaves: int, alpha: float, memory: BlockMemory | None = None) -> None:
        assert 1 <= leaves < 2**31, leaves
        self.leaves, self.alpha = leaves, alpha
        self.keys = (memory or PrivateMemory()).zeros(leaves, np.float64)  # all else is rebuilt from them
        self.heap = np.zeros(leaves, np.int32)  # place -> leaf
        self.place = np.full(leaves, -1, np.int32)  # leaf -> place
        self._count = np.zeros(1, np.int64)
        self._upto = np.cumsum(np.arange(1.0, leaves + 1) ** -alpha)  # mass of the first places
        self._changed = 0

    @property
    def count(self) -> int:
        return int(self._count[0])

    @property
    def total(self) -> float:
        return float(self._upto[self.count - 1]) if self.count else 0.0

    def __getitem__(self, index: Array | slice) -> Array:
        keys: Array = self.keys[index]
        return keys

    def set(self, index: Array, keys: Array) -> None:
        """Sets leaves; of two equal indices the later wins."""
        if not _set(self.heap, self.place, self.keys, self._count, index, keys):
            raise ValueError(f"rank heap: keys must be finite and not negative, got {keys}")
        self._changed += len(index)

    def draw(self, points: Array) -> tuple[Array, Array]:
        """The leaf below each point of [0, 1) times the total, and its mass."""
        assert self.count > 0, "rank heap: nothing to draw"
        if SORTED * self._changed > self.count:
            self.sort()
        places = np.searchsorted(self._upto[: self.count], points * self.total, side="right")
        places = np.minimum(places, self.count - 1)  # round-off
        return self.heap[places].astype(np.int64), (places + 1.0) ** -self.alpha

    def rebuild(self, keys: Array) -> None:
        self.keys[:] = keys
        self.sort()

    def sort(self) -> None:
        """Ties by their leaves."""
        leaves = np.flatnonzero(self.keys)
        order = leaves[np.argsort(-self.keys[leaves], kind="stable")]
        self._count[0], self._changed = len(order), 0
        self.heap[: len(order)] = order
        self.place[:] = -1
        self.place[order] = np.arange(len(order))


@njit("void(i4[::1], i4[::1], f8[::1], i8, i8, i8)")
def _sift(heap: Array, place: Array, keys: Array, leaf: int, at: int, count: int) -> None:
    """Puts a leaf into the free place `at`, or above or below it, where its key belongs."""
    key = keys[leaf]
    while at > 0 and keys[heap[(at - 1) // 2]] < key:
        heap[at] = heap[(at - 1) // 2]
        place[heap[at]] = at
        at = (at - 1) // 2
    while True:
        child = 2 * at + 1
        if child + 1 < count and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if child >= count or keys[heap[child]] <= key:
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = leaf
    place[leaf] = at


@njit("b1(i4[::1], i4[::1], f8[::1], i8[::1], i8[::1], f8[::1])")
def _set(heap: Array, place: Array, keys: Array, count: Array, index: Array, new: Array) -> bool:
    """False: a key is bad, and nothing was changed."""
    if not all_valid(new):
        return False
    for i in range(len(index)):
        leaf = index[i]
        at = place[leaf]
        keys[leaf] = new[i]
        if new[i] > 0:
            if at < 0:
                at = count[0]
                count[0] += 1
            _sift(heap, place, keys, leaf, at, count[0])
        elif at >= 0:  # the last one takes its place
            place[leaf] = -1
            count[0] -= 1
            last = heap[count[0]]
            if last != leaf:
                _sift(heap, place, keys, last, at, count[0])
    return True
