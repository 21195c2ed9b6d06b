"""Batches of one draw, and the batch that is drawn while the learner works on another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import Store
from torch import nn

from veldt.algorithms.base import Batch
from veldt.algorithms.dqn import DQN
from veldt.learning.learner import Feed
from veldt.storing.store import Sample


class Peeking(DQN):
    """What it computes ahead are the rewards and the target network that it saw."""

    def ahead(self, target: nn.Module, batch: Batch) -> Any:
        return batch.host["reward"], target


def feed(store: Any, prefetch: int = 1, ahead: bool = False) -> Feed:
    return Feed(store, Peeking(hidden=(4,)), 8, prefetch, torch.device("cpu"), ahead)


def step(of: Feed, target: nn.Module | None = None) -> tuple[Sample, Batch]:
    """What a learner does with it in one update."""
    found = of.next()
    assert found is not None
    of.prepare(target)
    of.wait()
    return found


def number(sample: Sample) -> int:
    return int(sample.keys[0]) // 100


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_has_the_rows_of_its_sample(ahead: bool) -> None:
    of = feed(Store(), prefetch=2, ahead=ahead)
    for _ in range(5):
        sample, batch = step(of)
        assert len(sample.keys) == 8 and batch.host is sample.rows
        np.testing.assert_array_equal(batch["reward"].numpy(), sample.rows["reward"])
        np.testing.assert_array_equal(batch.weights.numpy(), sample.weights)


@pytest.mark.parametrize("ahead", [False, True])
def test_one_draw_is_split_into_batches_that_are_spread_over_it(ahead: bool) -> None:
    store = Store()
    of = feed(store, prefetch=4, ahead=ahead)
    batches = [step(of)[0].keys for _ in range(4)]
    assert store.asked == [32] * (2 if ahead else 1), "ahead: the next draw comes with the last batch of this one"
    for first, keys in enumerate(batches):
        assert keys.tolist() == list(range(100 + first, 132, 4))


def test_without_ahead_nothing_is_drawn_early() -> None:
    store = Store()
    of = feed(store)
    for count in (1, 2, 3):
        _, batch = step(of, nn.Identity())
        assert store.number == count and batch.ahead is None


def test_the_next_batch_is_drawn_while_this_one_is_in_use() -> None:
    store, target = Store(), nn.Identity()
    of = feed(store, ahead=True)
    assert [number(step(of, target)[0]) for _ in range(3)] == [1, 2, 3]
    assert store.number == 4


def test_what_needs_the_target_network_is_computed_ahead_unless_it_is_about_to_change() -> None:
    of, one, other = feed(Store(), ahead=True), nn.Identity(), nn.Identity()
    assert step(of, one)[1].ahead is None, "the first batch was drawn when it was asked for"
    _, batch = step(of, None)
    assert batch.ahead is not None and batch.ahead[0] is batch.host["reward"] and batch.ahead[1] is one
    assert step(of, other)[1].ahead is None
    _, batch = step(of, other)
    assert batch.ahead is not None and batch.ahead[1] is other


@pytest.mark.parametrize("ahead", [False, True])
def test_an_empty_store_is_asked_again(ahead: bool) -> None:
    store = Store()
    of = feed(store, ahead=ahead)
    store.empty = True
    assert of.next() is None and of.next() is None
    store.empty = False
    assert number(step(of)[0]) == 1
    store.empty = True
    if ahead:
        assert number(step(of)[0]) == 2
    assert of.next() is None
    store.empty = False
    assert number(step(of)[0]) == (3 if ahead else 2)


@pytest.mark.parametrize("ahead", [False, True])
def test_clear_drops_batches_that_were_not_used(ahead: bool) -> None:
    store = Store()
    of = feed(store, prefetch=3, ahead=ahead)
    assert number(step(of)[0]) == 1
    of.clear()
    assert [number(step(of)[0]) for _ in range(3)] == [2, 2, 2]


def test_an_error_of_the_thread_is_raised_where_the_learner_waits() -> None:
    class Broken(Store):
        def sample(self, n: int) -> Sample | None:
            if self.number:
                raise OSError("the disk is gone")
            return super().sample(n)

    of = feed(Broken(), ahead=True)
    assert of.next() is not None
    of.prepare(None)
    with pytest.raises(OSError, match="the disk is gone"):
        of.wait()
    of.wait()  # raised once


def test_time_spent_on_samples_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr("veldt.learning.learner.time.perf_counter", lambda: float(next(seconds)))
    plain, early = feed(Store()), feed(Store(), ahead=True)
    for _ in range(3):
        step(plain)
    assert plain.timings == {"sample": 3.0}, "each draw"
    for _ in range(3):
        step(early)
    assert early.timings == {"sample": 4.0}, "the first draw, and three waits"
