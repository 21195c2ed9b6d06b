"""Inline: all nodes in one thread, round-robin. For tests, debugging, exact reproducibility, and plain DQN."""

import contextlib
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from veldt.counters import Counters
from veldt.program import BLOCK_MEMORY, CELL, INCARNATION, ROWS, Given, Node, Program
from veldt.records.tree import Array
from veldt.runtime.base import Host, Stuck, array_state, load_arrays
from veldt.shared import PrivateCell, PrivateRows


class Inline:
    @contextmanager
    def start(self, program: Program) -> Iterator["InlineNodes"]:
        arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in program.arrays.items()}
        objects: dict[str, Any] = {}
        rows: list[PrivateRows] = []
        cells: dict[str, PrivateCell] = {}

        def given(node: Node) -> Given:
            rows.append(PrivateRows())
            cells[node.name] = PrivateCell()
            own = {INCARNATION: 0, BLOCK_MEMORY: None, CELL: cells[node.name], ROWS: rows[-1]}
            return Given(objects, arrays, {placeholder.what: x for placeholder, x in own.items()})

        host = Host(program.nodes.values(), objects, given)
        try:
            yield InlineNodes(host, arrays, program.unsaved, rows, cells)
        finally:
            host.close()


class InlineNodes:
    live = False

    def __init__(
        self,
        host: Host,
        arrays: dict[str, Array],
        unsaved: Collection[str],
        rows: list[PrivateRows],
        cells: dict[str, PrivateCell],
    ) -> None:
        self.host, self.objects, self._rows, self._cells = host, host.objects, rows, cells
        self._arrays, self._unsaved = arrays, unsaved
        self._since = time.perf_counter()
        self._idle = 0  # rounds without work
        self._counters = [x for x in self.objects.values() if isinstance(x, Counters)]

    def step(self) -> None:
        self._watch(self.host.step(), [node.name for node, _ in self.host.workers])

    def _watch(self, worked: bool, who: list[str]) -> None:
        """Raises Stuck after two rounds without work: in one thread, there will never be any.

        Not after one: a worker that was refused may have inserted some of its data, which may be enough for another.
        """
        self._idle = 0 if worked else self._idle + 1
        if self._idle == 2:
            raise Stuck(f"{', '.join(who)} cannot do any work; look at the store's limiter and capacity")

    def count(self, name: str) -> int:
        return sum(counters.get(name) for counters in self._counters)

    def metrics(self) -> dict[str, float]:
        """What the nodes report, and `busy/...`: the fraction of the time since the last call that each role took."""
        out = self.host.metrics()
        elapsed, self._since = time.perf_counter() - self._since, time.perf_counter()
        out |= self.host.busy(elapsed)
        self.host.reset_busy()
        return out

    def stop(self) -> None:
        for rows in self._rows:
            rows.stopping = True

    def cut(self) -> None:
        """The store may refuse the flushed blocks: then the other workers are stepped until it accepts them.

        All nodes are asked again after that, so that no node has changed since its cut.
        """
        while waiting := self.host.cut():
            others = [i for i, (node, _) in enumerate(self.host.workers) if node.name not in waiting]
            self._watch(any([self.host.step_worker(i) for i in others]), waiting)

    def resume(self, number: int) -> None:
        self.host.resume(number)

    def state(self) -> dict[str, dict[str, Any]]:
        return self.host.state() | array_state(self._arrays, self._unsaved)

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        load_arrays(self._arrays, state)
        self.host.load_state(state)

    def snapshot(self) -> Self:
        return self

    def salvage(self, seconds: float) -> Self:
        """After an error in a step: what its environments and its recorder had is lost."""
        with contextlib.suppress(Exception):
            self.host.cut()
        return self

    def resources(self) -> tuple[list[int], list[int]]:
        return [], []

    def cell(self, name: str) -> PrivateCell:
        return self._cells[name]

    def stores(self) -> dict[str, Any]:
        return self.host.stores()
