"""The store against a plain list of blocks: what is in it, what it gives out, what it forgets, and how large it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check_valid
from oracles import earlier_episode, examples, make_block

from veldt.errors import UserError
from veldt.experiment.prepare import check_memory
from veldt.machine import format_bytes
from veldt.ports import Source
from veldt.records.block import Schema, Window
from veldt.records.tree import PACKED, spec
from veldt.storing.limiters import MinSize, Queue
from veldt.storing.ranks import Ranked
from veldt.storing.replay import Replay
from veldt.storing.ring import UnrollQueue
from veldt.storing.selectors import FLOOR, Prioritized, Uniform
from veldt.storing.slots import Size, parse_capacity, plan_size

COLUMNS = {"obs": spec((33,), np.float32), "reward": spec((), np.float64), "action": spec((2,), np.int64)}
STATE = {"h": spec((3,), np.float32)}
WINDOW = Window(history=2, length=2, lookahead=1, stride=2)
SCHEMA = Schema(COLUMNS, WINDOW, fresh=8, starts=STATE)
S = SCHEMA.starts  # 4 window starts in a block

ITEMS = st.lists(st.booleans(), min_size=S, max_size=S)
PRIORITIES = st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.0, 1e6]), min_size=S, max_size=S)
BAD = st.sampled_from([np.nan, np.inf, -np.inf, -1.0])


def make_store(selector=Prioritized, limiter=None, capacity=100, slots=8, schema=SCHEMA, **kwargs):
    return Replay(schema, selector(slots * schema.starts), limiter or MinSize(1), capacity, slots, **kwargs)


def make_queue(limiter, slots=8, schema=SCHEMA):
    return UnrollQueue(schema, limiter, slots)


def block(sequence, items=(True,) * S, actor=0, schema=SCHEMA):
    return make_block(schema, Source(actor, sequence), items)


def everything(store):
    """All that a store remembers, as bytes."""
    state = store.state()
    parts = [*store.rows.values(), *store.starts.values(), store.items, state.get("mass", np.zeros(0))]
    numbers = {name: x for name, x in vars(store).items() if isinstance(x, int | float)}
    return [x.tobytes() for x in parts], numbers, dict(store.latest), state.get("rng")


def check_sample(sample, blocks):
    """Every window is that of the item its key names; `blocks` has the live ones by serial."""
    for i, key in enumerate(sample.keys.tolist()):
        serial, offset = divmod(key, S)
        source = blocks[serial]
        assert source.items[offset], "only items are drawn"
        rows = slice(offset * WINDOW.stride, offset * WINDOW.stride + WINDOW.rows)
        for name, column in source.columns().items():
            assert (sample.rows[name][i] == column[rows]).all(), (name, key)
        for name, column in SCHEMA.start_layout.columns(source.starts).items():
            assert (sample.starts[name][i] == column[offset]).all(), (name, key)


class ReplayMachine(RuleBasedStateMachine):
    """Replay with priorities; the model is a list of (serial, block, {offset: mass})."""

    @initialize(
        alpha=st.sampled_from([0.0, 0.6, 1.0]),
        slots=st.integers(1, 6),
        capacity=st.integers(1, 20),
        slack=st.sampled_from([0.0, 0.5]),
        min_size=st.integers(0, 6),
    )
    def begin(self, **config):
        self.config = config
        self.store = self.make()
        self.model = []
        self.largest, self.sequence, self.serial, self.stale, self.evicted = 1.0, 0, 0, 0, 0
        self.keys = [0]  # every key there ever was; block 0 goes in first
        self.sources = []  # of the messages that came since the store was made or loaded
        self.insert([True] * S, None, 0)

    def make(self):
        config = self.config
        return Replay(
            SCHEMA,
            Prioritized(config["slots"] * S, config["alpha"], beta=0.5),
            MinSize(config["min_size"]),
            config["capacity"],
            config["slots"],
            config["slack"],
        )

    @property
    def size(self):
        return sum(len(masses) for _, _, masses in self.model)

    def evict(self):
        self.evicted += len(self.model.pop(0)[2])

    def mass(self, priority):
        mass = max(priority, FLOOR) ** self.config["alpha"]
        self.largest = max(self.largest, mass)
        return mass

    @rule(items=ITEMS, priorities=st.none() | PRIORITIES, actor=st.integers(0, 2))
    def insert(self, items, priorities, actor):
        fresh = block(self.sequence, items, actor)
        source = Source(actor, self.sequence)
        assert self.store.insert(fresh, None if priorities is None else np.array(priorities), source)
        self.sources.append(source)
        hard = int(self.config["capacity"] * (1 + self.config["slack"]))
        while self.model and (len(self.model) == self.config["slots"] or self.size + sum(items) > hard):
            self.evict()
        offsets = [s for s in range(S) if items[s]]
        masses = {s: self.largest if priorities is None else self.mass(priorities[s]) for s in offsets}
        self.model.append((self.serial, fresh, masses))
        self.keys += [self.serial * S + s for s in offsets]
        self.sequence, self.serial = self.sequence + 1, self.serial + 1

    @precondition(lambda self: self.sources)
    @rule(data=st.data())
    def insert_again(self, data):
        """A message that came before is taken and changes nothing, whether its block is still there or not."""
        before, duplicates = everything(self.store), self.store.duplicates
        known = data.draw(st.sampled_from(self.sources))
        fresh = block(known.number, actor=known.channel)
        assert self.store.insert(fresh, None, known) and self.store.duplicates == duplicates + 1
        self.store.duplicates = duplicates
        assert everything(self.store) == before

    @rule(n=st.integers(1, 12))
    def sample(self, n):
        sampled = self.store.sampled
        sample = self.store.sample(n)
        if self.size < max(1, self.config["min_size"]):
            assert sample is None and self.store.sampled == sampled
            return
        assert self.store.sampled == sampled + n and len(sample.keys) == n
        check_sample(sample, {serial: fresh for serial, fresh, _ in self.model})
        masses = {serial * S + s: mass for serial, _, offsets in self.model for s, mass in offsets.items()}
        probability = np.array([masses[key] for key in sample.keys.tolist()]) / sum(masses.values())
        np.testing.assert_allclose(sample.probability, probability, rtol=1e-9)
        weights = (self.size * probability) ** -0.5
        np.testing.assert_allclose(sample.weights, weights / weights.max(), rtol=1e-5)

    @rule(data=st.data())
    def update(self, data):
        """Any keys there ever were, some of them twice; those of blocks that are gone are counted."""
        live = {serial: masses for serial, _, masses in self.model}
        known = [key for key in self.keys if key // S not in live or key % S in live[key // S]]
        keys = data.draw(st.lists(st.sampled_from(known), max_size=6)) if known else []
        priorities = data.draw(st.lists(st.sampled_from([0.0, 0.5, 3.0, 50.0]), min_size=len(keys), max_size=len(keys)))
        self.store.update(np.array(keys, np.int64), np.array(priorities, np.float64))
        for key, priority in zip(keys, priorities, strict=True):
            if key // S in live:
                live[key // S][key % S] = self.mass(priority)
            else:
                self.stale += 1

    @rule()
    def trim(self):
        self.store.trim()
        while self.size > self.config["capacity"]:
            self.evict()

    @rule(since=st.integers(0, 8))
    def save_and_load(self, since):
        """A store loaded from its state and its blocks, saved in two parts, goes on as the old one would."""
        state = self.store.state()
        first, stop, late = self.store.blocks(since)
        again = self.make()
        again.load_state(state)
        again.load_blocks(first, late)
        start, _, whole = self.store.blocks(0)
        again.load_blocks(start, {name: x[: max(0, since - start)] for name, x in whole.items()})
        assert (start, stop) == (self.serial - len(self.model), self.serial)
        check_valid(again)
        mine, other = self.store.sample(5), again.sample(5)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert (mine.keys == other.keys).all() and (mine.weights == other.weights).all()
            assert all((mine.rows[name] == other.rows[name]).all() for name in mine.rows)
            assert all((mine.starts[name] == other.starts[name]).all() for name in mine.starts)
        self.store, self.sources = again, []

    @rule(first=st.integers(0, 12), count=st.integers(0, 3))
    def drop_blocks(self, first, count):
        """Blocks whose rows are lost keep their place and have no items."""
        lost = [masses for serial, _, masses in self.model if first <= serial < first + count]
        assert self.store.drop_blocks(first, first + count) == sum(map(len, lost))
        for masses in lost:
            self.evicted += len(masses)
            masses.clear()
        for serial, fresh, masses in self.model:
            if not masses:
                fresh.items[:] = False
                self.keys = [key for key in self.keys if key // S != serial]

    @invariant()
    def store_is_the_model(self):
        if not hasattr(self, "store"):
            return
        store = self.store
        check_valid(store)
        assert (store.size, store.next, store.stale, store.evicted) == (
            self.size,
            self.serial,
            self.stale,
            self.evicted,
        )
        assert store.next - store.oldest == len(self.model) and store.nbytes == len(self.model) * SCHEMA.nbytes
        for serial, _, masses in self.model:
            slot = serial % self.config["slots"]
            leaves = store.selector.tree[slot * S : (slot + 1) * S]
            np.testing.assert_allclose(leaves, [masses.get(s, 0.0) for s in range(S)], rtol=1e-12)


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


class QueueMachine(RuleBasedStateMachine):
    """A queue is a store: each item once, in the order they came; the model is a list of keys."""

    @initialize(capacity=st.integers(4, 12))
    def begin(self, capacity):
        self.capacity = capacity
        self.slots = capacity + S  # room for blocks of a single item each, and for the one that exceeds the capacity
        self.store = self.make()
        self.blocks, self.queue = [], []

    def make(self):
        return make_queue(Queue(self.capacity), self.slots)

    @rule(items=ITEMS.filter(any))
    def insert(self, items):
        fresh = block(len(self.blocks), items)
        taken = self.store.insert(fresh, None)
        assert taken == (len(self.queue) < self.capacity)
        if taken:
            self.queue += [len(self.blocks) * S + s for s in range(S) if items[s]]
            self.blocks.append(fresh)

    @rule(n=st.integers(1, 8))
    def sample(self, n):
        sample = self.store.sample(n)
        if len(self.queue) < n:
            assert sample is None
            return
        assert sample.keys.tolist() == self.queue[:n] and (sample.weights == 1).all()
        check_sample(sample, dict(enumerate(self.blocks)))
        self.store.update(sample.keys, np.ones(n))  # a queue has no use for it, and no harm comes of it
        del self.queue[:n]

    @rule()
    def save_and_load(self):
        again = self.make()
        again.load_state(self.store.state())
        first, _, blocks = self.store.blocks(0)
        again.load_blocks(first, blocks)
        self.store = again

    @rule()
    def trim(self):
        self.store.trim()

    @invariant()
    def store_is_the_model(self):
        if hasattr(self, "store"):
            check_valid(self.store)
            assert self.store.size == len(self.queue) and self.store.evicted == 0


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("capacity", "slots", "items"), [(4, 8, (True, True, True, False)), (8, 2, (True, False, False, False))]
)
def test_a_queue_drops_nothing_that_was_not_read(capacity, slots, items):
    """Not when the last block exceeds the capacity, nor when the slots are fewer than sparse blocks need."""
    store = make_queue(Queue(capacity), slots)
    taken = [s for s in range(4) if store.insert(block(s, items), None)]
    check_valid(store)
    assert store.evicted == 0 and store.size == len(taken) * sum(items)


def test_a_loaded_queue_goes_on_in_order_where_the_ring_wraps():
    store, again = (make_queue(Queue(100), slots=3) for _ in range(2))
    for sequence in range(4):
        store.insert(block(sequence), None)
        if sequence < 2:
            store.sample(S)
    again.load_state(store.state())
    first, _, blocks = store.blocks(0)
    again.load_blocks(first, blocks)
    assert again.sample(2 * S).keys.tolist() == list(range(2 * S, 4 * S))


def test_a_queue_forgets_a_block_that_could_not_be_read_back():
    store = make_queue(Queue(100))
    for sequence in range(3):
        store.insert(block(sequence), None)
    assert store.drop_blocks(1, 2) == 2 * S, "and those before it: slots are freed from the oldest on"
    check_valid(store)
    assert store.sample(S).keys.tolist() == [8, 9, 10, 11]


def test_a_full_queue_whose_blocks_could_not_be_read_back_takes_new_ones():
    store = make_queue(Queue(3 * S), slots=3)
    for sequence in range(3):
        assert store.insert(block(sequence), None)
    assert store.drop_blocks(0, 2) == 2 * S
    check_valid(store)
    assert store.insert(block(3), None) and store.insert(block(4), None)
    assert store.sample(3 * S).keys.tolist() == list(range(2 * S, 5 * S))


def test_a_queue_is_not_trimmed():
    store = make_queue(Queue(S + 1))
    assert store.insert(block(0), None) and store.insert(block(1), None)
    store.trim()
    assert store.size == 2 * S


@pytest.mark.parametrize("selector", [Prioritized, Uniform, Ranked])
def test_sample_returns_at_once_in_any_state(selector):
    """None where there is nothing, whole batches where there is one item or more; never a loop."""
    store = make_store(selector, capacity=4, slots=2)
    assert store.sample(3) is None
    store.insert(block(0, [False] * S), None)
    assert store.sample(3) is None, "a block without items"
    store.insert(block(1, [False, True, False, False]), np.zeros(S))
    assert store.sample(512).keys.tolist() == [S + 1] * 512, "one item, of priority zero"
    store.drop_blocks(0, 9)
    assert store.sample(1) is None, "all items lost"


def test_slack_is_used_by_inserts_and_given_back_by_trim():
    store = make_store(capacity=2 * S, slots=8, slack=0.5)
    sizes = [store.insert(block(sequence), None) and store.size for sequence in range(5)]
    assert sizes == [S, 2 * S, 3 * S, 3 * S, 3 * S]
    store.trim()
    check_valid(store)
    assert store.size == 2 * S and store.oldest == 3


def test_a_block_larger_than_the_store_is_taken_and_trimmed():
    store = make_store(capacity=2, slots=3)
    for sequence in range(5):
        store.insert(block(sequence), None)
        check_valid(store)
        assert store.size == S
    store.trim()
    check_valid(store)
    assert store.size == 0 and store.sample(1) is None


@settings(max_examples=examples(60), deadline=None)
@given(BAD, st.integers(0, S - 1), st.integers(0, 5), st.sampled_from([Prioritized, Uniform, Ranked]))
def test_a_bad_priority_is_refused_and_changes_nothing(bad, where, blocks, selector):
    store = make_store(selector, capacity=10, slots=3)
    for sequence in range(blocks):
        store.insert(block(sequence), np.full(S, 1.0 + sequence))
    priorities = np.ones(S)
    priorities[where] = bad
    before = everything(store)
    with pytest.raises(ValueError, match="finite"):
        store.insert(block(9), priorities)
    assert everything(store) == before, "insert"
    if blocks:
        live = np.arange(store.oldest * S, store.oldest * S + S)
        with pytest.raises(ValueError, match="finite"):
            store.update(live, priorities)
        with pytest.raises(ValueError, match="finite"):
            store.update(np.append(live, 0), np.append(priorities, 1.0))  # key 0 is stale once block 0 is gone
        assert everything(store) == before, "update"


def test_the_priority_of_what_is_no_item_does_not_matter():
    store = make_store()
    assert store.insert(block(0, [True, False, True, False]), np.array([1.0, np.nan, 2.0, -5.0]))
    check_valid(store)


def test_a_stale_priority_is_ignored_and_counted():
    store = make_store(slots=2)
    store.insert(block(0), np.ones(S))
    keys = store.sample(8).keys
    store.insert(block(1), np.ones(S))
    store.insert(block(2), np.ones(S))  # lies where block 0 lay
    before = store.selector.save()
    store.update(keys, np.full(8, 77.0))
    assert store.stale == 8 and (store.selector.save() == before).all()
    with pytest.raises(AssertionError, match="no sample returned"):
        store.update(np.array([3 * S]), np.ones(1))


def test_a_priority_for_a_dropped_item_is_ignored():
    store = make_store()
    store.insert(block(0), None)
    store.insert(block(1), None)
    keys = np.arange(2 * S)
    store.drop_blocks(0, 1)
    store.update(keys, np.ones(2 * S))
    check_valid(store)
    assert set(store.sample(64).keys.tolist()) == set(range(S, 2 * S))


STORES = pytest.mark.parametrize(
    "make", [make_store, lambda **kwargs: make_queue(Queue(100), **kwargs)], ids=["replay", "queue"]
)


@STORES
def test_a_message_is_taken_once(make):
    """Numbers are those of a channel: another channel has its own, and a block without a source is always new."""
    store = make()
    for channel, number in ((7, 0), (7, 1), (7, 1), (8, 0), (7, 0), (8, 1), (7, 2)):
        assert store.insert(block(0), None, Source(channel, number))
    assert store.duplicates == 2 and store.next == 5 and store.latest == {7: 2, 8: 1}
    for _ in range(2):
        assert store.insert(block(0), None)
    assert store.duplicates == 2 and store.next == 7 and store.latest == {7: 2, 8: 1}


@STORES
def test_a_message_that_was_refused_is_taken_when_it_comes_again(make):
    store = make(slots=1)
    store.limiter = Queue(1)
    assert store.insert(block(0), None, Source(0, 0))
    assert not store.insert(block(1), None, Source(0, 1)) and store.latest == {0: 0}
    store.limiter = Queue(100)
    store.sample(S)
    assert store.insert(block(1), None, Source(0, 1)) and (store.next, store.duplicates) == (2, 0)


@STORES
def test_channels_start_anew_when_a_store_is_loaded(make):
    store, again = make(), make()
    for number in range(3):
        assert store.insert(block(number), None, Source(0, number))
    state = store.state()
    assert "latest" not in state
    again.load_state(state | {"latest": {"0": [0, 2]}})  # as older checkpoints have it
    first, _, blocks = store.blocks(0)
    again.load_blocks(first, blocks)
    assert again.latest == {} and (again.sources == -1).all()
    assert again.insert(block(3), None, Source(0, 0)) and (again.next, again.duplicates) == (4, 0)


@STORES
def test_nothing_that_comes_out_is_a_view_of_the_store(make):
    store = make(slots=3)
    source = block(0)
    store.insert(source, np.ones(S))
    before = everything(store)
    for array in (*source.rows.values(), *source.starts.values(), source.items):
        array[...] = np.ones((), array.dtype)
    assert everything(store) == before, "nor what went in"
    _, _, blocks = store.blocks(0)
    state = store.state()
    state["counts"].clear()
    for array in (*blocks.values(), state["items"], *(state[name] for name in ("mass",) if name in state)):
        array[...] = 1
    assert everything(store) == before
    sample = store.sample(4)
    before = everything(store)
    for array in (*sample.rows.values(), *sample.starts.values(), sample.weights, sample.probability, sample.keys):
        assert array.flags.writeable
        array[...] = 1
    assert everything(store) == before


def test_a_store_of_a_window_without_state_is_saved_too():
    schema = Schema(COLUMNS, WINDOW, fresh=8)
    store, again = make_store(schema=schema), make_store(schema=schema)
    for sequence in range(10):
        store.insert(block(sequence, schema=schema), None)
    again.load_state(store.state())
    first, stop, blocks = store.blocks(0)
    again.load_blocks(first, blocks)
    assert (first, stop) == (2, 10) and everything(again) == everything(store)


def test_blocks_that_are_gone_are_not_loaded():
    """An older file of blocks, some of them evicted since, leaves the newer blocks alone."""
    store, again = make_store(slots=3), make_store(slots=3)
    for sequence in range(2):
        store.insert(block(sequence), None)
    old = store.blocks(0)
    for sequence in range(2, 5):
        store.insert(block(sequence), None)
    again.load_state(store.state())
    for first, _, blocks in (store.blocks(2), old):
        again.load_blocks(first, blocks)
    assert everything(again) == everything(store)


def test_the_parts_of_a_sample_are_the_sample():
    store = make_store()
    for sequence in range(4):
        store.insert(block(sequence), np.arange(S) + 1.0)
    sample = store.sample(12)
    parts = [sample.part(first, 3) for first in range(3)]
    assert sorted(key for part in parts for key in part.keys.tolist()) == sorted(sample.keys.tolist())
    for part in parts:
        check_sample(part, {sequence: block(sequence) for sequence in range(4)})
        weights = (4 * S * part.probability) ** -0.4
        np.testing.assert_allclose(part.weights, weights / weights.max(), rtol=1e-6)  # of this batch, not of the draw
    assert sample.part(0, 1) is sample


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("2GB", 2e9, "gb"),
        ("2 gb", 2e9, "gb"),
        (" 1.5GiB ", 1.5 * 2**30, "gib"),
        ("300MB", 3e8, "mb"),
        ("4kib", 4096, "kib"),
        ("512b", 512, "b"),
        ("100_000", 100_000, ""),
        (50_000, 50_000, ""),
        ("1_000.5kb", 1_000_500, "kb"),
    ],
)
def test_capacities_are_steps_or_bytes(text, amount, unit):
    assert parse_capacity(text) == (amount, unit)


@pytest.mark.parametrize(
    "text", ["", "GB", "2TB", "-1", "-2GB", "0", "0GB", "1e6", "2 G B", "many", "_1", "1,000", 0, -5, "nan", "0.5"]
)
def test_other_capacities_are_refused(text):
    with pytest.raises(UserError, match=r"100_000 or as 2GB"):
        plan_size(text, SCHEMA)


def memory(store):
    blocks = (*store.rows.values(), *store.starts.values(), store.commit, store.sources)
    return sum(x.nbytes for x in (*blocks, store.items, store.selector.tree.nodes))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(10_000, 300_000), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([2, 8, 10, 64]))
def test_a_store_given_bytes_stays_within_them(nbytes, slack, fresh):
    schema = Schema(COLUMNS, WINDOW, fresh, STATE)
    if nbytes < 2 * (schema.nbytes + 11 * schema.starts + 32) + 1024:
        with pytest.raises(UserError, match="less than two blocks"):
            plan_size(f"{nbytes}B", schema, slack)
        return
    size = plan_size(f"{nbytes}B", schema, slack)
    store = Replay(schema, Uniform(size.slots * schema.starts), MinSize(), size.capacity, size.slots, slack)
    assert memory(store) <= size.nbytes <= nbytes
    assert size.nbytes + 2 * (schema.nbytes + 32) > nbytes, "no block that would fit is left out"
    assert (
        sum(x.nbytes for x in store.rows.values()) + sum(x.nbytes for x in store.starts.values())
        == size.slots * schema.nbytes
    )
    assert store.hard_capacity <= size.slots * schema.starts


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(2, 5_000), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([2, 8, 10, 64]))
def test_a_store_given_steps_has_room_for_them(steps, slack, fresh):
    schema = Schema(COLUMNS, WINDOW, fresh, STATE)
    size = plan_size(steps, schema, slack)
    store = Replay(schema, Uniform(size.slots * schema.starts), MinSize(), size.capacity, size.slots, slack)
    assert size.capacity == steps // WINDOW.stride
    assert size.slots * schema.starts >= store.hard_capacity and size.slots >= 2
    assert memory(store) <= size.nbytes <= memory(store) + size.slots * (2 * schema.starts + 8) + 1024
    assert plan_size(f"{steps:_}", schema, slack) == size


def test_a_store_that_cannot_fit_is_refused_in_words():
    size = Size(1_000_000, 125_000, 7_000_000_000)
    check_memory(size, 8_000_000_000)
    with pytest.raises(UserError) as error:
        check_memory(size, 7_500_000_000)
    said = str(error.value)
    assert "7.0 GB" in said and "1,000,000 items" in said and "7.5 GB" in said and "3.8GB" in said
    assert parse_capacity(said.split()[-1].rstrip("."))[1] == "gb", "what it proposes can be typed"


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (2e6, "2.0 MB"), (5e12, "5000.0 GB")]
)
def test_bytes_in_words(n, text):
    assert format_bytes(n) == text


def test_metrics_count_what_happened():
    store = make_store(slots=2)
    for sequence in range(3):
        store.insert(block(sequence, [True, True, False, False]), None)
    store.sample(5)
    store.update(np.array([0]), np.ones(1))
    assert store.metrics() == {
        "store_items": 4,
        "store_bytes": 2 * SCHEMA.nbytes,
        "store_inserted": 6,
        "store_sampled": 5,
        "store_evicted": 2,
        "store_stale": 1,
        "store_duplicates": 0,
    }


def test_a_window_is_read_from_its_own_block_only():
    """The last window of a block ends with the block's last row, whatever lies behind it in memory."""
    store = make_queue(Queue(100), slots=2)
    source = dataclasses.replace(block(0), items=np.array([False, False, False, True]))
    store.insert(source, None)
    sample = store.sample(1)
    assert (sample.rows["reward"][0] == source.rows[PACKED]["reward"][-WINDOW.rows :]).all()


def test_a_sample_of_one_item_is_a_copy_too():
    store = make_store()
    store.insert(block(0), np.ones(S))
    sample = store.sample(1)
    before = everything(store)
    for array in (*sample.rows.values(), *sample.starts.values(), sample.weights, sample.probability, sample.keys):
        array[...] = 1
    assert everything(store) == before


@pytest.mark.parametrize("large", [False, True])
def test_what_lies_before_the_episode_reads_as_zero_in_large_and_in_small_observations(large):
    """Where a window trains one step; and nothing but observations is blanked."""
    flag, image = spec((), np.bool_), spec((200,) if large else (3,), np.uint8)
    columns = {"obs/image": image, "obs/speed": spec((2,), np.float32), "other": image, "first": flag, "valid": flag}
    schema = Schema(columns, Window(history=4, lookahead=2), fresh=8)
    rng = np.random.default_rng(0)
    source = make_block(schema, Source(0, 0), [True] * 8)
    truth = source.columns()
    for name in ("obs/image", "obs/speed", "other"):
        truth[name][...] = rng.integers(1, 99, truth[name].shape)
    truth["first"][:] = rng.random(schema.rows) < 0.3
    truth["valid"][:] = rng.random(schema.rows) < 0.8
    store = make_queue(Queue(8), 8, schema)
    store.insert(source, None)
    rows, blanked = store.sample(8).rows, 0
    for i, t in np.ndindex(8, schema.window.rows):
        earlier = earlier_episode(truth["first"][i:], truth["valid"][i:], t, schema.window.before)
        blanked += earlier
        assert (rows["other"][i, t] == truth["other"][i + t]).all()
        for name in ("obs/image", "obs/speed"):
            assert (rows[name][i, t] == (0 if earlier else truth[name][i + t])).all(), (name, i, t)
    assert 5 < blanked < 8 * schema.window.before


def test_a_sample_that_is_held_does_not_change():
    """Large enough for buffers that are used again; held as it came, or as a part of it."""
    schema = Schema({"obs": spec((4096,), np.float32), "reward": spec((), np.float32)}, Window(lookahead=1), fresh=4)
    store = make_store(Uniform, capacity=32, schema=schema)
    for sequence in range(8):
        store.insert(block(sequence, schema=schema), None)
    held = [store.sample(16).rows["obs"], store.sample(16).part(1, 4).rows["obs"]]
    before = [x.copy() for x in held]
    for _ in range(8):
        store.sample(16)
    assert all((x == y).all() for x, y in zip(held, before, strict=True))


def test_a_checkpoint_of_another_size_is_refused_in_words():
    small, large = (Replay(SCHEMA, Uniform(n * SCHEMA.starts), MinSize(), 100, n) for n in (3, 5))
    with pytest.raises(UserError, match=r"store has 3 x \d+ window starts, this one 5"):
        large.load_state(small.state())


def test_a_part_of_a_gigabyte_is_a_capacity():
    assert parse_capacity("0.5GB") == (0.5e9, "gb")


@pytest.mark.parametrize("inserted", [0, 1, 3, 5, 8, 21])
def test_spread_blocks_are_whole_and_go_from_the_oldest_to_the_newest(inserted):
    store = make_store(capacity=10**6)
    blocks = [block(sequence) for sequence in range(inserted)]
    for one in blocks:
        assert store.insert(one, None)
    rows, starts = store.spread_blocks(4)
    there = blocks[-store.n_slots :] if inserted else []
    picked = [there[i] for i in np.linspace(0, len(there) - 1, min(4, len(there))).astype(int)]
    for name, column in rows.items():
        np.testing.assert_array_equal(column, np.array([one.columns()[name] for one in picked]).reshape(column.shape))
        assert not np.shares_memory(column, next(iter(store.rows.values())))
    assert all(len(x) == len(picked) and x.shape[1] == S for x in starts.values())
