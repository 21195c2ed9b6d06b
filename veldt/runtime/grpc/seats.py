"""Seats: the places that a run has for actors that share no memory with it, and the gate that a plan describes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from veldt.counters import NAMES
from veldt.records.tree import Array
from veldt.runtime.grpc import wire
from veldt.runtime.local.board import Board, SharedRows
from veldt.runtime.local.plan import Channel, Plan, call_rings
from veldt.runtime.shm.format import Format
from veldt.runtime.shm.latest import Latest
from veldt.runtime.shm.memory import Memory
from veldt.runtime.shm.ring import Reader, Writer

RECORD = 3 + len(NAMES)  # words of a seat's record: session (two), incarnation, counts when it was claimed
INCARNATION, BASE = 2, 3


@dataclass
class Port:
    """One channel of a seat: the ring there, and of a call the ring back, each with the formats of its messages."""

    name: str
    there: Writer
    formats: Sequence[Format]
    back: Reader | None = None
    answers: Sequence[Format] = ()
    window: int = 8  # messages that may be on their way
    finite: bool = True  # floats are checked


@dataclass
class Seat:
    """A place for an actor, with all that the run keeps for it. What is shared outlives the gate."""

    name: str
    ports: Sequence[Port]
    cells: dict[str, Latest]
    record: memoryview  # RECORD words, zero at first
    counts: Array  # [rows, WIDTH], of all processes
    row: memoryview  # of these, the actor's own
    assignment: Callable[[int], dict[str, Any]]  # what the actor is to build, given its incarnation
    owned: bool = True  # by a process of the run, whose newest life takes it from any earlier one

    @property
    def session(self) -> str:
        """'': nobody's."""
        low, high = self.record[0] % (1 << 64), self.record[1] % (1 << 64)
        return f"{high:016x}{low:016x}" if low or high else ""

    def claim(self, session: str) -> None:
        """For a new session. A gate that is killed in here leaves it to nobody."""
        self.leave()
        for i in range(len(NAMES)):
            self.record[BASE + i] = self.row[i]
        self.record[INCARNATION] += 1
        number = int(session, 16)
        self.record[1] = wire.signed(number >> 64)
        self.record[0] = wire.signed(number % (1 << 64))

    def leave(self) -> None:
        self.record[0] = self.record[1] = 0

    def count(self, told: list[int]) -> None:
        for i, n in enumerate(told):
            self.row[i] = self.record[BASE + i] + n

    def counted(self) -> list[int]:
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
    gate, seats, records = plan.gate, [], Memory(descriptors["gate seats"])
    for i, name in enumerate(gate.seats):
        ports: list[Port] = []
        for channel in plan.channels:
            if channel.process != name:
                continue
            formats = [[Format.of(tree) for tree in trees] for trees in gate.messages[channel.node]]
            stream, there, back = formats
            if stream:
                writer = stream_writer(channel)
                ports.append(Port(f"{channel.node} stream", writer, stream, window=writer.most, finite=False))
            if there:
                writer = call_writer(channel)
                replies = Reader(descriptors[call_rings(channel)[1]])
                ports.append(Port(f"{channel.node} calls", writer, there, replies, back, writer.most))
        rows = SharedRows(descriptors[gate.rows[name]], board, plan.row(name))
        cells = {cell: Latest(descriptors[cell]) for cell in gate.cells[name]}
        record = records.words(8 * RECORD * i, RECORD)
        assigned = functools.partial(_assigned, gate.assignments.get(name, {}))
        seats.append(Seat(name, ports, cells, record, rows.table, rows.row, assigned, owned=name in plan.processes))
    return seats


def _assigned(assignment: dict[str, Any], incarnation: int) -> dict[str, Any]:
    return assignment
