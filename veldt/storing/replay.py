"""Replay: items are drawn again and again by a selector, and the oldest blocks are evicted when the store is full."""

from __future__ import annotations

from typing import Any, ClassVar

import numba
import numpy as np

from veldt.metrics import STORE
from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import Array, Tree
from veldt.storing.limiters import Limiter
from veldt.storing.ring import BlockRing
from veldt.storing.selectors import Selector, check_priorities, writeable
from veldt.storing.slots import BlockMemory
from veldt.storing.store import Blocks, Sample, Store


class Replay(Store):
    """Blocks, priorities and counts lie in block memory that may outlive the process: then the store continues where the
    process was killed."""

    METRICS: ClassVar = STORE

    def __init__(
        self,
        schema: Schema,
        selector: Selector,
        limiter: Limiter,
        capacity: int,  # items
        n_slots: int,
        slack: float = 0.0,  # inserts may exceed the capacity by this fraction until trim()
        seed: int = 0,
        memory: BlockMemory | None = None,  # the one that the selector was made with
        pinned: bool = False,  # samples lie in pages that a GPU can read by itself
    ) -> None:
        self.schema, self.selector, self.limiter, self.capacity = schema, selector, limiter, capacity
        self.hard_capacity = int(capacity * (1 + slack))
        self.rng = np.random.default_rng(seed)
        self.ring = ring = BlockRing(schema, n_slots, memory, pinned)
        if memory is not None and memory.found:
            ring.evicted = ring.inserted - ring.size
            selector.adopt(ring.items.reshape(-1))
            ring.keep()

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        """Takes a block; False: not now. Missing priorities read as the largest so far."""
        ring = self.ring
        if ring.is_duplicate(source):
            return True
        offsets = np.flatnonzero(block.items)
        if not self.limiter.can_insert(len(offsets), ring.size, ring.inserted, ring.sampled):
            return False
        if priorities is not None:
            assert priorities.shape == block.items.shape, (priorities.shape, block.items.shape)
            priorities = check_priorities(priorities[offsets])
        while ring.full or self._overfull(len(offsets)):
            self._evict()
        self.selector.insert(ring.next % ring.n_slots * self.schema.starts + offsets, priorities)
        ring.append(block, source, len(offsets))
        return True

    def sample(self, n: int) -> Sample | None:
        return self.draw(n) if self.can_sample(n) else None

    def can_sample(self, n: int) -> bool:
        ring = self.ring
        return ring.size > 0 and self.limiter.can_sample(n, ring.size, ring.inserted, ring.sampled)

    def draw(self, n: int) -> Sample:
        """As `sample`, without asking the limiter."""
        draw = self.selector.draw(n, self.rng)
        sample = self.ring.read(draw.leaves, self.selector.weights(draw, self.ring.size), draw.probability)
        self.count_sampled(n)
        return sample

    def count_sampled(self, n: int) -> None:
        """Counts n items as sampled."""
        self.ring.sampled += n
        self.ring.keep()

    def update(self, keys: Array, priorities: Array) -> None:
        """New priorities for sampled items. Keys of blocks that are gone are ignored and counted."""
        assert keys.shape == priorities.shape, (keys.shape, priorities.shape)
        priorities, ring, starts = check_priorities(priorities), self.ring, self.schema.starts
        oldest, stop = ring.oldest * starts, ring.next * starts
        found, kept, known = _alive(writeable(np.ascontiguousarray(keys)), priorities, ring.items.reshape(-1), oldest, stop)
        assert known, "update: a key that no sample returned"
        ring.stale += len(keys) - len(found)
        self.selector.update(found, kept)

    def _overfull(self, more: int) -> bool:
        """Whether `more` items would exceed the capacity and its slack."""
        ring = self.ring
        return ring.next > ring.oldest and ring.size + more > self.hard_capacity

    def trim(self) -> None:
        """Evicts the oldest blocks down to the capacity (Ape-X's learner does it every 100 updates)."""
        while self.ring.size > self.capacity:
            self._evict()

    def _evict(self) -> None:
        ring = self.ring
        leaves = ring.item_leaves(ring.oldest)
        ring.erase_oldest()
        self.selector.remove(leaves)
        ring.size -= len(leaves)
        ring.evicted += len(leaves)

    def spread_blocks(self, n: int) -> Blocks:
        return self.ring.spread_blocks(n)

    def metrics(self) -> dict[str, float]:
        return self.ring.metrics()

    # Checkpoints.

    @property
    def oldest(self) -> int:
        return self.ring.oldest

    @property
    def next(self) -> int:
        return self.ring.next

    def state(self) -> dict[str, Any]:
        """All but the blocks themselves; `blocks` has those."""
        return self.ring.state() | {"mass": self.selector.save(), "rng": self.rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self.ring.load_state(state)
        self.selector.load(state["mass"])
        self.rng.bit_generator.state = state["rng"]

    def blocks(self, since: int, most: int = 1 << 62) -> tuple[int, int, Tree]:
        return self.ring.blocks(since, most)

    def load_blocks(self, first: int, blocks: Tree) -> None:
        self.ring.load_blocks(first, blocks)

    def drop_blocks(self, first: int, stop: int) -> int:
        """Removes the items of blocks first ... stop - 1, whose rows could not be read back; how many there were."""
        leaves = self.ring.drop_items(first, stop)
        self.selector.remove(leaves)
        self.ring.keep()
        return len(leaves)

    def check_valid(self) -> None:
        """The invariants, for tests."""
        ring = self.ring
        ring.check_valid()
        assert not self._overfull(0) or ring.next - ring.oldest == 1
        assert ring.inserted - ring.evicted == ring.size
        self.selector.check_valid(ring.items.ravel())


@numba.njit("Tuple((i8[::1], f8[::1], b1))(i8[::1], f8[::1], b1[::1], i8, i8)", cache=True)
def _alive(keys: Array, priorities: Array, items: Array, oldest: int, stop: int) -> Any:
    """The leaves of the keys that are still in the store, their priorities, and whether the store has given out all keys.

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
