"""UnrollQueue: each item is given out once, oldest first, and none is evicted (IMPALA's queue of unrolls)."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import numpy as np

from veldt.metrics import STORE
from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import Array, Tree
from veldt.storing.limiters import Limiter
from veldt.storing.ring import BlockRing
from veldt.storing.selectors import check_priorities
from veldt.storing.slots import BlockMemory
from veldt.storing.store import Blocks, Sample, Store


class UnrollQueue(Store):
    """How many items may wait is up to the limiter. A block is freed once all of its items were given out.

    Blocks and counts lie in block memory that may outlive the process: then the queue continues where the process was
    killed, and no item is given out twice.
    """

    METRICS: ClassVar = STORE

    def __init__(
        self,
        schema: Schema,
        limiter: Limiter,
        n_slots: int,
        memory: BlockMemory | None = None,
        pinned: bool = False,  # samples lie in pages that a GPU can read by itself
    ) -> None:
        self.schema, self.limiter = schema, limiter
        self.ring = ring = BlockRing(schema, n_slots, memory, pinned)
        if memory is not None and memory.found:
            ring.evicted = ring.inserted - ring.size - ring.sampled
            self._free()  # what the earlier process gave out and did not free
            ring.keep()
        self._unread = deque(ring.all_item_leaves().tolist())

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        """Takes a block; False: not now. Priorities are checked and have no effect."""
        ring = self.ring
        if ring.is_duplicate(source):
            return True
        offsets = np.flatnonzero(block.items)
        if not self.limiter.can_insert(len(offsets), ring.size, ring.inserted, ring.sampled):
            return False
        if priorities is not None:
            assert priorities.shape == block.items.shape, (priorities.shape, block.items.shape)
            check_priorities(priorities[offsets])
        if ring.full:
            return False
        self._unread.extend((ring.next % ring.n_slots * self.schema.starts + offsets).tolist())
        ring.append(block, source, len(offsets))
        return True

    def sample(self, n: int) -> Sample | None:
        ring, unread = self.ring, self._unread
        if not (ring.size > 0 and self.limiter.can_sample(n, ring.size, ring.inserted, ring.sampled)):
            return None
        assert n <= len(unread), (n, len(unread))
        probability = np.full(n, 1.0 / len(unread))
        leaves = np.array([unread.popleft() for _ in range(n)], np.int64)
        sample = ring.read(leaves, np.ones(n, np.float32), probability)
        ring.sampled += n
        ring.items.reshape(-1)[leaves] = False
        ring.size -= n
        self._free()
        ring.keep()
        return sample

    def _free(self) -> None:
        """Frees the oldest blocks that have no items left."""
        ring = self.ring
        while ring.oldest < ring.next and not ring.items[ring.oldest % ring.n_slots].any():
            ring.erase_oldest()

    def update(self, keys: Array, priorities: Array) -> None:
        """Has no effect: what was sampled is gone."""
        assert keys.shape == priorities.shape, (keys.shape, priorities.shape)
        check_priorities(priorities)

    def trim(self) -> None:
        """Has no effect: a queue evicts nothing."""

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
        return self.ring.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.ring.load_state(state)
        self._unread = deque(self.ring.all_item_leaves().tolist())

    def blocks(self, since: int, most: int = 1 << 62) -> tuple[int, int, Tree]:
        return self.ring.blocks(since, most)

    def load_blocks(self, first: int, blocks: Tree) -> None:
        self.ring.load_blocks(first, blocks)

    def drop_blocks(self, first: int, stop: int) -> int:
        """Removes the items of blocks first ... stop - 1, whose rows could not be read back, and those of all blocks before
        them, because slots are freed from the oldest on; how many items there were."""
        leaves = self.ring.drop_items(self.ring.oldest, stop)
        self._unread = deque(self.ring.all_item_leaves().tolist())
        self._free()
        self.ring.keep()
        return len(leaves)

    def check_valid(self) -> None:
        """The invariants, for tests."""
        ring = self.ring
        ring.check_valid()
        assert ring.inserted - ring.evicted - ring.sampled == ring.size
        assert list(self._unread) == ring.all_item_leaves().tolist()
