"""Program: the nodes of a run and the references between them. A topology builds one; a runtime runs it.

    program = Program()
    store = program.add("store", Replay, schema, ...)
    program.add("learner", Learner, algorithm, env, store, ..., on=store)

`add` returns a Ref. Refs are passed as plain arguments: the runtime replaces each by the object, or by a proxy of it if it
is in another process (`veldt.ports`). Nothing is built before the runtime starts.

A node is any object. What a runtime calls, where it is there:

    step() -> bool              a worker: did it do any work? The runtime owns the loop, and no step blocks
    metrics() -> dict           numbers to log, by name
    state(), load_state(state)  what a checkpoint has of it: arrays and JSON values by name
    cut() -> bool               prepares for a checkpoint: ends what is in progress (False: not yet, call again)
    resume(number)              goes on after a cut, with random streams seeded by this number
    close()
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy.typing as npt

from veldt.ports import Examples, Port, ports_of
from veldt.records.tree import Spec, spec

T = TypeVar("T")
Parts = Mapping[str, tuple[int, ...]]  # name -> shape


class Placeholder(NamedTuple):
    """Stands for what the runtime gives to a node."""

    what: str


INCARNATION: Any = Placeholder("incarnation")  # how often the node was restarted: 0 for its first life
BLOCK_MEMORY: Any = Placeholder("block memory")  # arrays that outlive the node's process (`storing.slots.BlockMemory`)
CELL: Any = Placeholder("cell")  # a value of which the newest wins, shared by all processes (`shared.Cell`)
ROWS: Any = Placeholder("rows")  # integers, a row of which each process owns (`shared.Rows`)


class Ref(NamedTuple):
    name: str


class ArrayRef(NamedTuple):
    name: str


@dataclass(frozen=True)
class Node:
    name: str
    build: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: str = ""  # the prefix of its name
    on: str | None = None  # the node whose process this one shares
    threads: int = 1  # for tensor operations in its process
    light: bool = False  # needs no torch: a process of such nodes alone has none
    elsewhere: bool = False  # its process may be on another machine
    keep: bool = False  # a restart goes on from its state, and a checkpoint waits for it
    examples: Mapping[str, Examples] = field(default_factory=dict)  # by port
    constants: Mapping[str, Any] = field(default_factory=dict)  # attributes of the object that its proxies have too
    ram: int = 0  # bytes that it takes beside what every process and every network takes

    @property
    def role(self) -> str:
        """Its name without scope and index: `actor` for `a/actor/3`."""
        return self.name.removeprefix(self.scope).partition("/")[0]

    @property
    def node_class(self) -> type:
        build = self.build
        while isinstance(build, functools.partial):
            build = build.func
        if isinstance(build, type):
            return build
        try:
            found = get_type_hints(build).get("return", object)
        except (NameError, TypeError):
            found = object
        return found if isinstance(found, type) else object

    @property
    def ports(self) -> dict[str, Port]:
        return ports_of(self.node_class)

    @property
    def is_worker(self) -> bool:
        return hasattr(self.node_class, "step")

    def has(self, placeholder: Any) -> bool:
        return placeholder in walk((self.args, self.kwargs), Placeholder)

    @property
    def everywhere(self) -> bool:
        """It keeps nothing but what is in shared cells, rows and arrays: every process that needs it builds its own."""
        arrays = bool(walk((self.args, self.kwargs), ArrayRef)) and not self.ports and self.on is None
        return (self.has(CELL) or self.has(ROWS) or arrays) and not self.is_worker


@dataclass
class Program:
    nodes: dict[str, Node] = field(default_factory=dict)
    prefix: str = ""
    arrays: Spec = field(default_factory=dict)
    parts: dict[str, Parts] = field(default_factory=dict)  # in which arrays are saved; of no entry: as a whole

    def scope(self, prefix: str) -> "Program":
        """The same program, under a name: what is added to it is called prefix/name."""
        return Program(self.nodes, f"{self.prefix}{prefix}/", self.arrays, self.parts)

    def array(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, parts: Parts | None = None, saved: bool = True
    ) -> Any:
        """An array of zeros that every node that is given it maps. Checkpoints have it if it is `saved`.

        One of one axis may be saved in parts: their names and shapes, in their order in the array. Parts called
        weights/... are the weights of a checkpoint.
        """
        name = self.prefix + name
        assert name not in self.arrays, f"two arrays are named {name}"
        self.arrays[name] = spec(shape, dtype)
        if parts is not None:
            assert shape == (sum(map(math.prod, parts.values())),), (shape, parts)
            self.parts[name] = dict(parts)
        if not saved:
            self.parts[name] = {}
        return ArrayRef(name)

    def add(
        self,
        name: str,
        build: Callable[..., Any],
        *args: Any,
        on: Any = None,  # the Ref of the node whose process to share
        threads: int = 1,
        light: bool = False,
        elsewhere: bool = False,
        keep: bool = False,
        examples: Mapping[str, Examples] | None = None,
        constants: Mapping[str, Any] | None = None,
        ram: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Adds a node and returns its Ref (typed Any, because it stands for the object that `build` will return)."""
        name = self.prefix + name
        assert name not in self.nodes, f"two nodes are named {name}"
        place = None if on is None else on.name
        assert place is None or place in self.nodes, f"{name}: there is no node {place} to share a process with"
        for ref in walk((args, kwargs), Ref):
            assert ref.name in self.nodes, f"{name}: {ref.name} is not in this program (yet)"
        options = (place, threads, light, elsewhere, keep, examples or {}, constants or {}, ram)
        self.nodes[name] = Node(name, build, args, kwargs, self.prefix, *options)
        return Ref(name)


def root(name: str, nodes: Mapping[str, Node]) -> str:
    """The node that has a process, which this one shares; where `nodes` are those of one process, the first of them."""
    while (on := nodes[name].on) is not None and on in nodes:
        name = on
    return name


def walk(value: Any, kind: type[T]) -> list[T]:
    """All of this type among arguments, wherever they lie."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list | tuple):
        return [found for part in value for found in walk(part, kind)]
    if isinstance(value, dict):
        return walk(list(value.values()), kind)
    return []


@dataclass(frozen=True)
class Given:
    """What stands behind the placeholders of one node."""

    nodes: Mapping[str, Any]  # objects and proxies, by name
    arrays: Mapping[str, Any] = field(default_factory=dict)
    placeholders: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.nodes[value.name]
        if isinstance(value, ArrayRef):
            return self.arrays[value.name]
        if isinstance(value, Placeholder):
            return self.placeholders[value.what]
        if type(value) in (list, tuple):
            return type(value)(self.resolve(part) for part in value)
        if type(value) is dict:
            return {key: self.resolve(part) for key, part in value.items()}
        return value

    def build(self, node: Node) -> Any:
        return node.build(*self.resolve(node.args), **self.resolve(node.kwargs))
