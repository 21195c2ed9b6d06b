"""The whole update on the device, as one CUDA graph: loss, gradient, clipping, finite check, optimizer, priorities.

The host launches it and goes on. What it has to know (was the update finite, metrics, priorities) comes back through pinned
memory while the next update runs. So nothing in an update may depend on a value that the host reads: one whose loss or
gradient is not finite runs to its end and changes nothing; the learning rate and Adam's count are scalars on the device.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veldt.algorithms.base import Algorithm, Batch
from veldt.learning.optim import Flat, Owned
from veldt.records.tree import Array

WARM_UP = 3  # updates before the capture: libraries allocate workspaces in the first, and optimizers their averages
LAG, NORM = "policy_lag", "gradient_norm"


class Report(NamedTuple):
    """What the host learns of an update."""

    fine: bool  # it was finite, and was applied
    metrics: dict[str, Tensor]  # scalars in the host's memory
    priorities: Array  # [B]


class Launched:
    """An update that the device works on. It keeps its batch, whose memory must not be used again before the end."""

    def __init__(self, batch: Batch, host: Tensor, names: list[str], event: torch.cuda.Event | None) -> None:
        self._batch, self._host, self._names, self._event = batch, host, names, event

    def wait(self) -> Report:
        if self._event is not None:
            self._event.synchronize()
        host, count = self._host.clone(), 1 + len(self._names)  # the pinned memory is used again
        return Report(bool(host[0]), dict(zip(self._names, host[1:count], strict=True)), host[count:].numpy())


class Columns(dict[str, Tensor]):
    """Columns of a batch that note which of them are read."""

    def __init__(self, columns: Any, read: set[str]) -> None:
        super().__init__(columns)
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        self._read.add(name)
        return super().__getitem__(name)


@contextlib.contextmanager
def host_not_asked() -> Iterator[None]:
    """Raises where the host would wait for a value of the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Captured:
    """Launches updates. The first ones run operation by operation, as everything does where there is no CUDA (in tests)."""

    def __init__(self, algorithm: Algorithm, target: nn.Module, flat: Flat, updater: Owned, device: torch.device) -> None:
        self.algorithm, self.target, self.flat, self.updater, self.device = algorithm, target, flat, updater, device
        self.launches = 0
        self.columns: frozenset[str] | None = None  # those that the loss reads; None: not known yet
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._acted = algorithm.window.before  # the row of a window whose action is the first that is trained
        self._lr, self._steps = torch.zeros((), device=device), torch.zeros((), device=device)
        self._read: set[str] = set()
        self._names: list[str] = []  # of the metrics
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None  # what the graph reads
        self._out = torch.zeros(0)  # what it writes: fine, metrics, priorities
        self._hosts: list[Tensor] = []  # pinned copies of that, for two updates
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights were made there

    def on_stream(self) -> AbstractContextManager[Any]:
        """Work in here comes after the updates launched so far, and before later ones."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    def launch(self, batch: Batch, steps: int) -> Launched:
        """Starts an update; `batch` has tensors on the device, and `steps` is the number of updates before this one.

        Raises whatever a graph cannot hold, with weights and buffers as they were before.
        """
        with self.on_stream():
            self._lr.fill_(self.updater.lr())
            self._steps.fill_(steps)
            if self._graph is None:
                self._begin(batch)
            if self._graph is not None:
                self._fill(batch)
                self._graph.replay()
            return self._send(batch)

    def _begin(self, batch: Batch) -> None:
        """One update without a graph; or, after the last of these, the capture."""
        weights = self.flat.weights.clone()
        try:
            if self._stream is not None and self.launches >= WARM_UP:
                self._capture(batch)
                return
            rows = Columns({name: batch[name] for name in batch}, self._read)
            # A capture that fails leaves CUDA's allocator in a state that leaks, so one that would fail is not begun.
            checks = self._stream is not None and self.launches == WARM_UP - 1
            with host_not_asked() if checks else contextlib.nullcontext():
                self._out = self._compute(Batch(rows, batch.starts, batch.weights, self.device))
        except Exception:
            self.flat.weights.copy_(weights)
            raise

    def _capture(self, batch: Batch) -> None:
        rows = {name: batch[name].clone() for name in sorted(self._read)}
        starts = {name: x.clone() for name, x in batch.starts.items()}
        static, graph = Batch(rows, starts, batch.weights.clone(), self.device), torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            out = self._compute(static)
        self._graph, self._batch, self._out, self.columns = graph, static, out, frozenset(self._read)

    def _fill(self, batch: Batch) -> None:
        static = self._batch
        assert static is not None
        for name in static:
            static[name].copy_(batch[name], non_blocking=True)
        for name, x in static.starts.items():
            x.copy_(batch.starts[name], non_blocking=True)
        static.weights.copy_(batch.weights, non_blocking=True)

    def _compute(self, batch: Batch) -> Tensor:
        """The update. Returns one vector for the host: fine, the metrics, the priorities."""
        flat = self.flat
        buffers = flat.buffers.clone()  # the forward pass may change them
        loss = self.algorithm.loss(flat.net, self.target, batch)
        flat.backward(loss.losses)
        with torch.no_grad():
            norm = torch.linalg.vector_norm(flat.gradient)
            # A Huber loss has a finite gradient even where the loss is infinite, so both are checked.
            found = torch.stack([norm, *(value.detach() for value in loss.losses.values())])
            fine = found.isfinite().all().float()
            self.updater.masked_update(list(loss.losses), norm, fine, self._lr)
            if len(buffers):
                flat.buffers.copy_(torch.where(fine > 0, flat.buffers, buffers))
            if loss.after is not None:
                before = flat.weights.clone()
                loss.after()
                flat.weights.copy_(torch.where(fine > 0, flat.weights, before))
            metrics = {name: x.float().mean() for name, x in loss.metrics.items()} | {NORM: norm}
            if "version" in batch:
                metrics[LAG] = (self._steps - batch["version"][:, self._acted]).clamp_min(0).mean()
            self._names = list(metrics)
            return torch.cat((torch.stack([fine, *metrics.values()]), loss.priorities.float()))

    def _send(self, batch: Batch) -> Launched:
        """Starts the copy to the host. Two updates may be under way, each with pinned memory of its own."""
        self.launches += 1
        if self._stream is None:
            return Launched(batch, self._out, self._names, None)
        if not self._hosts:
            self._hosts = [torch.empty(self._out.shape, pin_memory=True) for _ in range(2)]
        host, event = self._hosts[self.launches % 2], torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        host.copy_(self._out, non_blocking=True)
        event.record(self._stream)
        return Launched(batch, host, self._names, event)
