"""Windows copied out of an arena, which rows are blanked, and buffers that are used again."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import earlier_episode, examples

from veldt.records.tree import Layout, spec
from veldt.storing import windows
from veldt.storing.windows import Buffers, copy_windows, earlier_rows, locate

RECORD = Layout({"a": spec((), np.float64), "b": spec((3,), np.uint8)}).record
DTYPES = [np.uint8, np.bool_, np.float32, np.int64, RECORD]


def kept_bytes(buffers: Buffers) -> int:
    return sum(array.nbytes for kept in buffers._kept.values() for array in kept)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 5), max_size=2),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
    st.data(),
)
def test_windows_are_the_rows_from_first_on_and_zeros_where_blank(dtype, shape, window, n, blanks, threads, data):
    shape = tuple(shape)
    rows = window + data.draw(st.integers(0, 20))
    size = int(np.prod((rows, *shape))) * np.dtype(dtype).itemsize
    source = np.random.default_rng(0).integers(0, 2, size, np.uint8).view(dtype).reshape(rows, *shape)
    first = np.array(data.draw(st.lists(st.integers(0, rows - window), min_size=n, max_size=n)), np.int64)
    blank = np.array(data.draw(st.lists(st.integers(0, window), min_size=n, max_size=n)), np.int64) if blanks else None
    out = np.full(n * window * size // rows, 7, np.uint8).view(dtype).reshape(n, window, *shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "THREADS", threads)
        patch.setattr(windows, "LARGE", 0)
        copy_windows(source, first, out, blank)
    for i in range(n):
        for t in range(window):
            empty = blank is not None and t < blank[i]
            expected = np.zeros(shape, dtype) if empty else source[first[i] + t]
            assert out[i, t].tobytes() == expected.tobytes(), (i, t)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(1, 7).flatmap(
        lambda t: st.tuples(*[st.lists(st.booleans(), min_size=t, max_size=t)] * 2, st.integers(0, t - 1))
    )
)
def test_earlier_rows_are_those_of_earlier_episodes_and_beyond_gaps(case):
    first, valid, at = case
    (count,) = earlier_rows(np.array([first]), np.array([valid]), at)
    assert [j < count for j in range(at)] == [earlier_episode(first, valid, j, at) for j in range(at)]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(0, 30), st.integers(2, 9))
def test_a_key_counts_window_starts_since_the_store_began(slots, starts, stride, oldest, rows):
    """Every leaf, for a ring whose oldest block has any serial."""
    leaves = np.arange(slots * starts)
    first, keys = locate(leaves, starts, rows, stride, oldest, oldest % slots * starts, len(leaves))
    for leaf in leaves.tolist():
        slot, offset = divmod(leaf, starts)
        assert first[leaf] == slot * rows + offset * stride
        serial = next(s for s in range(oldest, oldest + slots) if s % slots == slot)  # the block that is in this slot
        assert keys[leaf] == serial * starts + offset


LARGE = (Buffers.SMALL // 8, 8)


def address(array):
    return array.__array_interface__["data"][0]


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def buffers(request, monkeypatch):
    """Pages can be pinned only where there is a GPU; all else is as there."""
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **other: plain(*shape, **other))
    return Buffers(request.param)


def test_a_buffer_is_used_again_only_when_nobody_holds_it(buffers):
    a = buffers.empty(LARGE, np.uint8)
    assert a.shape == LARGE and a.dtype == np.uint8
    b = buffers.empty(LARGE, np.uint8)
    assert not np.shares_memory(a, b)
    where = address(a)
    del a
    c = buffers.empty(LARGE, np.uint8)
    assert address(c) == where, "free again, used again"
    assert kept_bytes(buffers) == 2 * c.nbytes


HOLDERS = {
    "a view": lambda x: x[3:5],
    "a view of a view": lambda x: x[3:][:, 2],
    "another dtype": lambda x: x.view(np.uint64),
    "reshaped": lambda x: x.reshape(-1),
    "a tensor": torch.from_numpy,
    "a tensor of a view": lambda x: torch.from_numpy(x[1:])[:, :2],
    "a list": lambda x: [x],
    "a memoryview": memoryview,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_whoever_holds_a_part_of_a_buffer_keeps_it(hold, buffers):
    a = buffers.empty(LARGE, np.uint8)
    where, held = address(a), hold(a)
    del a
    assert address(buffers.empty(LARGE, np.uint8)) != where
    del held
    assert address(buffers.empty(LARGE, np.uint8)) == where


def test_whoever_holds_a_field_of_records_keeps_them(buffers):
    a = buffers.empty((Buffers.SMALL,), RECORD)
    where, held = address(a), a["b"]
    del a
    other = buffers.empty((Buffers.SMALL,), RECORD)
    other["b"] = 1
    assert address(other) != where
    del held, other
    assert address(buffers.empty((Buffers.SMALL,), RECORD)) == where


def test_no_more_than_a_few_buffers_are_kept(buffers):
    held = [buffers.empty(LARGE, np.uint8) for _ in range(3 * Buffers.KEEP)]
    assert len({address(x) for x in held}) == len(held)
    assert kept_bytes(buffers) == Buffers.KEEP * held[0].nbytes
    loose = held[-1]
    held.clear()
    assert sys.getrefcount(loose) == 2, "the others are nobody's but their users'"


def test_shapes_and_dtypes_have_buffers_of_their_own():
    buffers = Buffers()
    for shape, dtype in ((LARGE, np.uint8), (LARGE[::-1], np.uint8), (LARGE, np.float32), (LARGE, RECORD)):
        array = buffers.empty(shape, dtype)
        assert array.shape == shape and array.dtype == dtype
        del array
    assert buffers.empty((2, 2), np.uint8).shape == (2, 2)  # small ones are never kept
    assert kept_bytes(buffers) == Buffers.SMALL * (1 + 1 + 4 + RECORD.itemsize)


def test_shapes_that_are_no_longer_asked_for_are_forgotten():
    buffers = Buffers()
    for n in range(3 * Buffers.SHAPES):
        buffers.empty((Buffers.SMALL + n,), np.uint8)
    assert kept_bytes(buffers) <= (Buffers.SHAPES + 1) * (Buffers.SMALL + n)
