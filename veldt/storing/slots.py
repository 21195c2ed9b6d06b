"""Slots: where blocks lie, in memory of one process or shared by several.

A ring of slots; block number `serial` is in slot serial % count. Each slot has a commit word: the serial of its block plus
one, or 0 while the slot is empty or being written. So a block that a killed writer left unfinished does not count, a reader
in another process can tell whether what it copied was whole, and a store's index can be rebuilt from the slots alone.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import PACKED, Array, Tree

NO_SOURCE = Source(-1, -1)  # of a block that came in no message


class BlockMemory(Protocol):
    """Where the arrays of a store come from: private memory, or shared memory that outlives the process."""

    found: bool  # the arrays hold what an earlier process left in them

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array: ...
    def apart(self) -> BlockMemory: ...  # the part that holds the blocks and nothing else


class PrivateMemory:
    """Memory that is gone when the process ends."""

    found = False

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    def apart(self) -> PrivateMemory:
        return self


class Slots:
    def __init__(self, schema: Schema, count: int, memory: BlockMemory | None = None) -> None:
        memory = (memory or PrivateMemory()).apart()
        self.schema, self.count = schema, count
        self.commit = memory.zeros(count, np.int64)  # serial + 1
        self.sources = memory.zeros((count, 2), np.int64)  # Source, or NO_SOURCE
        self.rows = schema.layout.make(memory.zeros, count * schema.rows)
        self.starts = schema.start_layout.make(memory.zeros, count * schema.starts)
        self.items = memory.zeros((count, schema.starts), np.bool_)

    def write(self, serial: int, block: Block, source: Source | None) -> None:
        slot = serial % self.count
        self.commit[slot] = 0
        at = slot * self.schema.rows
        for name, array in block.rows.items():
            self.rows[name][at : at + self.schema.rows] = array
        at = slot * self.schema.starts
        for name, array in block.starts.items():
            self.starts[name][at : at + self.schema.starts] = array
        self.items[slot] = block.items
        self.sources[slot] = NO_SOURCE if source is None else source
        self.commit[slot] = serial + 1

    def erase(self, serial: int) -> None:
        self.commit[serial % self.count] = 0
        self.items[serial % self.count] = False

    @property
    def serials(self) -> Array:
        """Of the blocks that are here, in order."""
        return np.sort(self.commit[self.commit > 0]) - 1

    def read(self, first: int, stop: int) -> tuple[int, Tree]:
        """Copies of blocks first ... stop - 1 that were still whole after the copy, and the serial of the first of these.
        The oldest blocks are evicted first, so only blocks in front can be missing."""
        serials = np.arange(first, stop)
        slots = serials % self.count
        out: Tree = {}
        for name, array in self._arrays().items():
            blocks = array[slots]
            if name.endswith(PACKED):  # a record is saved as its bytes
                blocks = blocks.view(np.uint8).reshape(*blocks.shape, array.dtype.itemsize)
            out[name] = blocks
        gone = np.flatnonzero(self.commit[slots] != serials + 1)
        lost = int(gone[-1]) + 1 if len(gone) else 0
        return first + lost, {name: array[lost:] for name, array in out.items()}

    def put_back(self, first: int, blocks: Tree, oldest: int, stop: int) -> None:
        """Puts back what `read` returned, as far as its serials are among oldest ... stop - 1."""
        serials = np.arange(first, first + len(next(iter(blocks.values()))))
        wanted = (serials >= oldest) & (serials < stop)
        slots = serials[wanted] % self.count
        for name, array in self._arrays().items():
            saved = blocks[name][wanted]
            if name.endswith(PACKED):
                saved = np.ascontiguousarray(saved).view(array.dtype).reshape(len(slots), array.shape[1])
            array[slots] = saved

    def _arrays(self) -> Tree:
        """By the names they are saved under, [count, rows of a block, ...]."""
        out: Tree = {}
        for kind, arrays, size in (("rows", self.rows, self.schema.rows), ("starts", self.starts, self.schema.starts)):
            for name, array in arrays.items():
                out[f"{kind}/{name}"] = array.reshape(self.count, size, *array.shape[1:])
        return out


class MappedBlocks:
    """The blocks of a store in another process. It goes on meanwhile: what it evicts while it is copied is left out."""

    def __init__(self, schema: Schema, n_slots: int, memory: BlockMemory, oldest: int, next_: int) -> None:
        self.schema, self.oldest, self.next = schema, oldest, next_
        self._slots = Slots(schema, n_slots, memory)

    def blocks(self, since: int, most: int) -> tuple[int, int, Tree]:
        """At most `most` blocks from serial `since` on: first serial, the one after the last, and copies of their rows."""
        first = max(since, self.oldest)
        stop = min(self.next, first + most)
        first, arrays = self._slots.read(first, stop)
        return first, stop, arrays

    def load_blocks(self, first: int, blocks: Tree) -> None:
        self._slots.put_back(first, blocks, self.oldest, self.next)
