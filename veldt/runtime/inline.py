"""Inline: all nodes in one thread, round-robin. For tests, debugging, exact reproducibility, and plain DQN."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from veldt.counters import Counters
from veldt.program import Program, resolve
from veldt.runtime.base import Stuck, busy_parts, merge, spent


class Inline:
    @contextmanager
    def start(self, program: Program) -> Iterator[InlineNodes]:
        objects: dict[str, Any] = {}
        try:
            for node in program.nodes.values():
                objects[node.name] = node.build(*resolve(node.args, objects), **resolve(node.kwargs, objects))
            yield InlineNodes(objects)
        finally:
            for thing in objects.values():
                if hasattr(thing, "close"):
                    thing.close()


class InlineNodes:
    live = False

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects = objects
        self._workers = {name: x for name, x in objects.items() if hasattr(x, "step")}
        self.busy = dict.fromkeys(self._workers, 0.0)  # seconds that each worker has taken
        self._since = time.perf_counter()
        self._idle = 0  # rounds without work
        self._counters = [x for x in objects.values() if isinstance(x, Counters)]

    def step(self) -> None:
        """One round: every worker once."""
        self._watch(any([self._step(name) for name in self._workers]), self._workers)

    def _step(self, name: str) -> bool:
        began = time.perf_counter()
        worked: bool = self._workers[name].step()
        self.busy[name] += time.perf_counter() - began
        return worked

    def _watch(self, worked: bool, who: Iterable[str]) -> None:
        """In one thread, two rounds without work mean that none will ever come.

        Not one: a worker that is refused may have brought in a part of what it has, and that may be all another needs.
        """
        self._idle = 0 if worked else self._idle + 1
        if self._idle == 2:
            raise Stuck(f"{', '.join(who)} cannot do any work; look at the store's limiter and capacity")

    def count(self, name: str) -> int:
        return sum(counters.get(name) for counters in self._counters)

    def metrics(self) -> dict[str, float]:
        """What the nodes tell, and `busy/...`: the part of the time since the last call that each kind of worker took."""
        out = merge(thing.metrics() for thing in self._with("metrics").values())
        elapsed, self._since = time.perf_counter() - self._since, time.perf_counter()
        out |= busy_parts(self.busy | spent(self._with("spent")), elapsed)
        self.busy = dict.fromkeys(self.busy, 0.0)
        return out

    def stop(self) -> None:
        for counters in self._counters:
            counters.stopping = True

    def cut(self) -> None:
        """The store may say "not now" to the flushed blocks: then the other workers go on until it takes them.

        All are asked again after that, so that in the end nobody has moved since the cut.
        """
        things = self._with("cut")
        while waiting := [name for name, thing in things.items() if not thing.cut()]:
            self._watch(any([self._step(name) for name in self._workers if name not in waiting]), waiting)

    def reset(self, number: int) -> None:
        for thing in self.objects.values():
            if hasattr(thing, "cut") and hasattr(thing, "reset"):
                thing.reset(number)

    def state(self) -> dict[str, dict[str, Any]]:
        return {name: thing.state() for name, thing in self._with("state").items()}

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        for name, thing in self._with("load_state").items():
            thing.load_state(state[name])

    def snapshot(self) -> InlineNodes:
        return self

    def memory(self) -> tuple[list[int], list[int]]:
        return [], []

    def stores(self) -> dict[str, Any]:
        return self._with("load_blocks")

    def _with(self, method: str) -> dict[str, Any]:
        return {name: thing for name, thing in self.objects.items() if hasattr(thing, method)}
