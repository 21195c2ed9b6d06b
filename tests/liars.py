"""A gate with all that is behind it in this process, and somebody with a valid token who lies to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from chaos import program_of

import veldt
from veldt.counters import NAMES
from veldt.experiment.prepare import make_gate
from veldt.program import BLOCK_MEMORY, CELL, INCARNATION, ROWS, Given
from veldt.records.block import Block, Schema
from veldt.records.tree import PACKED, Tree
from veldt.runtime.base import Host
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.gate import Gate
from veldt.runtime.grpc.seats import RECORD, Seat, make_seats
from veldt.runtime.grpc.streams import ActorStream
from veldt.runtime.grpc.wire import Refused, frame
from veldt.runtime.local.board import ROW, Board
from veldt.runtime.local.plan import Channel, call_rings, make_plan, stream_ring
from veldt.runtime.services import CallService, ServiceEnds, StreamService
from veldt.runtime.shm.memory import EventBell, SharedMemory, make_shared_memory
from veldt.runtime.shm.ring import Reader, Writer
from veldt.shared import PrivateCell, PrivateRows
from veldt.storing.store import BlockCodec

TOKEN = "0123456789abcdef" * 4


class House:
    """The gate of a run, its rings, and the nodes behind them; no process and no socket: frames are handed in."""

    def __init__(self, config: Any) -> None:
        program, self.config = program_of(config), config
        self.env = config.env_spec()
        self.schema: Schema = config.schema(self.env)
        self.central = config.inference == "central"
        self.node = "recorder" if self.central else "store"
        plan = self.plan = make_plan(program, 16, make_gate(config, TOKEN), "/nowhere")
        fds = self.fds = {name: make_shared_memory("veldt test") for name in plan.descriptors()}
        fds["gate bell"] = EventBell.make()
        SharedMemory(fds["gate seats"], 8 * RECORD * len(plan.seats))
        self.board = Board(fds["board"], plan.rows)
        bell = EventBell(self.board.memory, ROW, fds["gate bell"])
        self.seats = make_seats(plan, self.board, fds, self._stream, self._calls)
        self.gate = Gate(self.seats, [], self.board, bell, TOKEN)
        own = ("actor/", "policy/", "recorder/")
        nodes = [node for name, node in program.nodes.items() if not name.startswith(own)]
        known: dict[str, Any] = {}

        def given(node: Any) -> Given:
            places = {INCARNATION: 0, BLOCK_MEMORY: None, CELL: PrivateCell(), ROWS: PrivateRows()}
            return Given(known, {}, {place.what: x for place, x in places.items()})

        self.host = Host(nodes, known, given)
        self.store = known["store"]
        channels, ports = [Channel(seat.name, self.node) for seat in self.seats], plan.ports[self.node]
        if self.central:
            ends = [ServiceEnds(Reader(fds[call_rings(c)[0]]), Writer(fds[call_rings(c)[1]])) for c in channels]
            self.service: Any = CallService(known[self.node], ports, ends)
        else:
            self.service = StreamService(known[self.node], ports, [Reader(fds[stream_ring(c)]) for c in channels])
        self.ports = list(ports)

    def _stream(self, channel: Channel) -> Writer:
        return Writer(self.fds[stream_ring(channel)], self.board.bell(1), 1 << 20, 16)

    def _calls(self, channel: Channel) -> Writer:
        return Writer(self.fds[call_rings(channel)[0]], self.board.bell(1), max_slots=8)

    def serve(self, updates: bool = False) -> None:
        """All that was accepted reaches its node, and the learner learns from it."""
        for seat in self.seats:
            for lane in seat.lanes:
                lane.push()
        while self.service.step() or (self.central and self.service._open):
            pass
        if updates:
            self.host.step()

    def close(self) -> None:
        self.host.close()
        self.gate.loop.close()
        for fd in self.fds.values():
            os.close(fd)


@contextlib.contextmanager
def house_of(config: Any) -> Iterator[House]:
    house = House(config)
    try:
        yield house
    finally:
        house.close()


class Caller:
    """Somebody with a token. His stream is closed by a lie, and he comes back over a new one."""

    def __init__(self, house: House, rng: Random) -> None:
        self.house, self.rng, self.session = house, rng, secrets.token_hex(16)
        self.refused = self.steps = 0
        self.why: set[str] = set()
        self.number = 0  # of the next message that is true
        self.connect()

    def connect(self) -> None:
        self.stream = ActorStream(self.house.gate, None, own=False)
        hello = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": self.session, "seat": ""}
        self.say(frame(wire.HELLO, json.dumps(hello).encode()))
        assert self.stream.seat is not None, self.stream.end

    @property
    def seat(self) -> Seat:
        assert self.stream.seat is not None
        return self.stream.seat

    def say(self, data: bytes) -> bool:
        """Whether the gate took it."""
        try:
            self.stream._take(wire.parse(data))
        except Refused as error:
            self.refused += 1
            self.why.add(str(error))
            self.house.gate.refuse(self.stream, str(error))
            self.stream.close()
            return False
        return True

    # What is true.

    def message(self) -> Tree:
        return honest_step(self.house) if self.house.central else honest_block(self.house)

    def number_next(self) -> int:
        (lane,) = self.seat.lanes
        return lane.writer.written + len(lane.pending)

    def header(self) -> np.ndarray[Any, Any]:
        if self.house.central:
            group = self.house.plan.gate.limits[self.seat.name].keys[0]  # type: ignore[union-attr]
            return np.array([self.house.ports.index("send"), self.number_next(), group])
        return np.array([self.house.ports.index("insert")])

    def frame_of(self, tree: Tree, **fields: Any) -> bytes:
        (lane,) = self.seat.lanes
        which, flags, parts = lane.formats.pack(tree)
        ack = 0 if lane.reader is None else lane.reader.written
        known = {"format_": which, "flags": flags, "number": self.number_next(), "ack": ack}
        return frame(wire.DATA, *parts, **known | fields)

    def tell_truth(self) -> bool:
        told = self.say(self.frame_of({"@port": self.header(), **self.message()}))
        self.steps += told * (self.house.config.envs_per_actor // 2 if self.house.central else self.house.schema.fresh)
        return told

    def report(self, counts: dict[str, Any] | None = None, **metrics: Any) -> bytes:
        now = [self.seat.row[i] - self.seat.record[4 + i] for i in range(len(NAMES))]
        values = [(counts or {}).get(name, now[i]) for i, name in enumerate(NAMES)]
        return frame(wire.REPORT, json.dumps({"counts": values, "metrics": metrics}).encode())


def honest_block(house: House) -> Tree:
    schema = house.schema
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    columns = schema.layout.columns(rows)
    columns["valid"][:], columns["discount"][:] = True, 1.0
    block = Block(schema, rows, starts, np.ones(schema.starts, np.bool_))
    return BlockCodec().pack(block, np.ones(schema.starts))


def honest_step(house: House) -> Tree:
    n = house.config.envs_per_actor // house.config.central.groups
    step = {name: np.zeros((n, *c.shape), c.dtype) for name, c in house.env.step.items()}
    return step | {"valid": np.ones(n, np.bool_), "discount": np.ones(n, np.float32)}


# What is not.

FLOATS = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e12, -1e12)
INTEGERS = (-1, 3, 1 << 20, 1 << 31, 1 << 53, 1 << 62, -(1 << 62), -(1 << 63))
NUMBERS = (-1, 0, 1, 5, 255, 1 << 31, 1 << 62, -(1 << 63), 1e300, 0.5, True, None, "x", [], {})
METRICS = ("eval_return", "env_steps", "episodes", "train_return", "epsilon", "lag_updates", "\x1b[2J", "a" * 120, "é", "")


def falsify(rng: Random, tree: Tree, schema: Schema) -> tuple[Tree, str]:
    """A message with one value changed, and what that was; derived from its columns, the packed ones too."""
    tree = {name: x.copy() for name, x in tree.items()}
    name = rng.choice([name for name in tree if tree[name].size])
    x: Any = tree[name]
    if name.endswith(PACKED):
        layout = schema.layout if name.startswith("rows/") else schema.start_layout
        record = x.view(layout.record)
        field = rng.choice(list(layout.record.names))
        name, x = f"{name}/{field}", record[field]
    at = tuple(rng.randrange(n) for n in x.shape)
    with np.errstate(all="ignore"):
        if x.dtype.kind == "b":
            x.view(np.uint8)[at] = rng.choice((0, 1, 2, 255))
        elif x.dtype.kind == "f":
            x[at] = rng.choice(FLOATS)
        else:
            info = np.iinfo(x.dtype)
            x[at] = rng.choice([n for n in INTEGERS if info.min <= n <= info.max])
    return tree, name


def lie(rng: Random, who: Caller) -> bytes:
    """A valid frame with content that is wrong, or strange."""
    how = rng.random()
    if how < 0.6:
        tree, _ = falsify(rng, {"@port": who.header(), **who.message()}, who.house.schema)
        return who.frame_of(tree)
    if how < 0.75:
        name, number = rng.choice(("number", "ack", "channel", "format_")), rng.choice(INTEGERS)
        small = name in ("channel", "format_")
        return who.frame_of({"@port": who.header(), **who.message()}, **{name: number % 256 if small else number})
    if how < 0.85:
        return who.report({rng.choice(NAMES): rng.choice(NUMBERS)})
    if how < 0.95:
        many = rng.choice((1, 1, 180))
        return who.report({}, **{f"{rng.choice(METRICS)}{i or ''}": rng.choice(NUMBERS) for i in range(many)})
    content = {
        "seat": rng.choice(("actor/0", "\x1b[2J", 3)),
        "session": rng.choice(("", "0" * 32, 5)),
        "protocol": wire.PROTOCOL,
    }
    kinds = [kind for kind in wire.KINDS if kind != wire.LEAVE]
    return frame(
        rng.choice(kinds), json.dumps(content).encode(), channel=rng.choice((0, 1, 255)), number=rng.choice(INTEGERS)
    )
