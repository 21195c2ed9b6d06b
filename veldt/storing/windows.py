"""Copying windows of consecutive rows out of the blocks of a store, as fast as memory can be copied."""

import ctypes
import functools
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from veldt.compiled import njit
from veldt.machine import core_count
from veldt.records.block import Schema
from veldt.records.step import is_observation
from veldt.records.tree import PACKED, Array, Tree


def copy_windows(source: Array, first: Array, out: Array, blank: Array | None = None) -> None:
    """out[i, t] = source[first[i] + t], for source [rows, ...] and out [n, T, ...]; but zero for t < blank[i]."""
    rows, windows = source.reshape(-1), out.reshape(len(out), -1)
    width = source.nbytes // len(source)
    # Any column is copied as words, or as bytes where its rows do not end at a word: two kernels, whatever the dtype.
    dtype = np.dtype(np.uint64 if width % 8 == 0 else np.uint8)
    blank = np.zeros(0, np.int64) if blank is None else blank
    threads = THREADS if out.nbytes >= LARGE else 1

    def part(thread: int) -> None:
        of = slice(len(out) * thread // threads, len(out) * (thread + 1) // threads)
        _copy_windows(rows.view(dtype), width // dtype.itemsize, first[of], windows[of].view(dtype), blank[of])

    if threads == 1:
        part(0)
    else:
        list(_threads().map(part, range(threads)))


LARGE = 1 << 24  # bytes; smaller copies use one thread
THREADS = max(1, min(4, core_count() // 4))  # one core alone does not reach the memory's bandwidth


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "copy")


@njit(
    ["void(u8[::1], i8, i8[::1], u8[:,::1], i8[::1])", "void(u1[::1], i8, i8[::1], u1[:,::1], i8[::1])"],
    nogil=True,
)
def _copy_windows(rows: Array, width: int, first: Array, out: Array, blank: Array) -> None:
    """A window lies in one piece: row after row. (With signed indices numba does not vectorise this.)"""
    end = np.uint64(out.shape[1])
    for i in range(len(first)):
        begin = np.uint64(width * blank[i]) if len(blank) else np.uint64(0)
        source, target = rows[width * first[i] :], out[i]
        for w in range(begin):
            target[w] = 0
        for w in range(begin, end):
            target[w] = source[w]


@njit("Tuple((i8[::1], i8[::1]))(i8[::1], i8, i8, i8, i8, i8, i8)")
def locate(leaves: Array, starts: int, rows: int, stride: int, oldest: int, oldest_leaf: int, count: int) -> Any:
    """The first row of each leaf's window, and its key: serial * starts + offset."""
    first, keys = np.empty(len(leaves), np.int64), np.empty(len(leaves), np.int64)
    for i in range(len(leaves)):
        slot = leaves[i] // starts
        first[i] = slot * rows + (leaves[i] - slot * starts) * stride
        age = leaves[i] - oldest_leaf
        keys[i] = oldest * starts + (age if age >= 0 else age + count)
    return first, keys


@njit("i8[::1](b1[:,:], b1[:,:], i8)")
def earlier_rows(first: Array, valid: Array, at: int) -> Array:
    """How many rows of each window [n, T] lie before the episode of its row `at`, or before a row that is not valid."""
    out = np.zeros(len(first), np.int64)
    for i in range(len(first)):
        for t in range(at, 0, -1):
            if first[i, t] or not valid[i, t - 1]:
                out[i] = t
                break
    return out


class Windows:
    """Reads windows, and the recurrent state at window starts. `storing/device.py` has the same on a GPU."""

    outdated = False  # blocks were changed without `wrote`: it has to be called for all

    def __init__(self, schema: Schema, rows: Tree, starts: Tree, pinned: bool = False) -> None:
        self.schema, self.rows, self.starts = schema, rows, starts
        self._buffers = Buffers(pinned)
        self._blanks = schema.window.slices and schema.window.before > 0
        self._packed = [name for name in schema.layout.spec if is_observation(name) and name not in schema.layout.large]

    def wrote(self, slot: int) -> None:
        """The block in this slot is another now."""

    def read_starts(self, leaves: Array) -> Tree:
        """Copies of the columns [n, ...] of these window starts."""
        return self.schema.start_layout.columns({name: array.take(leaves, axis=0) for name, array in self.starts.items()})

    def read(self, first: Array) -> Tree:
        """The columns [n, T, ...] of the windows that start at these rows."""
        schema = self.schema
        shape = (len(first), schema.window.rows)
        out = {name: self._buffers.empty((*shape, *array.shape[1:]), array.dtype) for name, array in self.rows.items()}
        columns = schema.layout.columns(out)
        copy_windows(self.rows[PACKED], first, out[PACKED])  # first, because it has the flags that `blank` is made from
        blank = earlier_rows(columns["first"], columns["valid"], schema.window.before) if self._blanks else None
        for name in schema.layout.large:
            copy_windows(self.rows[name], first, out[name], blank if is_observation(name) else None)
        if blank is not None and self._packed and blank.any():
            earlier = np.arange(schema.window.rows) < blank[:, None]  # [n, T]
            for name in self._packed:
                columns[name][earlier] = 0
        return columns


class Buffers:
    """Arrays that are used again as soon as no one else holds them or a view of them.

    A new array of many MB comes from the system every time, and each of its pages costs a fault when first written.
    """

    KEEP = 4  # arrays of one shape; more than that in use at once are not kept
    SMALL = 1 << 17  # bytes; smaller arrays are left to the allocator
    SHAPES = 8  # different shapes

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned  # pages that a GPU can read by itself
        self._kept: dict[tuple[tuple[int, ...], np.dtype[np.generic]], list[Array]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Buffers, (self.pinned,)  # a copy in another process starts empty

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        dtype = np.dtype(dtype)
        if math.prod(shape) * dtype.itemsize < self.SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            kept = self._kept.setdefault((shape, dtype), [])
            if len(self._kept) > self.SHAPES:
                self._kept.pop(next(iter(self._kept)))
            for i in range(len(kept)):
                if sys.getrefcount(kept[i]) == ALONE:
                    return kept[i]
            array = _pinned(shape, dtype) if self.pinned else np.empty(shape, dtype)
            if len(kept) < self.KEEP:
                kept.append(array)
            return array


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    import torch

    owner = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    memory: Any = (ctypes.c_uint8 * owner.numel()).from_address(owner.data_ptr())
    memory.owner = owner  # keeps the tensor alive as long as the array
    # Not an array made from an array: a view of it would refer to the inner one, and the outer one would seem unused.
    array: Array = np.ndarray(shape, dtype, memory)
    return array


_probe = [np.empty(0)]
ALONE = sys.getrefcount(_probe[0])  # references to an array that only a list holds
