"""Session: the protocol's state at the actor: its mailboxes, cells and rows. The stream and the loop are the link's."""

import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import veldt
from veldt.counters import NAMES
from veldt.errors import UserError
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import ACK_S, HEARTBEAT_S, LinkLost
from veldt.runtime.grpc.wire import DATA, HOLD, PART, QUIT, STATUS, STOPPING, Formats, Frame, Refused, frame
from veldt.runtime.proxies import CallerEnds
from veldt.runtime.shm.memory import Format
from veldt.shared import Cell

if TYPE_CHECKING:
    from veldt.runtime.grpc.link import Link

REPORT_S = 0.1  # between two reports of counts
MAX_WINDOW = 1 << 16  # messages that may be unacknowledged
MAX_COUNT = 1 << 53


class Mailbox:
    """The actor's end of one channel: messages to a node of the run, each kept until the run has it in shared memory; and,
    for calls, the node's answers."""

    def __init__(self, session: "Session", channel: int, port: dict[str, Any]) -> None:
        """`port` is the description of the lane in the run's welcome."""
        self._session, self._channel, self._window = session, channel, int(port["window"])
        if not 0 < self._window <= MAX_WINDOW or min(int(port["written"]), int(port["tail"])) < 0:
            raise Refused("a channel with an invalid window")
        self._formats = Formats(wire.parse_formats(port["formats"]))
        self.kept: deque[bytes] = deque()  # frames that the run has not acknowledged
        self._base = int(port["written"])  # the number of the first of them
        self._sent = 0  # how many of them were sent over this stream
        self.answer_formats = Formats(wire.parse_formats(port["answers"] or []), finite=False)
        self._answers: deque[Tree] = deque()
        self._next = self._acked = int(port["tail"])  # numbers of the next answer, and of the next to acknowledge
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

    def put(self, tree: Tree) -> bool:
        """False: too many messages are not acknowledged; keep it and try again."""
        if len(self.kept) >= self._window:
            return False
        format_, flags, parts = self._formats.pack(tree, self._session.compress)
        number, ack = self.written, self._next
        self.kept.append(frame(DATA, *parts, channel=self._channel, format_=format_, flags=flags, number=number, ack=ack))
        self._acked = ack
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
        self._acked = self._next
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


class LinkRows:
    """The counts of the whole run (`shared.Rows`): the last that the run sent, and what was added here since."""

    def __init__(self, link: "Link") -> None:
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


class Session:
    """What an actor has of the run: its seat, its mailboxes, and the counts and flags of the run. Outlives each stream."""

    def __init__(self, link: "Link", seat: str, compress: bool) -> None:
        self.id = secrets.token_hex(16)
        self.seat, self.compress, self.wake, self.rows = seat, compress, link.wake, LinkRows(link)
        self.incarnation = self.flags = 0
        self.stopping = self.hold = self.quit = False  # orders of the run
        self.welcome: dict[str, Any] | None = None  # the first one
        self.mailboxes: dict[str, Mailbox] = {}  # by the name of the lane
        self.cells: dict[str, LinkCell] = {}
        self._senders: list[Mailbox | LinkCell] = []  # both
        self.largest_frame = 4 << 20  # bytes
        self.sent_at = time.monotonic()
        self._reported_at, self._reported = 0.0, [0] * len(NAMES)
        self._metrics: dict[str, float] = {}

    def ends(self, node: str, cells: Mapping[str, Cell]) -> CallerEnds:
        calls = self.mailboxes.get(f"{node} calls")
        return CallerEnds(self.mailboxes.get(f"{node} stream"), calls, calls, cells)

    def report(self, metrics: dict[str, float]) -> None:
        """Sends metrics with the next counts; values that are not finite are left out."""
        self._metrics |= {name[:128]: float(x) for name, x in metrics.items() if -1e300 < x < 1e300}
        assert len(self._metrics) <= wire.MAX_METRICS, len(self._metrics)

    # Frames that arrive.

    def accept(self, received: Frame) -> None:
        """Starts the session with the run's welcome, or resumes it over a new stream."""
        if received.kind != wire.WELCOME:
            raise Refused("no welcome")
        welcome = wire.load_json(received.payload, self.largest_frame)
        try:
            if self.welcome is None:
                self._start(welcome)
            else:
                self._resume(welcome)
            self._reported, self._reported_at = [0] * len(NAMES), 0.0  # the counts are sent again
            self._set_status(STATUS.pack(*map(int, welcome["status"])))
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
            raise Refused(f"no welcome: {repr(error)[:200]}") from None
        self.welcome = self.welcome or welcome
        self.sent_at = time.monotonic()

    def _start(self, welcome: dict[str, Any]) -> None:
        if self.compress and not welcome.get("lz4"):
            raise UserError("The run's host cannot decompress: pip install 'veldt[lz4]' there.")
        self.seat, self.incarnation = str(welcome["seat"]), int(welcome["incarnation"])
        self.mailboxes = {str(port["name"]): Mailbox(self, i, port) for i, port in enumerate(welcome["ports"])}
        self.cells = {str(name): LinkCell(self.wake, i) for i, name in enumerate(welcome["latest"])}
        self._senders = [*self.mailboxes.values(), *self.cells.values()]
        largest = max((mailbox.answer_formats.largest for mailbox in self.mailboxes.values()), default=0)
        self.largest_frame = max(self.largest_frame, largest + wire.HEADER.size)

    def _resume(self, welcome: dict[str, Any]) -> None:
        if welcome["incarnation"] != self.incarnation:
            raise LinkLost(f"The seat {self.seat} of the run was given to another actor.")
        for mailbox, port in zip(self.mailboxes.values(), welcome["ports"], strict=True):
            mailbox.resend(int(port["written"]))
        for cell in self.cells.values():
            cell.ask_again()

    def _set_status(self, payload: bytes | memoryview) -> bool:
        """Whether the flags have changed."""
        if len(payload) != STATUS.size:
            raise Refused("a status has the wrong size")
        before = self.flags
        flags, *counts = STATUS.unpack(payload)
        if min(counts) < 0 or max(counts) > MAX_COUNT:
            raise Refused("a status with invalid counts")
        self.flags = flags
        self.stopping, self.hold, self.quit = (bool(self.flags & flag) for flag in (STOPPING, HOLD, QUIT))
        self.rows.run, self.rows.counted = counts[: len(NAMES)], counts[len(NAMES) :]
        return self.flags != before

    def take(self, received: Frame) -> bool:
        """Handles a frame; whether there is something new for the actor."""
        kind = received.kind
        if kind in (DATA, wire.ACK, wire.VALUE):
            boxes, cells = self.mailboxes.values(), self.cells.values()
            takers: list[Mailbox | LinkCell] = [*cells] if kind == wire.VALUE else [*boxes]
            if received.channel >= len(takers):
                raise Refused("a frame has an unknown channel")
            return takers[received.channel].take(received)
        if kind == wire.HEARTBEAT:
            return self._set_status(received.payload)
        if kind != wire.END:
            raise Refused("the run sent a frame of a kind that only actors send")
        self.quit = True
        return True

    # Frames to send.

    def hello(self) -> bytes:
        hello = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": self.id, "seat": self.seat}
        return frame(wire.HELLO, wire.dump_json(hello | {"again": self.welcome is not None}))

    def next_frame(self, leaving: bool) -> bytes | None:
        """The frame to send now: messages first."""
        for sender in self._senders:
            if (data := sender.next_frame()) is not None:
                return data
        now = time.monotonic()
        for mailbox in self.mailboxes.values():
            if mailbox.ack_due(half=now - self.sent_at < ACK_S):
                return mailbox.ack()
        news = bool(self._metrics) or self._reported != self.rows.mine
        if news and (now - self._reported_at > REPORT_S or leaving):
            report = {"counts": self.rows.mine, "metrics": self._metrics}
            self._reported, self._metrics, self._reported_at = list(self.rows.mine), {}, now
            return frame(wire.REPORT, wire.dump_json(report))
        return frame(wire.HEARTBEAT) if now - self.sent_at > HEARTBEAT_S else None
