"""Replay: items are drawn again and again by a selector, and old blocks are evicted when the store is full."""

import hashlib
from typing import Any, ClassVar

import numpy as np

from veldt.compiled import njit
from veldt.errors import UserError
from veldt.metrics import DEMOS, STORE
from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import Array, namespace
from veldt.storing.limiters import Limiter
from veldt.storing.ring import BlockRing
from veldt.storing.selectors import Prioritized, check_priorities
from veldt.storing.slots import BlockMemory
from veldt.storing.store import Sample

EVICT = -0.4  # exponent of the priorities by which blocks are evicted (Horgan et al. 2018, Ape-X DPG)


class Replay(BlockRing):
    """A block that is inserted without priorities gets the largest so far.

    The oldest block is evicted, or one of the `candidates` oldest: block b with probability W_b / sum_c W_c, where W is the
    sum of p^-0.4 over the items of a block. The candidates that are older than it become the newest blocks, with new keys.
    """

    def __init__(
        self,
        schema: Schema,
        selector: Prioritized,
        limiter: Limiter,
        capacity: int,  # items
        n_slots: int,
        slack: float = 0.0,  # inserts may exceed the capacity by this fraction until trim()
        seed: int = 0,
        memory: BlockMemory | None = None,  # the one that the selector was made with
        pinned: bool = False,
        candidates: int = 1,  # blocks of which one is evicted
        device: str = "",
    ) -> None:
        self.selector, self.capacity, self.candidates = selector, capacity, candidates
        self.hard_capacity = int(capacity * (1 + slack))
        self.rng = np.random.default_rng(seed)
        super().__init__(schema, limiter, n_slots, memory, pinned, device)

    def _adopt(self) -> None:
        super()._adopt()
        self.evicted = self.inserted - self.size
        self.selector.adopt(self.items.reshape(-1))

    def _make_room(self, items: int) -> bool:
        while self.full or self._overfull(items):
            self._evict()
        return True

    def _add_items(self, leaves: Array, priorities: Array | None) -> None:
        self.selector.insert(leaves, priorities)

    def sample(self, n: int) -> Sample | None:
        return self.draw(n) if self.can_sample(n) else None

    def draw(self, n: int) -> Sample:
        """As `sample`, without asking the limiter."""
        leaves, probability = self.selector.draw(n, self.rng)
        sample = self.read(leaves, self.selector.weights(probability, self.size), probability)
        self.count_sampled(n)
        return sample

    def count_sampled(self, n: int) -> None:
        self.sampled += n
        self.keep()

    def update(self, keys: Array, priorities: Array) -> None:
        """New priorities for sampled items. Keys of blocks that are gone are ignored and counted."""
        assert keys.shape == priorities.shape, (keys.shape, priorities.shape)
        priorities, starts = check_priorities(priorities), self.schema.starts
        keys, items = np.array(keys, np.int64), self.items.reshape(-1)
        found, kept, known = _alive(keys, priorities, items, self.oldest * starts, self.next * starts)
        assert known, "update: a key that no sample returned"
        self.stale += len(keys) - len(found)
        self.selector.update(found, kept)

    def _overfull(self, more: int) -> bool:
        return self.next > self.oldest and self.size + more > self.hard_capacity

    def trim(self) -> None:
        """Evicts blocks down to the capacity (Ape-X's learner does it every 100 updates)."""
        while self.size > self.capacity:
            self._evict()

    def _evict(self) -> None:
        if self.candidates > 1:
            for _ in range(self._choose()):
                self._make_newest()
        leaves = self.item_leaves(self.oldest, self.oldest + 1)
        self.erase_oldest()
        self.selector.remove(leaves)
        self.size -= len(leaves)
        self.evicted += len(leaves)

    def _choose(self) -> int:
        """Which of the oldest blocks is evicted: the first without items, or one by the priorities of its items."""
        weights = []
        for serial in range(self.oldest, min(self.oldest + self.candidates, self.next)):
            leaves = self.item_leaves(serial, serial + 1)
            if not len(leaves):
                return serial - self.oldest
            weights.append(float((self.selector.priorities(leaves) ** EVICT).sum()))
        upto = np.cumsum(weights)
        return int(np.searchsorted(upto[:-1], self.rng.random() * upto[-1], side="right"))

    def _make_newest(self) -> None:
        """Gives the oldest block the next serial. In a full ring that is a new name for the same slot. Otherwise the block
        is copied first: if this process is killed in between, the block is there twice."""
        old, new = self.oldest % self.n_slots, self.next % self.n_slots
        if old == new:
            self.commit[old] = self.next + 1
        else:
            offsets = np.flatnonzero(self.items[old])
            self.selector.move(old * self.schema.starts + offsets, new * self.schema.starts + offsets)
            self.write(self.next, self._block(old), Source(*self.sources[old].tolist()))
            self.erase(self.oldest)
        self.oldest, self.next = self.oldest + 1, self.next + 1
        self.keep()

    def _block(self, slot: int) -> Block:
        """A view of the block in a slot."""
        at, s = slot * self.schema.rows, slot * self.schema.starts
        rows = {name: x[at : at + self.schema.rows] for name, x in self.rows.items()}
        starts = {name: x[s : s + self.schema.starts] for name, x in self.starts.items()}
        return Block(self.schema, rows, starts, self.items[slot])

    def state(self) -> dict[str, Any]:
        return super().state() | {"mass": self.selector.save(), "rng": self.rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.selector.load(state["mass"])
        self.rng.bit_generator.state = state["rng"]

    def drop_blocks(self, first: int, stop: int) -> int:
        """Removes the items of blocks first ... stop - 1, whose rows could not be read back; how many there were."""
        leaves = self.drop_items(first, stop)
        self.selector.remove(leaves)
        self.keep()
        return len(leaves)


class Mixture(Replay):
    """R2D3 (Gulcehre et al. 2020): each item of a sample is drawn from the demonstrations with probability `ratio`, and
    else from the run's own blocks; each of the two has its own priorities. Blocks are inserted into the run's own, and only
    those are in checkpoints.

    Keys of demonstrations are negative. Importance weights are those of each store's own probabilities, divided by the
    largest of the batch. The limiter counts both kinds of items: how often the learner learns does not depend on the ratio.
    """

    METRICS: ClassVar = (*STORE, *DEMOS)

    def __init__(self, demos: Replay, ratio: float, *own: Any, **options: Any) -> None:
        """`own` and `options` are the arguments of `Replay`, for the run's own blocks."""
        super().__init__(*own, **options)
        self.demos, self.ratio = demos, ratio
        self._drawn = self._drawn_demos = 0  # items, by this process
        self._digest = _digest(demos)

    def sample(self, n: int) -> Sample | None:
        if not self.can_sample(n):
            return None
        chosen = self.rng.random(n) < self.ratio  # which are demonstrations
        demos = int(chosen.sum())
        self._drawn += n
        self._drawn_demos += demos
        self.count_sampled(demos)
        if demos == 0:
            return self.draw(n)
        theirs = self.demos.draw(demos)
        theirs = theirs._replace(keys=-1 - theirs.keys)
        return theirs if demos == n else self._together(self.draw(n - demos), theirs, chosen)

    def _together(self, own: Sample, theirs: Sample, chosen: Array) -> Sample:
        """Two samples as one, where `chosen` says which items are theirs."""

        def both(a: Any, b: Any) -> Any:
            if namespace(a) is np:
                out = np.empty((len(chosen), *a.shape[1:]), a.dtype)
                out[~chosen], out[chosen] = a, b
                return out
            from_numpy = namespace(a).from_numpy
            where = [from_numpy(np.flatnonzero(x)).to(a.device) for x in (~chosen, chosen)]
            out = a.new_empty((len(chosen), *a.shape[1:]))
            return out.index_copy_(0, where[0], a).index_copy_(0, where[1], b)

        weights = both(
            self.selector.raw_weights(own.probability, self.size),
            self.demos.selector.raw_weights(theirs.probability, self.demos.size),
        )
        return Sample(
            both(own.keys, theirs.keys),
            {name: both(x, theirs.rows[name]) for name, x in own.rows.items()},
            {name: both(x, theirs.starts[name]) for name, x in own.starts.items()},
            (weights / weights.max()).astype(np.float32),
            both(own.probability, theirs.probability),
        )

    def update(self, keys: Array, priorities: Array) -> None:
        mine = keys >= 0
        super().update(keys[mine], priorities[mine])
        self.demos.update(-1 - keys[~mine], priorities[~mine])

    def metrics(self) -> dict[str, float]:
        counts = {"store_bytes": self.nbytes + self.demos.nbytes, "demo_items": self.demos.size}
        drawn = {"demo_part": self._drawn_demos / self._drawn} if self._drawn else {}
        return super().metrics() | counts | drawn

    def state(self) -> dict[str, Any]:
        """The demonstrations themselves are read again when a run is resumed, so only their priorities are saved."""
        demos = self.demos.state()
        return super().state() | {"demo_mass": demos["mass"], "demo_rng": demos["rng"], "demo_digest": self._digest}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if state["demo_digest"] != self._digest:
            raise UserError("The demonstrations differ from those of the checkpoint.")
        self.demos.load_state(self.demos.state() | {"mass": state["demo_mass"], "rng": state["demo_rng"]})


def _digest(store: Replay) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(store.rows.items()):
        digest.update(name.encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


@njit("Tuple((i8[::1], f8[::1], b1))(i8[::1], f8[::1], b1[::1], i8, i8)")
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
