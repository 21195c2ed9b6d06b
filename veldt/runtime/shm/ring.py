"""Ring: one writer, one reader, a bounded number of messages. A stream is one ring, a call is two.

There are no locks. A writer that is killed in the middle of a write leaves an uncommitted message, which its successor
overwrites.
"""

import os
import time
import zlib
from typing import Any

import numpy as np

from veldt.records.tree import Tree, read_only
from veldt.runtime.shm.memory import CHECKED, PAGE, Bytes, Format, SharedMemory, Waker

LINE = 64  # bytes of a cache line, on which slots begin


class Torn(RuntimeError):
    """A message was published but is not intact. This is a bug or broken hardware, so the process must not continue."""


# Layout of a ring: a page of words, a page for each message format, then the slots.
SHAPE, FORMATS = 0, 1  # the shape is slots * 2^40 + bytes of a slot, in one word, so that it changes atomically
HEAD, TAIL = 8, 16  # on cache lines of their own: messages written and messages read, ever
MAX_FORMATS = 8
FORMAT_BYTES = PAGE
COMMIT, LENGTH, FORMAT, CHECKSUM = 0, 1, 2, 3  # the words at the start of each slot
SLOT_HEADER = 64


def has_columns(tree: Tree, names: tuple[str, ...], kinds: list[tuple[np.dtype[Any], tuple[int, ...]]]) -> bool:
    """Whether a message has these names, types and shapes, in this order."""
    if tuple(tree) != names:
        return False
    for x, (dtype, shape) in zip(tree.values(), kinds, strict=True):
        if x.dtype is not dtype or x.shape != shape:
            return False
    return True


def _ring_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of a ring with this number of slots, which is also the offset of the next slot."""
    return PAGE + MAX_FORMATS * FORMAT_BYTES + slots * (SLOT_HEADER + slot_bytes)


class Ring:
    """What reader and writer have in common. A message is a flat dict of arrays (a Tree); slots are reused in turn."""

    writes = False  # otherwise views are read-only

    def __init__(self, fd: int) -> None:
        self.fd, self.slots = fd, 0
        self._shape = 0  # when it was mapped; 0: it is not
        self._words: memoryview
        self._formats: list[Format] = []

    def _map(self) -> bool:
        """Maps the ring, and again after the writer has made the slots larger. False: it is not laid out yet."""
        if not self._shape and os.fstat(self.fd).st_size == 0:
            return False
        if not self._shape or self._words[SHAPE] != self._shape:
            memory = SharedMemory(self.fd)
            shape = memory.words(0, 1)[SHAPE]
            if shape == 0:
                return False
            self.slots, self.slot_bytes = divmod(shape, 1 << 40)
            if memory.nbytes < _ring_bytes(self.slots, self.slot_bytes):
                memory = SharedMemory(self.fd)  # it grew after it was mapped: the size changes before the shape
            self._memory, self._words, self._shape = memory, memory.words(0, PAGE // 8), shape
            self._at = [_ring_bytes(i, self.slot_bytes) for i in range(self.slots)]
            self._headers = [memory.words(at, SLOT_HEADER // 8) for at in self._at]
            self._views: list[dict[int, Tree]] = [{} for _ in self._at]  # by slot and format
            self._held = [-1] * self.slots  # the format of the message that this writer last put in each slot
        return True

    def _slot_views(self, slot: int, format_: int) -> Tree:
        found = self._views[slot].get(format_)
        if found is None:
            found = self._formats[format_].views(self._memory.map, self._at[slot] + SLOT_HEADER)
            self._views[slot][format_] = found if self.writes else read_only(found)
        return found

    def _holds(self, slot: int, number: int) -> bool:
        """Whether this slot holds message `number`, committed."""
        header = self._headers[slot]
        if header[COMMIT] != number + 1:
            return False
        format_ = header[FORMAT]
        if format_ >= len(self._formats):
            self._read_formats()
        return 0 <= format_ < len(self._formats) and header[LENGTH] == self._formats[format_].nbytes

    def _read_formats(self) -> None:
        memory = self._memory
        while len(self._formats) < self._words[FORMATS]:
            at = PAGE + len(self._formats) * FORMAT_BYTES
            self._formats.append(Format.load(memory.map[at + 8 : at + 8 + memory.words(at, 1)[0]]))

    def _bytes(self, slot: int, nbytes: int) -> memoryview:
        at = self._at[slot] + SLOT_HEADER
        return memoryview(self._memory.map)[at : at + nbytes]

    @property
    def waiting(self) -> int:
        """Messages written and not yet read."""
        return self._words[HEAD] - self._words[TAIL] if self._shape or self._map() else 0

    @property
    def written(self) -> int:
        """Messages ever written, over all incarnations of the writer."""
        return self._words[HEAD] if self._shape or self._map() else 0

    @property
    def popped(self) -> int:
        """Messages ever popped, over all incarnations of the reader."""
        return self._words[TAIL] if self._shape or self._map() else 0


class Writer(Ring):
    """The writing end. Slots are as large as the largest message so far; a larger one waits until the ring is empty.

    The reader's bell rings with every message; with `later`, only once per call of `ring`.
    """

    writes = True

    def __init__(
        self, fd: int, reader: Waker | None = None, budget: int = 16 << 20, max_slots: int = 64, later: bool = False
    ) -> None:
        super().__init__(fd)
        self.reader, self.budget, self.max_slots, self.later = reader, budget, max_slots, later
        self._unrung = False  # messages were put since the bell rang
        self._known: dict[Any, int] = {}  # format of a message -> its number
        # Of the latest message: its names, types and shapes, and the number of its format.
        self._names: tuple[str, ...] = ("",)
        self._kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self._latest = 0

    def put(self, tree: Tree) -> bool:
        """False: the ring is full; keep the message and try again."""
        if not has_columns(tree, self._names, self._kinds):  # most messages are like the one before
            key = tuple([(name, x.dtype, x.shape) for name, x in tree.items()])
            number = self._known.get(key)
            if number is None:
                number = self._known[key] = self._number(Format.of(tree))
            self._names, self._kinds, self._latest = tuple(tree), [(x.dtype, x.shape) for x in tree.values()], number
        return self._put(self._latest, tree)

    def put_bytes(self, format_: Format, data: Bytes) -> bool:
        """Like `put`, with the bytes of all arrays as the slot will hold them."""
        number = self._known.get(format_)
        if number is None:
            number = self._known[format_] = self._number(format_)
        assert len(data) == format_.nbytes, (len(data), format_.columns)
        return self._put(number, data)

    def _put(self, number: int, message: Tree | Bytes) -> bool:
        words = self._words
        head = words[HEAD]
        if head - words[TAIL] >= self.slots:
            return False
        if self._formats[number].nbytes > self.slot_bytes:
            if head != words[TAIL]:
                return False
            self._lay_out(self._formats[number].nbytes)
        slot = head % self.slots
        self._reserve(slot)
        self._write(slot, number, message)
        self._commit(slot, head)
        self._publish(head)
        self._unrung = True
        if not self.later:
            self.ring()
        return True

    def ring(self) -> None:
        if self._unrung and self.reader is not None:
            self.reader.ring()
        self._unrung = False

    def recent(self) -> list[Tree]:
        """Views of the newest messages, read or not, of any incarnation, that have not been overwritten."""
        head = self.written
        slots = [n % self.slots for n in range(max(0, head - self.slots), head) if self._holds(n % self.slots, n)]
        return [self._slot_views(slot, self._headers[slot][FORMAT]) for slot in slots]

    # The four steps of a write. If the process is killed between any two of them, readers do not see the message.

    def _reserve(self, slot: int) -> None:
        self._headers[slot][COMMIT] = 0

    def _write(self, slot: int, number: int, message: Tree | Bytes) -> None:
        header, nbytes = self._headers[slot], self._formats[number].nbytes
        if isinstance(message, dict):
            views = self._slot_views(slot, number)
            for view, x in zip(views.values(), message.values(), strict=True):
                view[...] = x
        else:
            self._bytes(slot, nbytes)[:] = message
        if CHECKED or self._held[slot] != number:
            header[FORMAT], header[LENGTH], self._held[slot] = number, nbytes, number
            header[CHECKSUM] = zlib.crc32(self._bytes(slot, nbytes)) if CHECKED else -1

    def _commit(self, slot: int, head: int) -> None:
        self._headers[slot][COMMIT] = head + 1

    def _publish(self, head: int) -> None:
        self._words[HEAD] = head + 1

    def _lay_out(self, nbytes: int) -> None:
        """Gives an empty ring slots of at least this size."""
        nbytes = -(-nbytes // LINE) * LINE
        slots = max(2, min(self.max_slots, self.budget // (SLOT_HEADER + nbytes)))
        memory = SharedMemory(self.fd, _ring_bytes(slots, nbytes))
        memory.words(0, 1)[SHAPE] = slots << 40 | nbytes
        self._map()

    def _number(self, new: Format) -> int:
        """The number of a format in this ring; a new one is added."""
        if not self._map():
            self._lay_out(new.nbytes)
        self._read_formats()  # of an earlier incarnation of this writer
        number = next((i for i, known in enumerate(self._formats) if known.columns == new.columns), None)
        if number is None:
            number, data = len(self._formats), new.dump()
            if number == MAX_FORMATS or len(data) > FORMAT_BYTES - 8:
                raise ValueError(f"too many formats in one stream, or the format is too long: {data!r}")
            at = PAGE + number * FORMAT_BYTES
            self._memory.words(at, 1)[0] = len(data)
            self._memory.map[at + 8 : at + 8 + len(data)] = data
            self._formats.append(new)
            self._words[FORMATS] = number + 1
        return number


class Reader(Ring):
    """The reading end: `peek` gives views of the oldest message, which are valid until `pop` frees its slot."""

    def __init__(self, fd: int, writer: Waker | None = None) -> None:
        super().__init__(fd)
        self.writer = writer

    def peek(self, ahead: int = 0) -> Tree | None:
        """Views of the message this many behind the oldest; None: there is none yet."""
        if not self._shape and not self._map():
            return None
        words = self._words
        number = words[TAIL] + ahead
        if words[HEAD] <= number:
            return None
        if words[SHAPE] != self._shape:  # read after the head: the message may be the first in larger slots
            self._map()
        slot = number % self.slots
        header = self._headers[slot]
        found = self._views[slot].get(header[FORMAT])
        if CHECKED or found is None or header[COMMIT] != number + 1:
            if not self._is_intact(slot, number) and not self._wait_intact(slot, number):
                raise Torn(f"message {number} of a ring was not committed, or changed after that")
            found = self._slot_views(slot, header[FORMAT])
        return found

    def peek_bytes(self, ahead: int = 0) -> tuple[Format, memoryview] | None:
        """Like `peek`, with the bytes of all arrays as they are in the slot."""
        if self.peek(ahead) is None:
            return None
        slot = (self._words[TAIL] + ahead) % self.slots
        format_ = self._formats[self._headers[slot][FORMAT]]
        return format_, self._bytes(slot, format_.nbytes)

    def _wait_intact(self, slot: int, number: int) -> bool:
        deadline = time.monotonic() + 1.0  # on CPUs that reorder stores, the last may become visible later
        while CHECKED and time.monotonic() < deadline:
            if self._is_intact(slot, number):
                return True
        return False

    def _is_intact(self, slot: int, number: int) -> bool:
        if not self._holds(slot, number):
            return False
        header = self._headers[slot]
        return header[CHECKSUM] < 0 or header[CHECKSUM] == zlib.crc32(self._bytes(slot, header[LENGTH]))

    def pop(self) -> None:
        words = self._words
        words[TAIL] = tail = words[TAIL] + 1
        if self.writer is not None and 2 * (words[HEAD] - tail) <= self.slots:
            self.writer.ring()  # a waiting writer is woken when half of the slots are free, not for each one
