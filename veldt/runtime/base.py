"""The seam between a program and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from veldt.program import Program


class Stuck(RuntimeError):
    """No node can do any work: the program would wait for ever."""


def spent(workers: Iterable[Any]) -> dict[str, float]:
    """Seconds that workers took for parts of their steps, by part, since the last call."""
    out: dict[str, float] = {}
    for worker in workers:
        for part, seconds in getattr(worker, "spent", {}).items():
            out[part] = out.get(part, 0.0) + seconds
            worker.spent[part] = 0.0
    return out


class Nodes(Protocol):
    """A running program, as the one who started it sees it."""

    live: bool  # its state is taken while it runs; otherwise it stands still whenever `until` is asked

    def count(self, name: str) -> int: ...  # a counter of the run, such as env_steps
    def metrics(self) -> dict[str, float]: ...
    def cut(self) -> None: ...  # ends running episodes and brings all they recorded into the store
    def reset(self, number: int) -> None: ...  # begins new episodes, seeded by this number
    def state(self) -> dict[str, dict[str, Any]]: ...  # by node; arrays may be the node's own: who keeps them copies them
    def load_state(self, state: dict[str, dict[str, Any]]) -> None: ...
    def stop(self) -> None: ...  # the run is about to end: long steps are cut short; safe in a signal handler
    def stores(self) -> dict[str, Any]: ...  # the nodes that hold blocks
    def snapshot(self) -> Any: ...  # `state` and `stores` of one moment, good while all goes on
    def memory(self) -> tuple[list[int], list[int]]: ...  # the other processes, and the descriptors of shared memory


class Runtime(Protocol):
    def run(self, program: Program, until: Callable[[Nodes], bool]) -> None:
        """Builds the nodes and keeps them working until `until`, asked again and again, says True."""
