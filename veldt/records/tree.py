"""Flat dicts of arrays, their description, and how one row of them lies in memory."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tree = dict[str, Array]  # column name -> array; all columns share their leading axes


class ArraySpec(NamedTuple):
    """One column of one row: its shape without leading axes, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Spec = dict[str, ArraySpec]


def spec(shape: tuple[int, ...], dtype: npt.DTypeLike) -> ArraySpec:
    return ArraySpec(tuple(shape), np.dtype(dtype))


def zeros(columns: Spec, *leading: int) -> Tree:
    return {name: np.zeros((*leading, *c.shape), c.dtype) for name, c in columns.items()}


def namespace(x: Any) -> Any:
    """numpy or torch, whichever made `x`; torch is never imported for a numpy array."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


PACKED = "packed"
SMALL = 64  # bytes; a column up to this size shares the packed record


class Layout:
    """How one row lies in memory: small columns packed in one record, large ones apart.

    A *storage* is a dict of arrays with any leading axes: `packed` (the record) and one array for each large column.
    The recorder, a block, the store's arena and a sample are storages of one layout, so a row moves with one copy
    for each large column and one for all the others.
    """

    def __init__(self, columns: Spec) -> None:
        assert PACKED not in columns, columns
        self.spec = dict(columns)
        self.large = {name: c for name, c in columns.items() if c.nbytes > SMALL}
        small = [(name, c.dtype, c.shape) for name, c in columns.items() if c.nbytes <= SMALL]
        # align=True keeps every stride a multiple of its item size, so torch can view each field in place.
        self.record = np.dtype(small, align=True)

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.record.itemsize + sum(c.nbytes for c in self.large.values())

    def zeros(self, *leading: int, zeros: Callable[..., Array] = np.zeros) -> Tree:
        """A storage of arrays that `zeros(shape, dtype)` gives."""
        storage = {name: zeros((*leading, *c.shape), c.dtype) for name, c in self.large.items()}
        if self.record.names:
            storage[PACKED] = zeros(leading, self.record)
        return storage

    def received(self, message: Tree, prefix: str) -> Tree:
        """The storage in a message, whose arrays have names with this prefix; the packed record came as bytes."""
        packed = {PACKED: message[prefix + PACKED].view(self.record)} if self.record.names else {}
        return {name: message[prefix + name] for name in self.large} | packed

    def columns(self, storage: Tree) -> Tree:
        """Every column by name, as views into the storage."""
        return {name: storage[name] if name in self.large else storage[PACKED][name] for name in self.spec}


def read_only(tree: Tree) -> Tree:
    for array in tree.values():
        array.flags.writeable = False
    return tree
