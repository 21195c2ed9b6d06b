"""Forward passes of central inference as CUDA graphs: history and recurrent state stay on the GPU, a new record goes up,
and what decides the actions comes down.

A graph has a fixed number of environments. There is one for each power of two, and a smaller batch is filled up with
environments that do not exist: one more row of the histories and states, which nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from veldt.algorithms.base import Algorithm, Tensors
from veldt.records.tree import Tree

WARM_UP = 2  # passes of a size before it is captured
SMALLEST = 8  # environments


@dataclass
class Pass:
    """A forward pass of one size: what it reads and writes, on the device and on the host."""

    lanes: Tensor  # [size], the environments
    new: Tensors  # [size, ...], their newest records
    out: Tensors = field(default_factory=dict)  # what the pass gives, and the recurrent state before it
    hosts: Tensors = field(default_factory=dict)  # copies of that in pinned memory
    graph: Any = None  # None: its operations are launched one by one
    runs: int = 0  # without a graph


class GraphedForward:
    """`rows` [total + 1, history, ...] and `states` [total + 1, ...] are those of all environments, on the device."""

    def __init__(
        self, algorithm: Algorithm, net: nn.Module, rows: Tensors, states: Tensors, stage: Tensors, seen: list[str]
    ):
        self.algorithm, self.net, self.rows, self.states, self.stage, self.seen = algorithm, net, rows, states, stage, seen
        self.device = next(net.parameters()).device
        self.total = len(next(iter(stage.values())))
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._passes: dict[int, Pass] = {}
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the weights were made there

    def run(self, index: Tensor) -> Tree:
        """Takes the staged records of these environments; returns what the pass gives and the state before it, [n, ...]."""
        n = len(index)
        size = min(max(SMALLEST, 1 << (n - 1).bit_length()), max(self.total, SMALLEST))
        made = self._passes.get(size) or self._make(size)
        made.lanes[:n].copy_(index, non_blocking=True)
        made.lanes[n:].fill_(self.total)
        for name, x in made.new.items():
            x[:n].copy_(self.stage[name][:n], non_blocking=True)
        if made.graph is not None:
            made.graph.replay()
        else:
            self._begin(made)
        for name, host in made.hosts.items():
            host[:n].copy_(made.out[name][:n], non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        return {name: host[:n].numpy().copy() for name, host in made.hosts.items()}

    def _make(self, size: int) -> Pass:
        index = torch.full((size,), self.total, dtype=torch.int64, device=self.device)
        new = {name: torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=self.device) for name, x in self.stage.items()}
        self._passes[size] = Pass(index, new)
        return self._passes[size]

    def _begin(self, made: Pass) -> None:
        """A pass without a graph; or the capture, and its first replay."""
        made.runs += 1
        if self.stream is None or made.runs <= WARM_UP:
            made.out = self._compute(made)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                made.out = self._compute(made)
            made.graph = graph
            graph.replay()
        if not made.hosts:
            pin = self.stream is not None
            made.hosts = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=pin) for name, x in made.out.items()}

    def _compute(self, made: Pass) -> Tensors:
        index, new = made.lanes, made.new
        rows, before = gather(self.rows, self.states, index, new, self.seen)
        out, after = self.algorithm.forward(self.net, rows, before)
        for name, x in self.rows.items():
            x.index_copy_(0, index, rows[name])
        for name, x in after.items():
            self.states[name].index_copy_(0, index, x)
        return out | before


def gather(rows: Tensors, states: Tensors, index: Tensor, new: Tensors, seen: list[str]) -> tuple[Tensors, Tensors]:
    """What a pass sees of these environments: rows [n, history, ...] that end with the new ones, and the recurrent state
    before them, which is zero where an episode begins."""
    before = {name: x[index].masked_fill_(new["first"].view(-1, *[1] * (x.ndim - 1)), 0) for name, x in states.items()}
    if not rows:
        return {name: new[name][:, None] for name in seen}, before
    return {name: torch.cat((x[index, 1:], new[name][:, None]), 1) for name, x in rows.items()}, before
