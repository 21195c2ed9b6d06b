"""The protocols of a runtime and of a running program."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from veldt.program import Program
from veldt.records.tree import Array


class Stuck(RuntimeError):
    """No node can do any work: the program would wait forever."""


class Nodes(Protocol):
    """A running program, as its caller sees it."""

    live: bool  # nodes run between calls of `step` too; their state is taken while they run

    def step(self) -> None: ...  # supervises for a moment; inline: steps every worker once
    def count(self, name: str) -> int: ...  # a counter, such as env_steps, over all scopes
    def metrics(self) -> dict[str, float]: ...
    def cut(self) -> None: ...  # ends running episodes and inserts everything recorded into the store
    def resume(self, number: int) -> None: ...  # begins new episodes, seeded by this number
    def state(self) -> dict[str, dict[str, Any]]: ...  # by node; arrays may be the node's own: copy what you keep
    def load_state(self, state: dict[str, dict[str, Any]]) -> None: ...
    def stop(self) -> None: ...  # the run is about to end: long steps are cut short; safe in a signal handler
    def stores(self) -> dict[str, Any]: ...  # the nodes that hold blocks
    def snapshot(self) -> Any: ...  # `state` and `stores` of one moment, valid while the nodes run
    def resources(self) -> tuple[list[int], list[int]]: ...  # pids of other processes, descriptors of shared memory


class Runtime(Protocol):
    def start(self, program: Program) -> AbstractContextManager[Nodes]:
        """Builds the nodes; leaving the context ends them."""


ARRAYS = "/arrays"  # the key of the program's arrays in a state


def array_state(arrays: dict[str, Array]) -> dict[str, dict[str, Any]]:
    return {ARRAYS: {name: x.copy() for name, x in arrays.items()}} if arrays else {}


def load_arrays(arrays: dict[str, Array], state: dict[str, dict[str, Any]]) -> None:
    for name, x in arrays.items():
        if name in state.get(ARRAYS, {}):
            x[...] = state[ARRAYS][name]
