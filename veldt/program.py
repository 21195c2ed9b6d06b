"""Program: what runs, and what talks to what. A topology fills one; a runtime runs it.

    program = Program()
    store = program.add("store", Replay, schema, ...)
    program.add("learner", Learner, algorithm, env, store, ..., on=store)

`add` returns a Ref. Refs are passed as plain arguments: whoever builds the node puts the object, or a way to reach it, in
their place. Nothing is built before the runtime starts.

Nodes are of two kinds. A *worker* has `step() -> bool` (did it do any work?); the runtime owns the loop. A *service* has
methods that others call, and never blocks. Both may have `metrics()`, `state()` and `load_state()`, `close()`, and
`cut() -> bool`, which prepares for a checkpoint (False: not yet).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, get_type_hints

T = TypeVar("T")


class Incarnation:
    """Stands, in the arguments of a node, for how often it was restarted: 0 for its first life."""


INCARNATION: Any = Incarnation()


class Memory:
    """Stands, in the arguments of a node, for memory that outlives the node's process (`storing.slots.BlockMemory`)."""


MEMORY: Any = Memory()


class Ref(NamedTuple):
    """Stands for a node in the arguments of another."""

    name: str


@dataclass(frozen=True)
class Node:
    name: str
    build: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on: str | None = None  # the node whose process this one shares
    gpus: float = 0
    threads: int = 1  # for tensor operations in its process
    light: bool = False  # needs no torch: a process of such nodes alone has none
    scope: str = ""  # the prefix of its name, with a slash at the end

    @property
    def kind_name(self) -> str:
        """The name without scope and index: "actor" of a/actor/3. Nodes of one kind share the names of their metrics."""
        return self.name.removeprefix(self.scope).partition("/")[0]


def kind_of(node: Node) -> type:
    """The class of the object that `node.build` will return; `object` if it does not say."""
    build = node.build
    while isinstance(build, functools.partial):
        build = build.func
    if isinstance(build, type):
        return build
    try:
        found = get_type_hints(build).get("return", object)
    except (NameError, TypeError):
        found = object
    return found if isinstance(found, type) else object


@dataclass
class Program:
    nodes: dict[str, Node] = field(default_factory=dict)
    prefix: str = ""

    def scope(self, prefix: str) -> Program:
        """The same program, under a name: what is added to it is called prefix/name."""
        return Program(self.nodes, f"{self.prefix}{prefix}/")

    def add(
        self,
        name: str,
        build: Callable[..., Any],
        *args: Any,
        on: Any = None,  # the Ref of the node whose process to share
        gpus: float = 0,
        threads: int = 1,
        light: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Adds a node and returns its Ref (typed Any, because it stands for the object that `build` will return)."""
        name = self.prefix + name
        assert name not in self.nodes, f"two nodes are named {name}"
        place = None if on is None else on.name
        assert place is None or place in self.nodes, f"{name}: there is no node {place} to share a process with"
        for ref in walk((args, kwargs), Ref):
            assert ref.name in self.nodes, f"{name}: {ref.name} is not in this program (yet)"
        self.nodes[name] = Node(name, build, args, kwargs, place, gpus, threads, light, self.prefix)
        return Ref(name)


def walk(value: Any, kind: type[T]) -> list[T]:
    """All of this type among arguments, wherever they lie."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list | tuple):
        return [found for part in value for found in walk(part, kind)]
    if isinstance(value, dict):
        return walk(list(value.values()), kind)
    return []


def resolve(value: Any, nodes: dict[str, Any], incarnation: int = 0, memory: Any = None) -> Any:
    """The value with every Ref replaced by what `nodes` has under its name."""
    if isinstance(value, Ref):
        return nodes[value.name]
    if isinstance(value, Incarnation):
        return incarnation
    if isinstance(value, Memory):
        return memory
    if type(value) in (list, tuple):
        return type(value)(resolve(part, nodes, incarnation, memory) for part in value)
    if type(value) is dict:
        return {key: resolve(part, nodes, incarnation, memory) for key, part in value.items()}
    return value
