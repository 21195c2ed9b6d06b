"""Ports: how a method of a node travels when its caller is in another process.

A seam is a class, often a Protocol, whose methods are marked. A node class that derives from it, or that marks methods of
its own, works under every runtime: proxies, services and back-pressure follow from the marks.

    class ParamShard:
        @stream                                   # one way, bounded. False: full, keep it and try again
        def push(self, gradient: Array, at: int) -> bool: ...

        @call                                     # request and reply. None or False: not yet, call again
        def take(self, worker: int) -> Task | None: ...

        @latest                                   # one writer, many readers, the newest value wins
        def weights(self, have: int = -1) -> Weights | None: ...

**stream**: while the node returns False, its caller's ring fills up, and then the caller gets False. A stream method that
returns nothing never refuses: its proxy keeps the message until there is room.

**call**: the node's method is called until it returns something, which is sent back. The caller repeats the call with the
same integers until the reply is there; these integers identify the call, so one caller may wait for several at a time. A
call may also be split in two methods: `@call(reply="recv")` on `send` sends the request and returns whether it was taken,
and `recv` with the same integers returns the reply or None. `after` names a method that is called once replies were sent
(work that callers need not wait for), `due` an attribute: the time by which a reply will be ready, in seconds of
`time.monotonic`.

At most 8 calls of one caller to a node are open at a time. A caller that was restarted and calls again replaces the call
that its earlier incarnation had open; a reply to a dead caller is lost.

**latest**: the method returns a NamedTuple that begins with an integer, its version; None if the caller has that version.

Arguments and results are arrays, dicts of arrays, numbers, None, and NamedTuples of these. Anything else needs a `codec`.
What is delivered once, and to whom again: docs/architecture.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import numpy as np

from veldt.records.tree import Array, Tree

F = TypeVar("F", bound=Callable[..., Any])
STREAM, CALL, LATEST = "stream", "call", "latest"
# Columns: the header of a message, the number of a reply, what it brings. No key of a dict begins with @.
PORT, REPLY, RESULT = "@port", "@reply", "@result"
MARK = "_veldt_port"
EMPTY = inspect.Parameter.empty


class Codec(Protocol):
    """Turns the arguments of a method into one message, a flat dict of arrays, and back.

    With `views`, what `unpack` returns are views of the message, which hold for a later message in the same place too.
    """

    views: bool

    def pack(self, *args: Any) -> Tree: ...
    def unpack(self, node: Any, message: Tree) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Port:
    """One marked method. It is sent to processes that do not import the node's class."""

    name: str
    kind: str
    names: tuple[str, ...]  # of the arguments
    defaults: tuple[Any, ...]  # inspect.Parameter.empty: none
    codec: Codec
    result: Value
    keys: tuple[int, ...] = ()  # which arguments are integers: they are in the header of a message and identify a call
    reply: str = ""  # call: the method that returns the reply, if that is another one
    after: str = ""
    due: str = ""
    only: tuple[str, ...] = ()  # call: the keys of a dict that are sent back; empty: all
    cancels: str = ""  # stream: the call that it withdraws; such a message is sent in order with the calls
    refuses: bool = True  # stream: the method returns a bool
    source: bool = False  # the method takes the keyword `source`

    @property
    def with_calls(self) -> bool:
        return self.kind == CALL or bool(self.cancels)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in order, with those that were given by name or left out."""
        if len(args) == len(self.names) and not kwargs:
            return args
        given = dict(zip(self.names, args, strict=False)) | kwargs
        missing = [n for n, d in zip(self.names, self.defaults, strict=True) if n not in given and d is EMPTY]
        if len(args) > len(self.names) or missing or not given.keys() <= set(self.names):
            raise TypeError(f"takes the arguments {', '.join(self.names)}; got {args} and {kwargs}")
        return tuple(given.get(name, default) for name, default in zip(self.names, self.defaults, strict=True))

    def packer(self, index: int) -> Callable[[tuple[Any, ...]], Tree]:
        """Makes the messages of calls of the port with this index.

        A header has the index, the message's number if it goes with the calls, and the integers among the arguments. It is
        reused: who puts a message copies it.
        """
        first, pack = 2 if self.with_calls else 1, self.codec.pack
        header = np.full(first + len(self.keys), index, np.int64)
        words, places = header.data, tuple(enumerate(self.keys, first))  # an array's elements are slower

        def message(args: tuple[Any, ...]) -> Tree:
            for at, i in places:
                words[at] = args[i]
            return {PORT: header, **pack(*args)}

        return message

    def reply_with(self, number: Array, result: Any) -> Tree:
        """The reply to the call with this number, an array [1]. A dict has its own keys there."""
        message: Tree = {REPLY: number}
        if self.result.kind is dict:
            for key in self.only or result:
                message[key] = result[key]
        else:
            self.result.pack(RESULT, result, message)
        return message

    def read_reply(self, message: Tree) -> Any:
        """What a reply brings, with arrays of its own."""
        copies = {name: x.copy() for name, x in message.items() if name != REPLY}
        return copies if self.result.kind is dict else self.result.unpack(RESULT, copies)


@overload
def stream(method: F) -> F: ...
@overload
def stream(*, cancels: str = "", codec: Codec | None = None) -> Callable[[F], F]: ...
def stream(method: Any = None, *, cancels: str = "", codec: Codec | None = None) -> Any:
    """One way, bounded, in order. `cancels` names a call of the same node with the same integers, which it withdraws."""
    return _mark(method, STREAM, {"cancels": cancels}, codec)


@overload
def call(method: F) -> F: ...
@overload
def call(
    *, reply: str = "", after: str = "", due: str = "", only: tuple[str, ...] = (), codec: Codec | None = None
) -> Callable[[F], F]: ...
def call(method: Any = None, *, codec: Codec | None = None, **options: Any) -> Any:
    """Request and reply. `only` names the keys of a dict that are sent back."""
    return _mark(method, CALL, options, codec)


def latest(method: F) -> F:
    marked: F = _mark(method, LATEST, {}, None)
    return marked


def _mark(method: Any, kind: str, options: dict[str, Any], codec: Codec | None) -> Any:
    def mark(function: Any) -> Any:
        setattr(function, MARK, (kind, options, codec))
        return function

    return mark if method is None else mark(method)


def ports_of(node_class: type) -> dict[str, Port]:
    """The ports of a node class by name: its own marks and those of the classes it derives from."""
    found: dict[str, Port] = {}
    for name in dir(node_class):
        for owner in node_class.__mro__:
            marked = vars(owner).get(name)
            if hasattr(marked, MARK):
                found[name] = _port(name, node_class, owner, marked)
                break
    return found


def _port(name: str, node_class: type, owner: type, method: Any) -> Port:
    """`owner` is the class that marks the method: the node's own, or its seam, whose annotations hold."""
    kind, options, codec = getattr(method, MARK)
    where, hints = f"{node_class.__name__}.{name}", get_type_hints(method)
    parameters = {p.name: p.default for p in inspect.signature(method).parameters.values()}
    names = [p for p in parameters if p not in ("self", "source")]
    values = [value_of(hints.get(p, Any), f"{where}: {p}") for p in names] if codec is None else []
    reply = options.get("reply", "")
    replies = get_type_hints(getattr(owner, reply, None) or getattr(node_class, reply)) if reply else hints
    result = value_of(replies.get("return", Any), f"the result of {where}")
    keys = tuple(i for i, value in enumerate(values) if value.kind is int and not value.optional)
    columns = [(i, names[i], value) for i, value in enumerate(values) if i not in keys]
    if len(columns) == 1 and columns[0][2] == Value(dict):
        columns = [(columns[0][0], "", Value(dict))]
    if name.startswith("_") or (kind == CALL and result.kind is NoneType):
        raise TypeError(f"{where} cannot be a port: its name must be public, and a call must return something")
    return Port(
        name,
        kind,
        tuple(names),
        tuple(parameters[p] for p in names),
        codec or Arguments(len(names), columns),
        result._replace(optional=False),  # None is "not yet", which is not sent
        keys,
        refuses=hints.get("return") is not NoneType,
        source="source" in inspect.signature(getattr(node_class, name)).parameters,
        **options,
    )


class Value(NamedTuple):
    """How one argument or result is laid out: a number or an array is a column, a dict has a column for each key."""

    kind: Any  # int, float, bool, np.ndarray, dict, NoneType, or a NamedTuple class
    optional: bool = False
    fields: tuple[tuple[str, Any], ...] = ()  # of a NamedTuple: names and Values

    def pack(self, name: str, value: Any, message: Tree) -> None:
        if value is None:
            assert self.optional or self.kind is NoneType, f"{name} is None"
        elif self.kind is dict:
            message.update(zip(prefixed(name, tuple(value)), value.values(), strict=True) if name else value)
        elif self.fields:
            for i, (part, kind) in enumerate(self.fields):
                kind.pack(f"{name}.{part}", value[i], message)
        else:
            message[name] = value if isinstance(value, np.ndarray) else np.array(value, DTYPES.get(self.kind))

    def unpack(self, name: str, message: Tree) -> Any:
        """Arrays are views of the message."""
        if self.kind is dict:
            keys = keys_under(name, tuple(message))
            return None if self.optional and not keys else {short: message[key] for short, key in keys}
        if self.fields:
            if self.optional and not any(key.startswith(f"{name}.") for key in message):
                return None
            return self.kind(*(kind.unpack(f"{name}.{part}", message) for part, kind in self.fields))
        found = message.get(name)
        if found is None or self.kind not in DTYPES:
            return found
        return self.kind(found)


DTYPES = {int: np.int64, float: np.float64, bool: np.bool_}


@functools.cache
def keys_under(name: str, keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """The keys of a dict that is in a message under a name, and those that they have there."""
    start = f"{name}/" if name else ""
    return [(key.removeprefix(start), key) for key in keys if key.startswith(start) and key != PORT]


@functools.cache
def prefixed(name: str, keys: tuple[str, ...]) -> list[str]:
    return [f"{name}/{key}" for key in keys]


def value_of(hint: Any, where: str) -> Value:
    """The layout that a type annotation describes."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        others = [part for part in get_args(hint) if part is not NoneType]
        optional = len(others) < len(get_args(hint))
        hint = others[0] if len(others) == 1 else object
    kind = get_origin(hint) or hint
    while hasattr(kind, "__value__"):  # an alias made with TypeAliasType, as NumPy has them from Python 3.12 on
        kind = get_origin(kind.__value__) or kind.__value__
    if kind in (int, float, bool, NoneType, dict, np.ndarray):
        return Value(kind, optional)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        fields = tuple((name, value_of(hints[name], f"{where}.{name}")) for name in kind._fields)
        return Value(kind, optional, fields)
    raise TypeError(
        f"{where} is {hint}: it cannot travel between processes; use arrays, dicts of arrays, numbers or a codec"
    )


class Arguments:
    """The codec of a method whose arguments are arrays, dicts of arrays and numbers: columns under their names.

    One dict of arrays beside integers has no name: the message has the keys of the dict.
    """

    def __init__(self, arguments: int, columns: Sequence[tuple[int, str, Value]]) -> None:
        """`columns`: position, name and layout of the arguments that are not in the header."""
        self.arguments, self.columns = arguments, columns
        self.bare = next((i for i, name, _ in columns if not name), None)  # where the dict without a name is
        self.views = all((value.kind is np.ndarray and not value.optional) or not name for _, name, value in columns)

    def pack(self, *args: Any) -> Tree:
        if self.bare is not None:
            return args[self.bare]  # type: ignore[no-any-return]
        message: Tree = {}
        for i, name, value in self.columns:
            value.pack(name, args[i], message)
        return message

    def unpack(self, node: Any, message: Tree) -> list[Any]:
        """The integers are missing: None stands for each."""
        args: list[Any] = [None] * self.arguments
        for i, name, value in self.columns:
            args[i] = value.unpack(name, message)
        return args


class Source(NamedTuple):
    """Where a message came from. It is set by the host that received it, never by the sender."""

    channel: int
    number: int  # of the message in its channel, from 0, over all lives of the sender


class Check(Protocol):
    """What a message may contain, for those that come from an actor that the run did not start."""

    steps: int  # env steps that such a message brings

    def __call__(self, message: Tree) -> str: ...  # why it is refused; empty: it is not


@dataclass(frozen=True)
class Examples:
    """Example arguments and results of one port, for transports that must know the formats of messages beforehand.

    Without any, the port cannot be used over such a transport. Numbers need no Examples.
    """

    arguments: Sequence[tuple[Any, ...]] = ()
    results: Sequence[Any] = field(default=())
    check: Check | None = None


def example_messages(port: Port, given: Examples | None, index: int = 0) -> tuple[list[Tree], list[Tree]]:
    """Messages to a port, which is the index-th of its node; and of a call its replies."""
    if given is None:
        columns = port.codec.columns if isinstance(port.codec, Arguments) else None
        if columns is None or any(value.kind not in DTYPES for _, _, value in columns):
            raise TypeError(f"{port.name} has arguments whose shapes are unknown: give examples to program.add")
        given = Examples([tuple([0] * len(port.names))])
    there = [port.packer(index)(args) for args in given.arguments]
    if port.kind != CALL or not there:
        return there, []
    results = given.results or ([port.result.kind(0)] if port.result.kind in DTYPES else [])
    if not results:
        raise TypeError(f"{port.name} has a result whose shape is unknown: give examples to program.add")
    return there, [port.reply_with(np.zeros(1, np.int64), result) for result in results]
