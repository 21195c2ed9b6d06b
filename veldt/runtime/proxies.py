"""Proxies: each stands for a node in another process. Its methods follow from the node's ports (`veldt.ports`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from veldt.ports import LATEST, PORT, REPLY, RESULT, Port
from veldt.records.tree import Tree
from veldt.shared import Cell


class Outbox(Protocol):
    def put(self, tree: Tree) -> bool: ...  # False: full

    @property
    def written(self) -> int: ...  # messages ever put, over all incarnations


class Inbox(Protocol):
    def peek(self) -> Tree | None: ...  # views of the oldest message, valid until it is popped
    def pop(self) -> None: ...


class CallerEnds(NamedTuple):
    """A caller's ends of its channel to one node."""

    stream: Outbox | None = None
    calls: Outbox | None = None
    replies: Inbox | None = None
    cells: Mapping[str, Cell] = {}


class Proxy:
    """Has a method for each port of a node, and its constants. Names with an underscore are its own: no port has one."""

    def __init__(self, ports: Mapping[str, Port], ends: CallerEnds, constants: Mapping[str, Any] | None = None) -> None:
        vars(self).update(constants or {})
        stream = None if ends.stream is None else _Buffered(ends.stream)
        self._calls = None if ends.calls is None or ends.replies is None else _Calls(ends.calls, ends.replies)
        self._outboxes = [out for out in (stream, self._calls) if out is not None]
        for index, port in enumerate(ports.values()):
            if port.kind == LATEST:
                setattr(self, port.name, _Latest(port, ends.cells[port.name]))
            elif not port.with_calls:
                if stream is not None:
                    setattr(self, port.name, _Stream(port, index, stream))
            elif self._calls is not None:
                called = _Call(port, index, self._calls)
                setattr(self, port.name, called)
                if port.cancels:
                    setattr(self, port.name, called.cancel)
                elif port.reply:
                    setattr(self, port.name, called.send)
                    setattr(self, port.reply, called.recv)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a node in another process cannot be used here: it is not a port, or its examples are missing"
        )


def outboxes_of(proxy: Proxy) -> list[_Buffered]:
    """Those with messages that had to wait for room are drained by the process's loop."""
    return proxy._outboxes


def makes_calls(proxy: Proxy) -> bool:
    """Whether it has made any."""
    return proxy._calls is not None and proxy._calls.made > 0


class _Buffered:
    """An outbox, and the messages that had to wait for room in it."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self.messages: deque[Tree] = deque()

    def put(self, message: Tree) -> bool:
        return (not self.messages or self.drain()) and self._put(message)

    def _put(self, message: Tree) -> bool:
        return self._out.put(message)

    def keep(self, message: Tree) -> None:
        self.messages.append({name: x.copy() for name, x in message.items()})
        self.drain()

    def drain(self) -> bool:
        while self.messages:
            if not self._put(self.messages[0]):
                return False
            self.messages.popleft()
        return True


class _Stream:
    def __init__(self, port: Port, index: int, out: _Buffered) -> None:
        self._port, self._pack, self._out = port, port.packer(index), out

    def __call__(self, *args: Any, **kwargs: Any) -> bool | None:
        message = self._pack(self._port.bind(args, kwargs))
        if self._port.refuses:
            return self._out.put(message)
        if not self._out.put(message):
            self._out.keep(message)
        return None


Place = tuple[int, ...]  # the index of a port, and the integers among the arguments of a call


class _Calls(_Buffered):
    """The calls of one caller to one node. A reply has the number of its call; replies to an earlier life are dropped."""

    def __init__(self, out: Outbox, replies: Inbox) -> None:
        super().__init__(out)
        self._replies = replies
        self.made = 0
        self.waiting: dict[Place, int] = {}  # the numbers of open calls, and of those that were answered
        self._open: dict[int, tuple[Place, Port]] = {}
        self._answers: dict[Place, Any] = {}
        self._number = 0  # of the newest message

    def _put(self, message: Tree) -> bool:
        message[PORT][1] = self._number = self._out.written
        return self._out.put(message)

    def ask(self, port: Port, place: Place, message: Tree) -> bool:
        if (self.messages and not self.drain()) or not self._put(message):
            return False
        self.made += 1
        self.waiting[place] = self._number
        self._open[self._number] = place, port
        return True

    def answer(self, place: Place) -> Any:
        """The reply to the call that is open there; None: not yet."""
        replies, answers = self._replies, self._answers
        while place not in answers and (message := replies.peek()) is not None:
            found = self._open.pop(message[REPLY].item(), None)
            if found is not None:
                answers[found[0]] = found[1].read_reply(message)
            replies.pop()
        answer = answers.pop(place, None)
        if answer is not None:
            del self.waiting[place]
        return answer

    def forget(self, key: tuple[int, ...]) -> None:
        for place in [place for place in self.waiting if place[1:] == key]:
            self._open.pop(self.waiting.pop(place), None)
            self._answers.pop(place, None)


class _Call:
    def __init__(self, port: Port, index: int, calls: _Calls) -> None:
        self._port, self._index, self._calls, self._arguments = port, index, calls, len(port.names)
        self._pack = port.packer(index)
        self._not_yet = False if port.result.kind is bool else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != self._arguments:
            args = self._port.bind(args, kwargs)
        place = self._place(args)
        if place not in self._calls.waiting and not self._calls.ask(self._port, place, self._pack(args)):
            return self._not_yet
        found = self._calls.answer(place)
        return self._not_yet if found is None else found

    def send(self, *args: Any, **kwargs: Any) -> bool:
        if kwargs or len(args) != self._arguments:
            args = self._port.bind(args, kwargs)
        return self._calls.ask(self._port, self._place(args), self._pack(args))

    def recv(self, *key: int) -> Any:
        return self._calls.answer((self._index, *key))

    def _place(self, args: tuple[Any, ...]) -> Place:
        return (self._index, *map(args.__getitem__, self._port.keys))

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        args = self._port.bind(args, kwargs)
        self._calls.forget(self._place(args)[1:])
        self._calls.keep(self._pack(args))


class _Latest:
    def __init__(self, port: Port, cell: Cell) -> None:
        self._port, self._cell = port, cell

    def __call__(self, have: int = -1) -> Any:
        found = self._cell.read(have)
        return None if found is None else self._port.result.unpack(RESULT, found[1])
