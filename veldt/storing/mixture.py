"""Mixture: the store of a run, and one of demonstrations beside it (R2D3; Gulcehre et al. 2020)."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np

from veldt.errors import UserError
from veldt.metrics import DEMOS, STORE
from veldt.records.tree import Array
from veldt.storing.replay import Replay, Sample


class Mixture(Replay):
    """Each item of a sample is drawn from the demonstrations with probability `ratio`, and else from the run's own blocks;
    each of the two has its own priorities.

    Keys of demonstrations are negative. Importance weights are those of each store's own probabilities, divided by the
    largest of the batch. The limiter counts all that is drawn: how often the learner learns does not depend on the ratio.
    """

    METRICS: ClassVar = (*STORE, *DEMOS)

    def __init__(self, demos: Replay, ratio: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
        self.sampled += demos
        self._keep()
        if demos == 0:
            return self.draw(n)
        theirs = self.demos.draw(demos)
        theirs = theirs._replace(keys=-1 - theirs.keys)
        return theirs if demos == n else self._together(self.draw(n - demos), theirs, chosen)

    def _together(self, own: Sample, theirs: Sample, chosen: Array) -> Sample:
        """Two samples as one, where `chosen` says which items are theirs."""

        def both(a: Array, b: Array) -> Array:
            out = np.empty((len(chosen), *a.shape[1:]), a.dtype)
            out[~chosen], out[chosen] = a, b
            return out

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

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.demos.nbytes

    def metrics(self) -> dict[str, float]:
        told = super().metrics() | {"demo_items": self.demos.size}
        return told | ({"demo_part": self._drawn_demos / self._drawn} if self._drawn else {})

    def state(self) -> dict[str, Any]:
        """The demonstrations themselves are read again; their priorities are in no file but this."""
        demos = self.demos.state()
        return super().state() | {"demo_mass": demos["mass"], "demo_rng": demos["rng"], "demo_digest": self._digest}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if state["demo_digest"] != self._digest:
            raise UserError("The demonstrations are not those that the checkpoint was made with.")
        self.demos.load_state(self.demos.state() | {"mass": state["demo_mass"], "rng": state["demo_rng"]})


def _digest(store: Replay) -> str:
    """Of the steps in a store."""
    digest = hashlib.sha256()
    for name, array in sorted(store.rows.items()):
        digest.update(name.encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()
