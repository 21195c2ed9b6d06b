"""The sum tree: exact sums, no drift, and never a leaf without mass."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_valid
from oracles import chi_square, examples

from veldt.storing.selectors import SumTree

MASSES = st.lists(st.sampled_from([0.0, 0.0, 5e-324, 1e-12, 0.1, 1 / 3, 1.0, 7.0, 1e12, 1e300]), min_size=1, max_size=20)
ENDS = [0.0, np.nextafter(0, 1), 0.5, np.nextafter(1, 0), 1.0]


def filled(masses):
    tree = SumTree(len(masses))
    tree.set(np.arange(len(masses)), np.array(masses, np.float64))
    return tree


def test_a_million_updates_leave_no_drift():
    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    for _ in range(100):
        index = rng.integers(0, 5000, 10_000)
        tree.set(index, 10 ** rng.uniform(-9, 9, 10_000) * (rng.random(10_000) < 0.8))
    assert tree.nodes.dtype == np.float64
    assert tree.total == pytest.approx(math.fsum(tree[:]), rel=1e-9)
    check_valid(tree)  # parents are exactly left + right
    again = SumTree(5000)
    again.rebuild(tree[:])
    assert again.nodes.tobytes() == tree.nodes.tobytes()


@settings(max_examples=examples(200), deadline=None)
@given(MASSES, st.lists(st.floats(0, 1), max_size=10))
def test_a_leaf_without_mass_is_never_drawn(masses, points):
    tree = filled(masses)
    check_valid(tree)
    if tree.total == 0:
        with pytest.raises(AssertionError, match="nothing to draw"):
            tree.draw(np.array(points))
        return
    drawn = tree.draw(np.array(points + ENDS))[0]
    assert all(0 <= leaf < len(masses) and masses[leaf] > 0 for leaf in drawn)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20).filter(any), st.data())
def test_a_point_falls_on_the_leaf_that_covers_it(masses, data):
    total = sum(masses)
    twice = data.draw(st.integers(0, 2 * total - 1).filter(lambda x: x % 2 == 1))  # half a unit off any boundary
    covers = next(i for i in range(len(masses)) if sum(masses[: i + 1]) > twice / 2)
    assert filled(masses).draw(np.array([twice / 2 / total]))[0].tolist() == [covers]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1e6)), max_size=12))
def test_of_equal_indices_the_later_wins(updates):
    tree, model = SumTree(7), [0.0] * 7
    for index, mass in updates:
        model[index] = mass
    tree.set(np.array([i for i, _ in updates], np.int64), np.array([m for _, m in updates], np.float64))
    assert tree[:].tolist() == model
    check_valid(tree)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-9])
def test_bad_masses_are_refused_and_change_nothing(bad):
    tree = filled([1.0, 2.0, 3.0])
    before = tree.nodes.copy()
    with pytest.raises(ValueError, match="finite"):
        tree.set(np.array([0, 1]), np.array([5.0, bad]))
    assert (tree.nodes == before).all()


def test_draws_follow_the_masses():
    rng = np.random.default_rng(1)
    masses = rng.random(50) * (np.arange(50) % 5 > 0)
    counts = np.bincount(filled(masses).draw(rng.random(100_000))[0], minlength=50)
    there = masses > 0
    assert counts[~there].sum() == 0
    assert chi_square(counts[there], 100_000 * masses[there] / masses.sum()) > 1e-4
    assert chi_square(counts[there], np.full(40, 100_000 / 40)) < 1e-4, "the test itself can tell"


def test_check_valid_sees_a_parent_that_is_off_by_one_bit():
    tree = filled([0.1] * 70)  # three levels
    for at in (tree.levels[1], tree.levels[2]):
        right = tree.nodes[at]
        tree.nodes[at] = np.nextafter(right, 1)
        with pytest.raises(AssertionError):
            check_valid(tree)
        tree.nodes[at] = right
    check_valid(tree)
    tree.nodes[70] = 0.5  # a leaf that is none
    with pytest.raises(AssertionError):
        check_valid(tree)
