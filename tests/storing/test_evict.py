"""Eviction by priority: which block goes, and that those which stay are whole under their new serials."""

from __future__ import annotations

import numpy as np
import pytest
from invariants import check_valid
from oracles import chi_square, make_block

from veldt.ports import Source
from veldt.records.block import Schema, Window
from veldt.records.tree import spec
from veldt.storing.limiters import MinSize
from veldt.storing.ranks import Ranked
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized

COLUMNS = {"obs": spec((33,), np.float32), "reward": spec((), np.float64)}
SCHEMA = Schema(COLUMNS, Window(history=2, length=2, lookahead=1, stride=2), 8, {"h": spec((3,), np.float32)})
S = SCHEMA.starts


def make_store(selector=Prioritized, slots=8, capacity=1000, seed=0, alpha=0.6, candidates=4, slack=0.0):
    chosen = selector(slots * S, alpha)
    return Replay(SCHEMA, chosen, MinSize(1), capacity, slots, slack=slack, seed=seed, candidates=candidates)


def insert(store, number, priorities=None, items=(True,) * S):
    assert store.insert(make_block(SCHEMA, Source(0, number), items), priorities, Source(0, number))


def numbers(store):
    """Of the messages whose blocks are here, oldest first."""
    return [int(store.sources[serial % store.n_slots][1]) for serial in range(store.oldest, store.next)]


@pytest.mark.parametrize("selector", [Prioritized, Ranked])
def test_one_of_the_oldest_goes_by_its_priorities(selector):
    """P(b) = W_b / sum_c W_c over the four oldest, W_b = sum_i p_i^-0.4."""
    rng = np.random.default_rng(0)
    priorities = 10 ** rng.uniform(-3, 1, (6, S))
    gone = []
    for seed in range(3000):
        store = make_store(selector, slots=6, seed=seed)
        for number in range(6):
            insert(store, number, priorities[number])
        insert(store, 6)
        gone += set(range(7)) - set(numbers(store))
    weights = [sum(p**-0.4 for p in priorities[number]) for number in range(4)]
    counts = np.bincount(gone, minlength=4)
    assert len(counts) == 4 and counts.sum() == 3000
    assert chi_square(counts, 3000 * np.array(weights) / sum(weights)) > 1e-4


@pytest.mark.parametrize("slots", [5, 9])  # the ring is full, or its capacity is
@pytest.mark.parametrize("selector", [Prioritized, Ranked])
def test_blocks_that_stay_are_whole_and_keep_their_priorities(selector, slots):
    rng = np.random.default_rng(1)
    store, priorities = make_store(selector, slots, capacity=5 * S, slack=0.3), {}
    oldest = 0
    for number in range(200):
        priorities[number] = 10 ** rng.uniform(-3, 1, S)
        items = rng.random(S) < 0.8
        insert(store, number, priorities[number], items)
        if number % 7 == 0:
            store.trim()
        check_valid(store)
        here = numbers(store)
        assert len(set(here)) == len(here)
        oldest = max(oldest, number - min(here))
        sample = store.sample(16)
        for i, key in enumerate(sample.keys.tolist()):
            serial, offset = divmod(key, S)
            known = store.sources[serial % store.n_slots][1]
            rows = slice(offset * 2, offset * 2 + SCHEMA.window.rows)
            for name, column in make_block(SCHEMA, Source(0, int(known)), items).columns().items():
                assert (sample.rows[name][i] == column[rows]).all(), (name, key)
        for serial, known in zip(range(store.oldest, store.next), here, strict=True):
            leaves = store.item_leaves(serial, serial + 1)
            np.testing.assert_allclose(store.selector.tree[leaves], priorities[known][leaves % S] ** 0.6)
        fresh = 10 ** rng.uniform(-3, 1, 16)
        store.update(sample.keys, fresh)
        for key, priority in zip(sample.keys.tolist(), fresh, strict=True):
            priorities[int(store.sources[key // S % store.n_slots][1])][key % S] = priority
    assert oldest > 2 * slots, "some stayed while twice as many as there are slots came"
    assert store.next > 200, "under new serials"


def test_a_loaded_store_evicts_as_the_one_that_was_saved():
    rng = np.random.default_rng(2)
    store, again = make_store(slots=5), make_store(slots=5, seed=9)
    for number in range(20):
        insert(store, number, rng.random(S))
    again.load_state(store.state())
    first, _, blocks = store.blocks(0)
    again.load_blocks(first, blocks)
    again.sources[:] = store.sources  # a load forgets them, and `numbers` reads them
    for number in range(20, 60):
        priorities = rng.random(S)
        for each in (store, again):
            insert(each, number, priorities)
        assert numbers(again) == numbers(store) and (again.sample(9).keys == store.sample(9).keys).all()


def test_a_block_without_items_goes_first():
    store = make_store(slots=4)
    for number in range(4):
        insert(store, number, items=(False,) * S if number == 2 else (True,) * S)
    insert(store, 4)
    assert sorted(numbers(store)) == [0, 1, 3, 4]


def test_priorities_on_their_way_to_a_block_that_moved_are_stale():
    store = make_store(slots=2, candidates=2)
    insert(store, 0, np.full(S, 1e6))
    insert(store, 1, np.full(S, 1e-6))
    keys = store.sample(8).keys
    insert(store, 2)
    assert numbers(store) == [0, 2]
    before = store.selector.save()
    store.update(keys, np.full(8, 77.0))
    assert store.stale == 8 and (store.selector.save() == before).all()


def test_one_candidate_is_the_oldest():
    store = make_store(slots=4, candidates=1)
    for number in range(9):
        insert(store, number, np.full(S, float(9 - number)))
    assert numbers(store) == [5, 6, 7, 8] and store.next == 9
