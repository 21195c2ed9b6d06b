"""Copying windows of consecutive rows out of an arena, at the speed of memory."""

from __future__ import annotations

import sys

import numba
import numpy as np
import numpy.typing as npt

from veldt.tree import Array


def copy_windows(source: Array, first: Array, out: Array, blank: Array | None = None) -> None:
    """out[i, t] = source[first[i] + t], for source [rows, ...] and out [n, T, ...]; but zero for t < blank[i]."""
    rows, windows = source.reshape(len(source), -1), out.reshape(*out.shape[:2], -1)
    width = rows.shape[1] * rows.itemsize
    # Any column is copied as words, or as bytes where its rows do not end at a word: two kernels, whatever the dtype.
    dtype = np.uint64 if width % 8 == 0 else np.uint8
    _copy_windows(rows.view(dtype), first, windows.view(dtype), _NONE if blank is None else blank)


_NONE = np.zeros(0, np.int64)


@numba.njit(
    ["void(u8[:,::1], i8[::1], u8[:,:,::1], i8[::1])", "void(u1[:,::1], i8[::1], u1[:,:,::1], i8[::1])"], cache=True
)
def _copy_windows(rows: Array, first: Array, out: Array, blank: Array) -> None:
    for i in range(len(first)):
        begin = blank[i] if len(blank) else 0
        for t in range(out.shape[1]):
            if t < begin:
                for w in range(out.shape[2]):
                    out[i, t, w] = 0
            else:
                row = first[i] + t
                for w in range(out.shape[2]):
                    out[i, t, w] = rows[row, w]


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

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], np.dtype[np.generic]], list[Array]] = {}

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        dtype = np.dtype(dtype)
        if int(np.prod(shape)) * dtype.itemsize < self.SMALL:
            return np.empty(shape, dtype)
        kept = self._kept.setdefault((shape, dtype), [])
        for i in range(len(kept)):
            if sys.getrefcount(kept[i]) == ALONE:
                return kept[i]
        array = np.empty(shape, dtype)
        if len(kept) < self.KEEP:
            kept.append(array)
        return array

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for kept in self._kept.values() for array in kept)


_probe = [np.empty(0)]
ALONE = sys.getrefcount(_probe[0])  # what an array in a list and nowhere else counts
