"""What all runtimes have in common: the protocols of a runtime and of a running program, and the host of its nodes."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from veldt.metrics import busy_shares, declared, merge
from veldt.program import Given, Node, Parts, Program
from veldt.records.tree import Array
from veldt.shared import Cell


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
    def cell(self, name: str) -> Cell: ...  # of the node of this name, for reading
    def stores(self) -> dict[str, Any]: ...  # the nodes that hold blocks
    def snapshot(self) -> Any: ...  # `state` and `stores` of one moment, valid while the nodes run
    def salvage(self, seconds: float) -> Any: ...  # the same at the end, after any error: what can be had in this time
    def resources(self) -> tuple[list[int], list[int]]: ...  # pids of other processes, descriptors of shared memory


class Runtime(Protocol):
    def start(self, program: Program) -> AbstractContextManager[Nodes]:
        """Builds the nodes; leaving the context ends them."""


ARRAYS = "/arrays"  # the key of the program's arrays in a state; of one that is saved in parts: /arrays/NAME


def array_state(arrays: dict[str, Array], parts: Mapping[str, Parts]) -> dict[str, dict[str, Any]]:
    """Copies. Of an array that others write to meanwhile, each element is one that it had during the copy."""
    whole = {name: x.copy() for name, x in arrays.items() if name not in parts}
    out: dict[str, dict[str, Any]] = {ARRAYS: whole} if whole else {}
    for name, own in parts.items():
        if not own:  # it is not saved
            continue
        ends = np.cumsum([math.prod(shape) for shape in own.values()])
        split = np.split(arrays[name].copy(), ends[:-1])
        out[f"{ARRAYS}/{name}"] = {part: x.reshape(shape) for (part, shape), x in zip(own.items(), split, strict=True)}
    return out


def load_arrays(arrays: dict[str, Array], parts: Mapping[str, Parts], state: dict[str, dict[str, Any]]) -> None:
    for name, x in arrays.items():
        if name in parts and f"{ARRAYS}/{name}" in state:
            found = state[f"{ARRAYS}/{name}"]
            x[...] = np.concatenate([np.reshape(found[part], math.prod(shape)) for part, shape in parts[name].items()])
        elif name in state.get(ARRAYS, {}):
            x[...] = state[ARRAYS][name]


class Host:
    """Builds some nodes of a program and steps the workers among them: inline all nodes, otherwise those of one process."""

    def __init__(self, nodes: Iterable[Node], known: dict[str, Any], given: Callable[[Node], Given]) -> None:
        """`known` has the proxies of nodes in other processes; nodes built here are added to it."""
        self.nodes = list(nodes)
        self.declarations = declared(self.nodes)
        self.objects: dict[str, Any] = {}
        try:
            for node in self.nodes:
                self.objects[node.name] = known[node.name] = given(node).build(node)
        except BaseException:
            self.close()
            raise
        self.workers = [(node, self.objects[node.name]) for node in self.nodes if hasattr(self.objects[node.name], "step")]
        self.busy_s = [0.0] * len(self.workers)
        self._timings: dict[str, float] = {}

    def step(self) -> bool:
        return any([self.step_worker(i) for i in range(len(self.workers))])

    def step_worker(self, index: int) -> bool:
        began = time.perf_counter()
        worked = bool(self.workers[index][1].step())
        if worked:
            self.busy_s[index] += time.perf_counter() - began
        return worked

    def metrics(self) -> dict[str, float]:
        return merge((thing.metrics() for thing in self._with("metrics").values()), self.declarations)

    def busy(self, elapsed: float) -> dict[str, float]:
        """`busy/...`: the fraction of the elapsed time that workers, and parts of their steps, took since `reset_busy`."""
        for _, worker in self.workers:
            for part, seconds in getattr(worker, "timings", {}).items():
                self._timings[part] = self._timings.get(part, 0.0) + seconds
                worker.timings[part] = 0.0
        taken = [(node.role, self.busy_s[i]) for i, (node, _) in enumerate(self.workers)]
        return busy_shares([*taken, *self._timings.items()], elapsed)

    def reset_busy(self) -> None:
        self.busy_s, self._timings = [0.0] * len(self.workers), {}

    def cut(self) -> list[str]:
        """Asks all nodes to prepare for a checkpoint; returns those that are not ready yet."""
        return [name for name, thing in self._with("cut").items() if not thing.cut()]

    def resume(self, number: int) -> None:
        for thing in self._with("resume").values():
            thing.resume(number)

    def state(self) -> dict[str, dict[str, Any]]:
        return {name: thing.state() for name, thing in self._with("state").items()}

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        for name, thing in self._with("load_state").items():
            if name in state:
                thing.load_state(state[name])

    def close(self) -> None:
        for thing in self._with("close").values():
            thing.close()

    def stores(self) -> dict[str, Any]:
        return self._with("load_blocks")

    def _with(self, method: str) -> dict[str, Any]:
        return {name: thing for name, thing in self.objects.items() if hasattr(thing, method)}
