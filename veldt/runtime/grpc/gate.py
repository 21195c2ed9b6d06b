"""Gate: the run's end of all streams, a process between them and the rings in shared memory.

The gate keeps nothing: numbers of messages are those of the rings, and a seat's record is in shared memory too. So it may
be killed at any moment, and the next one goes on where the rings are. A message is acknowledged when it is in its ring,
sent again until then, and dropped if it is there already: each arrives once, and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

import veldt
from veldt.counters import NAMES
from veldt.errors import UserError
from veldt.metrics import GATE
from veldt.records.tree import Array
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import (
    ACK_S,
    BEAT_S,
    GREET_S,
    KEEPALIVE,
    LOOK_S,
    METHOD,
    SERVICE,
    SILENT_S,
    check_address,
    check_token,
    grpc,
    is_loopback,
    is_unix,
)
from veldt.runtime.grpc.wire import (
    ACK,
    BEAT,
    BYE,
    DATA,
    END,
    HELLO,
    HOLD,
    PART,
    PART_BYTES,
    QUIT,
    STATUS,
    STOPPING,
    TOLD,
    VALUE,
    WANT,
    WELCOME,
    Formats,
    Frame,
    Refused,
    frame,
)
from veldt.runtime.local.board import COUNTS, Board
from veldt.runtime.shm import Bytes, Format, Memory, Reader, Writer

LEAVE_S = 30.0  # a seat waits so long for an actor whose stream broke
STATUS_S = 0.25  # between two reports of the run's counts
SPIN = 12  # looks for an answer before the gate sleeps: to be woken takes longer than most answers
RECORD = 3 + len(NAMES)  # words of a seat's record: session (two), incarnation, counts when it was claimed
INCARNATION, BASE = 2, 3

log = logging.getLogger("veldt")


class EventBell:
    """A `Bell` for a process that sleeps in an event loop: its words are those of a Bell, and it is woken by an eventfd."""

    def __init__(self, memory: Memory, offset: int, fd: int) -> None:
        self._words = memory.words(offset, 2)
        self.fd = fd

    @staticmethod
    def make() -> int:
        """A descriptor for it."""
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        words = self._words
        words[0] = (words[0] + 1) & 0x7FFFFFFF
        if words[1]:
            with contextlib.suppress(BlockingIOError):  # it was rung so often that it will wake for certain
                os.eventfd_write(self.fd, 1)

    # The rest is its owner's.

    def asleep(self, value: bool) -> None:
        """Whether it has to be woken, or looks anyway."""
        self._words[1] = value

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class LatestReader(Protocol):
    def read(self, have: int, dtype: npt.DTypeLike) -> tuple[int, Array] | None: ...


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
    latest: dict[str, LatestReader]
    record: memoryview  # RECORD words, zero at first
    row: memoryview  # of the board, where the actor's counts are
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
            self.record[BASE + i] = self.row[COUNTS + i]
        self.record[INCARNATION] += 1
        number = int(session, 16)
        self.record[1] = wire.signed(number >> 64)
        self.record[0] = wire.signed(number % (1 << 64))

    def leave(self) -> None:
        self.record[0] = self.record[1] = 0

    def count(self, told: list[int]) -> None:
        for i, n in enumerate(told):
            self.row[COUNTS + i] = self.record[BASE + i] + n

    def counted(self) -> list[int]:
        return [self.row[COUNTS + i] - self.record[BASE + i] for i in range(len(NAMES))]


@dataclass
class Door:
    """Where the gate listens: `unix:/path`, or `HOST:PORT` with a token, and with TLS beyond this host."""

    address: str
    certificate: bytes = b""
    key: bytes = b""

    def check(self, token: str) -> None:
        check_address(self.address)
        if is_unix(self.address):
            return
        if not token:
            raise UserError(f"The run does not listen on {self.address} without a token; give a token file.")
        check_token(token)
        if bool(self.certificate) != bool(self.key):
            raise UserError("TLS needs both a certificate and its key.")
        if not self.certificate and not is_loopback(self.address):
            raise UserError(
                f"The run does not listen on {self.address} without TLS; give a certificate and its key, or listen on "
                "127.0.0.1."
            )


def make_folder(path: Path) -> None:
    """The folder of a socket, which is nobody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"The folder of a socket must be yours alone: chmod 700 {path}, or name one that is not there.")


def remove_socket(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"{path} is there and is no socket; name another.")
        path.unlink()


def read_so_far(reader: Reader) -> int:
    """Messages that were ever read. Its writer goes on meanwhile, so what is waiting belongs to one number of written."""
    while True:
        written, waiting = reader.written, reader.waiting
        if reader.written == written:
            return written - waiting


class _Lane:
    """One port of a seat that has a stream: what is on its way in both directions."""

    def __init__(self, port: Port, channel: int) -> None:
        self.port, self.channel = port, channel
        self.formats, self.answers = Formats(port.formats, port.finite), Formats(port.answers)
        self.pending: deque[tuple[Format, Bytes]] = deque()  # what the ring had no room for
        self.acked = port.there.written
        self.tail = 0 if port.back is None else read_so_far(port.back)  # answers that the actor has
        self.sent = self.tail  # answers, over this stream

    def take(self, came: Frame) -> bool:
        """A message, and whether it was new; one that the ring has already is acknowledged again."""
        port = self.port
        expected = port.there.written + len(self.pending)
        if came.number < expected:
            self.acked = min(self.acked, expected - 1)
            return False
        if came.number > expected or len(self.pending) >= port.window:
            raise Refused("a message is missing" if came.number > expected else "more messages than the window allows")
        message = self.formats.check(came)
        if self.pending or not port.there.put_bytes(*message):
            self.pending.append(message)
        return True

    def push(self) -> bool:
        """Brings what waited into the ring; whether some of it went."""
        went = False
        while self.pending and self.port.there.put_bytes(*self.pending[0]):
            self.pending.popleft()
            went = True
        return went

    def received(self, ack: int) -> None:
        """The actor has all answers before this number."""
        back = self.port.back
        if back is None:
            return
        if ack > back.written:
            raise Refused("an answer is acknowledged that was never given")
        for _ in range(ack - self.tail):
            back.pop()
            self.tail += 1
        self.sent = max(self.sent, ack)  # over an earlier stream

    @property
    def answered(self) -> bool:
        """Whether there is an answer to send."""
        return self.port.back is not None and self.port.back.written > self.sent

    def answer(self) -> bytes:
        back = self.port.back
        assert back is not None
        found = back.peek_bytes(self.sent - self.tail)
        assert found is not None, (self.sent, self.tail)
        format_, payload = self.answers.number(found[0]), found[1]
        written = self.acked = self.port.there.written
        self.sent += 1
        return frame(DATA, payload, channel=self.channel, format_=format_, number=self.sent - 1, ack=written)

    def owes(self, half: bool) -> bool:
        """Whether an acknowledgement is owed; with `half`: for so many that it should not wait."""
        owed = self.port.there.written - self.acked
        return 2 * owed >= self.port.window if half else owed > 0

    def ack(self) -> bytes:
        self.acked = self.port.there.written
        return frame(ACK, channel=self.channel, ack=self.acked)


class _Sending:
    """A value on its way to one actor, in parts."""

    def __init__(self, channel: int, tag: int, value: Array) -> None:
        self.channel, self.tag, self.data, self.offset = channel, tag, value.data, 0

    def part(self) -> bytes:
        at, data = self.offset, self.data[self.offset : self.offset + PART_BYTES]
        self.offset += len(data)
        return frame(VALUE, PART.pack(at, len(self.data)), data, channel=self.channel, number=self.tag)

    @property
    def done(self) -> bool:
        return self.offset >= len(self.data)


class _Stream:
    """One actor's stream, from the first frame to the end. What is wrong with it closes it and nothing else."""

    def __init__(self, gate: Gate, context: Any) -> None:
        self.gate, self.context = gate, context
        self.seat: Seat | None = None
        self.lanes: list[_Lane] = []
        self.wants: dict[int, int] = {}  # name of a value -> the version that the actor has
        self.sending: list[_Sending] = []
        self.opened = self.heard = self.spoke = self.status_at = time.monotonic()
        self.writing = 0.0  # since when; 0: not
        self.status = b""  # the last that was sent
        self.first: bytes | None = None  # WELCOME
        self.over = self.told = False  # END is to be said, and was
        self.bye = False
        self.end: asyncio.Future[tuple[grpc.StatusCode, str] | None] = gate.loop.create_future()
        self._wake: asyncio.Future[None] | None = None

    def close(self, code: grpc.StatusCode | None = None, why: str = "") -> None:
        if not self.end.done():
            self.end.set_result(None if code is None else (code, why))

    def wake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def live(self) -> None:
        reader, writer = (self.gate.loop.create_task(part) for part in (self._read(), self._write()))
        try:
            end = await self.end
        finally:
            self.close()
            self.wake()
            reader.cancel()
            await asyncio.wait([writer], timeout=1.0)  # a write that is cancelled takes the status with it
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if end is not None:
            await self.context.abort(*end)

    async def _read(self) -> None:
        gate, context = self.gate, self.context
        try:
            while (data := await context.read()) is not grpc.aio.EOF and not self.end.done():
                self.heard = time.monotonic()
                gate.frames_in += 1
                gate.bytes_in += len(data)
                self._take(wire.parse(data))
            self.close()
        except Refused as error:
            gate.refuse(self, str(error))
            self.close(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.UsageError):
            self.close()  # the stream is broken
        except Exception as error:
            gate.failed(error)
            self.close(grpc.StatusCode.INTERNAL, "the gate failed")

    def _take(self, came: Frame) -> None:
        kind = came.kind
        if self.seat is None:
            if kind != HELLO:
                raise Refused("no hello")
            self.gate.greet(self, wire.load_json(came.payload))
        elif kind in (DATA, ACK):
            if came.channel >= len(self.lanes):
                raise Refused("a message has no known channel")
            lane = self.lanes[came.channel]
            new = kind == DATA and lane.take(came)
            lane.received(came.ack)
            if new and lane.port.back is not None:
                self.gate.spin()
            elif lane.owes(half=True):
                self.wake()
        elif kind == WANT:
            if came.channel >= len(self.seat.latest):
                raise Refused("a value has no known name")
            self.wants[came.channel] = wire.signed(came.number)
            self.look_values()
        elif kind == TOLD:
            told = wire.load_json(came.payload)
            counts, metrics = wire.told_counts(told), wire.told_metrics(told)
            self.seat.count(counts)
            self.gate.tell(self.seat, metrics)
        elif kind == BYE:
            self.bye = True
            self.close()
        elif kind != BEAT:
            raise Refused("a frame that only the run sends")

    def look(self) -> bool:
        """Goes on with what waited; whether there is an answer to send."""
        found = False
        for lane in self.lanes:
            if lane.pending and lane.push() and lane.owes(half=True):
                self.wake()
            if lane.answered:
                found = True
        if found:
            self.wake()
        return found

    def look_values(self) -> None:
        """Begins to send values that the actor wants and does not have."""
        assert self.seat is not None
        for channel, have in list(self.wants.items()):
            if any(sending.channel == channel for sending in self.sending):
                continue
            found = self.gate.value(list(self.seat.latest.values())[channel], have)
            if found is not None:
                del self.wants[channel]
                self.sending.append(_Sending(channel, *found))
                self.wake()

    async def _write(self) -> None:
        gate = self.gate
        try:
            while True:
                while (data := self._next()) is not None and not self.end.done():
                    await self._send(data)
                if self.over and not self.told:
                    self.told = True
                    await self._send(frame(END))  # the actor says goodbye; closed here, this might not reach it
                if self.end.done():
                    return
                self._wake = gate.loop.create_future()
                await self._wake
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.UsageError):
            self.close()
        except Exception as error:
            gate.failed(error)
            self.close(grpc.StatusCode.INTERNAL, "the gate failed")

    async def _send(self, data: bytes) -> None:
        self.writing = time.monotonic()
        await self.context.write(data)
        self.writing, self.spoke = 0.0, time.monotonic()
        self.gate.frames_out += 1
        self.gate.bytes_out += len(data)

    def _next(self) -> bytes | None:
        """The frame to send now: answers first, then what the actor waits for least."""
        if self.seat is None:
            return None
        if self.first is not None:
            data, self.first = self.first, None
            return data
        for lane in self.lanes:
            if lane.answered:
                return lane.answer()
        now = time.monotonic()
        for lane in self.lanes:
            if lane.owes(half=now - self.spoke < ACK_S):
                return lane.ack()
        if self.status_due(now):
            self.status_at, self.status = now, self.gate.status(self.seat)
            return frame(BEAT, self.status)
        if self.sending:
            data = self.sending[0].part()
            if self.sending[0].done:
                del self.sending[0]
            return data
        return None

    def status_due(self, now: float) -> bool:
        assert self.seat is not None
        if now - self.spoke > BEAT_S:
            return True
        if self.gate.flags != self.status[0]:
            return True
        return now - self.status_at > STATUS_S and self.gate.status(self.seat) != self.status

    def tick(self, now: float) -> None:
        """What is due by the clock."""
        if self.seat is None:
            if now - self.opened > self.gate.greet_s:
                self.close(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        elif now - self.heard > self.gate.silent or (self.writing and now - self.writing > self.gate.silent):
            self.close(grpc.StatusCode.DEADLINE_EXCEEDED, "the actor fell silent")
        else:
            self.look()
            if self.wants:
                self.look_values()
            if self.status_due(now) or any(lane.owes(half=False) for lane in self.lanes):
                self.wake()


class Gate:
    """Takes actors in, gives them seats, and stands between their streams and the rings. Runs only while it is stepped."""

    METRICS: ClassVar = GATE

    def __init__(
        self,
        seats: Sequence[Seat],
        doors: Sequence[Door],
        board: Board,
        bell: EventBell | None = None,
        token: str = "",
        leave: float = LEAVE_S,
        silent: float = SILENT_S,
        greet: float = GREET_S,
    ) -> None:
        for door in doors:
            door.check(token)
        self.seats, self.doors, self.leave, self.silent, self.greet_s = list(seats), list(doors), leave, silent, greet
        self._token, self._board, self._bell = token, board, bell
        self._streams: dict[str, _Stream] = {}  # seat -> its stream
        self._open: set[_Stream] = set()  # those without a seat too
        began = time.monotonic()
        self._left = {seat.name: began for seat in seats if seat.session}  # seats that wait for their actor, since when
        self._values: dict[int, tuple[int, Array]] = {}  # the newest of each value, as it is sent
        self._told: dict[str, dict[str, float]] = {}
        self.frames_in = self.frames_out = self.bytes_in = self.bytes_out = self.refused = self.reconnects = 0
        self._said = 0.0  # when a refusal was logged last
        self._spins = 0
        self._stepped = time.monotonic()
        self.flags, self._counts = 0, [0] * len(NAMES)
        self._error: BaseException | None = None
        self._servers: list[Any] = []
        self.addresses: list[str] = []  # those of the doors, with their real ports
        largest = max((Formats(port.formats).largest for seat in seats for port in seat.ports), default=0)
        self._options = [
            *KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.max_receive_message_length", max(64 << 10, wire.JSON_BYTES, largest) + wire.HEADER.size),
            ("grpc.max_send_message_length", wire.MOST_BYTES),
            ("grpc.server_handshake_timeout_ms", int(1000 * greet)),
            ("grpc.max_connection_idle_ms", 30_000),  # without a stream
            ("grpc.max_concurrent_streams", 2),
            ("grpc.max_allowed_incoming_connections", 4 * len(self.seats) + 256),
            ("grpc.so_reuseport", 0),
        ]
        self.loop = asyncio.new_event_loop()

    def start(self) -> None:
        self._look_at_board()
        self.loop.run_until_complete(self._start())
        if self._bell is not None:
            self._bell.asleep(True)
            self.loop.add_reader(self._bell.fd, self._rung)

    def step(self, seconds: float = LOOK_S) -> None:
        """Serves for so long."""
        self._tick()
        self.loop.call_later(min(seconds, LOOK_S), self.loop.stop)
        self.loop.run_forever()
        if self._error is not None:
            raise self._error

    def close(self, over: bool = True) -> None:
        """`over`: actors are told that the run has ended; otherwise they come back to the next gate."""
        for stream in list(self._open):
            if over and stream.seat is not None:
                stream.over = True
                stream.wake()
            else:
                stream.close(grpc.StatusCode.UNAVAILABLE, "the gate closes")
        until = time.monotonic() + 1.0
        while self._open and time.monotonic() < until:
            self.loop.call_later(0.01, self.loop.stop)
            self.loop.run_forever()
        for stream in list(self._open):
            stream.close(grpc.StatusCode.UNAVAILABLE, "the gate closes")
        for server in self._servers:
            self.loop.run_until_complete(server.stop(0.2))
        if self._bell is not None:
            self._bell.asleep(False)
            self.loop.remove_reader(self._bell.fd)
        self.loop.run_until_complete(asyncio.sleep(0.01))  # what gRPC still has to say about the streams
        self.loop.close()
        for door in self.doors:
            if is_unix(door.address):
                with contextlib.suppress(OSError):
                    os.unlink(door.address.removeprefix("unix:"))

    def metrics(self) -> dict[str, float]:
        """Totals since this gate began, and how many actors are here now."""
        names = ("frames_in", "frames_out", "bytes_in", "bytes_out", "refused", "reconnects")
        told = {f"gate_{name}": float(getattr(self, name)) for name in names}
        waiting = [len(lane.pending) for stream in self._streams.values() for lane in stream.lanes]
        return told | {"gate_actors": float(len(self._streams)), "gate_pending": float(sum(waiting))}

    def told(self) -> dict[str, dict[str, float]]:
        """What the actors told, by seat, since this was last asked."""
        told, self._told = self._told, {}
        return told

    @property
    def connected(self) -> list[str]:
        return list(self._streams)

    # What streams ask of it.

    def greet(self, stream: _Stream, told: dict[str, Any]) -> None:
        protocol, version, session = told.get("protocol"), told.get("veldt"), told.get("session")
        name, again = told.get("seat", ""), told.get("again", False)
        if (protocol, version) != (wire.PROTOCOL, veldt.__version__):
            stream.close(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the run has veldt {veldt.__version__} (protocol {wire.PROTOCOL}), the actor has {str(version)[:32]} "
                f"(protocol {str(protocol)[:32]}); install the same on both",
            )
            return
        if not _is_session(session) or not isinstance(name, str) or not isinstance(again, bool):
            raise Refused("a hello without a session")
        assert isinstance(session, str)
        seat = next((seat for seat in self.seats if seat.session == session), None)
        if seat is None and again:
            stream.close(grpc.StatusCode.NOT_FOUND, "the session is over, and its seat is another actor's")
            return
        if seat is None:
            seat = self._free(name)
            if seat is None:
                wanted = f"the seat {name[:64]!r}" if name else "no seat"
                why = f"{wanted} is {'not ' if name else ''}free; the run has {len(self.seats)}"
                stream.close(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
                return
            self._take_over(seat)
            seat.claim(session)
        else:
            self._take_over(seat)
            self.reconnects += 1
        self._sit(stream, seat)

    def refuse(self, stream: _Stream, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._said > 10.0:  # whoever sends nonsense does not fill the log
            self._said = now
            who = "an actor" if stream.seat is None else stream.seat.name
            log.warning("gate: refused %s: %s (%d refused so far)", who, why, self.refused)

    def failed(self, error: BaseException) -> None:
        """A fault of the gate's own, which its host is to see."""
        self._error = self._error or error
        self.loop.stop()

    def tell(self, seat: Seat, metrics: dict[str, float]) -> None:
        known = self._told.setdefault(seat.name, {})
        if len(known) < wire.MOST_METRICS:
            known |= metrics

    def value(self, reader: LatestReader, have: int) -> tuple[int, Array] | None:
        """The newest, which all who want it share."""
        known = self._values.get(id(reader))
        found = reader.read(-1 if known is None else known[0], np.uint8)
        if found is not None:
            known = self._values[id(reader)] = found
        return known if known is not None and known[0] != have else None

    def status(self, seat: Seat) -> bytes:
        return STATUS.pack(self.flags, *self._counts, *seat.counted())

    def spin(self) -> None:
        """A question was handed on: looks for its answer for a while, instead of falling asleep."""
        if not self._spins:
            if self._bell is not None:
                self._bell.asleep(False)
            self.loop.call_soon(self._spin)
        self._spins = SPIN

    def _spin(self) -> None:
        self._spins -= 1
        if self._spins > 0 and not any([stream.look() for stream in self._streams.values()]):
            self.loop.call_soon(self._spin)
            return
        self._spins = 0
        if self._bell is not None:
            self._bell.asleep(True)
            self._look()  # what was answered before it was known that it has to be rung for

    def _rung(self) -> None:
        assert self._bell is not None
        self._bell.clear()
        self._look()

    def _look(self) -> None:
        for stream in self._streams.values():
            stream.look()

    # Seats.

    def _free(self, name: str) -> Seat | None:
        now = time.monotonic()
        for seat in self.seats:
            waits = seat.name in self._left and now - self._left[seat.name] < self.leave
            free = seat.name not in self._streams and (not seat.session or not waits)
            if (seat.name == name and (free or seat.owned)) or (not name and free and not seat.owned):
                return seat
        return None

    def _take_over(self, seat: Seat) -> None:
        earlier = self._streams.pop(seat.name, None)
        if earlier is not None:
            earlier.close(grpc.StatusCode.ABORTED, f"another actor has taken the seat {seat.name}")
            earlier.lanes = []
            earlier.seat = None

    def _sit(self, stream: _Stream, seat: Seat) -> None:
        self._streams[seat.name] = stream
        self._left.pop(seat.name, None)
        self._look_at_board()
        stream.seat = seat
        stream.lanes = [_Lane(port, i) for i, port in enumerate(seat.ports)]
        stream.status, incarnation = self.status(seat), seat.record[INCARNATION]
        told = {
            "protocol": wire.PROTOCOL,
            "veldt": veldt.__version__,
            "seat": seat.name,
            "incarnation": incarnation,
            "ports": [_described(lane) for lane in stream.lanes],
            "latest": list(seat.latest),
            "assignment": seat.assignment(incarnation),
            "status": STATUS.unpack(stream.status),
            "lz4": _has_lz4(),
        }
        stream.first = frame(WELCOME, wire.dump_json(told))
        stream.wake()

    def _leave(self, stream: _Stream) -> None:
        self._open.discard(stream)
        seat = stream.seat
        if seat is None or self._streams.get(seat.name) is not stream:
            return
        del self._streams[seat.name]
        if stream.bye:
            seat.leave()
        else:
            self._left[seat.name] = time.monotonic()

    # The servers.

    async def _start(self) -> None:
        for door in self.doors:
            handler = grpc.stream_stream_rpc_method_handler(self._handler("" if is_unix(door.address) else self._token))
            server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=2 * len(self.seats) + 64)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
            if is_unix(door.address):
                path = Path(door.address.removeprefix("unix:"))
                make_folder(path.parent)
                remove_socket(path)
            try:
                if door.certificate:
                    credentials = grpc.ssl_server_credentials([(door.key, door.certificate)])
                    port = server.add_secure_port(door.address, credentials)
                else:
                    port = server.add_insecure_port(door.address)
            except (RuntimeError, ValueError):
                port = 0
            if not port:
                raise UserError(f"The run cannot listen on {door.address}; is the port taken, or the certificate wrong?")
            await server.start()
            self._servers.append(server)
            host = door.address.rpartition(":")[0]
            self.addresses.append(door.address if is_unix(door.address) else f"{host}:{port}")

    def _handler(self, token: str) -> Callable[[Any, Any], Any]:
        async def handle(_: Any, context: Any) -> None:
            if token and not _is_authorized(context.invocation_metadata(), token):
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong or missing")
            stream = _Stream(self, context)
            self._open.add(stream)
            try:
                await stream.live()
            finally:
                self._leave(stream)

        return handle

    def _tick(self) -> None:
        now = time.monotonic()
        gap, self._stepped = now - self._stepped, now
        self._look_at_board()
        for stream in list(self._open):
            if gap > 1.0:  # this process stood still, and not they
                stream.heard, stream.opened = stream.heard + gap, stream.opened + gap
                stream.writing = stream.writing and stream.writing + gap
            stream.tick(now)

    def _look_at_board(self) -> None:
        board = self._board
        self.flags = STOPPING * board.stopping | HOLD * board.hold | QUIT * board.quit
        self._counts = board.counts.sum(axis=0).tolist()


def _described(lane: _Lane) -> dict[str, Any]:
    port = lane.port
    return {
        "name": port.name,
        "formats": wire.describe(port.formats),
        "written": port.there.written,
        "window": port.window,
        "answers": None if port.back is None else wire.describe(port.answers),
        "tail": lane.tail,
    }


def _is_session(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef") and int(value, 16) > 0


def _is_authorized(metadata: Any, token: str) -> bool:
    """Compared in constant time."""
    given = [value for key, value in metadata or () if key == "authorization"]
    if len(given) != 1 or not isinstance(given[0], str):
        return False
    return hmac.compare_digest(given[0].encode(), f"Bearer {token}".encode())


def _has_lz4() -> bool:
    try:
        wire.check_compression()
    except UserError:
        return False
    return True
