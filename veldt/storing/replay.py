"""Store: blocks, a selector that draws their items, a limiter that sets the rate, and a capacity.

Blocks lie in a ring of slots (`veldt.storing.slots`), oldest first. The s-th window start of the block in a slot is leaf
slot * S + s of the selector, and the key serial * S + s of whoever sampled it: a key whose block is gone is stale, and is
ignored and counted.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numba
import numpy as np

from veldt.errors import UserError
from veldt.metrics import STORE
from veldt.records.block import Block, Schema
from veldt.records.step import is_observation
from veldt.records.tree import PACKED, Array, Tree
from veldt.storing.limiters import Limiter
from veldt.storing.selectors import Selector, check_priorities
from veldt.storing.slots import BlockMemory, PrivateMemory, Slots
from veldt.storing.windows import Buffers, copy_windows, earlier_rows, locate


class Sample(NamedTuple):
    keys: Array  # int64 [n]
    rows: Tree  # columns [n, T, ...]
    starts: Tree  # columns [n, ...]
    weights: Array  # float32 [n], importance weights
    probability: Array  # float64 [n]

    def part(self, first: int, every: int) -> Sample:
        """Every so-many-th item, from the first on."""
        if every == 1:
            return self
        keep = slice(first, None, every)
        rows, starts = ({name: x[keep] for name, x in tree.items()} for tree in (self.rows, self.starts))
        return Sample(self.keys[keep], rows, starts, self.weights[keep], self.probability[keep])


class Store(Protocol):
    schema: Schema

    def insert(self, block: Block, priorities: Array | None) -> bool: ...
    def sample(self, n: int) -> Sample | None: ...
    def update(self, keys: Array, priorities: Array) -> None: ...
    def trim(self) -> None: ...
    def some(self, n: int) -> tuple[Tree, Tree]: ...


COUNTS = ("oldest", "next", "size", "inserted", "sampled", "stale", "evicted", "duplicates")


class Replay:
    """The store of this process. Its blocks, priorities and counts lie in memory that may outlive the process: then it goes
    on where an earlier one was killed."""

    METRICS: ClassVar = STORE

    def __init__(
        self,
        schema: Schema,
        selector: Selector,
        limiter: Limiter,
        capacity: int,  # items
        slots: int,
        slack: float = 0.0,  # inserts may exceed the capacity by this part until trim()
        seed: int = 0,
        memory: BlockMemory | None = None,  # the one that the selector was made with
        pinned: bool = False,  # samples lie where a GPU can read them by itself
    ) -> None:
        memory = memory or PrivateMemory()
        self.schema, self.selector, self.limiter = schema, selector, limiter
        self.capacity, self.slots = capacity, slots
        self.hard_capacity = int(capacity * (1 + slack))
        self.rng = np.random.default_rng(seed)
        self.memory = Slots(schema, slots, memory)
        self.rows, self.starts, self.items = self.memory.rows, self.memory.starts, self.memory.items
        self._kept = memory.zeros(len(COUNTS), np.int64)  # a copy of the counts
        self.oldest = 0  # serial of the oldest block
        self.next = 0  # serial of the next block
        self.size = 0  # items
        self.inserted = 0  # items, ever
        self.sampled = 0  # items, ever
        self.stale = 0  # priorities that came after their block was gone
        self.evicted = 0  # items
        self.duplicates = 0  # blocks that came twice
        self.latest: dict[int, tuple[int, int]] = {}  # actor -> (incarnation, sequence) of its last block
        self._buffers = Buffers(pinned)
        self._blanks = schema.window.slices and schema.window.before > 0
        self._packed = [name for name in schema.layout.spec if is_observation(name) and name not in schema.layout.large]
        if memory.found:
            self._adopt()

    def _adopt(self) -> None:
        """Goes on from what an earlier life left in the memory. Its index is rebuilt from the slots; its counts may lack
        the one insert or sample in which it was killed."""
        for name, count in zip(COUNTS, self._kept.tolist(), strict=True):
            setattr(self, name, count)
        serials = self.memory.serials
        self.items[self.memory.commit == 0] = False
        if len(serials):
            self.oldest, self.next = int(serials[0]), int(serials[-1]) + 1
        else:
            self.oldest = self.next
        self.size = int(self.items.sum())
        self.evicted = self.inserted - self.size - (self.sampled if self.selector.once else 0)
        for actor, incarnation, sequence in self.memory.ids[serials % self.slots].tolist():
            self.latest[actor] = max(self.latest.get(actor, (-1, -1)), (incarnation, sequence))
        if self.selector.once:
            self._free()  # what the earlier life gave out, and had no time to free
        self.selector.adopt(self.items.reshape(-1), self._order())
        self._keep()

    def insert(self, block: Block, priorities: Array | None) -> bool:
        """Takes a block; False: not now. Priorities are one for each window start; None reads as the largest so far."""
        actor, *number = block.id
        if self.latest.get(actor, (-1, -1)) >= tuple(number):
            self.duplicates += 1
            return True
        items = int(block.items.sum())
        if not self.limiter.can_insert(items, self.size, self.inserted, self.sampled):
            return False
        offsets = np.flatnonzero(block.items)
        if priorities is not None:
            assert priorities.shape == block.items.shape, (priorities.shape, block.items.shape)
            priorities = check_priorities(priorities[offsets])
        while self.next - self.oldest == self.slots or self._overfull(items):
            if self.selector.once:  # a queue forgets nothing unread
                return False
            self._evict()
        slot = self.next % self.slots
        self.selector.insert(slot * self.schema.starts + offsets, priorities)
        self.memory.write(self.next, block)
        self.latest[actor] = (block.id.incarnation, block.id.sequence)
        self.next += 1
        self.size += items
        self.inserted += items
        self._keep()
        return True

    def _keep(self) -> None:
        self._kept[:] = (
            self.oldest,
            self.next,
            self.size,
            self.inserted,
            self.sampled,
            self.stale,
            self.evicted,
            self.duplicates,
        )

    def sample(self, n: int) -> Sample | None:
        """n items and their windows; None: not now. The arrays are copies, never views of the store.

        Where a window trains a single step (`Window.slices`), observations before that step's episode read as zeros: a
        stack of the history is then a plain slice of the window.
        """
        return self.draw(n) if self.can_sample(n) else None

    def can_sample(self, n: int) -> bool:
        return self.size > 0 and self.limiter.can_sample(n, self.size, self.inserted, self.sampled)

    def draw(self, n: int) -> Sample:
        """As `sample`, whatever the limiter says."""
        size, draw = self.size, self.selector.draw(n, self.rng)
        states = {name: array.take(draw.leaves, axis=0) for name, array in self.starts.items()}
        schema, oldest_leaf = self.schema, self.oldest % self.slots * self.schema.starts
        first, keys = locate(
            draw.leaves, schema.starts, schema.rows, schema.window.stride, self.oldest, oldest_leaf, self.items.size
        )
        rows = self._windows(first)
        self.sampled += n
        if self.selector.once:
            self._consume(draw.leaves)
        self._keep()
        return Sample(
            keys=keys,
            rows=rows,
            starts=self.schema.start_layout.columns(states),
            weights=self.selector.weights(draw, size),
            probability=draw.probability,
        )

    def _windows(self, first: Array) -> Tree:
        """The columns [n, T, ...] of the windows that start at these rows."""
        schema = self.schema
        shape = (len(first), schema.window.rows)
        out = {name: self._buffers.empty((*shape, *array.shape[1:]), array.dtype) for name, array in self.rows.items()}
        columns = schema.layout.columns(out)
        copy_windows(self.rows[PACKED], first, out[PACKED])  # first: the others ask it where episodes begin
        blank = earlier_rows(columns["first"], columns["valid"], schema.window.before) if self._blanks else None
        for name in schema.layout.large:
            copy_windows(self.rows[name], first, out[name], blank if is_observation(name) else None)
        if blank is not None and self._packed and blank.any():
            earlier = np.arange(schema.window.rows) < blank[:, None]  # [n, T]
            for name in self._packed:
                columns[name][earlier] = 0
        return columns

    def update(self, keys: Array, priorities: Array) -> None:
        """New priorities for sampled items. Keys of blocks that are gone are ignored and counted."""
        assert keys.shape == priorities.shape, (keys.shape, priorities.shape)
        priorities = check_priorities(priorities)
        if not self.selector.prioritized:
            return
        starts = self.schema.starts
        oldest, stop = self.oldest * starts, self.next * starts
        found, kept, known = _alive(np.ascontiguousarray(keys), priorities, self.items.reshape(-1), oldest, stop)
        assert known, "update: a key that no sample returned"
        self.stale += len(keys) - len(found)
        self.selector.update(found, kept)

    def _overfull(self, more: int) -> bool:
        """Whether so many more items are too many. How full a queue gets is its limiter's to say."""
        return not self.selector.once and self.next > self.oldest and self.size + more > self.hard_capacity

    def trim(self) -> None:
        """Brings the store back to its capacity, oldest blocks first (Ape-X's learner does it every 100 updates)."""
        while self.size > self.capacity and not self.selector.once:  # a queue forgets nothing unread
            self._evict()

    def _evict(self) -> None:
        slot = self.oldest % self.slots
        offsets = np.flatnonzero(self.items[slot])
        self.memory.erase(self.oldest)
        self.selector.remove(slot * self.schema.starts + offsets)
        self.size -= len(offsets)
        self.evicted += len(offsets)
        self.oldest += 1

    def _consume(self, leaves: Array) -> None:
        """A queue forgets what it gave out, and frees each block that has nothing left."""
        self.items.reshape(-1)[leaves] = False
        self.size -= len(leaves)
        self._free()

    def _free(self) -> None:
        while self.oldest < self.next and not self.items[self.oldest % self.slots].any():
            self.memory.erase(self.oldest)
            self.oldest += 1

    def some(self, n: int) -> tuple[Tree, Tree]:
        """At most n whole blocks, evenly spread from the oldest to the newest: columns of rows [n, R, ...] and of starts
        [n, S, ...]."""
        n, schema = min(n, self.next - self.oldest), self.schema
        slots = np.linspace(self.oldest, self.next - 1, n).astype(np.int64) % self.slots
        rows = {name: x.reshape(self.slots, schema.rows, *x.shape[1:])[slots] for name, x in self.rows.items()}
        starts = {name: x.reshape(self.slots, schema.starts, *x.shape[1:])[slots] for name, x in self.starts.items()}
        return schema.layout.columns(rows), schema.start_layout.columns(starts)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are in the store now."""
        return (self.next - self.oldest) * self.schema.nbytes

    def metrics(self) -> dict[str, float]:
        return {
            "store_items": self.size,
            "store_bytes": self.nbytes,
            "store_inserted": self.inserted,
            "store_sampled": self.sampled,
            "store_evicted": self.evicted,
            "store_stale": self.stale,
        }

    def state(self) -> dict[str, Any]:
        """All but the blocks themselves; `blocks` has those."""
        return {
            "mass": self.selector.save(),
            "items": self.items.copy(),
            "counts": {name: getattr(self, name) for name in COUNTS},
            "latest": {str(actor): number for actor, number in self.latest.items()},
            "rng": self.rng.bit_generator.state,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state["items"].shape != self.items.shape:
            theirs, ours = (" x ".join(map(str, x.shape)) for x in (state["items"], self.items))
            raise UserError(
                f"The checkpoint's store has {theirs} window starts, this one {ours}: give the same store.capacity."
            )
        for name in COUNTS:
            setattr(self, name, int(state["counts"][name]))
        self.items[:] = state["items"]
        serials = np.arange(self.oldest, self.next)
        self.memory.commit[:] = 0
        self.memory.commit[serials % self.slots] = serials + 1
        self.selector.load(state["mass"], self._order())
        self.latest = {int(actor): (number[0], number[1]) for actor, number in state["latest"].items()}
        self.rng.bit_generator.state = state["rng"]
        self._keep()

    def _order(self) -> Array:
        """All leaves of blocks, oldest first."""
        slots = np.arange(self.oldest, self.next) % self.slots
        return (slots[:, None] * self.schema.starts + np.arange(self.schema.starts)).ravel()

    def blocks(self, since: int, most: int = 1 << 62) -> tuple[int, int, Tree]:
        """At most so many blocks from serial `since` on: first serial, the one after the last, and copies of their rows."""
        first = max(since, self.oldest)
        stop = min(self.next, first + most)
        return first, stop, self.memory.read(first, stop)[1]

    def load_blocks(self, first: int, blocks: Tree) -> None:
        """Puts back blocks that `blocks` returned, those of them that are still wanted."""
        self.memory.put_back(first, blocks, self.oldest, self.next)

    def drop_blocks(self, first: int, stop: int) -> int:
        """Forgets the items of blocks first ... stop - 1, whose rows could not be read back; how many there were.

        A queue frees slots from its oldest block on, so there those before them go too: it could not move on over a gap.
        """
        lost = 0
        for serial in range(self.oldest if self.selector.once else max(first, self.oldest), min(stop, self.next)):
            slot = serial % self.slots
            offsets = np.flatnonzero(self.items[slot])
            self.selector.remove(slot * self.schema.starts + offsets)
            self.items[slot] = False
            lost += len(offsets)
        self.size -= lost
        self.evicted += lost
        if self.selector.once:
            self._free()
        self._keep()
        return lost

    def check_valid(self) -> None:
        """The invariants, for tests."""
        assert 0 <= self.next - self.oldest <= self.slots
        assert self.size == self.items.sum()
        assert not self._overfull(0) or self.next - self.oldest == 1
        empty = np.ones(self.slots, np.bool_)
        empty[np.arange(self.oldest, self.next) % self.slots] = False
        assert not self.items[empty].any()
        assert self.inserted - self.evicted - (self.sampled if self.selector.once else 0) == self.size
        self.selector.check_valid(self.items.ravel())


@numba.njit("Tuple((i8[::1], f8[::1], b1))(i8[::1], f8[::1], b1[::1], i8, i8)", cache=True)
def _alive(keys: Array, priorities: Array, items: Array, oldest: int, stop: int) -> Any:
    """The leaves of the keys that are still in the store, their priorities, and whether all keys are ones it has given.

    The leaf of a key is key % leaves; keys from the oldest to the last span the leaves at most once.
    """
    leaves, kept = np.empty(len(keys), np.int64), np.empty(len(keys), np.float64)
    shift = oldest % len(items) - oldest
    count, known = 0, True
    for i in range(len(keys)):
        known &= keys[i] < stop
        if oldest <= keys[i] < stop:
            leaf = keys[i] + shift
            leaf -= len(items) if leaf >= len(items) else 0
            if items[leaf]:
                leaves[count] = leaf
                kept[count] = priorities[i]
                count += 1
    return leaves[:count], kept[:count], known
