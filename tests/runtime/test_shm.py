"""Shared memory: what is read is what was written, in order, whoever dies in the middle of it.

Run as a script, this file is the process in which writers live and are killed: it imports little and forks fast.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from veldt.errors import UserError
from veldt.records.tree import Tree
from veldt.runtime.shm import memory as shm_memory
from veldt.runtime.shm import ring
from veldt.runtime.shm.memory import Arena, Bell, Format, Latest, SharedMemory, make_shared_memory, read_state, write_state
from veldt.runtime.shm.ring import CHECKSUM, COMMIT, FORMAT, MAX_FORMATS, Reader, Torn, Writer

examples = int(os.environ.get("VELDT_EXAMPLES", "1"))


@contextlib.contextmanager
def memory(count: int = 1) -> Iterator[list[int]]:
    fds = [make_shared_memory("veldt test") for _ in range(count)]
    yield fds
    for fd in fds:
        os.close(fd)


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.0005)


# Records that tell whether they are whole: every one is a life, its number in that life, data, and a checksum of all.

SIZES = (1, 40, 700, 5_000, 20_000)  # of the data, one format each


def record(life: int, number: int, size: int) -> Tree:
    data = np.random.default_rng((life, number)).integers(0, 256, size, np.uint8)
    name = np.array([life, number], np.int64)
    return {"name": name, "data": data, "check": np.array(zlib.crc32(data, zlib.crc32(name)), np.int64)}


def name_of(found: Tree) -> tuple[int, int] | None:
    """The life and the number of a record, None if it is not whole."""
    life, number = found["name"].tolist()
    return (life, number) if zlib.crc32(found["data"], zlib.crc32(found["name"])) == found["check"] else None


# A ring against a list.


def equal(one: Tree, other: Tree) -> bool:
    return list(one) == list(other) and all(
        one[k].dtype == other[k].dtype and one[k].shape == other[k].shape and (one[k] == other[k]).all() for k in one
    )


SHAPES = [(), (3,), (0,), (2, 5), (100,), (7, 11, 13)]
MESSAGES = [
    {"x": np.zeros(shape, dtype), **({"y": np.zeros((), np.bool_)} if dtype is np.float32 else {})}
    for shape, dtype in [*zip(SHAPES, [np.int64, np.float32, np.uint8] * 2, strict=True), ((5000,), np.float64)]
]


def laid_out(format_: Format, message: Tree) -> bytes:
    """The bytes of a message, as a format says that they lie."""
    data = bytearray(format_.nbytes)
    for (name, *_), at in zip(format_.columns, format_.offsets, strict=True):
        raw = message[name].tobytes()
        data[at : at + len(raw)] = raw
    return bytes(data)


def views(format_: Format, data: memoryview) -> Tree:
    parts = zip(format_.columns, format_.offsets, strict=True)
    return {name: np.ndarray(shape, dtype, data, at) for (name, dtype, shape), at in parts}


class RingMachine(RuleBasedStateMachine):
    """Both ends begin new lives at any time; the model is a list of the messages that were put and not popped."""

    @initialize(budget=st.sampled_from([0, 3_000, 100_000]), most=st.sampled_from([2, 3, 8]), checked=st.booleans())
    def begin(self, budget: int, most: int, checked: bool) -> None:
        self.checked, ring.CHECKED = ring.CHECKED, checked
        self.fd = make_shared_memory("veldt test")
        self.budget, self.most = budget, most
        self.model: list[Tree] = []
        self.put_ever = self.largest = 0
        self.slots: int | None = None
        self.new_writer()
        self.new_reader()

    @rule()
    def new_writer(self) -> None:
        self.writer = Writer(self.fd, budget=self.budget, max_slots=self.most)

    @rule()
    def new_reader(self) -> None:
        self.reader = Reader(self.fd)

    @rule(kind=st.integers(0, len(MESSAGES) - 1), value=st.integers(0, 100), raw=st.booleans())
    def put(self, kind: int, value: int, raw: bool) -> None:
        message = {name: np.full_like(x, value) for name, x in MESSAGES[kind].items()}
        size = -(-Format.of(message).nbytes // 64) * 64  # slots begin on cache lines
        larger = self.slots is None or size > self.largest
        full = self.slots is not None and len(self.model) >= self.slots
        format_ = Format.of(message)
        took = self.writer.put_bytes(format_, laid_out(format_, message)) if raw else self.writer.put(message)
        assert took == (not full and not (larger and self.model)), "refused when full, or when it needs larger slots"
        if took:
            self.model.append(message)
            self.put_ever += 1
            if larger:
                self.largest = size
                self.slots = max(2, min(self.most, self.budget // (size + ring.SLOT_HEADER)))

    @rule()
    def peek(self) -> None:
        found = self.reader.peek()
        assert (found is None) == (not self.model)
        if found is not None:
            assert equal(found, self.model[0])
            format_, data = self.reader.peek_bytes() or (None, memoryview(b""))
            assert format_ is not None and len(data) == format_.nbytes
            assert equal(views(format_, data), self.model[0])
            assert not any(x.flags.writeable for x in found.values())

    @rule()
    def pop(self) -> None:
        if self.reader.peek() is not None:
            self.reader.pop()
            self.model.pop(0)

    @invariant()
    def counts(self) -> None:
        for end in (self.writer, self.reader):
            assert end.waiting == len(self.model) and end.written == self.put_ever
        if self.slots is not None:
            assert (self.writer.slots, self.reader.slots) == (self.slots, self.slots)

    def teardown(self) -> None:
        ring.CHECKED = self.checked
        os.close(self.fd)


RingMachine.TestCase.settings = settings(max_examples=60 * examples, stateful_step_count=40, deadline=None)
TestRing = RingMachine.TestCase


def test_views_stay_good_until_they_are_popped() -> None:
    with memory() as [fd]:
        writer, reader = Writer(fd, max_slots=2), Reader(fd)
        assert writer.put(record(0, 0, 700))
        view = reader.peek()
        assert view is not None
        assert writer.put(record(0, 1, 700)) and not writer.put(record(0, 2, 700))
        assert not Writer(fd, max_slots=2).put(record(0, 2, 700)), "a new life of the writer finds it full as well"
        assert name_of(view) == (0, 0)
        with pytest.raises(ValueError, match="read-only"):
            view["data"][0] = 1


def test_too_many_formats_are_refused_and_the_ring_goes_on() -> None:
    with memory() as [fd]:
        writer, reader = Writer(fd), Reader(fd)
        for n in range(MAX_FORMATS, 0, -1):
            assert writer.put({"x": np.zeros(n)})
        for life in (writer, Writer(fd)):
            with pytest.raises(ValueError, match="too many formats"):
                life.put({"x": np.zeros(0)})
            with pytest.raises(ValueError, match="too many formats"):
                life.put({"y" * 5000: np.zeros(1)})
            assert life.put({"x": np.ones(2)})
        sizes = []
        while (found := reader.peek()) is not None:
            sizes.append(len(found["x"]))
            reader.pop()
        assert sizes == [*range(MAX_FORMATS, 0, -1), 2, 2]


# All interleavings.


class Interrupted(Writer):
    """Calls `pause` before and after each of its steps."""

    pause: Callable[[], None]

    def _reserve(self, slot: int) -> None:
        self.pause()
        super()._reserve(slot)

    def _write(self, slot: int, number: int, tree: Tree) -> None:
        self.pause()
        super()._write(slot, number, tree)

    def _commit(self, slot: int, head: int) -> None:
        self.pause()
        super()._commit(slot, head)

    def _publish(self, head: int) -> None:
        self.pause()
        super()._publish(head)


def run_interleaved(fd: int, kind: type[Interrupted], schedule: tuple[int, ...], slots: int, sizes: list[int]) -> None:
    """The writer puts messages; the reader, in turns a peek and a pop, does schedule[i] actions at the i-th pause."""
    writer, reader = kind(fd, max_slots=slots), Reader(fd)
    turns, seen, popping = iter(schedule), [], False

    def act() -> None:
        nonlocal popping
        if popping:
            reader.pop()
            popping = False
        elif (found := reader.peek()) is not None:
            seen.append(name_of(found))
            popping = True

    def pause() -> None:
        for _ in range(next(turns, 0)):
            act()

    writer.pause = pause  # type: ignore[method-assign]
    for number, size in enumerate(sizes):
        message = record(0, number, size)
        while not writer.put(message):
            act()
    while len(seen) < len(sizes) or popping:
        assert popping or reader.waiting, "a message was lost"
        act()
    assert seen == [(0, number) for number in range(len(sizes))] and reader.peek() is None


def schedules(actions: int, pauses: int) -> Iterator[tuple[int, ...]]:
    """Every way to spread so many actions over so many pauses, and the time after the last."""
    for bars in itertools.combinations(range(actions + pauses), pauses):
        edges = (-1, *bars)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize(("slots", "sizes"), [(2, [40, 40, 40]), (3, [40, 700])])
def test_every_interleaving_of_a_writer_and_a_reader(slots: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses before each of the four steps of a put; the reader's peeks and pops fall wherever they can."""
    monkeypatch.setattr(ring, "CHECKED", False)  # the order of the steps has to do without
    records = {(number, size): record(0, number, size) for number, size in enumerate(sizes)}
    monkeypatch.setitem(globals(), "record", lambda life, number, size: records[number, size])
    count = 0
    with memory() as [fd]:
        for schedule in schedules(2 * len(sizes), 4 * len(sizes)):
            os.ftruncate(fd, 0)
            run_interleaved(fd, Interrupted, schedule, slots, sizes)
            count += 1
    assert count == math.comb(6 * len(sizes), 2 * len(sizes))


class HeadFirst(Interrupted):
    """A bug: the head moves on before the message is there."""

    def _reserve(self, slot: int) -> None:
        Writer._publish(self, self._words[ring.HEAD])
        super()._reserve(slot)

    def _publish(self, head: int) -> None:
        self.pause()


class CommitFirst(Interrupted):
    """A bug: both words are set, and then the message is written."""

    def _reserve(self, slot: int) -> None:
        head = self._words[ring.HEAD]
        header = self._headers[slot]
        header[FORMAT], header[ring.LENGTH], header[CHECKSUM] = 0, self._formats[0].nbytes, 12345 if ring.CHECKED else -1
        Writer._commit(self, slot, head)
        Writer._publish(self, head)
        super()._reserve(slot)
        Writer._commit(self, slot, head)

    def _publish(self, head: int) -> None:
        self.pause()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("bug", [HeadFirst, CommitFirst])
def test_a_writer_with_its_steps_in_the_wrong_order_is_caught(
    bug: type[Interrupted], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "CHECKED", checked)
    monkeypatch.setattr(ring.time, "monotonic", iter(range(10**9)).__next__)  # a checksum is not waited for long
    caught = 0
    with memory() as [fd]:
        for schedule in itertools.islice(schedules(2, 4), 100):
            os.ftruncate(fd, 0)
            try:
                run_interleaved(fd, bug, schedule, 2, [40])
            except (Torn, AssertionError):
                caught += 1
    assert caught > 0


class Watched(SharedMemory):
    """SharedMemory in which `Watched.touch` is called before every look at a word."""

    touch: Callable[[], None] = staticmethod(lambda: None)

    def words(self, offset: int, count: int) -> Any:
        Watched.touch()
        return Words(super().words(offset, count))


class Words:
    def __init__(self, words: memoryview) -> None:
        self.plain = words

    def __getitem__(self, index: int) -> int:
        Watched.touch()
        return self.plain[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.plain[index] = value


def test_a_writer_may_put_anything_between_two_looks_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the i-th and before the j-th word that a reader looks at, messages come: equal ones, and larger ones."""
    monkeypatch.setattr(ring, "CHECKED", False)
    monkeypatch.setattr(ring, "SharedMemory", Watched)
    changes = [(40,), (700,), (40, 40), (20_000, 1)]
    cases = itertools.product((False, True), range(1, 13), changes, range(13), changes)
    for warm, first, one, second, other in cases:
        if second > first or (second == 0 and other is changes[0]):  # zero: there is no second time
            between_two_looks(warm, {first: one, second: other}, monkeypatch)


def between_two_looks(warm: bool, plan: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with memory() as [fd]:
        writer, reader = Writer(fd, max_slots=3), Reader(fd)
        sent, seen, looks = 1, [(0, 0)], 0
        assert writer.put(record(0, 0, 40))
        early = reader if warm else Reader(fd)
        assert early.peek() is not None
        early.pop()

        def touch() -> None:
            nonlocal looks, sent
            looks += 1
            monkeypatch.setattr(Watched, "touch", lambda: None)
            for size in plan.get(looks, ()):
                sent += writer.put(record(0, sent, size))
            monkeypatch.setattr(Watched, "touch", touch)

        monkeypatch.setattr(Watched, "touch", touch)
        while looks < max(plan) or len(seen) < sent:
            found = reader.peek()
            if found is not None:
                seen.append(name_of(found))
                reader.pop()
            assert looks < 300, "a message was lost"
        monkeypatch.setattr(Watched, "touch", lambda: None)
        assert seen == [(0, number) for number in range(sent)] and writer.waiting == 0


# Killed in the middle. `lives` runs in a process of its own: it forks one writer after the other, and each is killed.

SPREAD_S = 0.0003  # after a write, the parent kills at any time until then


def lives(kind: str, kills: int, seed: int, log: int, fds: list[int]) -> None:
    """Every second writer kills itself at a chosen step, the others are killed from outside at any instruction.

    So are those that never come to their step.
    """
    rng = random.Random(seed)
    words = SharedMemory(log).words(0, 2 * kills)  # of each life: how often its write returned, and whether it began
    for life in range(kills):
        chosen, number, step = rng.random() < 0.5, rng.randrange(6), rng.choice(STEPS)
        pid = os.fork()
        if pid == 0:
            try:
                write = LIVES[kind](fds, life, (number, step) if chosen else (-1, ""))
                words[2 * life + 1] = 1
                while os.getppid() != 1:
                    words[2 * life] += write()
            finally:
                os._exit(1)
        writes, delay = (number + 2, 0.0) if chosen else (rng.randrange(6), rng.random() * SPREAD_S)
        until = math.inf
        while True:
            dead, status = os.waitpid(pid, os.WNOHANG)
            if dead:
                break
            if until == math.inf and words[2 * life + 1] and words[2 * life] >= writes:
                until = time.perf_counter() + delay
            if time.perf_counter() > until:
                os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (life, status)


STEPS = ("lay out", "reserve", "write", "half", "commit", "publish", "ring", "grown")


class Mortal(Writer):
    """Kills itself in its n-th put, before one of the steps, or half way through the data."""

    def __init__(self, fd: int, bell: Bell, death: tuple[int, str], **kwargs: Any) -> None:
        super().__init__(fd, bell, **kwargs)
        self.death = death
        self.puts = 0
        self.reader = self  # type: ignore[assignment]
        self.bell = bell

    def die(self, step: str) -> None:
        if self.death == (self.puts, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, tree: Tree) -> bool:
        done = super().put(tree)
        self.puts += done
        return done

    def _reserve(self, slot: int) -> None:
        self.die("reserve")
        super()._reserve(slot)

    def _write(self, slot: int, number: int, tree: Tree) -> None:
        self.die("write")
        if self.death == (self.puts, "half"):
            views = self._slot_views(slot, number)
            views["data"][: len(tree["data"]) // 2 + 1] = tree["data"][: len(tree["data"]) // 2 + 1]
            self.die("half")
        super()._write(slot, number, tree)

    def _commit(self, slot: int, head: int) -> None:
        self.die("commit")
        super()._commit(slot, head)

    def _publish(self, head: int) -> None:
        self.die("publish")
        super()._publish(head)

    def ring(self) -> None:
        self.die("ring")
        self.bell.ring()

    def _lay_out(self, nbytes: int) -> None:
        self.die("lay out")
        if self.death == (self.puts, "grown"):
            shm_memory.reserve(self.fd, os.fstat(self.fd).st_size + 100_000)
            self.die("grown")
        super()._lay_out(nbytes)


def ring_life(fds: list[int], life: int, death: tuple[int, str]) -> Callable[[], int]:
    board = SharedMemory(fds[1])
    writer, bell = Mortal(fds[0], Bell(board, 0), death, budget=60_000, max_slots=5), Bell(board, 64)
    sizes = random.Random(life)
    largest = SIZES[min(len(SIZES) - 1, life // 10)]  # messages grow over the lives
    waiting: list[Tree] = []
    numbers = itertools.count()

    def write() -> int:
        if not waiting:
            waiting.append(record(life, next(numbers), min(largest, sizes.choice(SIZES))))
        rung = bell.rung()
        if writer.put(waiting[0]):
            waiting.clear()
            return 1
        bell.wait(rung)
        return 0

    return write


@contextlib.contextmanager
def killing(kind: str, kills: int, fds: list[int], seed: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], memoryview]]:
    """The process of `lives`, and its log."""
    with memory() as [log]:
        words = SharedMemory(log, 16 * kills).words(0, 2 * kills)
        command = [sys.executable, __file__, kind, *map(str, (kills, seed, log, *fds))]
        process = subprocess.Popen(command, pass_fds=[log, *fds])
        try:
            yield process, words
        finally:
            process.kill()
            process.wait()


def check_ring_under_kills(kills: int, seed: int) -> dict[str, int]:
    with memory(2) as fds:
        board = SharedMemory(fds[1], 128)
        reader, bell = Reader(fds[0], Bell(board, 64)), Bell(board, 0)
        seen: list[tuple[int, int] | None] = []
        sizes: set[int] = set()
        with killing("ring", kills, fds, seed) as (process, words):
            deadline = time.monotonic() + 30 + 0.1 * kills
            while True:
                ended = process.poll() is not None
                rung = bell.rung()
                found = reader.peek()
                if found is not None:
                    seen.append(name_of(found))
                    sizes.add(len(found["data"]))
                    if len(seen) % 3 == 0:
                        reader = Reader(fds[0], Bell(board, 64))  # a new life of the reader sees the message again
                        again = reader.peek()
                        assert again is not None and name_of(again) == seen[-1]
                    reader.pop()
                elif ended:
                    break
                else:
                    bell.wait(rung)
                assert time.monotonic() < deadline, "the writers do not come to an end"
            assert process.returncode == 0
            returned = words.tolist()[::2]
        torn = seen.count(None)
        assert torn == 0, f"{torn} of {len(seen)} records are torn"
        assert seen == sorted(set(seen)), "a record came twice, or not in order"
        lost = 0
        for life, puts in enumerate(returned):
            numbers = [number for of, number in seen if of == life]
            assert numbers == list(range(len(numbers))), "a record is missing between two others"
            lost += puts - len(numbers) if len(numbers) < puts else 0
            assert len(numbers) <= puts + 1, "more records than puts were begun"
        assert lost == 0, f"{lost} records were lost after their put had returned"
        writer = Writer(fds[0])
        for number in range(reader.slots):
            assert writer.put(record(kills, number, 40)), "a slot was lost for ever"
        assert not writer.put(record(kills, 0, 40)) and writer.waiting == reader.slots
        assert len(seen) >= kills and len(sizes) == len(SIZES), "messages of every size came through"
    return {"kills": kills, "records": len(seen), "torn": torn, "lost": lost}


def test_a_killed_writer_tears_and_loses_nothing(record_property: Callable[[str, object], None]) -> None:
    for name, figure in check_ring_under_kills(100, seed=1).items():
        record_property(name, figure)


@pytest.mark.long
def test_two_thousand_killed_writers_tear_and_lose_nothing(record_property: Callable[[str, object], None]) -> None:
    figures = check_ring_under_kills(2000, seed=2)
    print(figures)
    for name, figure in figures.items():
        record_property(name, figure)


class Deaths:
    """Takes a copy of the memory before every line of ring.py, as it would be if the process died there."""

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
        if frame.f_code.co_filename != ring.__file__:
            return None
        self.take(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self.trace

    def take(self, line: str) -> None:
        self.copies.setdefault(os.pread(self.fd, os.fstat(self.fd).st_size, 0), line)


def test_a_writer_killed_between_any_two_lines_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of all, one of the same format, of a new one, and one that needs larger slots."""
    monkeypatch.setattr(ring, "CHECKED", False)
    deaths = 0
    for sizes in itertools.product((40, 41, 700), repeat=3):
        with memory() as [fd]:
            writer, reader, before = Writer(fd, max_slots=2), Reader(fd), 0
            for number, size in enumerate(sizes):
                with Deaths(fd) as putting:
                    took = writer.put(record(0, number, size))
                for data, line in putting.copies.items():
                    check_successor(data, before, number, line)
                    deaths += 1
                if not took:
                    break
                before += 1
                while number == 1 and reader.peek() is not None:  # empty, so that the third may need larger slots
                    reader.pop()
                    before -= 1
    assert deaths > 27 * 3 * 5


def check_successor(data: bytes, before: int, number: int, line: str) -> None:
    """The messages that waited before are there, perhaps the new one, and a new writer goes on."""
    with memory() as [fd]:
        os.write(fd, data)
        writer, reader = Writer(fd, max_slots=2), Reader(fd)
        waiting = [(0, n) for n in range(number - before, number)]
        for ahead in (1, 2, 3):
            seen = []
            while (found := reader.peek()) is not None:
                seen.append(name_of(found))
                reader.pop()
            assert seen == waiting or (ahead == 1 and seen == [*waiting, (0, number)]), (line, seen)
            waiting = [(ahead, 0), (ahead, 1)]
            assert all(writer.put(record(ahead, n, (700, 42, 40)[ahead - 1])) for n in (0, 1)), line
            assert not writer.put(record(9, 9, 40)), line


# Checksums.


def test_a_flipped_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "CHECKED", True)
    with memory() as [fd]:
        writer, reader = Writer(fd), Reader(fd)
        assert writer.put(record(0, 0, 700))
        found = reader.peek()
        assert found is not None
        found["data"].flags.writeable = True
        found["data"][500] ^= 1
        monkeypatch.setattr(ring.time, "monotonic", itertools.count().__next__)
        with pytest.raises(Torn):
            reader.peek()
        found["data"][500] ^= 1
        assert reader.peek() is not None


@pytest.mark.parametrize(("word", "value"), [(COMMIT, 0), (COMMIT, 2), (FORMAT, 3), (FORMAT, -1), (ring.LENGTH, 64)])
def test_a_message_that_was_not_committed_is_never_taken(word: int, value: int) -> None:
    with memory() as [fd]:
        writer, reader = Writer(fd), Reader(fd)
        assert writer.put(record(0, 0, 700))
        writer._headers[0][word] = value
        with pytest.raises(Torn):
            reader.peek()


def test_a_value_is_read_again_until_its_checksum_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_memory, "CHECKED", True)
    with memory() as [fd]:
        Latest(fd).write(7, {"x": np.arange(1000)})
        latest = Latest(fd)
        found = latest.read(-1)
        assert found is not None and found[0] == 7 and (found[1]["x"] == np.arange(1000)).all()
        latest._slots[1][17] ^= 1
        assert latest.read(-1) is None
        latest._slots[1][17] ^= 1
        assert latest.read(-1) is not None


# The newest value.


LIFE = 100_000  # tags of one writer: more than it can write before it is killed, and exact in float32 for all writers


def value(tag: int) -> Any:
    return np.full(300_000, tag, np.float32)


def latest_life(fds: list[int], life: int, death: tuple[int, str]) -> Callable[[], int]:
    latest, tags = Latest(fds[0]), itertools.count(1 + LIFE * life)
    writes = 0

    def write() -> int:
        nonlocal writes
        writes += 1
        tag = next(tags)
        x = value(tag)
        if death[0] == writes and latest._slots:  # dies half way
            slot = (latest._words[shm_memory.VERSION] + 1) & 1
            latest._slots[slot][:500_000] = x.view(np.uint8)[:500_000]
            os.kill(os.getpid(), signal.SIGKILL)
        latest.write(tag, {"x": x})
        if death[0] in (0, writes):
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    return write


def test_the_newest_value_is_whole_while_its_writers_are_killed() -> None:
    kills = 60
    with memory() as [fd], killing("latest", kills, [fd]) as (process, words):
        latest, have, seen = Latest(fd), -1, 0
        assert latest.read(have) is None or process.poll() is None
        deadline = time.monotonic() + 60
        while True:
            ended = process.poll() is not None
            found = latest.read(have)
            if found is not None:
                tag, x = found[0], found[1]["x"]
                assert tag > have, "older than the one before, or the one that was there"
                assert len(x) == 300_000 and (x == np.float32(tag)).all(), "a mix of two values"
                have, seen = tag, seen + 1
            elif ended:
                break
            assert time.monotonic() < deadline
            if seen % 10 == 0:
                latest = Latest(fd)
        assert process.returncode == 0 and seen > kills
        life = max(life for life in range(kills) if words[2 * life])
        last = {LIFE * life + words[2 * life], LIFE * life + words[2 * life] + 1}
        last |= {LIFE * later + 1 for later in range(life + 1, kills)}  # killed before it could count its first
        assert have in last, "the newest was there at the end"


def test_tags_name_values() -> None:
    def tree(*values: int) -> Tree:
        return {"x": np.array(values, np.int32)}

    with memory() as [fd]:
        writer, reader = Latest(fd), Latest(fd)
        assert reader.read(-1) is None, "nothing was written yet"
        writer.write(5, tree(1, 2, 3))
        tag, found = reader.read(-1) or (0, {})
        assert tag == 5 and found["x"].tolist() == [1, 2, 3]
        assert reader.read(5) is None and reader.read(4) is not None
        found["x"][:] = 0
        assert (reader.read(-1) or (0, found))[1]["x"].tolist() == [1, 2, 3], "it was a copy"
        Latest(fd).write(2, tree(4, 5, 6))
        tag, found = reader.read(5) or (0, {})
        assert tag == 2 and found["x"].tolist() == [4, 5, 6], "the last written is the newest, whatever its tag"
        with pytest.raises(AssertionError):
            writer.write(3, tree(1, 2, 3, 4))


def test_a_value_may_have_several_arrays() -> None:
    with memory() as [fd]:
        value = {"a": np.arange(3, dtype=np.int8), "b": np.array(2.5), "c": np.ones((2, 2), np.float32)}
        Latest(fd).write(1, value)
        _, found = Latest(fd).read(-1) or (0, {})
        assert list(found) == list(value)
        for name, x in value.items():
            assert found[name].dtype == x.dtype and found[name].shape == x.shape and (found[name] == x).all()


def test_a_first_value_that_was_never_finished_is_no_value() -> None:
    with memory() as [fd]:
        SharedMemory(fd, 3 * shm_memory.PAGE).words(0, 8)[shm_memory.SIZE] = 12  # killed before the version was set
        assert Latest(fd).read(-1) is None
        Latest(fd).write(1, {"x": np.arange(3, dtype=np.int32)})
        assert Latest(fd).read(-1) is not None


# Bells.


def echo(fd: int) -> None:
    """Answers a word with the same word, for as long as its parent lives."""
    board, parent = SharedMemory(fd), os.getppid()
    words, mine, theirs = board.words(128, 3), Bell(board, 0), Bell(board, 64)
    words[2] = 1
    while os.getppid() == parent:
        rung = mine.rung()
        if words[0] == words[1]:
            mine.wait(rung)
        else:
            words[1] = words[0]
            theirs.ring()


def test_bells_wake_whoever_sleeps() -> None:
    """Two processes that sleep whenever they wait. No ring is lost for longer than the longest sleep."""
    with memory() as [fd]:
        board = SharedMemory(fd, 4096)
        words, mine, theirs = board.words(128, 3), Bell(board, 64), Bell(board, 0)
        process = subprocess.Popen([sys.executable, __file__, "echo", str(fd)], pass_fds=[fd])
        try:
            wait_until(lambda: words[2] == 1)
            longest: list[float] = []
            while min(longest, default=1.0) > 0.06:
                some = [ping(words, mine, theirs) for _ in range(50)]
                assert np.median(some) < 0.02, "nobody is woken: every answer waits for the longest sleep"
                times = some + [ping(words, mine, theirs) for _ in range(2000)]
                longest.append(max(times))  # a busy machine may hold a process up for longer, but not every time
                assert len(longest) < 5, longest
        finally:
            process.kill()
            process.wait()


def ping(words: memoryview, mine: Bell, theirs: Bell) -> float:
    """Seconds until the answer."""
    began = time.perf_counter()
    rung = mine.rung()
    words[0] += 1
    theirs.ring()
    while words[1] != words[0]:
        mine.wait(rung)
        rung = mine.rung()
        assert time.perf_counter() < began + 20
    return time.perf_counter() - began


def test_the_other_end_is_rung_for() -> None:
    with memory(2) as [fd, board]:
        bells = [Bell(SharedMemory(board, 128), at) for at in (0, 64)]
        writer, reader = Writer(fd, bells[0], max_slots=2), Reader(fd, bells[1])
        assert writer.put(record(0, 0, 40)) and writer.put(record(0, 1, 40))
        assert [bell.rung() for bell in bells] == [2, 0]
        assert not writer.put(record(0, 2, 40)) and reader.peek() is not None
        assert [bell.rung() for bell in bells] == [2, 0]
        reader.pop()
        assert [bell.rung() for bell in bells] == [2, 1]


def test_a_writer_may_ring_once_for_many_messages() -> None:
    with memory(2) as [fd, board]:
        bell = Bell(SharedMemory(board, 128), 0)
        writer = Writer(fd, bell, max_slots=3, later=True)
        writer.ring()
        assert bell.rung() == 0, "for nothing it does not ring"
        assert writer.put(record(0, 0, 40)) and writer.put(record(0, 1, 40))
        assert bell.rung() == 0
        writer.ring(), writer.ring()
        assert bell.rung() == 1


def test_a_bell_that_has_rung_since_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(shm_memory, "_syscall", lambda *args: calls.append(args))
    with memory() as [fd]:
        bell = Bell(SharedMemory(fd, 64), 0)
        since = bell.rung()
        bell.ring()
        assert not calls, "nobody sleeps, so nobody is woken"
        bell.wait(since)
        assert not calls, "it rang after the look: look again"
        bell.wait(bell.rung())
        assert len(calls) == 1
        bell._words[0] = 0x7FFFFFFF
        bell.ring()
        assert bell.rung() == 0, "a futex has 32 bits"


def test_no_sleep_is_longer_than_the_longest() -> None:
    with memory() as [fd]:
        bell = Bell(SharedMemory(fd, 64), 0)
        times = []
        for seconds in (10.0, 10.0, 10.0, 0.001, 0.001, 0.001):
            began = time.perf_counter()
            bell.wait(bell.rung(), seconds)
            times.append(time.perf_counter() - began)
        assert 0.045 < min(times[:3]) < 0.1 and min(times[3:]) < 0.04, times


# Arenas.


def arena_life(fds: list[int], life: int, death: tuple[int, str]) -> Callable[[], int]:
    arena = Arena(fds[0])
    small, large = arena.zeros(3, np.int64), arena.zeros((100, 70), np.float32)
    assert arena.found
    assert small.tolist() == [1, 2, 3] and (large == np.arange(7000).reshape(100, 70)).all()
    small[0], large[99, 69] = 17, -1.0
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_an_arena_is_found_again_by_another_process() -> None:
    with memory() as [fd]:
        arena = Arena(fd)
        assert not arena.found
        small, large = arena.zeros(3, np.int64), arena.zeros((100, 70), np.float32)
        assert not small.any() and not large.any()
        small[:], large[:] = (1, 2, 3), np.arange(7000).reshape(100, 70)
        with killing("arena", 1, [fd]) as (process, _):
            assert process.wait(30) == 0
        assert small.tolist() == [17, 2, 3] and large[99, 69] == -1.0
        again = Arena(fd)
        assert again.found and again.zeros(3, np.int64).tolist() == [17, 2, 3]
        del small, large, arena
        assert again.zeros((100, 70), np.float32)[99, 69] == -1.0
        assert again.zeros((0,), np.float32).shape == (0,) and again.zeros((), np.int64).shape == ()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_memory_that_cannot_be_had_is_the_users_to_know(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    with memory() as [fd]:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        for make in (lambda: Arena(fd).zeros(10**6, np.float64), lambda: Latest(fd).write(1, {"x": np.zeros(9)})):
            with pytest.raises(UserError, match=r"MB of shared memory are needed.*lower store\.capacity"):
                make()
        with pytest.raises(UserError, match="shared memory"):
            Writer(fd).put({"x": np.zeros(9)})
        monkeypatch.undo()
        assert Writer(fd).put({"x": np.zeros(9)}), "and nothing is spoilt"


def test_other_errors_of_memory_are_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        shm_memory.reserve(-1, 4096)


def test_every_page_of_memory_is_there() -> None:
    with memory() as [fd]:
        SharedMemory(fd, 1 << 20)
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20, "a page that is missing would be a SIGBUS later"


# State on its way to another process.

DTYPES = st.sampled_from([np.bool_, np.uint8, np.int64, np.float32, np.float64])
ARRAYS = st.builds(
    lambda shape, dtype, n: np.array(np.arange(math.prod(shape)).reshape(shape) % 7 + n, dtype),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    DTYPES,
    st.integers(0, 9),
)
NAMES = st.text(st.characters(exclude_characters=":", codec="utf-8"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, st.dictionaries(st.text(max_size=8), ARRAYS | JSON, max_size=5), max_size=4))
@settings(max_examples=100 * examples, deadline=None)
def test_state_comes_back_as_it_was(state: dict[str, dict[str, Any]]) -> None:
    fd = write_state(state)
    found = read_state(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert found.keys() == state.keys()
    for node, part in state.items():
        assert found[node].keys() == part.keys()
        for name, x in part.items():
            y = found[node][name]
            if isinstance(x, np.ndarray):
                assert y.dtype == x.dtype and y.shape == x.shape and (y == x).all() and y.flags.writeable
            else:
                assert json.dumps(y) == json.dumps(x)


LIVES = {"ring": ring_life, "latest": latest_life, "arena": arena_life}

if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    if kind == "echo":
        echo(*map(int, numbers))
    else:
        kills, seed, log, *fds = map(int, numbers)
        lives(kind, kills, seed, log, fds)
