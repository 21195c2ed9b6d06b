"""Stores of QT-Opt: labelled transitions, which get too old, and a replay that begins with logged data."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from veldt.counters import Counters
from veldt.metrics import LABELLED
from veldt.ports import Source
from veldt.records.block import Block
from veldt.records.tree import Array
from veldt.storing.replay import Mixture, Replay
from veldt.storing.store import Sample

AT = "labelled_at"  # the column with the number of updates that the target networks of a label had seen


class Labelled(Replay):
    """Labelled transitions, drawn uniformly. A label is never given out more than `max_age` updates after its target
    networks were published: then its block is dropped. All rows of a block were labelled with the same networks."""

    METRICS: ClassVar = LABELLED
    STREAM_NAMES: ClassVar = {"messages": "label_blocks", "bytes": "label_bytes"}

    def __init__(self, max_age: int, counters: Counters, *own: Any, **options: Any) -> None:
        """`max_age` 0: labels do not get too old. `own` and `options` are the arguments of `Replay`."""
        self.max_age, self.counters = max_age, counters
        self.dropped = 0  # labels that were too old, by this process
        self._ages: list[tuple[float, float]] = []  # mean and largest age of the samples since the last `metrics`
        super().__init__(*own, **options)

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        at = int(block.columns()[AT][0])
        if self.max_age and self._now() - at > self.max_age:
            self.dropped += int(block.items.sum())
            return True
        return super().insert(block, priorities, source)

    def sample(self, n: int) -> Sample | None:
        if self.max_age:
            self._drop_old()
        sample = super().sample(n)
        if sample is not None:
            at: Any = sample.rows[AT]
            ages = np.maximum(self._now() - (at if isinstance(at, np.ndarray) else at.cpu().numpy()), 0)
            self._ages.append((float(ages.mean()), float(ages.max())))
        return sample

    def _now(self) -> int:
        return self.counters.get("learner_steps")

    def _drop_old(self) -> None:
        serials = np.arange(self.oldest, self.next)
        at = self.schema.layout.columns(self.rows)[AT].reshape(self.n_slots, self.schema.rows)[:, 0]
        for serial in serials[at[serials % self.n_slots] < self._now() - self.max_age].tolist():
            self.dropped += self.drop_blocks(serial, serial + 1)
        while self.oldest < self.next and not self.items[self.oldest % self.n_slots].any():
            self.erase_oldest()
        self.keep()

    def metrics(self) -> dict[str, float]:
        out = {"labelled_items": float(self.size), "labelled_sampled": float(self.sampled)}
        out["labels_dropped"] = float(self.dropped)
        if self._ages:
            means, largest = zip(*self._ages, strict=True)
            out |= {"label_age": sum(means) / len(means), "label_age_max": max(largest)}
        self._ages = []
        return out


class Logged(Mixture):
    """Logged data (demonstrations) beside the run's own steps, whose fraction is ramped up. Before there are `least` items
    of the run's own, all are logged: learning starts offline."""

    def __init__(self, demos: Replay, fraction: Callable[[], float], least: int, *own: Any, **options: Any) -> None:
        """`fraction()` is the probability, now, that an item is of the run's own steps."""
        self.fraction, self.least = fraction, max(1, least)
        super().__init__(demos, 1.0, *own, **options)

    def can_sample(self, n: int) -> bool:
        return self.limiter.can_sample(n, max(1, self.size), self.inserted, self.sampled)

    def sample(self, n: int) -> Sample | None:
        self.ratio = 1.0 - (self.fraction() if self.size >= self.least else 0.0)
        return super().sample(n)
