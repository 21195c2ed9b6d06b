"""Session: the protocol's state at the actor. It decides which frame is sent next and handles those that arrive; the stream
and the event loop are the link's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import veldt
from veldt.counters import NAMES
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import ACK_S, HEARTBEAT_S, LinkLost
from veldt.runtime.grpc.mailboxes import LinkCell, LinkInbox, LinkOutbox, LinkRows
from veldt.runtime.grpc.wire import (
    ACK,
    DATA,
    END,
    HEARTBEAT,
    HELLO,
    HOLD,
    QUIT,
    REPORT,
    STATUS,
    STOPPING,
    VALUE,
    WELCOME,
    Frame,
    Refused,
    frame,
)
from veldt.runtime.proxies import CallerEnds
from veldt.shared import Cell

REPORT_S = 0.1  # between two reports of counts


class Session:
    """What an actor has of the run: its seat, its mailboxes, and the counts and flags of the run. Outlives each stream."""

    def __init__(self, seat: str, compress: bool, wake: Callable[[], None], rows: LinkRows) -> None:
        """`wake` wakes the writer of the stream: there is something to send."""
        self.id = secrets.token_hex(16)
        self.seat, self.compress, self.wake, self.rows = seat, compress, wake, rows
        self.incarnation = 0
        self.flags = 0
        self.welcome: dict[str, Any] | None = None  # the first one
        self.outboxes: list[LinkOutbox] = []
        self.inboxes: list[LinkInbox | None] = []
        self._cells: list[LinkCell] = []
        self._channels: dict[str, int] = {}
        self._cell_numbers: dict[str, int] = {}
        self.largest_frame = 4 << 20  # bytes
        self.sent_at = time.monotonic()
        self._reported_at, self._reported = 0.0, [0] * len(NAMES)
        self._metrics: dict[str, float] = {}

    def ends(self, node: str, cells: Mapping[str, Cell]) -> CallerEnds:
        """The ends of the channel to a node of the run."""
        stream, calls = f"{node} stream", f"{node} calls"
        return CallerEnds(
            self.outbox(stream) if stream in self._channels else None,
            self.outbox(calls) if calls in self._channels else None,
            self.inbox(calls) if calls in self._channels else None,
            cells,
        )

    def outbox(self, name: str) -> LinkOutbox:
        return self.outboxes[self._channels[name]]

    def inbox(self, name: str) -> LinkInbox:
        inbox = self.inboxes[self._channels[name]]
        assert inbox is not None, f"{name} does not reply"
        return inbox

    def cell(self, name: str) -> LinkCell:
        return self._cells[self._cell_numbers[name]]

    @property
    def hold(self) -> bool:
        return bool(self.flags & HOLD)

    @property
    def stopping(self) -> bool:
        return bool(self.flags & STOPPING)

    @property
    def quit(self) -> bool:
        return bool(self.flags & QUIT)

    @property
    def settled(self) -> bool:
        """Whether the run has everything that was put."""
        return all(outbox.settled for outbox in self.outboxes)

    def report(self, metrics: dict[str, float]) -> None:
        """Sends metrics with the next counts; values that are not finite are left out."""
        self._metrics |= {name[:128]: float(x) for name, x in metrics.items() if -1e300 < x < 1e300}
        assert len(self._metrics) <= wire.MAX_METRICS, len(self._metrics)

    # Frames that arrive.

    def accept(self, received: Frame) -> None:
        """Starts the session with the run's welcome, or resumes it over a new stream."""
        if received.kind != WELCOME:
            raise Refused("no welcome")
        welcome = wire.load_json(received.payload, self.largest_frame)
        try:
            if self.welcome is None:
                self._start(welcome)
            else:
                self._resume(welcome)
            self._reported, self._reported_at = [0] * len(NAMES), 0.0  # the counts are sent again
            self._set_status(STATUS.pack(*map(int, welcome["status"])))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Refused(f"no welcome: {error!r}") from None
        self.welcome = self.welcome or welcome
        self.sent_at = time.monotonic()

    def _start(self, welcome: dict[str, Any]) -> None:
        self.seat, self.incarnation = str(welcome["seat"]), int(welcome["incarnation"])
        ports = welcome["ports"]
        self._channels = {str(port["name"]): i for i, port in enumerate(ports)}
        self.inboxes = [LinkInbox(i, port) if port["answers"] is not None else None for i, port in enumerate(ports)]
        self.outboxes = [LinkOutbox(self, i, port) for i, port in enumerate(ports)]
        self._cell_numbers = {str(name): i for i, name in enumerate(welcome["latest"])}
        self._cells = [LinkCell(self.wake, i) for i in range(len(self._cell_numbers))]
        largest = max((inbox.largest for inbox in self.inboxes if inbox is not None), default=0)
        self.largest_frame = max(self.largest_frame, largest + wire.HEADER.size)

    def _resume(self, welcome: dict[str, Any]) -> None:
        if welcome["incarnation"] != self.incarnation:
            raise LinkLost(f"The seat {self.seat} of the run was given to another actor.")
        for outbox, port in zip(self.outboxes, welcome["ports"], strict=True):
            outbox.resend(int(port["written"]))
        for cell in self._cells:
            cell.ask_again()

    def _set_status(self, payload: bytes | memoryview) -> bool:
        """Whether the flags have changed."""
        if len(payload) != STATUS.size:
            raise Refused("a status has the wrong size")
        flags, *counts = STATUS.unpack(payload)
        changed: bool = flags != self.flags
        self.flags = flags
        self.rows.run, self.rows.counted = counts[: len(NAMES)], counts[len(NAMES) :]
        return changed

    def take(self, received: Frame) -> bool:
        """Handles a frame; whether there is something new for the actor."""
        kind = received.kind
        if kind in (DATA, ACK):
            return self._take_message(received)
        if kind == HEARTBEAT:
            return self._set_status(received.payload)
        if kind == VALUE:
            if received.channel >= len(self._cells):
                raise Refused("a value has an unknown name")
            return self._cells[received.channel].take(received)
        if kind == END:
            self.flags |= QUIT
            return True
        raise Refused("the run sent a frame of a kind that only actors send")

    def _take_message(self, received: Frame) -> bool:
        if received.channel >= len(self.outboxes):
            raise Refused("a message has an unknown channel")
        self.outboxes[received.channel].acknowledged(received.ack)
        if received.kind == ACK:
            return True
        inbox = self.inboxes[received.channel]
        if inbox is None:
            raise Refused("an answer on a channel without calls")
        new = inbox.take(received)
        if 2 * inbox.unacknowledged >= inbox.slots:
            self.wake()
        return new

    # Frames to send.

    def hello(self) -> bytes:
        hello = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": self.id, "seat": self.seat}
        return frame(HELLO, wire.dump_json(hello | {"again": self.welcome is not None}))

    def next_frame(self, leaving: bool) -> bytes | None:
        """The frame to send now: messages first."""
        for outbox in self.outboxes:
            if (data := outbox.next_frame()) is not None:
                return data
        for cell in self._cells:
            if (data := cell.next_frame()) is not None:
                return data
        now = time.monotonic()
        for inbox in self.inboxes:
            unacknowledged = 0 if inbox is None else inbox.unacknowledged
            if inbox is not None and unacknowledged and (2 * unacknowledged >= inbox.slots or now - self.sent_at > ACK_S):
                return inbox.ack()
        if self._has_report() and (now - self._reported_at > REPORT_S or leaving):
            report = {"counts": self.rows.mine, "metrics": self._metrics}
            self._reported, self._metrics, self._reported_at = list(self.rows.mine), {}, now
            return frame(REPORT, wire.dump_json(report))
        if now - self.sent_at > HEARTBEAT_S:
            return frame(HEARTBEAT)
        return None

    def due(self, now: float) -> bool:
        """Whether a frame is to be sent because enough time has passed."""
        if now - self.sent_at > HEARTBEAT_S or (now - self._reported_at > REPORT_S and self._has_report()):
            return True
        return now - self.sent_at > ACK_S and any(inbox is not None and inbox.unacknowledged for inbox in self.inboxes)

    def _has_report(self) -> bool:
        return bool(self._metrics) or self._reported != self.rows.mine
