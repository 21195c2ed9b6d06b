"""Feed: batches from a store, on the learner's device."""

import contextlib
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veldt.algorithms.base import Batch
from veldt.storing.store import Sample, Store


@dataclass(eq=False)
class Feed:
    """Samples windows from the store and moves them to the learner's device; for a GPU, one batch ahead."""

    store: Store
    size: int  # of a batch
    prefetch: int  # batches of one draw
    device: torch.device
    early: bool = False  # `prepare` draws the next batch
    tensors: bool = False  # batches have tensors on the device, and nothing else: a graph reads them
    columns: Collection[str] | None = None  # those that are moved there then; None: all
    numpy: bool = False  # batches have NumPy arrays beside their tensors, wherever they were sampled

    def __post_init__(self) -> None:
        self.timings = {"sample": 0.0}  # seconds
        self._samples: deque[Sample] = deque()
        self._prepared: tuple[Sample, Batch] | None = None
        self._sources: deque[Sample] = deque(maxlen=2)  # pinned memory that may still be copied
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def next(self) -> tuple[Sample, Batch] | None:
        """A sample and its batch, which work on the current stream may use; None: the store has none now."""
        found, self._prepared = self._prepared or self._draw(), None
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return found

    def prepare(self) -> None:
        """With `early`: draws the next batch and starts to move it, while the device works."""
        if self.early and self._prepared is None:
            self._prepared = self._draw()

    def clear(self) -> None:
        """Drops all batches that were drawn and not used."""
        self._samples.clear()
        self._prepared = None

    def batch(self, sample: Sample) -> Batch:
        rows, starts = (_as_numpy(tree) if self.numpy else tree for tree in (sample.rows, sample.starts))
        return Batch(rows, starts, sample.weights, self.device)

    def _draw(self) -> tuple[Sample, Batch] | None:
        began = time.perf_counter()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            sample = self._sample()
            self.timings["sample"] += time.perf_counter() - began
            if sample is None:
                return None
            batch = self.batch(sample)
            if self._stream is not None and not self.tensors:
                batch.move()
            return sample, batch

    def _sample(self) -> Sample | None:
        if not self._samples:
            sample = self.store.sample(self.size * self.prefetch)
            if sample is None:
                return None
            if self.tensors:
                sample = self._move(sample)
            # A batch takes every prefetch-th item, so that each is spread over the whole of the stratified draw.
            self._samples.extend(sample.part(i, self.prefetch) for i in range(self.prefetch))
        return self._samples.popleft()

    def _move(self, sample: Sample) -> Sample:
        """A whole draw in one go: parts of it would not lie in one piece."""
        self._sources.append(sample)
        moved = self.batch(sample).move(self.columns)
        starts: Any = moved.starts
        return sample._replace(rows=dict(moved.host), starts=starts)


def _as_numpy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.cpu().numpy() if isinstance(x, Tensor) else x for name, x in tree.items()}
