"""BlockRing: the blocks of a store, oldest first, and its counts. All stores are such rings; the simplest is UnrollQueue.

Block number `serial` is in slot serial % n_slots. Its s-th window start is leaf slot * S + s, a place that later blocks use
again, and has the key serial * S + s, which is never used again: so a key whose block is gone is recognised.
"""

import logging
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

from veldt.errors import UserError
from veldt.metrics import STORE
from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import Array
from veldt.storing.limiters import Limiter
from veldt.storing.selectors import check_priorities
from veldt.storing.slots import NO_SOURCE, BlockMemory, PrivateMemory, Slots
from veldt.storing.store import Blocks, Sample, Store
from veldt.storing.windows import Windows, locate

log = logging.getLogger("veldt")
COUNTS = ("oldest", "next", "size", "inserted", "sampled", "stale", "evicted", "duplicates")
counts_of = attrgetter(*COUNTS)


class BlockRing(Slots, Store):
    """Blocks and counts lie in block memory that may outlive the process: then the ring continues where the process was
    killed. A subclass decides which items are given out, and calls `keep` after each change of the counts."""

    METRICS: ClassVar = STORE

    def __init__(
        self,
        schema: Schema,
        limiter: Limiter,
        n_slots: int,
        memory: BlockMemory | None = None,
        pinned: bool = False,
        device: str = "",  # of torch; samples are tensors there, gathered from a copy of the blocks
    ) -> None:
        memory = memory or PrivateMemory()
        super().__init__(schema, n_slots, memory)
        self.limiter, self.device = limiter, device
        self.size = 0  # items
        self.inserted = 0  # items, ever
        self.sampled = 0  # items, ever
        self.stale = 0  # priorities that came after their block was gone
        self.evicted = 0  # items
        self.duplicates = 0  # blocks that came twice
        self.latest: dict[int, int] = {}  # channel -> number of the newest message taken from it
        self._kept = memory.zeros(len(COUNTS), np.int64)  # a copy of the counts
        # pinned: samples lie in pages that a GPU can read by itself
        self._windows: Any = _on_device(self, device) if device else Windows(schema, self.rows, self.starts, pinned)
        if memory.found:
            self._adopt()
            self.keep()

    def _adopt(self) -> None:
        """Continues with what an earlier process left. All but the counts is rebuilt from the slots; the counts may lack
        the one insert or sample in which that process was killed."""
        for name, count in zip(COUNTS, self._kept.tolist(), strict=True):
            setattr(self, name, count)
        serials = self.serials
        self.items[self.commit == 0] = False
        if len(serials):
            self.oldest, self.next = int(serials[0]), int(serials[-1]) + 1
        else:
            self.oldest = self.next
        self.size = int(self.items.sum())
        self._windows.outdated = True
        for channel, number in self.sources[serials % self.n_slots].tolist():
            if channel != NO_SOURCE.channel:
                self.latest[channel] = max(number, self.latest.get(channel, -1))

    def keep(self) -> None:
        """Copies the counts to block memory."""
        self._kept[:] = counts_of(self)

    @property
    def full(self) -> bool:
        return self.next - self.oldest == self.n_slots

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are here now."""
        return (self.next - self.oldest) * self.schema.nbytes

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        if source is not None and self.latest.get(source.channel, -1) >= source.number:  # in a channel they only grow
            self.duplicates += 1
            return True
        offsets = np.flatnonzero(block.items)
        if not self.limiter.can_insert(len(offsets), self.size, self.inserted, self.sampled):
            return False
        if priorities is not None:
            assert priorities.shape == block.items.shape, (priorities.shape, block.items.shape)
            priorities = check_priorities(priorities[offsets])
        if not self._make_room(len(offsets)):
            return False
        self._add_items(self.next % self.n_slots * self.schema.starts + offsets, priorities)
        self.write(self.next, block, source)
        if source is not None:
            self.latest[source.channel] = source.number
        self.next += 1
        self.size += len(offsets)
        self.inserted += len(offsets)
        self.keep()
        return True

    def write(self, serial: int, block: Block, source: Source | None) -> None:
        super().write(serial, block, source)
        self._windows.wrote(serial % self.n_slots)

    def _bring_up_to_date(self) -> None:
        """Blocks were written that `write` has not seen: by an earlier process, or from a checkpoint."""
        self._windows.outdated = False
        for serial in range(self.oldest, self.next):
            self._windows.wrote(serial % self.n_slots)
        if self.device and self.next > self.oldest:
            log.info("store: %d blocks copied from RAM to %s", self.next - self.oldest, self.device)

    def _make_room(self, items: int) -> bool:
        """Whether the next slot is free for a block with this many items. A store that evicts makes it free."""
        return not self.full

    def _add_items(self, leaves: Array, priorities: Array | None) -> None:
        """Of the block that is about to be written, for a store that draws by more than the flags in `items`."""

    def can_sample(self, n: int) -> bool:
        return self.size > 0 and self.limiter.can_sample(n, self.size, self.inserted, self.sampled)

    def erase_oldest(self) -> None:
        self.erase(self.oldest)
        self.oldest += 1

    def item_leaves(self, first: int, stop: int) -> Array:
        """The leaves of the items of blocks first ... stop - 1, oldest first."""
        slots = np.arange(first, stop) % self.n_slots
        leaves: Array = (slots[:, None] * self.schema.starts + np.arange(self.schema.starts)).ravel()
        return leaves.compress(self.items.reshape(-1)[leaves])

    def read(self, leaves: Array, weights: Array, probability: Array) -> Sample:
        """Copies of the windows at these leaves.

        Where a window trains a single step (`Window.slices`), observations before that step's episode read as zeros: a
        stack of the history is then a plain slice of the window.
        """
        if self._windows.outdated:
            self._bring_up_to_date()
        schema, oldest_leaf = self.schema, self.oldest % self.n_slots * self.schema.starts
        first, keys = locate(
            leaves, schema.starts, schema.rows, schema.window.stride, self.oldest, oldest_leaf, self.items.size
        )
        return Sample(keys, self._windows.read(first), self._windows.read_starts(leaves), weights, probability)

    def spread_blocks(self, n: int) -> Blocks:
        n, schema = min(n, self.next - self.oldest), self.schema
        slots = np.linspace(self.oldest, self.next - 1, n).astype(np.int64) % self.n_slots
        rows = {name: x.reshape(self.n_slots, schema.rows, *x.shape[1:])[slots] for name, x in self.rows.items()}
        starts = {name: x.reshape(self.n_slots, schema.starts, *x.shape[1:])[slots] for name, x in self.starts.items()}
        return Blocks(schema.layout.columns(rows), schema.start_layout.columns(starts))

    def metrics(self) -> dict[str, float]:
        counts = {f"store_{name}": getattr(self, name) for name in COUNTS if name not in ("oldest", "next", "size")}
        return {"store_items": self.size, "store_bytes": self.nbytes} | counts

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """All but the blocks themselves; `blocks` has those."""
        return {"items": self.items.copy(), "counts": dict(zip(COUNTS, counts_of(self), strict=True))}

    def load_state(self, state: dict[str, Any]) -> None:
        """A resumed run starts with new channels: the messages of the earlier ones are not remembered."""
        if state["items"].shape != self.items.shape:
            theirs, ours = (" x ".join(map(str, x.shape)) for x in (state["items"], self.items))
            raise UserError(
                f"The checkpoint's store has {theirs} window starts, this one {ours}: give the same store.capacity."
            )
        for name in COUNTS:
            setattr(self, name, int(state["counts"][name]))
        self.items[:] = state["items"]
        self.latest = {}
        serials = np.arange(self.oldest, self.next)
        self.commit[:] = 0
        self.sources[:] = NO_SOURCE
        self.commit[serials % self.n_slots] = serials + 1
        self._windows.outdated = True  # the blocks come next, perhaps from another process
        self.keep()

    def drop_items(self, first: int, stop: int) -> Array:
        """Removes the items of blocks first ... stop - 1, which keep their slots; the leaves that they had."""
        first, stop = max(first, self.oldest), min(stop, self.next)
        leaves = self.item_leaves(first, stop)
        self._reserve(serial % self.n_slots for serial in range(first, stop))  # they were not written, and may be read
        self.items.reshape(-1)[leaves] = False
        self.size -= len(leaves)
        self.evicted += len(leaves)
        return leaves


def _on_device(ring: Slots, device: str) -> Any:
    import torch

    from veldt.storing.device import DeviceWindows

    return DeviceWindows(ring.schema, ring.rows, ring.starts, torch.device(device))


class UnrollQueue(BlockRing):
    """Each item is given out once, oldest first, and none is evicted (IMPALA's queue of unrolls).

    How many items may wait is up to the limiter. A block is freed once all of its items were given out.
    Priorities are checked and have no effect. A queue that continues where its process was killed gives out no item twice.
    """

    def _adopt(self) -> None:
        super()._adopt()
        self.evicted = self.inserted - self.size - self.sampled
        self._free()  # what the earlier process gave out and did not free

    def sample(self, n: int) -> Sample | None:
        if not self.can_sample(n):
            return None
        assert n <= self.size, (n, self.size)
        leaves = self.item_leaves(self.oldest, self.next)[:n]
        sample = self.read(leaves, np.ones(n, np.float32), np.full(n, 1.0 / self.size))
        self.sampled += n
        self.items.reshape(-1)[leaves] = False
        self.size -= n
        self._free()
        self.keep()
        return sample

    def _free(self) -> None:
        while self.oldest < self.next and not self.items[self.oldest % self.n_slots].any():
            self.erase_oldest()

    def update(self, keys: Array, priorities: Array) -> None:
        """Has no effect: what was sampled is gone."""
        assert keys.shape == priorities.shape, (keys.shape, priorities.shape)
        check_priorities(priorities)

    def trim(self) -> None:
        """Has no effect: a queue evicts nothing."""

    def drop_blocks(self, first: int, stop: int) -> int:
        """Removes the items of blocks first ... stop - 1, whose rows could not be read back, and those of all blocks before
        them, because slots are freed from the oldest on; how many items there were."""
        leaves = self.drop_items(self.oldest, stop)
        self._free()
        self.keep()
        return len(leaves)
