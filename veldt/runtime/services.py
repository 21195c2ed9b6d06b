"""Services: call a node for callers in other processes. They follow from the node's ports (`veldt.ports`)."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from veldt.metrics import STREAM
from veldt.ports import CALL, PORT, REPLY, RESULT, Port, Source
from veldt.records.tree import Tree
from veldt.runtime.proxies import Inbox, Outbox
from veldt.shared import Cell

MAX_VIEWS = 1000  # messages whose arguments are kept
UNUSED_S = 0.005  # between two polls for a first call
# What a stream's numbers are called. A node class may have names of its own (`STREAM_NAMES`); those that it leaves out are
# not reported.
STREAM_NAMES = {"messages": "stream_blocks", "bytes": "stream_bytes", "fill": "queue_fill", "refusing": "refusing"}


class Requests(Inbox, Protocol):
    """The receiving end of a ring."""

    slots: int  # capacity in messages; known once a message has arrived

    def peek(self, ahead: int = 0) -> Tree | None: ...  # the message this many behind the oldest

    @property
    def waiting(self) -> int: ...

    @property
    def popped(self) -> int: ...  # messages, over all incarnations


class Replies(Outbox, Protocol):
    def ring(self) -> None: ...  # wakes the reader, once for all messages put since the last ring
    def recent(self) -> list[Tree]: ...  # views of the newest messages, read or not, of any incarnation


class StreamService:
    """Calls the node with the messages that arrive, in order for each sender.

    Senders take turns, one message each. Once a port has refused a message it gets no other one in this step, and the
    sender of that message is first next time, so that all get their share. Other ports go on.
    """

    METRICS: ClassVar = STREAM

    def __init__(self, node: Any, ports: Mapping[str, Port], inboxes: Sequence[Requests]) -> None:
        self._node, self._inboxes = node, inboxes
        self._ports: list[tuple[Port, Any]] = [(port, getattr(node, port.name, None)) for port in ports.values()]
        self.messages = self.bytes = 0  # ever
        self._polls = self._refused = 0  # polls that found messages; messages that the node refused
        self._fill = 0.0  # sum over polls of the fill of the fullest ring
        self._turn = 0  # whose message is next
        self._names: Mapping[str, str] = getattr(node, "STREAM_NAMES", STREAM_NAMES)

    def step(self) -> bool:
        waiting = [inbox.waiting for inbox in self._inboxes]  # later ones wait: other nodes share this process
        left = sum(waiting)
        if not left:
            return False
        self._polls += 1
        self._fill += max(n / self._inboxes[i].slots for i, n in enumerate(waiting) if n)
        worked, refused = False, set[int]()  # ports that refused a message in this step
        turn, first = self._turn, -1
        while left:
            if waiting[turn]:
                if self._deliver(turn, self._inboxes[turn], refused):
                    waiting[turn] -= 1
                    left -= 1
                    worked = True
                else:
                    first = turn if first < 0 else first
                    left -= waiting[turn]
                    waiting[turn] = 0  # its later messages wait for this one
            turn = (turn + 1) % len(waiting)
        self._turn = turn if first < 0 else first
        self._refused += bool(refused)
        return worked

    def _deliver(self, channel: int, inbox: Requests, refused: set[int]) -> bool:
        """Calls the node with the oldest message of a sender, unless that port has refused another one."""
        message = inbox.peek()
        assert message is not None
        index, *integers = message[PORT].tolist()
        if index in refused:
            return False
        port, method = self._ports[index]
        args = fill(list(port.codec.unpack(self._node, message)), port, integers)
        source = {"source": Source(channel, inbox.popped)} if port.source else {}
        if is_no(method(*args, **source)):
            refused.add(index)
            return False
        self.messages += 1
        self.bytes += sum([x.nbytes for x in message.values()])
        inbox.pop()
        return True

    def metrics(self) -> dict[str, float]:
        polls, refused, fill = self._polls, self._refused, self._fill
        self._polls, self._refused, self._fill = 0, 0, 0.0
        numbers = {"messages": float(self.messages), "bytes": float(self.bytes)}
        numbers |= {"fill": fill / max(1, polls), "refusing": refused / max(1, polls)}
        return {name: numbers[what] for what, name in self._names.items()}


def is_no(result: Any) -> bool:
    """Whether a method said False, of Python or of NumPy."""
    return isinstance(result, (bool, np.bool_)) and not result


def fill(args: list[Any], port: Port, integers: Sequence[int]) -> list[Any]:
    """Adds the integers, which are at the end of a message's header, to its other arguments."""
    for i, integer in zip(port.keys, integers, strict=True):
        args[i] = integer
    return args


class ServiceEnds(NamedTuple):
    """A node's ends of the calls of one caller."""

    calls: Requests
    replies: Replies


Place = tuple[int, ...]  # of a call: its channel, the index of its port, the integers among its arguments
NOTHING: tuple[None, list[Any]] = (None, [])


class CallService:
    """Answers the calls of all callers; a node may collect calls and answer them as a batch.

    A request stays in its ring until it is answered. Replies are sent before work that no caller waits for (`after`).
    """

    def __init__(self, node: Any, ports: Mapping[str, Port], callers: Sequence[ServiceEnds]) -> None:
        self._node, self._callers = node, callers
        self.used = False  # a call has arrived
        self._poll_at = 0.0
        self._ports: list[tuple[Port, Any]] = [(port, getattr(node, port.name, None)) for port in ports.values()]
        self._names = {name: i for i, name in enumerate(ports)}
        self._recv = [getattr(node, port.reply) if port.reply else None for port in ports.values()]
        self._after = [getattr(node, port.after) for port in ports.values() if port.after]
        self._dues = [port.due for port in ports.values() if port.due]
        self._views: dict[int, tuple[Tree, list[Any]]] = {}
        self._taken: list[deque[int]] = [deque() for _ in callers]  # numbers of requests that wait in their ring, handled
        self._done: list[set[int]] = [set() for _ in callers]  # numbers of requests to pop once all older ones are done
        self._open: dict[Place, tuple[int, Sequence[Any]]] = {}  # numbers and arguments of calls that the node has accepted
        self._unsent: list[tuple[int, int, Tree]] = []  # channel, number of the call, and reply: they wait for room
        self._number = np.zeros(1, np.int64)  # of the call that is replied to
        # Requests that an earlier incarnation has answered and perhaps not popped.
        self._answered = [{int(reply[REPLY][0]) for reply in ends.replies.recent()} for ends in callers]

    def step(self) -> bool:
        if not self.used:  # polling a ring that its writer has not opened is a system call
            now = time.monotonic()
            if now < self._poll_at:
                return False
            self._poll_at = now + UNUSED_S
            if not any(ends.calls.waiting for ends in self._callers):
                return False
            self.used = True
        worked = False
        for channel, ends in enumerate(self._callers):
            taken, peek = self._taken[channel], ends.calls.peek
            while (message := peek(len(taken))) is not None and (number := self._take(channel, message)) is not None:
                taken.append(number)
                worked = True
        if self._open or self._unsent:
            worked |= self._answer()
        for channel, done in enumerate(self._done):
            if done:  # up to the oldest that is not
                taken, pop = self._taken[channel], self._callers[channel].calls.pop
                while taken and taken[0] in done:
                    pop()
                    done.discard(taken.popleft())
        return worked

    @property
    def rest(self) -> float:
        """Seconds until the next step is needed if no request arrives."""
        if not self._open or not self._dues:
            return math.inf
        return min(float(getattr(self._node, name)) for name in self._dues) - time.monotonic()

    def _take(self, channel: int, message: Tree) -> int | None:
        """Passes one request to the node, and returns its number. None: not now."""
        number: int
        index, number, *integers = message[PORT].tolist()
        if number in self._answered[channel]:
            self._done[channel].add(number)
            return number
        port, method = self._ports[index]
        # A ring has the same views for all messages of a slot, so the arguments are kept.
        message_, args = self._views.get(id(message), NOTHING)
        if message_ is not message:
            args = self._unpack(port, message)
        for i, integer in zip(port.keys, integers, strict=True):
            args[i] = integer
        place = (channel, index, *integers)
        if port.kind != CALL:
            self._withdraw((channel, self._names[port.cancels], *integers))
            method(*args)
            self._done[channel].add(number)
            return number
        if self._recv[index] is None:
            self._withdraw(place)  # of an earlier incarnation of the caller: one has a single call open with this key
        elif place in self._open or not method(*args):
            return None
        self._open[place] = number, args
        return number

    def _unpack(self, port: Port, message: Tree) -> list[Any]:
        args = list(port.codec.unpack(self._node, message))
        if port.codec.views:
            if len(self._views) > MAX_VIEWS:
                self._views.clear()
            self._views[id(message)] = message, args
        return args

    def _withdraw(self, place: Place) -> None:
        earlier = self._open.pop(place, None)
        if earlier is not None:
            self._done[place[0]].add(earlier[0])

    def _answer(self) -> bool:
        """Sends the replies that the node has."""
        sent = False
        if self._unsent:
            waiting, self._unsent = self._unsent, []
            sent = any([self._send(*reply) for reply in waiting])
        found_any = False
        for place, (number, args) in list(self._open.items()):
            recv = self._recv[place[1]]
            found = self._ports[place[1]][1](*args) if recv is None else recv(*place[2:])
            if found is not None and not is_no(found):
                del self._open[place]
                found_any = True
                self._number[0] = number
                sent |= self._send(place[0], number, self._ports[place[1]][0].reply_with(self._number, found))
        if sent:
            for ends in self._callers:
                ends.replies.ring()
        if found_any:
            for after in self._after:
                after()
        return sent

    def _send(self, channel: int, number: int, reply: Tree) -> bool:
        if self._callers[channel].replies.put(reply):
            self._done[channel].add(number)
            return True
        self._unsent.append((channel, number, reply | {REPLY: np.array([number], np.int64)}))
        return False


class LatestService:
    """Publishes a node's newest values in their cells."""

    def __init__(self, node: Any, ports: Mapping[str, Port], cells: Mapping[str, Cell]) -> None:
        self._values = [(getattr(node, name), ports[name].result, cell) for name, cell in cells.items()]
        self._versions = [-1] * len(self._values)

    def step(self) -> bool:
        worked = False
        for i, (method, result, cell) in enumerate(self._values):
            value = method(self._versions[i])
            if value is not None and value[0] != self._versions[i]:
                message: Tree = {}
                result.pack(RESULT, value, message)
                self._versions[i] = int(value[0])
                cell.write(self._versions[i], message)
                worked = True
        return worked
