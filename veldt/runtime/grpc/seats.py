"""Seats: places for actors that share no memory with the run. A seat connects an actor to the rings, cells and counts."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from veldt.counters import NAMES
from veldt.records.tree import Array
from veldt.runtime.grpc.wire import ACK, DATA, STATUS, Formats, Frame, Refused, frame
from veldt.runtime.local.board import Board, SharedRows
from veldt.runtime.local.plan import Channel, Plan, call_rings
from veldt.runtime.shm.memory import Bell, Bytes, Format, Latest, SharedMemory
from veldt.runtime.shm.ring import Reader, Writer

RECORD = 3 + len(NAMES)  # words of a seat's record: session (two), incarnation, counts when it was claimed
INCARNATION, BASE = 2, 3


class EventBell(Bell):
    """A `Bell` for a process that sleeps in an event loop: the same words in shared memory, but an eventfd wakes it."""

    def __init__(self, memory: SharedMemory, offset: int, fd: int) -> None:
        super().__init__(memory, offset)
        self.fd = fd

    @staticmethod
    def make() -> int:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full: it wakes anyway
            os.eventfd_write(self.fd, 1)

    def set_asleep(self, value: bool) -> None:
        """Whether a ring has to wake the owner, or the owner is polling."""
        self._words[1] = value

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


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
    ) -> None:
        self.name, self.channel, self.writer, self.reader = name, channel, writer, reader
        self.window = writer.max_slots  # messages that may be unacknowledged
        self.formats, self.answers = Formats(formats, finite), Formats(answers)
        self.restart()

    def restart(self) -> None:
        """For a new stream, over which the actor sends again what is not in the ring."""
        self.pending: deque[tuple[Format, Bytes]] = deque()  # messages that the ring had no room for
        self.acked = self.writer.written
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

    def take(self, received: Frame) -> bool:
        """Takes a message; whether it was new. A duplicate is acknowledged again."""
        expected = self.writer.written + len(self.pending)
        if received.number < expected:
            self.acked = min(self.acked, expected - 1)
            return False
        if received.number > expected or len(self.pending) >= self.window:
            raise Refused("a message is missing" if received.number > expected else "more messages than the window allows")
        message = self.formats.check(received)
        if self.pending or not self.writer.put_bytes(*message):
            self.pending.append(message)
        return True

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
            raise Refused("an answer is acknowledged that was never sent")
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
        self.acked = self.writer.written
        self.sent += 1
        return frame(DATA, payload, channel=self.channel, format_=format_, number=self.sent - 1, ack=self.acked)

    def ack_due(self, half: bool) -> bool:
        """Whether there is something to acknowledge; with `half`: at least half a window."""
        unacknowledged = self.writer.written - self.acked
        return 2 * unacknowledged >= self.window if half else unacknowledged > 0

    def ack(self) -> bytes:
        self.acked = self.writer.written
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

    @property
    def session(self) -> str:
        """Id of the session that has the seat; empty: none."""
        return self.record[:2].tobytes().hex() if any(self.record[:2]) else ""

    def claim(self, session: str) -> None:
        """Gives the seat to a new session. A gate that is killed in here leaves the seat free."""
        self.release()
        self.record[BASE:] = self.row[: len(NAMES)]
        self.record[INCARNATION] += 1
        self.record[:2] = memoryview(bytes.fromhex(session)).cast("q")

    def release(self) -> None:
        self.record[0] = self.record[1] = 0

    def set_counts(self, counts: list[int]) -> None:
        for i, n in enumerate(counts):
            self.row[i] = self.record[BASE + i] + n

    def status(self, flags: int) -> bytes:
        totals: list[int] = self.counts[:, : len(NAMES)].sum(axis=0).tolist()
        return STATUS.pack(flags, *totals, *[self.row[i] - self.record[BASE + i] for i in range(len(NAMES))])


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
            stream, requests, replies = ([Format.of(tree) for tree in trees] for trees in gate.messages[channel.node])
            if stream:
                lanes.append(Lane(f"{channel.node} stream", len(lanes), stream_writer(channel), stream, finite=False))
            if requests:
                writer, reader = call_writer(channel), Reader(descriptors[call_rings(channel)[1]])
                lanes.append(Lane(f"{channel.node} calls", len(lanes), writer, requests, reader, replies))
        rows = SharedRows(descriptors[gate.rows[name]], board, plan.row(name))
        mine = {cell: cells[cell] for cell in gate.cells[name]}
        record = records.words(8 * RECORD * i, RECORD)
        assignment = gate.assignments.get(name, {})
        seats.append(Seat(name, lanes, mine, record, rows.table, rows.row, assignment, owned=name in plan.processes))
    return seats
