"""Selectors: probabilities, importance weights and order are what the papers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import chi_square, examples

from veldt.records.block import Block, Schema, Window
from veldt.records.step import FLAG
from veldt.records.tree import spec
from veldt.storing.limiters import MinSize
from veldt.storing.ranks import Ranked
from veldt.storing.replay import Replay
from veldt.storing.selectors import FLOOR, Prioritized, Uniform

FLAGS = {"first": FLAG, "last": FLAG, "valid": FLAG}
PRIORITIES = st.lists(st.floats(0, 100), min_size=1, max_size=12)


def filled(selector, priorities):
    selector.insert(np.arange(len(priorities)), np.array(priorities, np.float64))
    return selector


@settings(max_examples=examples(100), deadline=None)
@given(PRIORITIES, st.floats(0, 1), st.floats(0, 1), st.integers(1, 16))
def test_probabilities_and_weights_are_the_papers(priorities, alpha, beta, n):
    """P(i) = p_i^a / sum p^a and w_i = (N P(i))^-b / max w; none counts less than the floor."""
    selector = filled(Prioritized(16, alpha, beta), priorities)
    leaves, probability = selector.draw(n, np.random.default_rng(0))
    mass = np.maximum(priorities, FLOOR) ** alpha
    assert probability.dtype == np.float64
    np.testing.assert_allclose(probability, mass[leaves] / mass.sum(), rtol=1e-9)
    weights = (len(priorities) * mass[leaves] / mass.sum()) ** -beta
    np.testing.assert_allclose(selector.weights(probability, len(priorities)), weights / weights.max(), rtol=1e-6)


@settings(max_examples=examples(100), deadline=None)
@given(PRIORITIES, st.integers(1, 16), st.integers(0, 99))
def test_each_stratum_gives_one_draw(priorities, n, seed):
    """The j-th leaf covers some of [j/n, (j+1)/n) of the total mass."""
    selector = filled(Prioritized(16, alpha=1.0), priorities)
    leaves, _ = selector.draw(n, np.random.default_rng(seed))
    ends = np.cumsum(np.maximum(priorities, FLOOR))
    begins = ends - np.maximum(priorities, FLOOR)
    tolerance = 1e-9 * ends[-1]
    for j, leaf in enumerate(leaves):
        assert begins[leaf] < (j + 1) / n * ends[-1] + tolerance and ends[leaf] > j / n * ends[-1] - tolerance


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_draws_follow_the_probabilities(alpha):
    rng = np.random.default_rng(2)
    selector = filled(Prioritized(64, alpha), 10 ** rng.uniform(-2, 1, 60))
    selector.remove(np.arange(0, 60, 7))
    draws = [selector.draw(1, rng) for _ in range(20_000)] + [selector.draw(80, rng) for _ in range(1000)]
    counts = np.bincount(np.concatenate([leaves for leaves, _ in draws]), minlength=64)
    expected = selector.tree[:] / selector.tree.total * 100_000
    assert (counts[expected == 0] == 0).all()
    assert chi_square(counts[expected > 0], expected[expected > 0]) > 1e-4


def test_a_missing_priority_reads_as_the_largest_so_far():
    selector = Prioritized(8, alpha=0.5)
    selector.insert(np.array([0]), None)
    selector.insert(np.array([1]), np.array([9.0]))
    selector.update(np.array([1]), np.array([4.0]))
    selector.insert(np.array([2]), None)
    assert selector.tree[:3].tolist() == [1.0, 2.0, 3.0]


@settings(max_examples=examples(30), deadline=None)
@given(PRIORITIES, st.integers(1, 16))
def test_uniform_ignores_priorities(priorities, n):
    selector = filled(Uniform(16), priorities)
    _, probability = selector.draw(n, np.random.default_rng(0))
    assert (probability == 1 / len(priorities)).all() and (selector.weights(probability, len(priorities)) == 1).all()
    assert (selector.tree[: len(priorities)] == 1).all()


@settings(max_examples=examples(50), deadline=None)
@given(PRIORITIES, st.lists(st.integers(0, 11), max_size=5))
def test_a_saved_selector_is_the_same_to_the_bit(priorities, removed):
    selector = filled(Prioritized(12), priorities)
    selector.remove(np.array(removed, np.int64))
    again = Prioritized(12)
    again.load(selector.save())
    assert again.tree.nodes.tobytes() == selector.tree.nodes.tobytes() and again.largest == selector.largest


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("make", [Prioritized, Uniform, Ranked])
def test_bad_priorities_are_refused(make, bad):
    schema = Schema({"obs": spec((), np.float32), **FLAGS}, Window(), 2)
    store = Replay(schema, make(8), MinSize(), 8, 4)
    rows = schema.layout.zeros(schema.rows)
    block = Block(schema, rows, {}, np.ones(2, np.bool_))
    assert store.insert(block, np.array([1.0, 2.0]))
    before = store.selector.save()
    with pytest.raises(ValueError, match="finite"):
        store.insert(block, np.array([1.0, bad]))
    with pytest.raises(ValueError, match="finite"):
        store.update(np.array([1]), np.array([bad]))
    assert (store.selector.save() == before).all() and store.size == 2
