"""Limiters: the law holds exactly, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles import examples

from veldt.storing.limiters import MinSize, Queue, SamplesPerInsert

RATIOS = st.sampled_from([0.125, 0.5, 1.0, 3.0, 32.0])


@settings(max_examples=examples(150), deadline=None)
@given(
    RATIOS,
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 8),
    st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=80),
)
def test_samples_per_insert_holds_its_law(ratio, min_size, burst, batch, moves):
    """From the first sample on, |ratio * (inserted - min_size) - sampled| <= tolerance; a refused move would break it."""
    limiter = SamplesPerInsert.for_run(ratio, min_size, burst, batch)
    inserted = sampled = 0
    for insert, n in moves:
        if insert:
            n = min(n, burst)
            error = ratio * (inserted + n - min_size) - sampled
            allowed = limiter.can_insert(n, inserted, inserted, sampled)
            assert allowed == (inserted < min_size or error <= limiter.tolerance)
            inserted += n * allowed
        else:
            n = min(n, batch)
            error = ratio * (inserted - min_size) - sampled - n
            allowed = limiter.can_sample(n, inserted, inserted, sampled)
            assert allowed == (inserted >= min_size and error >= -limiter.tolerance)
            sampled += n * allowed
        if sampled:
            assert abs(ratio * (inserted - min_size) - sampled) <= limiter.tolerance


def test_a_run_reaches_its_samples_per_insert():
    limiter = SamplesPerInsert.for_run(4.0, 100, burst=8, batch=32)
    inserted = sampled = 0
    for _ in range(10_000):
        if limiter.can_insert(8, inserted, inserted, sampled):
            inserted += 8
        if limiter.can_sample(32, inserted, inserted, sampled):
            sampled += 32
    assert sampled == pytest.approx(4.0 * (inserted - 100), abs=limiter.tolerance) and inserted >= 10_000


class Liveness(RuleBasedStateMachine):
    """Whatever was inserted, sampled, evicted or lost, an insert or a sample can go on."""

    @initialize(burst=st.integers(1, 8), batch=st.integers(1, 8), min_size=st.integers(0, 12), ratio=RATIOS)
    def begin(self, burst, batch, min_size, ratio):
        self.burst, self.batch = burst, batch
        self.size = self.inserted = self.sampled = 0
        self.limiter = self.make(burst, batch, min_size, ratio)

    def make(self, burst, batch, min_size, ratio):
        return SamplesPerInsert.for_run(ratio, min_size, burst, batch)

    @rule(n=st.integers(1, 8), times=st.integers(1, 20))
    def insert(self, n, times):
        n = min(n, self.burst)
        for _ in range(times):
            if self.limiter.can_insert(n, self.size, self.inserted, self.sampled):
                self.size, self.inserted = self.size + n, self.inserted + n

    @rule(n=st.integers(1, 8), times=st.integers(1, 20))
    def sample(self, n, times):
        n = min(n, self.batch)
        for _ in range(times):
            if self.limiter.can_sample(n, self.size, self.inserted, self.sampled):
                self.sampled += n
                self.size -= n * isinstance(self.limiter, Queue)

    @rule(part=st.sampled_from([0.1, 0.5, 1.0]))
    def lose(self, part):
        """Blocks are evicted, or could not be read back after a restart; the counters stay."""
        self.size -= int(part * self.size)

    @invariant()
    def someone_can_go_on(self):
        now = (self.size, self.inserted, self.sampled)
        for items in range(1, self.burst + 1):
            for n in range(1, self.batch + 1):
                assert self.limiter.can_insert(items, *now) or self.limiter.can_sample(n, *now), (
                    self.limiter,
                    items,
                    n,
                    now,
                )


class QueueLiveness(Liveness):
    def make(self, burst, batch, min_size, ratio):
        return Queue(batch + min_size)


TestLiveness = Liveness.TestCase
TestLiveness.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestQueueLiveness = QueueLiveness.TestCase
TestQueueLiveness.settings = settings(max_examples=examples(30), stateful_step_count=20, deadline=None)


@settings(max_examples=examples(50), deadline=None)
@given(RATIOS, st.integers(0, 3), st.integers(1, 8), st.integers(1, 8), st.integers(0, 500), st.integers(0, 500))
def test_an_empty_store_always_takes_a_block(ratio, min_size, burst, batch, inserted, sampled):
    for limiter in (SamplesPerInsert.for_run(ratio, min_size, burst, batch), MinSize(min_size), Queue(batch)):
        assert not limiter.can_sample(batch, 0, inserted, sampled)
        assert limiter.can_insert(burst, 0, inserted, sampled)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 20), st.integers(0, 30), st.integers(1, 8))
def test_nothing_is_sampled_below_the_minimum(min_size, size, n):
    for limiter in (MinSize(min_size), SamplesPerInsert(1.0, min_size, 1e9)):
        assert limiter.can_sample(n, size, size, 0) == (size >= max(1, min_size))


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 20), st.integers(0, 30), st.integers(1, 20))
def test_a_queue_is_bounded_and_gives_whole_batches(capacity, size, n):
    assume(n <= capacity)
    assert Queue(capacity).can_insert(1, size, size, 0) == (size < capacity)
    assert Queue(capacity).can_sample(n, size, size, 0) == (size >= n)
