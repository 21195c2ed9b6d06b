"""Seats: places for actors that share no memory with the run. A seat connects an actor to the rings, cells and counts.

A stream has one seat, or the seats of all actors of a site."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from veldt.counters import NAMES
from veldt.records.tree import Array
from veldt.runtime.grpc.guard import Allowance, Guard
from veldt.runtime.grpc.wire import ACK, DATA, STATUS, Formats, Frame, Refused, frame
from veldt.runtime.local.board import Board, SharedRows
from veldt.runtime.local.plan import Channel, Plan, call_rings
from veldt.runtime.shm.memory import Bytes, Format, Latest, SharedMemory
from veldt.runtime.shm.ring import Reader, Writer

# Words of a seat's record: session (two), incarnation, env steps in messages of this session, counts when it was claimed.
RECORD = 4 + len(NAMES)
INCARNATION, STEPS, BASE = 2, 3, 4


class Lane:
    """One channel of a seat: the ring to the node and, for calls, the ring of its replies, each with its formats; and the
    messages in flight between these rings and the actor's stream."""

    def __init__(
        self,
        name: str,
        channel: int,
        writer: Writer,
        formats: Sequence[Format],
        reader: Reader | None = None,
        answers: Sequence[Format] = (),
        finite: bool = True,  # floats must be finite
        guard: Guard | None = None,  # of an actor that the run did not start
    ) -> None:
        self.name, self.channel, self.writer, self.reader, self._guard = name, channel, writer, reader, guard
        self.window = writer.max_slots  # messages that may be unacknowledged
        self.formats, self.answers = Formats(formats, finite), Formats(answers)
        self.restart()

    def restart(self) -> None:
        """For a new stream, over which the actor sends again what is not in the ring."""
        self.pending: deque[tuple[Format, Bytes]] = deque()  # messages that the ring had no room for
        self.acked, self.acked_at = self.writer.written, 0.0
        self.sent = 0 if self.reader is None else self.reader.popped  # answers, over this stream

    def describe(self) -> dict[str, Any]:
        """For the WELCOME of an actor over a new stream."""
        return {
            "name": self.name,
            "formats": self.formats.described,
            "written": self.writer.written,
            "window": self.window,
            "answers": None if self.reader is None else self.answers.described,
            "tail": self.sent,
        }

    def take(self, received: Frame) -> int | None:
        """Takes a message; the env steps that it brings. None: it is a duplicate, which is acknowledged again.

        The number of a message is that of the ring: what an actor says it is must agree.
        """
        expected = self.writer.written + len(self.pending)
        if received.number < expected:
            if expected - received.number > 2 * self.window:
                raise Refused("a message is older than any that may be sent again")
            self.acked = min(self.acked, expected - 1)
            return None
        if received.number > expected or len(self.pending) >= self.window:
            raise Refused("a message is missing" if received.number > expected else "more messages than the window allows")
        format_, payload = message = self.formats.check(received)
        steps = 0 if self._guard is None else self._guard.check(received.format, format_.views(payload), expected)
        if self.pending or not self.writer.put_bytes(*message):
            self.pending.append(message)
        return steps

    def push(self) -> bool:
        """Moves pending messages to the ring; whether any was moved."""
        moved = False
        while self.pending and self.writer.put_bytes(*self.pending[0]):
            self.pending.popleft()
            moved = True
        return moved

    def acknowledged(self, ack: int) -> None:
        """The actor has all answers before this number."""
        if self.reader is None:
            return
        if ack > self.reader.written:
            raise Refused("a reply was acknowledged that was never sent")
        for _ in range(ack - self.reader.popped):
            self.reader.pop()
        self.sent = max(self.sent, ack)  # some were sent over an earlier stream

    @property
    def has_answer(self) -> bool:
        return self.reader is not None and self.reader.written > self.sent

    def next_answer(self) -> bytes:
        assert self.reader is not None
        found = self.reader.peek_bytes(self.sent - self.reader.popped)
        assert found is not None, (self.sent, self.reader.popped)
        format_, payload = self.answers.number(found[0]), found[1]
        self.acked, self.acked_at = self.writer.written, time.monotonic()
        self.sent += 1
        return frame(DATA, payload, channel=self.channel, format_=format_, number=self.sent - 1, ack=self.acked)

    def ack_due(self, half: bool) -> bool:
        """Whether there is something to acknowledge; with `half`: at least half a window."""
        unacknowledged = self.writer.written - self.acked
        return 2 * unacknowledged >= self.window if half else unacknowledged > 0

    def ack(self) -> bytes:
        self.acked, self.acked_at = self.writer.written, time.monotonic()
        return frame(ACK, channel=self.channel, ack=self.acked)


@dataclass(eq=False)
class Seat:
    """A place for an actor. Everything in shared memory outlives the gate."""

    name: str
    lanes: Sequence[Lane]
    cells: dict[str, Latest]
    record: memoryview  # RECORD words, zero at first
    counts: Array  # [rows, WIDTH], of all processes
    row: memoryview  # the actor's own row of these
    assignment: dict[str, Any]  # what the actor has to build
    owned: bool = True  # by a process of the run, whose newest incarnation replaces any earlier one
    lost_at: float = field(default_factory=time.monotonic)  # when its stream broke; at first, when the gate started
    allowance: Allowance | None = None  # of an actor that the run did not start

    @property
    def session(self) -> str:
        """Id of the session that has the seat; empty: none."""
        return self.record[:2].tobytes().hex() if any(self.record[:2]) else ""

    def claim(self, session: str) -> None:
        """Gives the seat to a new session. A gate that is killed in here leaves the seat free."""
        self.release()
        self.record[BASE:] = self.row[: len(NAMES)]
        self.record[STEPS] = 0
        self.record[INCARNATION] += 1
        self.record[:2] = memoryview(bytes.fromhex(session)).cast("q")

    def release(self) -> None:
        self.record[0] = self.record[1] = 0

    def take_report(self, counts: list[int], metrics: dict[str, float]) -> dict[str, float]:
        """Sets the counts of the actor's session; returns the metrics that are to be logged."""
        if self.allowance is not None:
            before = [self.row[i] - self.record[BASE + i] for i in range(len(NAMES))]
            self.allowance.check_counts(counts, before, self.record[STEPS])
            metrics = self.allowance.check_metrics(metrics)
        for i, n in enumerate(counts):
            self.row[i] = self.record[BASE + i] + n
        return metrics

    def describe(self) -> dict[str, Any]:
        """For the WELCOME of an actor over a new stream."""
        return {
            "seat": self.name,
            "incarnation": self.record[INCARNATION],
            "assignment": self.assignment,
            "ports": [lane.describe() for lane in self.lanes],
        }


def statuses(seats: Sequence[Seat], flags: int) -> bytes:
    """The STATUS of a stream with these seats: the counts of the run, and how much of them these sessions have counted."""
    totals: list[int] = seats[0].counts[:, : len(NAMES)].sum(axis=0).tolist()
    counted = [sum(seat.row[i] - seat.record[BASE + i] for seat in seats) for i in range(len(NAMES))]
    return STATUS.pack(flags, *totals, *counted)


def make_seats(
    plan: Plan,
    board: Board,
    descriptors: dict[str, int],
    stream_writer: Callable[[Channel], Writer],
    call_writer: Callable[[Channel], Writer],
) -> list[Seat]:
    assert plan.gate is not None
    gate, seats, records = plan.gate, [], SharedMemory(descriptors["gate seats"])
    cells = {cell: Latest(descriptors[cell]) for found in gate.cells.values() for cell in found}
    for i, name in enumerate(gate.seats):
        lanes: list[Lane] = []
        for channel in plan.channels:
            if channel.process != name:
                continue
            messages, limits = gate.messages[channel.node], gate.limits.get(name)
            stream, requests, replies = ([Format.of(one.example) for one in kinds] for kinds in messages)
            guards = [None if limits is None else Guard(kinds, limits.keys) for kinds in messages]
            if stream:
                finite = limits is not None  # the run's own may have overflowed: its learner says so
                writer = stream_writer(channel)
                lanes.append(Lane(f"{channel.node} stream", len(lanes), writer, stream, finite=finite, guard=guards[0]))
            if requests:
                writer, reader = call_writer(channel), Reader(descriptors[call_rings(channel)[1]])
                lane = Lane(f"{channel.node} calls", len(lanes), writer, requests, reader, replies, guard=guards[1])
                lanes.append(lane)
        rows = SharedRows(descriptors[gate.rows[name]], board, plan.row(name))
        mine = {cell: cells[cell] for cell in gate.cells[name]}
        record = records.words(8 * RECORD * i, RECORD)
        assignment = gate.assignments.get(name, {})
        seat = Seat(name, lanes, mine, record, rows.table, rows.row, assignment, owned=name in plan.processes)
        if name in gate.limits:
            seat.allowance = Allowance(gate.limits[name].ahead, gate.metrics)
        seats.append(seat)
    return seats
