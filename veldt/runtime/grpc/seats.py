"""Seats: places for actors that share no memory with the run. A seat connects an actor to the rings, cells and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from veldt.counters import NAMES
from veldt.records.tree import Array
from veldt.runtime.grpc import wire
from veldt.runtime.local.board import Board, SharedRows
from veldt.runtime.local.plan import Channel, Plan, call_rings
from veldt.runtime.shm.memory import Format, Latest, SharedMemory
from veldt.runtime.shm.ring import Reader, Writer

RECORD = 3 + len(NAMES)  # words of a seat's record: session (two), incarnation, counts when it was claimed
INCARNATION, BASE = 2, 3


@dataclass
class Port:
    """One channel of a seat: the ring to the node and, for calls, the ring of its replies, each with its formats."""

    name: str
    writer: Writer
    formats: Sequence[Format]
    reader: Reader | None = None
    answers: Sequence[Format] = ()
    window: int = 8  # messages that may be unacknowledged
    finite: bool = True  # floats must be finite


@dataclass
class Seat:
    """A place for an actor. Everything in shared memory outlives the gate."""

    name: str
    ports: Sequence[Port]
    cells: dict[str, Latest]
    record: memoryview  # RECORD words, zero at first
    counts: Array  # [rows, WIDTH], of all processes
    row: memoryview  # the actor's own row of these
    assignment: dict[str, Any]  # what the actor has to build
    owned: bool = True  # by a process of the run, whose newest incarnation replaces any earlier one

    @property
    def session(self) -> str:
        """Id of the session that has the seat; empty: none."""
        low, high = self.record[0] % (1 << 64), self.record[1] % (1 << 64)
        return f"{high:016x}{low:016x}" if low or high else ""

    def claim(self, session: str) -> None:
        """Gives the seat to a new session. A gate that is killed in here leaves the seat free."""
        self.release()
        for i in range(len(NAMES)):
            self.record[BASE + i] = self.row[i]
        self.record[INCARNATION] += 1
        number = int(session, 16)
        self.record[1] = wire.signed(number >> 64)
        self.record[0] = wire.signed(number % (1 << 64))

    def release(self) -> None:
        self.record[0] = self.record[1] = 0

    def set_counts(self, counts: list[int]) -> None:
        """Counts of this session, as the actor reports them."""
        for i, n in enumerate(counts):
            self.row[i] = self.record[BASE + i] + n

    def counted(self) -> list[int]:
        """Counts of this session that are included in `totals`."""
        return [self.row[i] - self.record[BASE + i] for i in range(len(NAMES))]

    def totals(self) -> list[int]:
        """The counts of the run."""
        found: list[int] = self.counts[:, : len(NAMES)].sum(axis=0).tolist()
        return found


def make_seats(
    plan: Plan,
    board: Board,
    descriptors: dict[str, int],
    stream_writer: Callable[[Channel], Writer],
    call_writer: Callable[[Channel], Writer],
) -> list[Seat]:
    """The seats of a plan, over the rings and cells of this host."""
    assert plan.gate is not None
    gate, seats, records = plan.gate, [], SharedMemory(descriptors["gate seats"])
    for i, name in enumerate(gate.seats):
        ports: list[Port] = []
        for channel in plan.channels:
            if channel.process != name:
                continue
            formats = [[Format.of(tree) for tree in trees] for trees in gate.messages[channel.node]]
            stream, requests, replies = formats
            if stream:
                writer = stream_writer(channel)
                ports.append(Port(f"{channel.node} stream", writer, stream, window=writer.max_slots, finite=False))
            if requests:
                writer = call_writer(channel)
                reader = Reader(descriptors[call_rings(channel)[1]])
                ports.append(Port(f"{channel.node} calls", writer, requests, reader, replies, writer.max_slots))
        rows = SharedRows(descriptors[gate.rows[name]], board, plan.row(name))
        cells = {cell: Latest(descriptors[cell]) for cell in gate.cells[name]}
        record = records.words(8 * RECORD * i, RECORD)
        assignment = gate.assignments.get(name, {})
        seats.append(Seat(name, ports, cells, record, rows.table, rows.row, assignment, owned=name in plan.processes))
    return seats
