"""What holds of a store, and of the trees that its items are drawn from, between any two calls."""

from __future__ import annotations

from functools import singledispatch

import numpy as np

from veldt.storing.ranks import RankHeap
from veldt.storing.replay import Replay
from veldt.storing.ring import BlockRing, UnrollQueue
from veldt.storing.selectors import SumTree


@singledispatch
def check_valid(of: object) -> None:
    raise TypeError(type(of).__name__)


@check_valid.register
def _(store: BlockRing) -> None:
    assert 0 <= store.next - store.oldest <= store.n_slots
    assert store.size == store.items.sum()
    empty = np.ones(store.n_slots, np.bool_)
    empty[np.arange(store.oldest, store.next) % store.n_slots] = False
    assert not store.items[empty].any()
    if isinstance(store, UnrollQueue):
        assert store.inserted - store.evicted - store.sampled == store.size
    if isinstance(store, Replay):
        assert not store._overfull(0) or store.next - store.oldest == 1
        assert store.inserted - store.evicted == store.size
        check_valid(store.selector.tree)
        assert ((store.selector.tree[:] > 0) == store.items.ravel()).all()


@check_valid.register
def _(tree: SumTree) -> None:
    assert np.isfinite(tree.nodes).all() and (tree.nodes >= 0).all()
    assert (tree.nodes[tree.leaves : tree.levels[1]] == 0).all()
    again = SumTree(tree.leaves)
    again.rebuild(tree[:])
    assert again.nodes.tobytes() == tree.nodes.tobytes(), "a parent is not the sum of its children"


@check_valid.register
def _(heap: RankHeap) -> None:
    items = heap.heap[: heap.count]
    assert np.isfinite(heap.keys).all() and (heap.keys >= 0).all()
    assert heap.count == np.count_nonzero(heap.keys) == np.count_nonzero(heap.place >= 0)
    assert (heap.place[items] == np.arange(heap.count)).all()
    parents = items[(np.arange(1, heap.count) - 1) // 2]
    assert (heap.keys[parents] >= heap.keys[items[1:]]).all(), "a parent is smaller than its child"
