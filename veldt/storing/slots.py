"""Slots: where blocks lie, in memory of one process or shared by several, and how many a capacity takes.

A ring of slots; block number `serial` is in slot serial % count. Each slot has a commit word: the serial of its block plus
one, or 0 while the slot is empty or being written. So a block that a killed writer left unfinished does not count, a reader
in another process can tell whether what it copied was whole, and a store's index can be rebuilt from the slots alone.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import PACKED, Array, Tree

NO_SOURCE = Source(-1, -1)  # of a block that came in no message
RESERVE = 4 << 20  # bytes of blocks whose pages are allocated in one go, in a few milliseconds


class BlockMemory(Protocol):
    """Where the arrays of a store come from: private memory, or shared memory that outlives the process."""

    found: bool  # the arrays hold what an earlier process left in them

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array: ...
    def sparse(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array: ...  # zeros that need `reserve`
    def reserve(self, first: int, stop: int, parts: int) -> None: ...  # before parts of the sparse arrays are written
    def apart(self) -> "BlockMemory": ...  # the part that holds the blocks and nothing else


class PrivateMemory:
    found = False

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    sparse = zeros  # the system allocates private pages when they are written

    def reserve(self, first: int, stop: int, parts: int) -> None: ...

    def apart(self) -> Self:
        return self


class Slots:
    """The blocks with serials oldest ... next - 1. Another process can map those of a store that is in use.

    A store starts at once, however large it is: pages for blocks are allocated when a process first writes near them.
    """

    def __init__(self, schema: Schema, n_slots: int, memory: BlockMemory, oldest: int = 0, next_: int = 0) -> None:
        memory = memory.apart()
        self.schema, self.n_slots = schema, n_slots
        self.oldest = oldest  # serial of the oldest block
        self.next = next_  # serial of the next block
        self.commit = memory.zeros(n_slots, np.int64)  # serial + 1
        self.sources = memory.zeros((n_slots, 2), np.int64)  # Source, or NO_SOURCE
        self.rows = schema.layout.zeros(n_slots * schema.rows, zeros=memory.sparse)
        self.starts = schema.start_layout.zeros(n_slots * schema.starts, zeros=memory.sparse)
        self.items = memory.zeros((n_slots, schema.starts), np.bool_)
        self._memory, self._per_part = memory, max(1, RESERVE // schema.nbytes)  # slots
        self._reserved: set[int] = set()  # slot // per part

    def _reserve(self, slots: Iterable[int]) -> None:
        for part in {slot // self._per_part for slot in slots} - self._reserved:
            first = part * self._per_part
            self._memory.reserve(first, min(first + self._per_part, self.n_slots), self.n_slots)
            self._reserved.add(part)

    def write(self, serial: int, block: Block, source: Source | None) -> None:
        slot = serial % self.n_slots
        self._reserve((slot,))
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
        self.commit[serial % self.n_slots] = 0
        self.items[serial % self.n_slots] = False

    @property
    def serials(self) -> Array:
        """Of the blocks that are here, in order."""
        return np.sort(self.commit[self.commit > 0]) - 1

    def blocks(self, since: int, most: int = 1 << 62) -> tuple[int, int, Tree]:
        """At most `most` blocks from serial `since` on: first serial, the one after the last, and copies of the blocks.

        Only blocks that were still whole after the copy: those that are evicted meanwhile are the ones in front.
        """
        first = max(since, self.oldest)
        stop = min(self.next, first + most)
        serials = np.arange(first, stop)
        slots = serials % self.n_slots
        out = {name: array[slots] for name, array in self._arrays().items()}
        gone = np.flatnonzero(self.commit[slots] != serials + 1)
        lost = int(gone[-1]) + 1 if len(gone) else 0
        return first + lost, stop, {name: array[lost:] for name, array in out.items()}

    def load_blocks(self, first: int, blocks: Tree) -> None:
        """Puts back blocks that `blocks` returned, if they are among oldest ... next - 1."""
        serials = np.arange(first, first + len(next(iter(blocks.values()))))
        wanted = (serials >= self.oldest) & (serials < self.next)
        slots = serials[wanted] % self.n_slots
        self._reserve(slots.tolist())
        for name, array in self._arrays().items():
            array[slots] = blocks[name][wanted]

    def _arrays(self) -> Tree:
        """By the names they are saved under, [n_slots, rows of a block, ...]; packed records as their bytes."""
        out: Tree = {}
        for kind, arrays, size in (("rows", self.rows, self.schema.rows), ("starts", self.starts, self.schema.starts)):
            for name, array in arrays.items():
                x = array.view(np.uint8).reshape(len(array), -1) if name == PACKED else array
                out[f"{kind}/{name}"] = x.reshape(self.n_slots, size, *x.shape[1:])
        return out


LEAF_BYTES = 11  # a leaf of the sum tree, its share of the nodes above (8 / 7 of it), and the item flag
RANKED_BYTES = 25  # key, place and mass of a leaf of the rank heap, and the item flag
TREE_BYTES = 1024  # a sum tree rounds every level up to a cache line
BLOCK_BYTES = 32  # a block's name and commit word
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Size(NamedTuple):
    capacity: int  # items
    slots: int  # blocks
    nbytes: int


def plan_size(capacity: str | int, schema: Schema, slack: float = 0.0, leaf_bytes: int = LEAF_BYTES) -> Size:
    """The slots and bytes for a capacity in steps (`100_000`) or in bytes (`2GB`)."""
    block = schema.nbytes + leaf_bytes * schema.starts + BLOCK_BYTES
    amount, unit = parse_capacity(capacity)
    if unit:
        slots = int((amount - TREE_BYTES) // block)
        if slots < 2:
            raise UserError(
                f"A store of {capacity} holds less than two blocks of {format_bytes(block)}; give it at least "
                f"{format_bytes(2 * block + TREE_BYTES)}."
            )
        items = int(slots * schema.starts / (1 + slack))
    else:
        items = max(1, int(amount) // schema.window.stride)
        slots = max(2, -(-int(items * (1 + slack)) // schema.starts))
    return Size(items, slots, slots * block + TREE_BYTES)


def parse_capacity(text: str | int) -> tuple[float, str]:
    """(amount, unit); the amount is in bytes if there is a unit, otherwise in steps."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?) ?([a-z]*)", str(text).strip().lower())
    if not match or match[2] not in UNITS or float(match[1].replace("_", "")) * UNITS[match[2]] < 1:
        raise UserError(f"store.capacity {text!r} is neither steps nor bytes; write it as 100_000 or as 2GB.")
    return float(match[1].replace("_", "")) * UNITS[match[2]], match[2]
