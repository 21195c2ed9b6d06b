"""The seam between a program and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from veldt.program import Program


class Stuck(RuntimeError):
    """No node can do any work: the program would wait for ever."""


class Nodes(Protocol):
    """A running program, as the one who started it sees it."""

    def count(self, name: str) -> int: ...  # a counter of the run, such as env_steps
    def metrics(self) -> dict[str, float]: ...
    def cut(self) -> None: ...  # ends running episodes and brings all they recorded into the store
    def reset(self, number: int) -> None: ...  # begins new episodes, seeded by this number
    def state(self) -> dict[str, dict[str, Any]]: ...  # by node
    def load_state(self, state: dict[str, dict[str, Any]]) -> None: ...
    def stop(self) -> None: ...  # the run is about to end: long steps are cut short; safe in a signal handler
    def stores(self) -> dict[str, Any]: ...  # the nodes that hold blocks


class Runtime(Protocol):
    def run(self, program: Program, until: Callable[[Nodes], bool]) -> None:
        """Builds the nodes and keeps them working until `until`, asked again and again, says True."""
