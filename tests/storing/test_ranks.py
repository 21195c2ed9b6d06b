"""The rank-based selector: the law of its draws, and the heap that it keeps the ranks in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_valid
from oracles import chi_square, examples

from veldt.storing.ranks import Ranked, RankHeap

CHANGES = st.lists(st.tuples(st.integers(0, 19), st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.0, 2.0, 1e6])), max_size=60)


def law(priorities, alpha):
    """P(i) = (1 / rank(i))^alpha / sum_k (1 / k)^alpha, rank 1 for the largest; by the definition, in plain Python."""
    best = sorted(priorities, reverse=True)
    masses = [(1 / (best.index(p) + 1)) ** alpha for p in priorities]
    return np.array(masses) / sum((1 / k) ** alpha for k in range(1, len(best) + 1))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_draws_follow_the_ranks(alpha):
    """Each item was once a mere insert, an update, or moved when another was removed."""
    rng = np.random.default_rng(3)
    selector, priorities = Ranked(64, alpha, 0.5), 10 ** rng.uniform(-3, 2, 60)
    selector.insert(np.arange(60), 10 ** rng.uniform(-3, 2, 60))
    selector.update(np.arange(60), priorities)
    gone = np.arange(0, 60, 7)
    selector.remove(gone)
    kept = np.setdiff1d(np.arange(60), gone)
    draws = [selector.draw(1, rng) for _ in range(20_000)] + [selector.draw(80, rng) for _ in range(1000)]
    counts = np.bincount(np.concatenate([leaves for leaves, _ in draws]), minlength=64)
    expected = law(priorities[kept].tolist(), alpha)
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], expected * 100_000) > 1e-4
    leaves, probability = draws[-1]
    np.testing.assert_allclose(probability, expected[np.searchsorted(kept, leaves)], rtol=1e-9)
    weights = (len(kept) * probability) ** -0.5
    np.testing.assert_allclose(selector.weights(probability, len(kept)), weights / weights.max(), rtol=1e-6)


def test_between_two_sorts_every_rank_is_held_once_and_the_largest_is_the_first():
    rng = np.random.default_rng(4)
    heap, alpha = RankHeap(1000, 0.7), 0.7
    heap.set(np.arange(1000), rng.random(1000))
    heap.sort()
    masses = np.arange(1, 1001) ** -alpha
    points = (np.cumsum(masses) - 0.5 * masses) / masses.sum()  # one for each rank
    for _ in range(12):  # 120 changes of 1,000: it is not sorted yet
        heap.set(rng.integers(0, 1000, 10), 2 * rng.random(10))
        leaves, mass = heap.draw(points)
        assert sorted(leaves.tolist()) == list(range(1000))
        np.testing.assert_allclose(mass, masses)
        assert leaves[0] == heap[:].argmax()
    assert (np.diff(heap[leaves]) > 0).any(), "the ranks are an approximation now"
    heap.set(np.arange(10), 2 * rng.random(10))
    leaves, _ = heap.draw(points)
    assert (np.diff(heap[leaves]) <= 0).all(), "and exact again"


@settings(max_examples=examples(100), deadline=None)
@given(CHANGES)
def test_the_heap_holds_what_was_set(changes):
    heap, expected = RankHeap(20, 0.7), np.zeros(20)
    for leaf, key in changes:
        heap.set(np.array([leaf]), np.array([key]))
        expected[leaf] = key
        check_valid(heap)
    assert (heap[:] == expected).all()
    if not expected.any():
        with pytest.raises(AssertionError, match="nothing to draw"):
            heap.draw(np.array([0.5]))
        return
    leaves, _ = heap.draw(np.array([0.0, 0.5, np.nextafter(1, 0), 1.0]))
    assert (expected[leaves] > 0).all() and expected[leaves[0]] == expected.max()


@settings(max_examples=examples(50), deadline=None)
@given(CHANGES)
def test_a_saved_selector_draws_the_same(changes):
    selector, again = Ranked(20), Ranked(20)
    for leaf, priority in [*changes, (7, 1.0)]:
        selector.update(np.array([leaf]), np.array([priority]))
    again.load(selector.save())
    assert again.largest == selector.largest
    for _ in range(3):
        draws = [each.draw(8, np.random.default_rng(0)) for each in (selector, again)]
        assert (draws[0][0] == draws[1][0]).all() and (draws[0][1] == draws[1][1]).all()
        for each in (selector, again):
            each.update(np.array([3, 7]), np.array([5.0, 0.1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_bad_keys_are_refused_and_nothing_changes(bad):
    heap = RankHeap(4, 0.7)
    heap.set(np.array([0, 1]), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="finite"):
        heap.set(np.array([2, 3]), np.array([1.0, bad]))
    check_valid(heap)
    assert heap[:].tolist() == [1.0, 2.0, 0.0, 0.0]
