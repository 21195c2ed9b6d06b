"""UnrollQueue: each item is given out once, oldest first, and none is evicted (IMPALA's queue of unrolls)."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from veldt.records.block import Schema
from veldt.records.tree import Array
from veldt.storing.limiters import Limiter
from veldt.storing.ring import BlockRing
from veldt.storing.selectors import check_priorities
from veldt.storing.slots import BlockMemory
from veldt.storing.store import Sample


class UnrollQueue(BlockRing):
    """How many items may wait is up to the limiter. A block is freed once all of its items were given out.

    Priorities are checked and have no effect. A queue that continues where its process was killed gives out no item twice.
    """

    def __init__(
        self, schema: Schema, limiter: Limiter, n_slots: int, memory: BlockMemory | None = None, pinned: bool = False
    ) -> None:
        super().__init__(schema, limiter, n_slots, memory, pinned)
        if self.adopted:
            self.evicted = self.inserted - self.size - self.sampled
            self._free()  # what the earlier process gave out and did not free
            self.keep()
        self._find_unread()

    def _find_unread(self) -> None:
        self._unread = deque(self.item_leaves(self.oldest, self.next).tolist())

    def _make_room(self, items: int) -> bool:
        return not self.full

    def _add_items(self, leaves: Array, priorities: Array | None) -> None:
        self._unread.extend(leaves.tolist())

    def sample(self, n: int) -> Sample | None:
        if not self.can_sample(n):
            return None
        unread = self._unread
        assert n <= len(unread), (n, len(unread))
        probability = np.full(n, 1.0 / len(unread))
        leaves = np.array([unread.popleft() for _ in range(n)], np.int64)
        sample = self.read(leaves, np.ones(n, np.float32), probability)
        self.sampled += n
        self.items.reshape(-1)[leaves] = False
        self.size -= n
        self._free()
        self.keep()
        return sample

    def _free(self) -> None:
        """Frees the oldest blocks that have no items left."""
        while self.oldest < self.next and not self.items[self.oldest % self.n_slots].any():
            self.erase_oldest()

    def update(self, keys: Array, priorities: Array) -> None:
        """Has no effect: what was sampled is gone."""
        assert keys.shape == priorities.shape, (keys.shape, priorities.shape)
        check_priorities(priorities)

    def trim(self) -> None:
        """Has no effect: a queue evicts nothing."""

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._find_unread()

    def drop_blocks(self, first: int, stop: int) -> int:
        """Removes the items of blocks first ... stop - 1, whose rows could not be read back, and those of all blocks before
        them, because slots are freed from the oldest on; how many items there were."""
        leaves = self.drop_items(self.oldest, stop)
        self._find_unread()
        self._free()
        self.keep()
        return len(leaves)

    def check_valid(self) -> None:
        super().check_valid()
        assert self.inserted - self.evicted - self.sampled == self.size
        assert list(self._unread) == self.item_leaves(self.oldest, self.next).tolist()
