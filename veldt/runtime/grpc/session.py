"""Session: the protocol's state at an actor or a site: its seats with their mailboxes, cells and rows. The stream and the
loop are the link's."""

import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import veldt
from veldt.counters import NAMES
from veldt.errors import UserError
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import ACK_S, HEARTBEAT_S, LinkLost
from veldt.runtime.grpc.mailboxes import Box, LinkCell, Mailbox
from veldt.runtime.grpc.wire import DATA, HOLD, QUIT, STATUS, STOPPING, Frame, Refused, frame
from veldt.runtime.proxies import CallerEnds
from veldt.shared import Cell

if TYPE_CHECKING:
    from veldt.runtime.grpc.link import Link

REPORT_S = 0.1  # between two reports of counts
MAX_COUNT = 1 << 53
MAX_LIFE = 1 << 40  # incarnation of a seat; a site multiplies it


class LinkRows:
    """The counts of the whole run (`shared.Rows`): the last that the run sent, and what was added here since."""

    def __init__(self, link: "Link") -> None:
        self._link = link
        self.mine = [0] * len(NAMES)  # counted in this session
        self.run = [0] * len(NAMES)
        self.counted = [0] * len(NAMES)  # how much of this session's is included in `run`

    def add(self, column: int, n: int) -> None:
        self.mine[column] += int(n)  # a numpy integer is not JSON

    def total(self, column: int) -> int:
        return self.run[column] + self.mine[column] - self.counted[column]

    @property
    def stopping(self) -> bool:
        """Reading this in the middle of a long step also keeps the stream alive."""
        self._link.keep_alive()
        return self._link.session.stopping


@dataclass(eq=False)
class LinkSeat:
    """One seat of a session."""

    name: str
    incarnation: int
    assignment: Any  # what the run asks for, unchecked
    ports: list[dict[str, Any]]  # descriptions of the mailboxes, as they were at first
    boxes: dict[str, Box]  # by the name of the lane
    counts: list[int]  # of this session
    reported: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    reported_at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # to be sent with the next counts

    def add(self, metrics: Mapping[str, float]) -> None:
        """Metrics for the next report; values that are not finite are left out."""
        self.metrics |= {name[:128]: float(x) for name, x in metrics.items() if -1e300 < x < 1e300}
        assert len(self.metrics) <= wire.MAX_METRICS, len(self.metrics)

    def next_report(self, channel: int, now: float, leaving: bool) -> bytes | None:
        news = bool(self.metrics) or self.reported != self.counts
        if not news or (now - self.reported_at <= REPORT_S and not leaving):
            return None
        report = {"counts": self.counts, "metrics": self.metrics}
        self.reported, self.metrics, self.reported_at = list(self.counts), {}, now
        return frame(wire.REPORT, wire.dump_json(report), channel=channel)


MakeBox = Callable[["Session", int, str, int, dict[str, Any]], Box]  # of seat, lane, channel and its description


def make_mailbox(session: "Session", seat: int, lane: str, channel: int, port: dict[str, Any]) -> Box:
    return Mailbox(session, channel, port)


class Session:
    """What an actor or a site has of the run: its seats, and the counts and flags of the run. Outlives each stream."""

    def __init__(
        self,
        link: "Link",
        seat: str,
        compress: bool,
        actors: int = 1,
        make_box: MakeBox = make_mailbox,
        id_: str = "",
    ) -> None:
        """`id_`: of a session that another process of the site began."""
        self.id, self._again, self._actors, self._make_box = id_ or secrets.token_hex(16), bool(id_), actors, make_box
        self._wanted, self.compress, self.wake, self.rows = seat, compress, link.wake, LinkRows(link)
        self.flags = 0
        self.stopping = self.hold = self.quit = False  # orders of the run
        self.welcome: dict[str, Any] | None = None  # the first one
        self.seats: list[LinkSeat] = []
        self.boxes: list[Box] = []  # of all seats, by channel
        self.cells: dict[str, LinkCell] = {}
        self.largest_frame = 4 << 20  # bytes
        self.sent_at = time.monotonic()

    @property
    def seat(self) -> str:
        return self.seats[0].name if self.seats else self._wanted

    @property
    def incarnation(self) -> int:
        return self.seats[0].incarnation

    @property
    def mailboxes(self) -> dict[str, Any]:
        """Of the first seat."""
        return self.seats[0].boxes

    def ends(self, node: str, cells: Mapping[str, Cell]) -> CallerEnds:
        calls = self.mailboxes.get(f"{node} calls")
        return CallerEnds(self.mailboxes.get(f"{node} stream"), calls, calls, cells)

    def report(self, metrics: dict[str, float]) -> None:
        self.seats[0].add(metrics)

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
            for seat in self.seats:
                seat.reported, seat.reported_at = [0] * len(NAMES), 0.0  # the counts are sent again
            self._set_status(STATUS.pack(*map(int, welcome["status"])))
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
            raise Refused(f"no welcome: {repr(error)[:200]}") from None
        self.welcome = self.welcome or welcome
        self.sent_at = time.monotonic()

    def _start(self, welcome: dict[str, Any]) -> None:
        if self.compress and not welcome.get("lz4"):
            raise UserError("The run's host cannot decompress: pip install 'veldt[lz4]' there.")
        described = [dict(seat) for seat in welcome["seats"]]
        if len(described) != self._actors or sum(len(seat["ports"]) for seat in described) > wire.MAX_CHANNELS:
            raise Refused("a welcome with another number of seats")
        for i, seat in enumerate(described):
            boxes: dict[str, Box] = {}
            for port in seat["ports"]:
                lane, channel = str(port["name"]), len(self.boxes)
                boxes[lane] = self._make_box(self, i, lane, channel, port)
                self.boxes.append(boxes[lane])
            counts = self.rows.mine if i == 0 else [0] * len(NAMES)
            name, life, told = str(seat["seat"]), int(seat["incarnation"]), seat.get("assignment")
            if not 0 <= life <= MAX_LIFE:
                raise Refused("a seat with an invalid incarnation")
            self.seats.append(LinkSeat(name, life, told, list(seat["ports"]), boxes, counts))
        self.cells = {str(name): LinkCell(self.wake, i) for i, name in enumerate(welcome["latest"])}
        largest = max((box.answer_formats.largest for box in self.boxes), default=0)
        self.largest_frame = max(self.largest_frame, largest + wire.HEADER.size)

    def _resume(self, welcome: dict[str, Any]) -> None:
        for seat, described in zip(self.seats, welcome["seats"], strict=True):
            if described["incarnation"] != seat.incarnation:
                raise LinkLost(f"The seat {seat.name} of the run was given to another actor.")
            for box, port in zip(seat.boxes.values(), described["ports"], strict=True):
                box.resend(int(port["written"]))
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
            takers: list[Any] = [*self.cells.values()] if kind == wire.VALUE else self.boxes
            if received.channel >= len(takers):
                raise Refused("a frame has an unknown channel")
            return bool(takers[received.channel].take(received))
        if kind == wire.HEARTBEAT:
            return self._set_status(received.payload)
        if kind != wire.END:
            raise Refused("the run sent a frame of a kind that only actors send")
        self.quit = True
        return True

    # Frames to send.

    def hello(self) -> bytes:
        hello = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": self.id, "seat": self.seat}
        if self._actors > 1:
            hello |= {"seat": "", "actors": self._actors}
        return frame(wire.HELLO, wire.dump_json(hello | {"again": self._again or self.welcome is not None}))

    @property
    def settled(self) -> bool:
        return all(box.settled for box in self.boxes)

    def next_frame(self, leaving: bool) -> bytes | None:
        """The frame to send now: messages first."""
        senders: list[Box | LinkCell] = [*self.boxes, *self.cells.values()]
        for sender in senders:
            if (data := sender.next_frame()) is not None:
                return data
        now = time.monotonic()
        for box in self.boxes:
            if box.ack_due(half=now - box.acked_at < ACK_S):
                return box.ack()
        for i, seat in enumerate(self.seats):
            if (data := seat.next_report(i, now, leaving)) is not None:
                return data
        return frame(wire.HEARTBEAT) if now - self.sent_at > HEARTBEAT_S else None
