"""A store whose memory outlives it: killed at any point, the next one goes on with every block that was whole.

Run as a script, this file is the process in which stores live and are killed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from invariants import check_valid

from veldt.errors import UserError
from veldt.machine import available_memory
from veldt.ports import Source
from veldt.records.block import Block, Schema, Window
from veldt.records.tree import Tree, spec
from veldt.runtime.shm.memory import Arena, SharedMemory, make_shared_memory
from veldt.storing import slots as slots_module
from veldt.storing.limiters import MinSize, Queue
from veldt.storing.ranks import Ranked
from veldt.storing.replay import Replay
from veldt.storing.ring import UnrollQueue
from veldt.storing.selectors import Prioritized, Uniform
from veldt.storing.slots import PrivateMemory, Slots, plan_size
from veldt.storing.store import Sample

COLUMNS = {"obs": spec((33,), np.float32), "reward": spec((), np.float64), "action": spec((2,), np.int64)}
SCHEMA = Schema(COLUMNS, Window(history=2, length=2, lookahead=1, stride=2), 8, {"h": spec((3,), np.float32)})
S = SCHEMA.starts  # 4
SLOTS, CAPACITY, BATCH = 4, 14, 6


@contextlib.contextmanager
def memory(count: int = 1) -> Iterator[list[int]]:
    fds = [make_shared_memory("veldt test") for _ in range(count)]
    yield fds
    for fd in fds:
        os.close(fd)


def open_replay(kind: str, fd: int, slots: int = SLOTS) -> Replay:
    arena = Arena(fd)
    make: Any = {"prioritized": Prioritized, "uniform": Uniform, "ranked": Ranked}[kind]
    capacity = CAPACITY if slots <= SLOTS else slots * S
    return Replay(SCHEMA, make(slots * S, memory=arena), MinSize(1), capacity, slots, memory=arena)


def open_queue(fd: int, slots: int = SLOTS) -> UnrollQueue:
    return UnrollQueue(SCHEMA, Queue(slots * S), slots, Arena(fd))


def open_store(kind: str, fd: int, slots: int = SLOTS) -> Replay | UnrollQueue:
    return open_queue(fd, slots) if kind == "fifo" else open_replay(kind, fd, slots)


def insert(store: Replay | UnrollQueue, sequence: int, priorities: Any = None) -> bool:
    """The block that message number `sequence` of channel 5 brings."""
    return store.insert(make_block(SCHEMA, sequence), priorities, Source(5, sequence))


def make_block(schema: Schema, sequence: int, items: Any = True) -> Block:
    """Every number in it follows from its sequence and from the row or start that it belongs to."""
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    for layout, storage in ((schema.layout, rows), (schema.start_layout, starts)):
        for column in layout.columns(storage).values():
            column[...] = 100 * sequence + np.arange(len(column)).reshape(-1, *[1] * (column.ndim - 1))
    return Block(schema, rows, starts, np.full(schema.starts, items, np.bool_))


def priority(sequence: int, updated: bool) -> Any:
    """One for each start. They differ, so that a mass that went astray is seen."""
    return 1.0 + np.arange(S) + 10 * sequence + (0.5 if updated else 0.0)


def masses(store: Replay, sequence: int, updated: bool) -> Any:
    return np.maximum(priority(sequence, updated), 1e-6) ** store.selector.alpha  # type: ignore[attr-defined]


def check_blocks(store: Replay | UnrollQueue) -> list[int]:
    """Every block is as it was sent, and has one of the masses that it ever had; the serials, which are the sequences."""
    live = list(range(store.oldest, store.next))
    for serial in live:
        slot, expected = serial % store.n_slots, make_block(SCHEMA, serial)
        assert store.sources[slot].tolist() == [5, serial]
        for ours, theirs, size in (
            (store.rows, expected.rows, SCHEMA.rows),
            (store.starts, expected.starts, SCHEMA.starts),
        ):
            for name, column in theirs.items():
                assert ours[name][slot * size : (slot + 1) * size].tobytes() == column.tobytes(), (serial, name)
        if isinstance(store, Replay):
            assert store.items[slot].all(), "an item is missing"
            mass = store.selector.save()[slot * S : (slot + 1) * S]
            if isinstance(store.selector, Uniform):
                assert (mass == 1).all()
            else:
                known = [masses(store, serial, updated) for updated in (False, True)]
                assert ((mass == known[0]) | (mass == known[1])).all(), (serial, mass, known)
    return live


def check_windows(sample: Sample) -> None:
    window = SCHEMA.window
    for i, key in enumerate(sample.keys.tolist()):
        serial, offset = divmod(key, S)
        columns = make_block(SCHEMA, serial).columns()
        rows = slice(offset * window.stride, offset * window.stride + window.rows)
        for name, column in columns.items():
            assert (sample.rows[name][i] == column[rows]).all(), (name, key)


# Killed between any two lines.


class Deaths:
    """Takes a copy of the memory before every line of the store's code, as it would be if the process died there."""

    FILES = ("replay.py", "queue.py", "ring.py", "slots.py", "selectors.py", "ranks.py")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.copies: dict[bytes, str] = {}  # and the line

    def __enter__(self) -> Deaths:
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self.before)
        self.take("the end")

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = os.path.basename(frame.f_code.co_filename)
        if name not in self.FILES:
            return None
        self.take(f"{name}:{frame.f_lineno}")
        return self.trace

    def take(self, line: str) -> None:
        self.copies.setdefault(os.pread(self.fd, os.fstat(self.fd).st_size, 0), line)


@contextlib.contextmanager
def copy_of(data: bytes) -> Iterator[int]:
    with memory() as [fd]:
        os.write(fd, data)
        yield fd


@pytest.mark.parametrize("kind", ["prioritized", "uniform", "ranked"])
def test_a_store_killed_between_any_two_lines_goes_on(kind: str) -> None:
    deaths = 0
    with memory() as [fd]:
        store = open_replay(kind, fd)
        for sequence in range(9):
            before = list(range(store.oldest, store.next))
            saved = store.selector.save()[:-1]
            with Deaths(fd) as inserting:
                assert insert(store, sequence, priority(sequence, False))
            for data, line in inserting.copies.items():
                with copy_of(data) as again:
                    adopted = open_replay(kind, again)
                    live = check_blocks(adopted)
                    # Some of the oldest may be gone, and the new one may be there; all the others are.
                    kept = before[len(before) - len([x for x in live if x < sequence]) :]
                    assert live in (kept, [*kept, sequence]), line
                    assert len(before) - len(kept) <= max(0, 1 + len(before) - CAPACITY // S), line
                    check_goes_on(adopted, live, sequence, line)
                    deaths += 1
            with Deaths(fd) as sampling:
                sample = store.sample(BATCH)
            assert sample is not None
            serials, offsets = np.divmod(sample.keys, S)
            new = np.array([priority(a, True)[b] for a, b in zip(serials, offsets, strict=True)])
            saved = store.selector.save()[:-1]
            with Deaths(fd) as updating:
                store.update(sample.keys, new)
            after = store.selector.save()[:-1]
            for data, line in [*sampling.copies.items(), *updating.copies.items()]:
                with copy_of(data) as again:
                    adopted = open_replay(kind, again)
                    assert check_blocks(adopted) == list(range(store.oldest, store.next)), line
                    mass = adopted.selector.save()[:-1]
                    assert ((mass == saved) | (mass == after)).all(), line
                    deaths += 1
            assert (open_replay(kind, fd).selector.save()[:-1] == after).all(), "and all of them once it has returned"
    assert deaths > 9 * 8


def check_goes_on(store: Replay, live: list[int], sequence: int, line: str) -> None:
    """A store that was adopted is valid, knows its blocks, and takes the next ones."""
    check_valid(store)
    assert store.size == len(live) * S and store.inserted in (sequence * S, (sequence + 1) * S), line
    for known in live:
        duplicates = store.duplicates
        assert insert(store, known, None) and store.duplicates == duplicates + 1, line
    for more in range(sequence + (sequence in live), sequence + 6):
        assert insert(store, more, priority(more, False))
        assert check_blocks(store)[-1] == more, line
        check_valid(store)
        sample = store.sample(BATCH)
        assert sample is not None
        check_windows(sample)


def test_a_queue_killed_between_any_two_lines_gives_nothing_twice_and_keeps_its_order() -> None:
    """A sample in which it was killed is lost, as far as it had got; nothing else is."""
    deaths = 0
    with memory() as [fd]:
        store = open_queue(fd)
        given, sequence = 0, 0
        for _ in range(6):
            while sequence - given // S < SLOTS:
                with Deaths(fd) as inserting:
                    assert insert(store, sequence, None)
                for data, line in inserting.copies.items():
                    with copy_of(data) as again:
                        deaths += 1
                        check_queue(open_queue(again), {given}, {sequence * S, (sequence + 1) * S}, line)
                sequence += 1
            with Deaths(fd) as sampling:
                sample = store.sample(BATCH)
            assert sample is not None and sample.keys.tolist() == list(range(given, given + BATCH))
            for data, line in sampling.copies.items():
                with copy_of(data) as again:
                    deaths += 1
                    check_queue(open_queue(again), {given, given + BATCH}, {sequence * S}, line)
            given += BATCH
    assert deaths > 50


def check_queue(store: UnrollQueue, firsts: set[int], stops: set[int], line: str) -> None:
    """What is left in an adopted queue is a run of items, from one of these keys on to one of those."""
    check_valid(store)
    check_blocks(store)
    left = store.size
    keys: list[int] = []
    while store.size:
        sample = store.sample(1)
        assert sample is not None
        check_windows(sample)
        keys += sample.keys.tolist()
    assert len(keys) == left and (not keys or keys == list(range(keys[0], keys[-1] + 1))), line
    assert not keys or (keys[0] in firsts and keys[-1] + 1 in stops), (line, keys, firsts, stops)
    assert keys or max(firsts) >= min(stops), line


@pytest.mark.parametrize("batch", [SLOTS * S, S])
def test_a_queue_killed_while_it_gave_out_takes_blocks_again(batch: int) -> None:
    with memory() as [fd]:
        store = open_queue(fd)
        for sequence in range(SLOTS):
            assert insert(store, sequence, None)
        with Deaths(fd) as sampling:
            assert store.sample(batch) is not None
        for data, line in sampling.copies.items():
            with copy_of(data) as again:
                adopted = open_queue(again)
                took = insert(adopted, SLOTS, None)
                assert took or adopted.sample(1) is not None, f"killed at {line}, it neither takes nor gives"


@pytest.mark.parametrize("kind", ["prioritized", "uniform", "ranked"])
def test_a_store_killed_while_it_adopts_is_adopted_again(kind: str) -> None:
    with memory() as [fd]:
        store = open_replay(kind, fd)
        for sequence in range(6):
            assert insert(store, sequence, priority(sequence, False))
        with Deaths(fd) as adopting:
            open_replay(kind, fd)
        assert adopting.copies
        for data, line in adopting.copies.items():
            with copy_of(data) as again:
                adopted = open_replay(kind, again)
                assert check_blocks(adopted) == check_blocks(store), line
                check_valid(adopted)


def test_serials_go_on_when_nothing_is_left() -> None:
    """Killed twice: after a block was committed and before it was counted, then while that block made room for the next."""
    with memory() as [fd]:
        store = open_replay("prioritized", fd, slots=1)
        store.keep = lambda: None  # type: ignore[method-assign]
        assert insert(store, 0, None)
        second = open_replay("prioritized", fd, slots=1)
        assert (second.oldest, second.next) == (0, 1)
        second._evict()
        third = open_replay("prioritized", fd, slots=1)
        assert (third.oldest, third.next) == (1, 1), "a serial is used once: it says which blocks a checkpoint has"


# Killed at any instruction.


INSERTED, GIVEN, LIVES, SAMPLES = range(4)  # words of the log; lives that have begun


def live_and_die(kind: str, kills: int, seed: int, log: int, fd: int) -> None:
    """One process after the other adopts the store, checks it, and works until it is killed."""
    rng = random.Random(seed)
    words = SharedMemory(log).words(0, 8)
    for life in range(kills):
        pid = os.fork()
        if pid == 0:
            try:
                (write_slots if kind == "slots" else work)(kind, fd, words)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        works, delay, began, until = rng.randrange(4), rng.random() * 0.001, -1, math.inf
        while True:
            dead, status = os.waitpid(pid, os.WNOHANG)
            if dead:
                break
            if began < 0 and words[LIVES] == life + 1:
                began = words[SAMPLES]
            if until == math.inf and 0 <= began <= words[SAMPLES] - works:
                until = time.perf_counter() + delay
            if time.perf_counter() > until:
                os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (life, status)


def work(kind: str, fd: int, words: memoryview) -> None:
    store = open_store(kind, fd)
    check_adopted(kind, store, words[INSERTED], words[GIVEN])
    sequence = store.next
    given = words[GIVEN] = S * store.next - store.size  # of a queue: a sample that was cut short is lost
    words[INSERTED] = sequence
    words[LIVES] += 1
    while os.getppid() != 1:
        while insert(store, sequence, priority(sequence, False)):
            sequence += 1
            words[INSERTED] = sequence
            if kind != "fifo" and sequence % 3 == 0:
                break
        sample = store.sample(BATCH)
        assert sample is not None
        words[SAMPLES] += 1
        check_windows(sample)
        if kind == "fifo":
            assert sample.keys.tolist() == list(range(given, given + BATCH))
            given += BATCH
            words[GIVEN] = given
        else:
            serials, offsets = np.divmod(sample.keys, S)
            store.update(sample.keys, np.array([priority(a, True)[b] for a, b in zip(serials, offsets, strict=True)]))


def check_adopted(kind: str, store: Replay | UnrollQueue, inserted: int, given: int) -> None:
    check_valid(store)
    live = check_blocks(store)
    assert store.next in (inserted, inserted + 1), "every insert that returned, and at most one more"
    if kind == "fifo":
        items = [serial * S + s for serial in live for s in range(S) if store.items[serial % store.n_slots, s]]
        assert items == list(range(items[0], store.next * S)) if items else True
        assert (items[0] if items else store.next * S) - given in range(BATCH + 1), "at most one sample is lost"
    else:
        assert len(live) >= min(store.next, CAPACITY // S - 1)
    if live:
        duplicates = store.duplicates
        assert insert(store, live[-1], None) and store.duplicates == duplicates + 1


@contextlib.contextmanager
def killing(kind: str, kills: int, seed: int, fd: int) -> Iterator[tuple[subprocess.Popen[bytes], memoryview]]:
    with memory() as [log]:
        words = SharedMemory(log, 64).words(0, 8)
        command = [sys.executable, __file__, kind, *map(str, (kills, seed, log, fd))]
        process = subprocess.Popen(command, pass_fds=[log, fd])
        try:
            yield process, words
        finally:
            process.kill()
            process.wait()


def check_under_kills(kind: str, kills: int) -> dict[str, int]:
    with memory() as [fd], killing(kind, kills, 1, fd) as (process, words):
        assert process.wait(60 + kills) == 0, "a life found something wrong"
        check_adopted(kind, open_store(kind, fd), words[INSERTED], words[GIVEN])
        assert words[LIVES] == kills and words[INSERTED] > kills and words[SAMPLES] > kills // 2
        return {"kills": kills, "inserted": words[INSERTED], "samples": words[SAMPLES]}


@pytest.mark.parametrize("kind", ["prioritized", "fifo"])
def test_a_store_killed_at_any_instruction_goes_on(kind: str) -> None:
    check_under_kills(kind, 60)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["prioritized", "fifo"])
def test_a_store_killed_a_thousand_times_goes_on(kind: str) -> None:
    print(kind, check_under_kills(kind, 1000))


# Read beside a writer.


def write_slots(kind: str, fd: int, words: memoryview) -> None:
    slots = Slots(SCHEMA, 8, Arena(fd))
    blocks = [make_block(SCHEMA, sequence) for sequence in range(100)]
    serial = int(slots.serials[-1]) + 1 if len(slots.serials) else 0
    words[LIVES] += 1
    while os.getppid() != 1:
        if serial >= 8:
            slots.erase(serial - 8)
        slots.write(serial, blocks[serial % 100], None)
        serial += 1
        words[SAMPLES] += serial % 20 == 0


def check_read(first: int, blocks: Tree) -> int:
    """Blocks that `Slots.blocks` gave are whole, and follow on one another; how many there are."""
    count = len(blocks["rows/obs"])
    for i in range(count):
        expected = make_block(SCHEMA, (first + i) % 100)
        parts = (("rows", expected.rows), ("starts", expected.starts))
        for name, array in ((f"{kind}/{name}", array) for kind, storage in parts for name, array in storage.items()):
            assert blocks[name][i].tobytes() == array.tobytes(), (first + i, name)
    return count


def test_what_is_read_beside_a_writer_is_whole() -> None:
    with memory() as [fd], killing("slots", 20, 2, fd) as (process, words):
        deadline = time.monotonic() + 60
        slots, got = None, 0
        while process.poll() is None:
            assert time.monotonic() < deadline
            if slots is None:
                if words[LIVES]:
                    slots = Slots(SCHEMA, 8, Arena(fd))
                continue
            newest = int(slots.commit.max())
            slots.oldest, slots.next = max(0, newest - 8), newest
            first, _, blocks = slots.blocks(0)
            assert max(0, newest - 8) <= first <= newest and len(blocks["rows/obs"]) == newest - first
            got += check_read(first, blocks)
        assert process.returncode == 0 and got > 0


def test_a_block_that_goes_while_it_is_copied_is_left_out() -> None:
    """The writer goes on by 0 ... 5 blocks before any of the copies of the reader."""
    for ahead, when in itertools.product(range(6), range(4)):
        slots = Slots(SCHEMA, 4, PrivateMemory(), 0, 4)
        for serial in range(4):
            slots.write(serial, make_block(SCHEMA, serial), None)
        arrays, copied = slots._arrays(), itertools.count()

        class Slow(dict[str, Any]):
            def items(self, slots: Slots = slots, copied: Any = copied, ahead: int = ahead, when: int = when) -> Any:
                for name, array in super().items():
                    if next(copied) == when:
                        for serial in range(4, 4 + ahead):
                            slots.write(serial, make_block(SCHEMA, serial), None)
                    yield name, array

        slots._arrays = lambda arrays=arrays, slow=Slow: slow(arrays)  # type: ignore[method-assign, misc]
        first, _, blocks = slots.blocks(0)
        late = when >= len(arrays)  # it was done before
        assert first == (0 if late else min(4, ahead)) and check_read(first, blocks) == 4 - first


def test_a_slot_that_is_being_written_is_no_block() -> None:
    with memory() as [fd]:
        slots = Slots(SCHEMA, 3, Arena(fd))
        for serial in range(3):
            slots.write(serial, make_block(SCHEMA, serial), None)
        with Deaths(fd) as writing:
            slots.write(3, make_block(SCHEMA, 3), None)
        assert len(writing.copies) > 3
        for data, line in writing.copies.items():
            with copy_of(data) as again:
                left = Slots(SCHEMA, 3, Arena(again), next_=4)
                assert left.serials.tolist() in ([0, 1, 2], [1, 2], [1, 2, 3]), line
                for serial in left.serials.tolist():
                    first, _, blocks = left.blocks(serial, 1)
                    assert check_read(first, blocks) == 1, line


# Pages.


def pages(fd: int) -> set[int]:
    """Numbers of the pages that were written."""
    out, end, at = set(), os.fstat(fd).st_size, 0
    while at < end:
        try:
            first = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole
            break
        at = os.lseek(fd, first, os.SEEK_HOLE)
        out |= set(range(first // mmap.PAGESIZE, -(-at // mmap.PAGESIZE)))
    return out


class Kernel:
    """posix_fallocate that remembers the pages it was asked for, and refuses more than so many calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: float = math.inf) -> None:
        self.asked: set[int] = set()
        self.calls, self.real = calls, os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, fd: int, first: int, nbytes: int) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.asked |= set(range(first // mmap.PAGESIZE, -(-(first + nbytes) // mmap.PAGESIZE)))
        self.real(fd, first, nbytes)


def test_a_store_of_many_gigabytes_is_made_without_its_pages() -> None:
    schema = Schema({"obs": spec((84, 84), np.uint8)}, Window(history=4, lookahead=3), 64)
    size = plan_size(f"{available_memory() // 2}b", schema)
    with memory(2) as [fd, blocks]:
        arena = Arena(fd, blocks)
        store = Replay(schema, Uniform(size.slots * 64, memory=arena), MinSize(1), size.capacity, size.slots, memory=arena)
        assert 512 * (os.fstat(fd).st_blocks + os.fstat(blocks).st_blocks) < 0.01 * size.nbytes
        assert store.insert(Block(schema, schema.layout.zeros(schema.rows), {}, np.ones(64, np.bool_)), None)
        assert 512 * os.fstat(blocks).st_blocks < 0.01 * size.nbytes


def test_a_store_that_cannot_fit_is_refused_before_anything_is_allocated() -> None:
    """No column alone is too large, but all together are."""
    columns = {name: spec((84, 84), np.uint8) for name in ("obs/a", "obs/b", "obs/c")}
    schema = Schema(columns, Window(), 64)
    slots = int(1.2 * available_memory() / schema.nbytes)
    with memory() as [fd]:
        with pytest.raises(UserError, match=r"MB of shared memory are needed.*lower store\.capacity"):
            Slots(schema, slots, Arena(fd))
        assert 512 * os.fstat(fd).st_blocks < 1e8


@pytest.mark.parametrize("kind", ["prioritized", "fifo"])
def test_every_page_is_allocated_before_it_is_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a store that goes on in memory that it finds, and by one that loads a checkpoint."""
    monkeypatch.setattr(slots_module, "RESERVE", 3 * SCHEMA.nbytes)
    kernel = Kernel(monkeypatch)
    with memory() as [fd]:
        store = open_store(kind, fd, slots=40)
        for sequence in range(25):
            insert(store, sequence)
            assert pages(fd) <= kernel.asked, sequence
        few = len(pages(fd))
        again = open_store(kind, fd, slots=40)
        for sequence in range(25, 100):
            if kind == "fifo" and again.full:
                again.sample(S)
            insert(again, sequence)
            assert pages(fd) <= kernel.asked, sequence
        assert len(pages(fd)) > few > 10
        state, (first, _, blocks) = again.state(), again.blocks(0)
    kernel.asked = set()
    with memory() as [fd]:
        resumed = open_store(kind, fd, slots=40)
        resumed.load_state(state)
        resumed.load_blocks(first, {name: x[:-4] for name, x in blocks.items()})
        resumed.drop_blocks(again.next - 4, again.next)
        resumed.spread_blocks(40)
        assert pages(fd) <= kernel.asked


def test_a_page_that_cannot_be_allocated_is_the_users_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "RESERVE", 3 * SCHEMA.nbytes)
    with memory() as [fd]:
        store = open_replay("prioritized", fd, slots=40)
        insert(store, 0)
        Kernel(monkeypatch, calls=0)
        insert(store, 1), insert(store, 2)
        with pytest.raises(UserError, match=r"shared memory are needed and cannot be allocated.*lower store\.capacity"):
            insert(store, 3)


if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    live_and_die(kind, *map(int, numbers))
