"""The seam between a program and where it runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from veldt.counters import NAMES
from veldt.program import Program


class Stuck(RuntimeError):
    """No node can do any work: the program would wait for ever."""


def spent(workers: dict[str, Any]) -> dict[str, float]:
    """Seconds that workers took for parts of their steps, by `part/worker`, since this was last asked."""
    out: dict[str, float] = {}
    for name, worker in workers.items():
        for part, seconds in getattr(worker, "spent", {}).items():
            out[f"{part}/{name}"] = seconds
            worker.spent[part] = 0.0
    return out


def busy_parts(seconds: dict[str, float], elapsed: float) -> dict[str, float]:
    """`busy/kind`: the part of the time that each kind of worker, or part of one, took."""
    out: dict[str, float] = {}
    for name, taken in seconds.items():
        kind = f"busy/{name.partition('/')[0]}"
        out[kind] = out.get(kind, 0.0) + taken / max(1e-9, elapsed)
    return out


def merge(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """What several nodes tell, as one: what has the same name is averaged; of counts of the whole run the latest holds."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, x in part.items():
            values.setdefault(name, []).append(x)
    return {name: max(x) if name in NAMES else sum(x) / len(x) for name, x in values.items()}


class Nodes(Protocol):
    """A running program, as the one who started it sees it."""

    live: bool  # it runs between two steps, and its state is taken meanwhile; otherwise it stands still

    def step(self) -> None: ...  # inline: each worker once; local: one look of the supervisor
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
    def start(self, program: Program) -> AbstractContextManager[Nodes]:
        """Builds the nodes, and closes them at the end of the `with`. They work while `Nodes.step` is called."""
