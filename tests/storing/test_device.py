"""A store that gathers windows on a device of torch gives out the same as one that copies them, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_valid
from oracles import examples

from veldt.errors import UserError
from veldt.ports import Source
from veldt.records.block import Block, Schema, Window, window_items
from veldt.records.tree import PACKED, Spec, spec
from veldt.runtime.shm.memory import Arena
from veldt.storing import device as device_module
from veldt.storing.device import check_free, runs
from veldt.storing.limiters import MinSize, Queue
from veldt.storing.replay import Mixture, Replay
from veldt.storing.ring import UnrollQueue
from veldt.storing.selectors import Prioritized
from veldt.storing.store import Sample

FLAGS: Spec = {name: spec((), dtype) for name, dtype in (("first", "?"), ("last", "?"), ("valid", "?"), ("reward", "f4"))}
COLUMNS: dict[str, Spec] = {
    "images": {"obs": spec((9, 11), np.uint8), "action": spec((), np.int64), **FLAGS},  # 99 bytes: no whole word
    "words": {"obs": spec((5, 4), np.float32), "action": spec((3,), np.float32), "mask": spec((66,), np.bool_), **FLAGS},
    "small": {"obs": spec((4,), np.float32), "action": spec((), np.int64), **FLAGS},
    "dict": {"obs/a": spec((2,), np.float32), "obs/b": spec((10, 10), np.uint8), "big": spec((20,), np.float64), **FLAGS},
}
STATE: Spec = {"state/h": spec((20,), np.float32), "state/taken": spec((3,), np.float32)}
WINDOWS = [Window(), Window(4, lookahead=3), Window(2, 3, 4, 2, 2), Window(1, 0, 5, 1, 5)]


def schema_of(columns: str, window: Window) -> Schema:
    return Schema(COLUMNS[columns], window, 2 * window.stride, STATE if window.length > 1 else None)


def block_of(schema: Schema, rng: np.random.Generator) -> Block:
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    for x in (*schema.layout.columns(rows).values(), *schema.start_layout.columns(starts).values()):
        x[...] = rng.normal(size=x.shape) if x.dtype.kind == "f" else rng.integers(0, 2, x.shape) * 255
    columns = schema.layout.columns(rows)
    columns["first"][...], columns["last"][...] = (rng.random((2, schema.rows)) < 0.2)[:]
    columns["valid"][...] = rng.random(schema.rows) < 0.9
    return Block(schema, rows, starts, window_items(columns["valid"], columns["last"], schema.window, schema.fresh))


def replay(schema: Schema, slots: int, device: str, **options: Any) -> Replay:
    leaves = slots * schema.starts
    selector = Prioritized(leaves, memory=options.get("memory"))
    return Replay(schema, selector, MinSize(1), leaves, slots, device=device, **options)


def same(found: Sample, expected: Sample) -> None:
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.weights, expected.weights)
    for mine, theirs in ((found.rows, expected.rows), (found.starts, expected.starts)):
        assert list(mine) == list(theirs)
        for name, x in mine.items():
            assert isinstance(x, torch.Tensor)
            assert x.numpy().dtype == theirs[name].dtype and x.shape == theirs[name].shape, name
            assert x.numpy().tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@settings(max_examples=examples(6), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(2, 7), staged=st.integers(1, 4), evicts=st.booleans())
def test_samples_are_those_of_a_store_in_ram(
    columns: str, window: Window, seed: int, slots: int, staged: int, evicts: bool
) -> None:
    """Through inserts, evictions, updates of priorities and trims, however many blocks go to the device at once."""
    schema, rng = schema_of(columns, window), np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "STAGED", staged * schema.nbytes)
        options = {"candidates": 3 if evicts else 1, "slack": 0.5}
        plain, ours = replay(schema, slots, "", **options), replay(schema, slots, "cpu", **options)
    for _ in range(12):
        for _ in range(rng.integers(0, 5)):
            block = block_of(schema, rng)
            assert plain.insert(block, None) and ours.insert(block, None)
        if plain.size:
            n = int(rng.integers(1, 9))
            expected, found = plain.sample(n), ours.sample(n)
            assert expected is not None and found is not None
            same(found, expected)
            priorities = rng.random(n)
            plain.update(expected.keys, priorities)
            ours.update(found.keys, priorities)
        plain.trim(), ours.trim()
    check_valid(ours)


def test_a_queue_gives_the_same_unrolls() -> None:
    schema, rng = schema_of("small", WINDOWS[3]), np.random.default_rng(1)
    plain, ours = UnrollQueue(schema, Queue(8), 8), UnrollQueue(schema, Queue(8), 8, device="cpu")
    for _ in range(10):
        while True:
            block = block_of(schema, rng)
            if not plain.insert(block, None):
                break
            assert ours.insert(block, None)
        expected, found = plain.sample(3), ours.sample(3)
        assert expected is not None and found is not None
        same(found, expected)


def test_a_sample_does_not_change_when_its_block_is_overwritten() -> None:
    schema, rng = schema_of("images", WINDOWS[1]), np.random.default_rng(2)
    store = replay(schema, 4, "cpu")
    blocks = [block_of(schema, rng) for _ in range(12)]
    for block in blocks[:6]:
        store.insert(block, None)
    sample = store.sample(4)
    assert sample is not None
    before = {name: x.clone() for name, x in sample.rows.items()}  # type: ignore[attr-defined]
    for block in blocks[6:]:
        store.insert(block, None)
        store.sample(2)
    assert all(torch.equal(before[name], x) for name, x in sample.rows.items())  # type: ignore[arg-type]


def test_a_killed_process_leaves_blocks_that_the_next_one_copies_again(
    fds: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    schema, rng = schema_of("dict", WINDOWS[1]), np.random.default_rng(3)
    first = replay(schema, 5, "cpu", memory=Arena(*fds[:2]))
    for number in range(7):
        first.insert(block_of(schema, rng), None, Source(0, number))
    with caplog.at_level("INFO"):
        again, plain = (replay(schema, 5, device, memory=Arena(*fds[:2])) for device in ("cpu", ""))
        expected, found = plain.sample(20), again.sample(20)
    assert expected is not None and found is not None
    same(found, expected)
    assert caplog.text.count("5 blocks copied from RAM to cpu") == 1


def test_a_checkpoint_is_that_of_a_store_in_ram_and_loads_in_either_order() -> None:
    """Blocks may be written by another process, after the state was loaded and before the first sample."""
    schema, rng = schema_of("words", WINDOWS[2]), np.random.default_rng(4)
    stores = [replay(schema, 4, device) for device in ("", "cpu")]
    for _ in range(6):
        block = block_of(schema, rng)
        for store in stores:
            store.insert(block, None)
    saved = [store.blocks(0) for store in stores]
    assert [x[:2] for x in saved] == [(2, 6), (2, 6)]
    for name, x in saved[0][2].items():
        if not name.endswith(PACKED):  # between its fields anything may lie
            assert x.tobytes() == saved[1][2][name].tobytes()
    other = replay(schema, 4, "cpu")
    other.insert(block_of(schema, rng), None)
    other.sample(1)
    other.load_state(stores[0].state())
    for own, source in ((other.rows, stores[0].rows), (other.starts, stores[0].starts)):
        for name, array in own.items():  # as another process does, in shared memory
            array[...] = source[name]
    expected, found = stores[0].sample(9), other.sample(9)
    assert expected is not None and found is not None
    same(found, expected)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_mixture_with_demonstrations(ratio: float) -> None:
    schema, made = schema_of("images", WINDOWS[1]), []
    for device in ("", "cpu"):
        rng, leaves = np.random.default_rng(5), 4 * schema.starts
        demos = replay(schema, 4, device, seed=9)
        own = (schema, Prioritized(leaves), MinSize(1), leaves, 4)
        made.append(Mixture(demos, ratio, *own, device=device))
        for _ in range(4):
            demos.insert(block_of(schema, rng), None)
            made[-1].insert(block_of(schema, rng), None)
    for _ in range(5):
        expected, found = made[0].sample(16), made[1].sample(16)
        assert expected is not None and found is not None
        same(found, expected)


def test_parts_of_a_draw() -> None:
    schema, rng = schema_of("small", WINDOWS[1]), np.random.default_rng(6)
    plain, ours = replay(schema, 4, ""), replay(schema, 4, "cpu")
    for _ in range(4):
        block = block_of(schema, rng)
        plain.insert(block, None), ours.insert(block, None)
    expected, found = plain.sample(12), ours.sample(12)
    assert expected is not None and found is not None
    for i in range(3):
        mine, theirs = found.part(i, 3), expected.part(i, 3)
        np.testing.assert_array_equal(mine.rows["obs"].numpy(), theirs.rows["obs"])  # type: ignore[attr-defined]
        np.testing.assert_array_equal(mine.weights, theirs.weights)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([3], [(0, 3, 1)]),
        ([3, 4, 5], [(0, 3, 3)]),
        ([5, 6, 0, 1], [(0, 5, 2), (2, 0, 2)]),
        ([2, 2], [(0, 2, 1), (1, 2, 1)]),
    ],
)
def test_blocks_of_consecutive_slots_are_one_copy(slots: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert runs(slots) == expected


def test_a_store_that_does_not_fit_on_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "free_bytes", lambda device: 10e9)
    check_free(int(8.9e9), torch.device("cuda"))
    with pytest.raises(UserError, match=r"12.0 GB of blocks, but 10.0 GB is free.*store\.capacity.*5.0GB.*device cpu"):
        check_free(int(12e9), torch.device("cuda"))
