"""Mixture: the replay of a run, and one of demonstrations beside it (R2D3; Gulcehre et al. 2020)."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np

from veldt.errors import UserError
from veldt.metrics import DEMOS, STORE
from veldt.ports import Source
from veldt.records.block import Block
from veldt.records.tree import Array, Tree
from veldt.storing.replay import Replay
from veldt.storing.store import Blocks, Sample, Store


class Mixture(Store):
    """Each item of a sample is drawn from the demonstrations with probability `ratio`, and else from the run's own blocks;
    each of the two has its own priorities. Blocks are inserted into the run's own.

    Keys of demonstrations are negative. Importance weights are those of each store's own probabilities, divided by the
    largest of the batch. The limiter counts both kinds of items: how often the learner learns does not depend on the ratio.
    """

    METRICS: ClassVar = (*STORE, *DEMOS)

    def __init__(self, own: Replay, demos: Replay, ratio: float) -> None:
        self.own, self.demos, self.ratio = own, demos, ratio
        self.schema = own.schema
        self._drawn = self._drawn_demos = 0  # items, by this process
        self._digest = _digest(demos)

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        return self.own.insert(block, priorities, source)

    def sample(self, n: int) -> Sample | None:
        own = self.own
        if not own.can_sample(n):
            return None
        chosen = own.rng.random(n) < self.ratio  # which are demonstrations
        demos = int(chosen.sum())
        self._drawn += n
        self._drawn_demos += demos
        own.count_sampled(demos)
        if demos == 0:
            return own.draw(n)
        theirs = self.demos.draw(demos)
        theirs = theirs._replace(keys=-1 - theirs.keys)
        return theirs if demos == n else self._together(own.draw(n - demos), theirs, chosen)

    def _together(self, own: Sample, theirs: Sample, chosen: Array) -> Sample:
        """Two samples as one, where `chosen` says which items are theirs."""

        def both(a: Array, b: Array) -> Array:
            out = np.empty((len(chosen), *a.shape[1:]), a.dtype)
            out[~chosen], out[chosen] = a, b
            return out

        weights = both(
            self.own.selector.raw_weights(own.probability, self.own.ring.size),
            self.demos.selector.raw_weights(theirs.probability, self.demos.ring.size),
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
        self.own.update(keys[mine], priorities[mine])
        self.demos.update(-1 - keys[~mine], priorities[~mine])

    def trim(self) -> None:
        self.own.trim()

    def spread_blocks(self, n: int) -> Blocks:
        """Of the run's own."""
        return self.own.spread_blocks(n)

    def metrics(self) -> dict[str, float]:
        counts = {"store_bytes": self.own.ring.nbytes + self.demos.ring.nbytes, "demo_items": self.demos.ring.size}
        drawn = {"demo_part": self._drawn_demos / self._drawn} if self._drawn else {}
        return self.own.metrics() | counts | drawn

    # Checkpoints: the run's own blocks, and the priorities of both.

    @property
    def oldest(self) -> int:
        return self.own.oldest

    @property
    def next(self) -> int:
        return self.own.next

    def state(self) -> dict[str, Any]:
        """The demonstrations themselves are read again when a run is resumed, so only their priorities are saved."""
        demos = self.demos.state()
        return self.own.state() | {"demo_mass": demos["mass"], "demo_rng": demos["rng"], "demo_digest": self._digest}

    def load_state(self, state: dict[str, Any]) -> None:
        self.own.load_state(state)
        if state["demo_digest"] != self._digest:
            raise UserError("The demonstrations are not those that the checkpoint was made with.")
        self.demos.load_state(self.demos.state() | {"mass": state["demo_mass"], "rng": state["demo_rng"]})

    def blocks(self, since: int, most: int = 1 << 62) -> tuple[int, int, Tree]:
        return self.own.blocks(since, most)

    def load_blocks(self, first: int, blocks: Tree) -> None:
        self.own.load_blocks(first, blocks)

    def drop_blocks(self, first: int, stop: int) -> int:
        return self.own.drop_blocks(first, stop)

    def check_valid(self) -> None:
        """The invariants, for tests."""
        self.own.check_valid()
        self.demos.check_valid()


def _digest(store: Replay) -> str:
    """Of the steps in a store."""
    digest = hashlib.sha256()
    for name, array in sorted(store.ring.rows.items()):
        digest.update(name.encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()
