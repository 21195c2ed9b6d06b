"""Batches of one draw, and the batch that is drawn while the learner works on another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import Store

from veldt.algorithms.base import Batch
from veldt.learning.feed import Feed
from veldt.storing.store import Sample


def feed(store: Any, prefetch: int = 1, early: bool = False) -> Feed:
    return Feed(store, 8, prefetch, torch.device("cpu"), early)


def step(of: Feed) -> tuple[Sample, Batch]:
    """What a learner does with it in one update."""
    found = of.next()
    assert found is not None
    of.prepare()
    return found


def number(sample: Sample) -> int:
    return int(sample.keys[0]) // 100


@pytest.mark.parametrize("early", [False, True])
def test_a_batch_has_the_rows_of_its_sample(early: bool) -> None:
    of = feed(Store(), prefetch=2, early=early)
    for _ in range(5):
        sample, batch = step(of)
        assert len(sample.keys) == 8 and batch.host is sample.rows
        np.testing.assert_array_equal(batch["reward"].numpy(), sample.rows["reward"])
        np.testing.assert_array_equal(batch.weights.numpy(), sample.weights)


@pytest.mark.parametrize("early", [False, True])
def test_one_draw_is_split_into_batches_that_are_spread_over_it(early: bool) -> None:
    store = Store()
    of = feed(store, prefetch=4, early=early)
    batches = [step(of)[0].keys for _ in range(4)]
    assert store.asked == [32] * (2 if early else 1), "early: the next draw comes with the last batch of this one"
    for first, keys in enumerate(batches):
        assert keys.tolist() == list(range(100 + first, 132, 4))


def test_nothing_is_drawn_early_unless_it_should_be() -> None:
    store = Store()
    of = feed(store)
    for count in (1, 2, 3):
        step(of)
        assert store.number == count


def test_the_next_batch_is_drawn_while_this_one_is_in_use() -> None:
    store = Store()
    of = feed(store, early=True)
    assert [number(step(of)[0]) for _ in range(3)] == [1, 2, 3]
    assert store.number == 4


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_for_a_graph_have_tensors_and_only_the_columns_that_it_reads(prefetch: int) -> None:
    plain, of = feed(Store(), prefetch), feed(Store(), prefetch)
    of.tensors, of.columns = True, {"reward", "last"}
    for _ in range(4):
        (sample, batch), (expected, _) = step(of), step(plain)
        assert set(batch) == {"reward", "last"}
        for name in batch:
            assert isinstance(batch.host[name], torch.Tensor)
            np.testing.assert_array_equal(batch.host[name].numpy(), expected.rows[name])
        np.testing.assert_array_equal(sample.keys, expected.keys)
        np.testing.assert_array_equal(batch.weights.numpy(), expected.weights)


def test_a_loss_without_a_graph_may_have_arrays_though_tensors_were_sampled() -> None:
    class Tensors(Store):
        def sample(self, n: int) -> Sample | None:
            sample = super().sample(n)
            assert sample is not None
            return sample._replace(rows={name: torch.from_numpy(x) for name, x in sample.rows.items()})  # type: ignore[misc]

    of = feed(Tensors())
    assert isinstance(step(of)[1].host["reward"], torch.Tensor)
    of.numpy = True
    batch = step(of)[1]
    assert isinstance(batch.host["reward"], np.ndarray)
    np.testing.assert_array_equal(batch["reward"].numpy(), batch.host["reward"])


@pytest.mark.parametrize("early", [False, True])
def test_an_empty_store_is_asked_again(early: bool) -> None:
    store = Store()
    of = feed(store, early=early)
    store.empty = True
    assert of.next() is None and of.next() is None
    store.empty = False
    assert number(step(of)[0]) == 1
    store.empty = True
    if early:
        assert number(step(of)[0]) == 2
    assert of.next() is None
    store.empty = False
    assert number(step(of)[0]) == (3 if early else 2)


@pytest.mark.parametrize("early", [False, True])
def test_clear_drops_batches_that_were_not_used(early: bool) -> None:
    store = Store()
    of = feed(store, prefetch=3, early=early)
    assert number(step(of)[0]) == 1
    of.clear()
    assert [number(step(of)[0]) for _ in range(3)] == [2, 2, 2]


def test_time_spent_on_samples_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr("veldt.learning.feed.time.perf_counter", lambda: float(next(seconds)))
    plain, early = feed(Store()), feed(Store(), early=True)
    for _ in range(3):
        step(plain)
    assert plain.timings == {"sample": 3.0}, "each draw"
    for _ in range(3):
        step(early)
    assert early.timings == {"sample": 4.0}, "and one more"
