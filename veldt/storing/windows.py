"""Copying windows of consecutive rows out of an arena, at the speed of memory."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from veldt.records.tree import Array


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


LARGE = 1 << 24  # bytes; what is smaller is copied by one thread
THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 4))  # one core copies at a part of the memory's speed


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "copy")


@numba.njit(
    ["void(u8[::1], i8, i8[::1], u8[:,::1], i8[::1])", "void(u1[::1], i8, i8[::1], u1[:,::1], i8[::1])"],
    cache=True,
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


@numba.njit("Tuple((i8[::1], i8[::1]))(i8[::1], i8, i8, i8, i8, i8, i8)", cache=True)
def locate(leaves: Array, starts: int, rows: int, stride: int, oldest: int, oldest_leaf: int, count: int) -> Any:
    """The first row of each leaf's window, and its key: the number of its window start since the store began."""
    first, keys = np.empty(len(leaves), np.int64), np.empty(len(leaves), np.int64)
    for i in range(len(leaves)):
        slot = leaves[i] // starts
        first[i] = slot * rows + (leaves[i] - slot * starts) * stride
        age = leaves[i] - oldest_leaf
        keys[i] = oldest * starts + (age if age >= 0 else age + count)
    return first, keys


@numba.njit("i8[::1](b1[:,:], b1[:,:], i8)", cache=True)
def earlier_rows(first: Array, valid: Array, at: int) -> Array:
    """How many rows of each window [n, T] lie before the episode of its row `at`, or before a row that is not valid."""
    out = np.zeros(len(first), np.int64)
    for i in range(len(first)):
        for t in range(at, 0, -1):
            if first[i, t] or not valid[i, t - 1]:
                out[i] = t
                break
    return out


class Buffers:
    """Arrays that are used again as soon as nobody else holds them or a view of them.

    An array of many MB comes fresh from the system every time, and each of its pages costs a fault when first written.
    """

    KEEP = 4  # of one shape: those in use beyond that are not kept
    SMALL = 1 << 17  # bytes; below that the allocator keeps them itself

    SHAPES = 8  # how many different ones

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned  # pages that a GPU can read by itself
        self._kept: dict[tuple[tuple[int, ...], np.dtype[np.generic]], list[Array]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Buffers, (self.pinned,)  # a copy in another process begins with none

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
                    array = kept[i]
                    return array
            array = _pinned(shape, dtype) if self.pinned else np.empty(shape, dtype)
            if len(kept) < self.KEEP:
                kept.append(array)
            return array

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for kept in self._kept.values() for array in kept)


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    import torch

    owner = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    memory: Any = (ctypes.c_uint8 * owner.numel()).from_address(owner.data_ptr())
    memory.owner = owner  # which lives as long
    # Not an array of an array: a view of that would hold the inner one, and nobody could see that the outer one is in use.
    array: Array = np.ndarray(shape, dtype, memory)
    return array


_probe = [np.empty(0)]
ALONE = sys.getrefcount(_probe[0])  # what an array in a list and nowhere else counts
