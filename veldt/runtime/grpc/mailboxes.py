"""Mailboxes: the actor's end of each channel of its stream, and of each value that the run publishes."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from veldt.errors import UserError
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.wire import DATA, PART, Formats, Frame, Refused, frame
from veldt.runtime.shm.memory import Format

if TYPE_CHECKING:
    from veldt.runtime.grpc.session import Session

MAX_WINDOW = 1 << 16  # messages that may be unacknowledged
MAX_NUMBER = 1 << 53  # of a message


class Box(Protocol):
    """The actor's end of one channel, as the session sees it."""

    answer_formats: Formats
    acked_at: float  # when answers were acknowledged last

    def take(self, received: Frame) -> bool: ...  # an acknowledgement or an answer; whether there is something new
    def resend(self, written: int) -> None: ...  # over a new stream; the run has this many messages
    def next_frame(self) -> bytes | None: ...  # a message that was not sent over this stream
    def ack_due(self, half: bool) -> bool: ...  # whether answers are to be acknowledged; `half`: half a window of them
    def ack(self) -> bytes: ...

    @property
    def settled(self) -> bool: ...  # the run has all messages


class Mailbox:
    """The actor's end of one channel: messages to a node of the run, each kept until the run has it in shared memory; and,
    for calls, the node's answers."""

    def __init__(self, session: "Session", channel: int, port: dict[str, Any]) -> None:
        """`port` is the description of the lane in the run's welcome."""
        self._session, self._channel, self._window = session, channel, int(port["window"])
        if not 0 < self._window <= MAX_WINDOW or not all(
            0 <= int(port[name]) <= MAX_NUMBER for name in ("written", "tail")
        ):
            raise Refused("a channel with an invalid window or number")
        self._formats = Formats(wire.parse_formats(port["formats"]))
        self.kept: deque[bytes] = deque()  # frames that the run has not acknowledged
        self._base = int(port["written"])  # the number of the first of them
        self._sent = 0  # how many of them were sent over this stream
        self.answer_formats = Formats(wire.parse_formats(port["answers"] or []), finite=False)
        self._answers: deque[Tree] = deque()
        self._next = self._acked = int(port["tail"])  # numbers of the next answer, and of the next to acknowledge
        self.acked_at = 0.0
        self.check: Callable[[Tree], str] | None = None  # of answers: why one is refused

    # For the actor.

    def expect(self, messages: Sequence[Tree], answers: Sequence[Tree]) -> None:
        """Raises a UserError unless the run takes these messages and sends these answers, and no others."""
        for message in messages:
            self._formats.pack(message)
        ours = [[Format.of(tree).columns for tree in trees] for trees in (messages, answers)]
        if [self._formats.described, self.answer_formats.described] != ours:
            raise UserError("The messages of the run and of this actor differ; install the same version of Veldt on both.")

    @property
    def written(self) -> int:
        return self._base + len(self.kept)

    @property
    def settled(self) -> bool:
        return not self.kept

    def put(self, tree: Tree) -> bool:
        """False: too many messages are not acknowledged; keep it and try again."""
        if len(self.kept) >= self._window:
            return False
        format_, flags, parts = self._formats.pack(tree, self._session.compress)
        number, ack = self.written, self._next
        self.kept.append(frame(DATA, *parts, channel=self._channel, format_=format_, flags=flags, number=number, ack=ack))
        self._acked, self.acked_at = ack, time.monotonic()
        self._session.wake()
        return True

    def peek(self) -> Tree | None:
        return self._answers[0] if self._answers else None

    def pop(self) -> None:
        self._answers.popleft()

    # For the session.

    def take(self, received: Frame) -> bool:
        """Takes an acknowledgement, and an answer if the frame has one; whether there is something new."""
        self._acknowledged(received.ack)
        if received.kind == wire.ACK:
            return True
        if received.number < self._next:
            return False  # a duplicate, from an earlier stream
        if received.number > self._next:
            raise Refused("a reply is missing")
        answer = self.answer_formats.unpack(received)
        if len(self._answers) >= self._window:
            raise Refused("more replies than requests")
        if self.check is not None and (why := self.check(answer)):
            raise Refused(why)
        self._answers.append(answer)
        self._next += 1
        if self.ack_due(half=True):
            self._session.wake()
        return True

    def _acknowledged(self, count: int) -> None:
        """The run has all messages before this number."""
        if count > self.written:
            raise Refused("the run acknowledges a message that was never sent")
        for _ in range(count - self._base):
            self.kept.popleft()
            self._base += 1
            self._sent = max(0, self._sent - 1)

    def resend(self, written: int) -> None:
        """Sends, over a new stream, all messages that the run does not have."""
        self._acknowledged(written)
        self._sent = 0

    def next_frame(self) -> bytes | None:
        if self._sent == len(self.kept):
            return None
        self._sent += 1
        return self.kept[self._sent - 1]

    def ack_due(self, half: bool) -> bool:
        unacknowledged = self._next - self._acked
        return 2 * unacknowledged >= self._window if half else unacknowledged > 0

    def ack(self) -> bytes:
        self._acked, self.acked_at = self._next, time.monotonic()
        return frame(wire.ACK, channel=self._channel, ack=self._acked)


class LinkCell:
    """The newest version of a value (`shared.Cell`). The actor asks for a version newer than its own; the run sends it as
    soon as there is one."""

    def __init__(self, wake: Callable[[], None], channel: int) -> None:
        self._wake, self._channel = wake, channel
        self._value: tuple[int, Tree] | None = None
        self._have: int | None = None  # the version of the actor, which wants a newer one
        self._asked = False  # over this stream
        self._parts, self._tag = bytearray(), 0
        self.check: Callable[[Tree], str] | None = None  # of values: why one is refused

    def read(self, have: int) -> tuple[int, Tree] | None:
        value = self._value
        if value is not None and value[0] == have:
            value = None
        if value is None and self._have is None:
            self._have, self._asked = have, False
            self._wake()
        return value

    def write(self, tag: int, value: Tree) -> None:
        raise NotImplementedError("an actor cannot publish values")

    def next_frame(self) -> bytes | None:
        if self._asked or self._have is None:
            return None
        self._asked = True
        return frame(wire.WANT, channel=self._channel, number=self._have)

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
        if total > wire.MAX_BYTES:
            raise Refused(f"a value of {total} bytes")
        self._parts += part
        if len(self._parts) < total:
            return False
        value = wire.unpack_value(self._parts)
        if self.check is not None and (why := self.check(value)):
            raise Refused(why)
        self._value, self._parts, self._have = (self._tag, value), bytearray(), None
        return True
