"""Shared memory without a name: a descriptor that is passed to other processes, and what lies in its mapping."""

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import platform
import sys
import zlib
from collections.abc import Iterator
from ctypes import c_int, c_long, c_void_p
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from veldt.errors import UserError
from veldt.machine import available_memory
from veldt.records.tree import Array, Tree

PAGE = mmap.PAGESIZE
ALIGN = 8  # bytes; arrays of a message begin at multiples of this
LARGE = 64 << 20  # bytes; what is larger is checked against free RAM before it is allocated
SPARE = LARGE  # bytes that stay free beside what is allocated while a run goes on
# On x86-64 stores become visible in program order. Elsewhere, and with VELDT_DEBUG=1, messages carry checksums.
CHECKED = platform.machine() not in ("x86_64", "AMD64") or os.environ.get("VELDT_DEBUG", "") not in ("", "0")

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0  # of the system call
_WAIT, _WAKE = 0, 1
_syscall: Any = None
if FUTEX:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.argtypes = [c_long, c_void_p, c_int, c_int, c_void_p, c_void_p, c_int]

# Layout of a `Latest`.
VERSION, SIZE, TAG, CHECKSUM = 0, 1, 2, 4  # words; there are two tags and two checksums, one for each slot
LENGTH, FORMAT = 6, 64  # the word with the length of the format, and the byte where the format begins
WANTED = 7  # the word with the version than which a reader wants a newer one

Bytes = bytes | memoryview


def make_shared_memory(name: str) -> int:
    """The descriptor of new shared memory, of size 0."""
    if not hasattr(os, "memfd_create") or not FUTEX:
        raise UserError("The local runtime needs Linux on x86-64 or aarch64; use --runtime inline here.")
    return os.memfd_create(name, os.MFD_CLOEXEC)


def reserve(fd: int, stop: int, first: int = 0) -> None:
    """Allocates every page of bytes first ... stop - 1 of a memfd, which becomes larger if it is smaller."""
    with _needing(stop - first):
        os.posix_fallocate(fd, first, stop - first)


@contextlib.contextmanager
def _needing(nbytes: int) -> Iterator[None]:
    """A UserError where the system has not that much shared memory."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise
        raise UserError(
            f"{nbytes / 1e6:,.1f} MB of shared memory are needed and cannot be allocated ({error.strerror}); lower "
            "store.capacity or the number of actors."
        ) from None


class SharedMemory:
    """A mapped memfd. Its first user gives it a size and allocates every page, so that there is no SIGBUS later."""

    def __init__(self, fd: int, nbytes: int = 0) -> None:
        if nbytes:
            reserve(fd, nbytes)
        self.nbytes = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.nbytes)

    def words(self, offset: int, count: int) -> memoryview:
        """int64 words, of which Python reads and writes one faster than an element of an array."""
        return memoryview(self.map)[offset : offset + 8 * count].cast("q")

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.ndarray(shape, dtype, self.map, offset)


class Format:
    """The names, types and shapes of a message's arrays, and the offset of each in a slot."""

    def __init__(self, columns: list[tuple[str, str, tuple[int, ...]]]) -> None:
        self.columns, self.offsets = columns, []
        self.dtypes = [np.dtype(code) for _, code, _ in columns]
        self.nbytes = 0
        for dtype, (_, _, shape) in zip(self.dtypes, columns, strict=True):
            self.offsets.append(self.nbytes)
            self.nbytes += -(-dtype.itemsize * math.prod(shape) // ALIGN) * ALIGN

    @classmethod
    def of(cls, tree: Tree) -> Self:
        return cls([(name, x.dtype.str, x.shape) for name, x in tree.items()])

    def dump(self) -> bytes:
        return json.dumps(self.columns).encode()

    @classmethod
    def load(cls, data: bytes) -> Self:
        return cls([(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(data)])

    def views(self, buffer: mmap.mmap | Bytes, offset: int = 0) -> Tree:
        """The arrays of a message, as views of its bytes."""
        parts = zip(self.columns, self.dtypes, self.offsets, strict=True)
        return {name: np.ndarray(shape, dtype, buffer, offset + at) for (name, _, shape), dtype, at in parts}


def write_state(state: dict[str, dict[str, Any]]) -> int:
    """Writes states by name, which are arrays and JSON, to new shared memory; returns its descriptor.

    Uses write() instead of a mapping: the kernel then neither clears the pages nor takes a fault for each.
    """
    rest: dict[str, dict[str, Any]] = {}
    tree: Tree = {}
    for node, part in state.items():
        rest[node] = {name: x for name, x in part.items() if not isinstance(x, np.ndarray)}
        tree |= {f"{node}:{name}": x for name, x in part.items() if isinstance(x, np.ndarray)}
    format_ = Format.of(tree)
    text = json.dumps([rest, format_.columns]).encode()
    fd = make_shared_memory("veldt state")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(len(text).to_bytes(ALIGN, "little") + text + bytes(-len(text) % ALIGN))
            start = file.tell()
            file.truncate(start + format_.nbytes)
            for x, at in zip(tree.values(), format_.offsets, strict=True):
                file.seek(start + at)
                file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_state(fd: int) -> dict[str, dict[str, Any]]:
    """A copy of what `write_state` wrote; closes the descriptor."""
    memory = SharedMemory(fd)
    os.close(fd)
    (size,) = memory.words(0, 1)
    state: dict[str, dict[str, Any]]
    state, columns = json.loads(memory.map[ALIGN : ALIGN + size])
    start = ALIGN + -(-size // ALIGN) * ALIGN
    for key, view in Format(columns).views(memory.map, start).items():
        node, _, name = key.partition(":")
        state[node][name] = view.copy()
    return state


class Latest:
    """The newest version of a value, for one writer and many readers. Weights are published this way.

    There are two slots: the parity of the version says which one is complete. A reader keeps its copy only if the version
    has not changed meanwhile. A writer that is killed has not changed it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._slots: list[Array] = []  # empty: it is not mapped

    def _map(self) -> bool:
        """False: nothing was written yet."""
        if not self._slots and os.fstat(self.fd).st_size:
            memory = SharedMemory(self.fd)
            if memory.words(0, 1)[VERSION]:
                self._open(memory)
        return bool(self._slots)

    def _open(self, memory: SharedMemory) -> None:
        self._words = memory.words(0, PAGE // 8)
        self.format = Format.load(memory.map[FORMAT : FORMAT + self._words[LENGTH]])
        size = self._words[SIZE]
        self._slots = [memory.array(PAGE + i * (-(-size // PAGE) * PAGE), (size,), np.uint8) for i in range(2)]

    def _lay_out(self, format_: Format) -> None:
        described = format_.dump()
        assert FORMAT + len(described) <= PAGE, described
        memory = SharedMemory(self.fd, PAGE + 2 * (-(-format_.nbytes // PAGE) * PAGE))
        words = memory.words(0, PAGE // 8)
        words[SIZE], words[LENGTH] = format_.nbytes, len(described)
        memory.map[FORMAT : FORMAT + len(described)] = described
        self._open(memory)

    def write(self, tag: int, value: Tree) -> None:
        """`tag` identifies the value. All values have the format of the first one."""
        format_ = Format.of(value)
        if not self._map():
            self._lay_out(format_)
        assert format_.columns == self.format.columns, (format_.columns, self.format.columns)
        version = self._words[VERSION] + 1
        slot = self._slots[version & 1]
        for x, at in zip(value.values(), format_.offsets, strict=True):
            slot[at : at + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        self._words[TAG + (version & 1)] = tag
        self._words[CHECKSUM + (version & 1)] = zlib.crc32(slot.data) if CHECKED else -1
        self._words[VERSION] = version

    @property
    def wanted(self) -> bool:
        """Whether a reader that has the newest value has asked for a newer one."""
        return (bool(self._slots) or self._map()) and self._words[WANTED] == self._words[VERSION]

    def read(self, have: int) -> tuple[int, Tree] | None:
        """(tag, copy of the value). None: the newest has the tag `have`, or ten copies in a row were overwritten."""
        found = self.read_bytes(have)
        return None if found is None else (found[0], self.format.views(found[1].data))

    def read_bytes(self, have: int) -> tuple[int, Array] | None:
        """Like `read`, with the bytes of all arrays as they are in the slot."""
        if not self._slots and not self._map():
            return None
        words = self._words
        for _ in range(10):
            version = words[VERSION]
            tag = words[TAG + (version & 1)]
            if tag == have and words[VERSION] == version:
                words[WANTED] = version
                return None
            checksum = words[CHECKSUM + (version & 1)]
            value = self._slots[version & 1].copy()
            if words[VERSION] == version and (checksum < 0 or zlib.crc32(value.data) == checksum):
                return tag, value
        return None


class Arena:
    """Arrays in shared memory that outlives this process. A successor that asks for the same arrays in the same order finds
    their contents.

    The kernel clears each page that it allocates: 16 GB take half a minute. So the pages of `sparse` arrays are allocated
    in parts, and whoever writes to a part calls `reserve` for it before: a page that cannot be allocated is then an error,
    and never a SIGBUS. To read a part that nobody has written allocates it too, so nobody does.
    """

    def __init__(self, fd: int, blocks: int | None = None) -> None:
        self.fd, self._blocks = fd, blocks
        self.found = os.fstat(fd).st_size > 0  # an earlier incarnation has made the arrays
        self._at = 0
        self._sparse: list[tuple[int, int]] = []  # offset and bytes of each array

    def apart(self) -> "Arena":
        """The arena for blocks: separate shared memory, if there is one, which other processes can map without the rest."""
        return self if self._blocks is None else Arena(self._blocks)

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array:
        stop = self._at + _whole_pages(_nbytes(shape, dtype))
        if os.fstat(self.fd).st_size < stop:
            _check_free(stop - self._at)
            reserve(self.fd, stop, self._at)
        return self._map(shape, dtype, stop)

    def sparse(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array:
        """As `zeros`, but the pages are not allocated yet; all of them together must fit into what is free."""
        stop = self._at + _whole_pages(_nbytes(shape, dtype))
        self._sparse.append((self._at, _nbytes(shape, dtype)))
        state = os.fstat(self.fd)
        if state.st_size < stop:
            _check_free(stop - 512 * state.st_blocks)
            with _needing(stop):
                os.ftruncate(self.fd, stop)
        return self._map(shape, dtype, stop)

    def reserve(self, first: int, stop: int, parts: int) -> None:
        """Allocates parts first ... stop - 1 of each sparse array, which has this many parts of equal size."""
        spans = [(at + n * first // parts, at + n * stop // parts) for at, n in self._sparse if n]
        _check_free(sum(end - begin for begin, end in spans) + SPARE)
        for begin, end in spans:
            reserve(self.fd, end, begin)

    def _map(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike, stop: int) -> Array:
        # Each array has a mapping of its own, which is unmapped with the array.
        array: Array = np.ndarray(shape, dtype, mmap.mmap(self.fd, stop - self._at, offset=self._at))
        self._at = stop
        return array


def _nbytes(shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> int:
    return np.dtype(dtype).itemsize * math.prod((shape,) if isinstance(shape, int) else shape)


def _whole_pages(nbytes: int) -> int:
    return -(-max(1, nbytes) // PAGE) * PAGE


def _check_free(nbytes: int) -> None:
    """Where RAM is short, the kernel may kill a process that asks for much, instead of refusing it."""
    if nbytes > LARGE and nbytes > (free := available_memory()):
        needed = f"{nbytes / 1e6:,.1f} MB of shared memory are needed"
        raise UserError(f"{needed}, {free / 1e6:,.1f} MB are free; lower store.capacity.")


class Waker(Protocol):
    """Wakes a process: a `Bell`, or an `EventBell`."""

    def ring(self) -> None: ...


class Bell:
    """Wakes a sleeping process. Two words of shared memory: how often it rang, and whether its owner sleeps.

    A ring can be lost if it comes at the moment when the owner falls asleep. So no sleep is longer than `LONGEST`, and an
    owner that wakes up always looks for work.
    """

    LONGEST = 0.05  # seconds

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        self._words = memory.words(offset, 2)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory.map, offset))
        self._time = (c_long * 2)()
        self._time_address = ctypes.addressof(self._time)

    def ring(self) -> None:
        words = self._words
        words[0] = (words[0] + 1) & 0x7FFFFFFF
        if words[1]:
            self._wake()

    def _wake(self) -> None:
        _syscall(FUTEX, self._address, _WAKE, 1, None, None, 0)

    def rung(self) -> int:
        """How often it rang. Read it before looking for work, and pass it to `wait` if there was none."""
        return self._words[0]

    def wait(self, since: int, seconds: float = LONGEST) -> None:
        """Sleeps until it rings, or returns at once if it has rung more often than `since`."""
        words = self._words
        words[1] = 1
        if words[0] == since:
            self._time[0], self._time[1] = 0, int(1e9 * max(0.0, min(seconds, self.LONGEST)))
            _syscall(FUTEX, self._address, _WAIT, since, self._time_address, None, 0)
        words[1] = 0


class EventBell(Bell):
    """A `Bell` for a process that sleeps in an event loop: the same words in shared memory, but an eventfd wakes it."""

    def __init__(self, memory: SharedMemory, offset: int, fd: int) -> None:
        super().__init__(memory, offset)
        self.fd = fd

    @staticmethod
    def make() -> int:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full: it wakes anyway
            os.eventfd_write(self.fd, 1)

    def set_asleep(self, value: bool) -> None:
        """Whether a ring has to wake the owner, or the owner is polling."""
        self._words[1] = value

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
