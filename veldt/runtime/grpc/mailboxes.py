"""Mailboxes: what an actor has of a run that it reaches over gRPC, that is outboxes, inboxes, cells and rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from veldt.counters import NAMES
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.wire import ACK, DATA, PART, WANT, Formats, Frame, Refused, frame

if TYPE_CHECKING:
    from veldt.runtime.grpc.link import Link
    from veldt.runtime.grpc.session import Session


class LinkOutbox:
    """Messages to one node of the run, each kept until the run has it in shared memory."""

    def __init__(self, session: Session, channel: int, port: dict[str, Any]) -> None:
        """`port` is the description of the port in the run's welcome."""
        self._session, self._channel = session, channel
        self._formats = Formats(wire.parse_formats(port["formats"]))
        self.window = int(port["window"])
        self._kept: deque[bytes] = deque()  # frames that are not acknowledged
        self._base = int(port["written"])  # the number of the first of them
        self._sent = 0  # how many of them were sent over this stream

    @property
    def written(self) -> int:
        return self._base + len(self._kept)

    @property
    def settled(self) -> bool:
        return not self._kept

    def put(self, tree: Tree) -> bool:
        """False: too many messages are not acknowledged; keep it and try again."""
        if len(self._kept) >= self.window:
            return False
        session = self._session
        format_, flags, parts = self._formats.pack(tree, session.compress)
        inbox, number = session.inboxes[self._channel], self._base + len(self._kept)
        ack = 0 if inbox is None else inbox.acknowledge()
        self._kept.append(frame(DATA, *parts, channel=self._channel, format_=format_, flags=flags, number=number, ack=ack))
        session.wake()
        return True

    def next_frame(self) -> bytes | None:
        if self._sent == len(self._kept):
            return None
        self._sent += 1
        return self._kept[self._sent - 1]

    def acknowledged(self, count: int) -> None:
        """The run has all messages before this number."""
        if not self._base <= count <= self._base + len(self._kept):
            if count < self._base:
                return
            raise Refused("the run acknowledges a message that was never sent")
        for _ in range(count - self._base):
            self._kept.popleft()
        self._sent = max(0, self._sent - (count - self._base))
        self._base = count

    def resend(self, written: int) -> None:
        """Sends, over a new stream, all messages that the run does not have."""
        self.acknowledged(written)
        self._sent = 0


class LinkInbox:
    """Answers of one node of the run."""

    def __init__(self, channel: int, port: dict[str, Any]) -> None:
        """`port` is the description of the port in the run's welcome."""
        self._channel = channel
        self._formats = Formats(wire.parse_formats(port["answers"]), finite=False)
        self.largest = self._formats.largest  # bytes of an answer
        self.slots = int(port["window"])
        self._next = int(port["tail"])  # the number of the next answer
        self._acked = self._next
        self._trees: deque[Tree] = deque()

    @property
    def waiting(self) -> int:
        return len(self._trees)

    def peek(self) -> Tree | None:
        return self._trees[0] if self._trees else None

    def pop(self) -> None:
        self._trees.popleft()

    def acknowledge(self) -> int:
        """The number of answers received, for a frame that is about to be sent."""
        self._acked = self._next
        return self._next

    def take(self, received: Frame) -> bool:
        if received.number < self._next:
            return False  # a duplicate, from an earlier stream
        if received.number > self._next:
            raise Refused("an answer is missing")
        self._trees.append(self._formats.unpack(received))
        self._next += 1
        return True

    @property
    def unacknowledged(self) -> int:
        return self._next - self._acked

    def ack(self) -> bytes:
        return frame(ACK, channel=self._channel, ack=self.acknowledge())


class LinkCell:
    """The newest version of a value (`shared.Cell`). The actor asks for a version newer than its own; the run sends it as
    soon as there is one."""

    def __init__(self, wake: Callable[[], None], channel: int) -> None:
        self._wake, self._channel = wake, channel
        self._value: tuple[int, Tree] | None = None
        self._wanted = False  # and not received yet
        self._have = -1
        self._asked = False  # over this stream
        self._parts, self._tag = bytearray(), 0

    def read(self, have: int) -> tuple[int, Tree] | None:
        value = self._value
        if value is not None and value[0] == have:
            value = None
        if value is None and not self._wanted:
            self._wanted, self._asked, self._have = True, False, have
            self._wake()
        return value

    def write(self, tag: int, value: Tree) -> None:
        raise NotImplementedError("an actor cannot publish values")

    def next_frame(self) -> bytes | None:
        if self._asked or not self._wanted:
            return None
        self._asked = True
        return frame(WANT, channel=self._channel, number=self._have)

    def ask_again(self) -> None:
        """Repeats the request over a new stream."""
        self._asked, self._parts = False, bytearray()

    def take(self, received: Frame) -> bool:
        """Adds one part; True: the value is complete."""
        if len(received.payload) < PART.size:
            raise Refused("a part of a value is too short")
        offset, total = PART.unpack_from(received.payload)
        part = received.payload[PART.size :]
        if offset == 0:
            self._parts, self._tag = bytearray(), received.number
        if offset != len(self._parts) or received.number != self._tag or offset + len(part) > total:
            raise Refused("a part of a value is missing")
        self._parts += part
        if len(self._parts) < total:
            return False
        self._value, self._parts = (wire.signed(self._tag), wire.unpack_value(self._parts)), bytearray()
        self._wanted = False
        return True


class LinkRows:
    """The counts of the whole run (`shared.Rows`): the last that the run sent, and what was added here since."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.mine = [0] * len(NAMES)  # counted in this session
        self.run = [0] * len(NAMES)
        self.counted = [0] * len(NAMES)  # how much of `mine` is included in `run`

    def add(self, column: int, n: int) -> None:
        self.mine[column] += int(n)  # a numpy integer is not JSON

    def total(self, column: int) -> int:
        return self.run[column] + self.mine[column] - self.counted[column]

    @property
    def stopping(self) -> bool:
        """Reading this in the middle of a long step also keeps the stream alive."""
        self._link.keep_alive()
        return self._link.session.stopping
