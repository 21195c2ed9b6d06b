"""Feed: samples windows from the store and moves them to the learner's device; for a GPU, one batch ahead."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from veldt.algorithms.base import Algorithm, Batch
from veldt.storing.store import Sample, Store


class Feed:
    """feed.next()          # a sample and its batch on the device; None: the store has none now
    feed.prepare(target)    # with `ahead`: begins the next batch in another thread, on another CUDA stream
    feed.wait()             # until that is done
    """

    def __init__(
        self,
        store: Store,
        algorithm: Algorithm,
        size: int,  # of a batch
        prefetch: int,  # batches of one draw
        device: torch.device,
        ahead: bool,  # begin the next batch while the learner works on this one
    ) -> None:
        self.store, self.size, self.prefetch, self.device = store, size, prefetch, device
        self.timings = {"sample": 0.0}  # seconds that the learner waited
        self._ahead = algorithm.ahead
        self._samples: deque[Sample] = deque()
        self._prepared: tuple[Sample, Batch] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "draw") if ahead else None
        self._preparing: Future[None] | None = None

    def next(self) -> tuple[Sample, Batch] | None:
        found, self._prepared = self._prepared, None
        if found is None:
            began = time.perf_counter()
            drawn = self._draw()
            self.timings["sample"] += time.perf_counter() - began
            if not drawn:
                return None
            sample = self._samples.popleft()
            found = sample, self._batch(sample)
        if self._stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._stream)  # for this batch
            self._stream.wait_stream(here)  # for the target network, if it was just copied
        return found

    def prepare(self, target: nn.Module | None) -> None:
        """Draws the next batch while the learner works on this one, and computes what needs only the target network.

        None: the target network is about to change, so nothing may be computed with it yet.
        """
        if self._thread is not None:
            self._preparing = self._thread.submit(self._prepare, target)

    def wait(self) -> None:
        """The learner calls this before it calls the store: one caller, and the same order of calls every time."""
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            began = time.perf_counter()
            preparing.result()
            self.timings["sample"] += time.perf_counter() - began

    def clear(self) -> None:
        """Drops all batches that were drawn and not used."""
        self._samples.clear()
        self._prepared = None

    def _draw(self) -> bool:
        if self._samples:
            return True
        sample = self.store.sample(self.size * self.prefetch)
        if sample is None:
            return False
        # A batch takes every prefetch-th item, so that each is spread over the whole of the stratified draw.
        self._samples.extend(sample.part(i, self.prefetch) for i in range(self.prefetch))
        return True

    def _prepare(self, target: nn.Module | None) -> None:
        if not self._draw():
            return
        sample = self._samples.popleft()
        with torch.cuda.stream(self._stream):
            batch = self._batch(sample).move()
            if target is not None:
                batch.ahead = self._ahead(target, batch)
        self._prepared = sample, batch

    def _batch(self, sample: Sample) -> Batch:
        return Batch(sample.rows, sample.starts, sample.weights, self.device)
