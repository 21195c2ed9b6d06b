"""Gate: the run's end of all streams, a process between them and the rings in shared memory.

The gate has no state of its own: message numbers are those of the rings, and the records of seats are in shared memory. So
it may be killed at any moment, and its successor continues from the rings. A message is acknowledged when it is in its
ring, sent again until then, and dropped if it is a duplicate: each arrives once, and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import veldt
from veldt.errors import UserError
from veldt.metrics import GATE
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import HANDSHAKE_S, KEEPALIVE, METHOD, POLL_S, SERVICE, SILENCE_S, grpc, is_unix
from veldt.runtime.grpc.doors import Door, make_folder, remove_socket
from veldt.runtime.grpc.event_bell import EventBell
from veldt.runtime.grpc.lanes import Lane, describe
from veldt.runtime.grpc.seats import INCARNATION, Seat
from veldt.runtime.grpc.streams import ActorStream
from veldt.runtime.grpc.wire import HOLD, QUIT, STATUS, STOPPING, WELCOME, Formats, Refused, frame
from veldt.runtime.local.board import Board
from veldt.runtime.shm.memory import Latest

RECONNECT_S = 30.0  # that a seat is kept for an actor whose stream broke
SPIN = 12  # polls for a reply before the gate sleeps: waking up takes longer than most replies

log = logging.getLogger("veldt")


class Gate:
    """Admits actors, gives them seats, and copies messages between streams and rings. Works only while it is stepped."""

    METRICS: ClassVar = GATE

    def __init__(
        self,
        seats: Sequence[Seat],
        doors: Sequence[Door],
        board: Board,
        bell: EventBell | None = None,
        token: str = "",
        reconnect: float = RECONNECT_S,
        silence: float = SILENCE_S,
        handshake: float = HANDSHAKE_S,
    ) -> None:
        for door in doors:
            door.check(token)
        self.seats, self.doors = list(seats), list(doors)
        self.reconnect, self.silence, self.handshake = reconnect, silence, handshake
        self._token, self._board, self._bell = token, board, bell
        self._streams: dict[str, ActorStream] = {}  # seat -> its stream
        self._open: set[ActorStream] = set()  # including those without a seat
        began = time.monotonic()
        self._lost = {seat.name: began for seat in seats if seat.session}  # seat -> when its stream broke
        self._values: dict[int, tuple[int, bytes]] = {}  # cell -> its newest value, packed for sending
        self._reports: dict[str, dict[str, float]] = {}  # seat -> metrics
        self.frames_in = self.frames_out = self.bytes_in = self.bytes_out = self.refused = self.reconnects = 0
        self._logged_at = 0.0  # when a refusal was logged last
        self._spins = 0
        self._stepped_at = time.monotonic()
        self.flags = 0
        self._error: BaseException | None = None
        self._servers: list[Any] = []
        self.addresses: list[str] = []  # of the doors, with their actual ports
        largest = max((Formats(port.formats).largest for seat in seats for port in seat.ports), default=0)
        self._options = [
            *KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.max_receive_message_length", max(64 << 10, wire.JSON_BYTES, largest) + wire.HEADER.size),
            ("grpc.max_send_message_length", wire.MAX_BYTES),
            ("grpc.server_handshake_timeout_ms", int(1000 * handshake)),
            ("grpc.max_connection_idle_ms", 30_000),  # without a stream
            ("grpc.max_concurrent_streams", 2),
            ("grpc.max_allowed_incoming_connections", 4 * len(self.seats) + 256),
            ("grpc.so_reuseport", 0),
        ]
        self.loop = asyncio.new_event_loop()

    def start(self) -> None:
        self._read_board()
        self.loop.run_until_complete(self._start())
        if self._bell is not None:
            self._bell.set_asleep(True)
            self.loop.add_reader(self._bell.fd, self._rung)

    def step(self, seconds: float = POLL_S) -> None:
        """Serves for this time, at most."""
        self._tick()
        self.loop.call_later(min(seconds, POLL_S), self.loop.stop)
        self.loop.run_forever()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """The run has ended: sends END to all actors."""
        for stream in list(self._open):
            if stream.seat is not None:
                stream.ending = True
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
            self._bell.set_asleep(False)
            self.loop.remove_reader(self._bell.fd)
        self.loop.run_until_complete(asyncio.sleep(0.01))  # gRPC's last callbacks
        self.loop.close()
        for door in self.doors:
            if is_unix(door.address):
                with contextlib.suppress(OSError):
                    os.unlink(door.address.removeprefix("unix:"))

    def metrics(self) -> dict[str, float]:
        """Totals since this gate started, and how many actors are connected now."""
        names = ("frames_in", "frames_out", "bytes_in", "bytes_out", "refused", "reconnects")
        totals = {f"gate_{name}": float(getattr(self, name)) for name in names}
        waiting = [len(lane.pending) for stream in self._streams.values() for lane in stream.lanes]
        return totals | {"gate_actors": float(len(self._streams)), "gate_pending": float(sum(waiting))}

    def take_reports(self) -> dict[str, dict[str, float]]:
        """The metrics that actors reported since the last call, by seat."""
        reports, self._reports = self._reports, {}
        return reports

    @property
    def connected(self) -> list[str]:
        return list(self._streams)

    # For streams.

    def admit(self, stream: ActorStream, hello: dict[str, Any]) -> None:
        """Gives the actor a seat: its own if it reconnects, else a free one. Closes the stream if there is none."""
        protocol, version, session = hello.get("protocol"), hello.get("veldt"), hello.get("session")
        name, again = hello.get("seat", ""), hello.get("again", False)
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
            stream.close(grpc.StatusCode.NOT_FOUND, "the session has ended, and its seat was given to another actor")
            return
        if seat is None:
            seat = self._find_free(name)
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
        self._assign(stream, seat)

    def refuse(self, stream: ActorStream, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._logged_at > 10.0:  # a faulty actor must not fill the log
            self._logged_at = now
            who = "an actor" if stream.seat is None else stream.seat.name
            log.warning("gate: refused %s: %s (%d refused so far)", who, why, self.refused)

    def fail(self, error: BaseException) -> None:
        """An error of the gate itself, which `step` raises."""
        self._error = self._error or error
        self.loop.stop()

    def add_report(self, seat: Seat, metrics: dict[str, float]) -> None:
        known = self._reports.setdefault(seat.name, {})
        if len(known) < wire.MAX_METRICS:
            known |= metrics

    def value(self, cell: Latest, have: int) -> tuple[int, bytes] | None:
        """The newest value of a cell, packed once for all actors; None: the actor has it, or there is none."""
        known = self._values.get(id(cell))
        found = cell.read_bytes(-1 if known is None else known[0])
        if found is not None:
            known = self._values[id(cell)] = found[0], wire.pack_value(cell.format, found[1])
        return known if known is not None and known[0] != have else None

    def status(self, seat: Seat) -> bytes:
        return STATUS.pack(self.flags, *seat.totals(), *seat.counted())

    def spin(self) -> None:
        """Polls for the reply to a call for a while, instead of sleeping."""
        if not self._spins:
            if self._bell is not None:
                self._bell.set_asleep(False)
            self.loop.call_soon(self._spin)
        self._spins = SPIN

    def _spin(self) -> None:
        self._spins -= 1
        if self._spins > 0 and not any([stream.poll() for stream in self._streams.values()]):
            self.loop.call_soon(self._spin)
            return
        self._spins = 0
        if self._bell is not None:
            self._bell.set_asleep(True)
            self._poll()  # replies that came before the bell was set to wake us

    def _rung(self) -> None:
        assert self._bell is not None
        self._bell.clear()
        self._poll()

    def _poll(self) -> None:
        for stream in self._streams.values():
            stream.poll()

    # Seats.

    def _find_free(self, name: str) -> Seat | None:
        now = time.monotonic()
        for seat in self.seats:
            reserved = seat.name in self._lost and now - self._lost[seat.name] < self.reconnect
            free = seat.name not in self._streams and (not seat.session or not reserved)
            if (seat.name == name and (free or seat.owned)) or (not name and free and not seat.owned):
                return seat
        return None

    def _take_over(self, seat: Seat) -> None:
        """Closes the stream that has the seat."""
        earlier = self._streams.pop(seat.name, None)
        if earlier is not None:
            earlier.close(grpc.StatusCode.ABORTED, f"another actor has taken the seat {seat.name}")
            earlier.lanes = []
            earlier.seat = None

    def _assign(self, stream: ActorStream, seat: Seat) -> None:
        self._streams[seat.name] = stream
        self._lost.pop(seat.name, None)
        self._read_board()
        stream.seat = seat
        stream.lanes = [Lane(port, i) for i, port in enumerate(seat.ports)]
        stream.status, incarnation = self.status(seat), seat.record[INCARNATION]
        welcome = {
            "protocol": wire.PROTOCOL,
            "veldt": veldt.__version__,
            "seat": seat.name,
            "incarnation": incarnation,
            "ports": [describe(lane) for lane in stream.lanes],
            "latest": list(seat.cells),
            "assignment": seat.assignment,
            "status": STATUS.unpack(stream.status),
            "lz4": _has_lz4(),
        }
        stream.first = frame(WELCOME, wire.dump_json(welcome))
        stream.wake()

    def _remove(self, stream: ActorStream) -> None:
        self._open.discard(stream)
        seat = stream.seat
        if seat is None or self._streams.get(seat.name) is not stream:
            return
        del self._streams[seat.name]
        if stream.left:
            seat.release()
        else:
            self._lost[seat.name] = time.monotonic()

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
            stream = ActorStream(self, context)
            self._open.add(stream)
            try:
                await stream.run()
            finally:
                self._remove(stream)

        return handle

    def _tick(self) -> None:
        now = time.monotonic()
        gap, self._stepped_at = now - self._stepped_at, now
        self._read_board()
        for stream in list(self._open):
            if gap > 1.0:  # this process did not run: the actors were not silent
                stream.received_at, stream.opened_at = stream.received_at + gap, stream.opened_at + gap
                stream.writing = stream.writing and stream.writing + gap
            stream.tick(now)

    def _read_board(self) -> None:
        board = self._board
        self.flags = STOPPING * board.stopping | HOLD * board.hold | QUIT * board.quit


def _is_session(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef") and int(value, 16) > 0


def _is_authorized(metadata: Any, token: str) -> bool:
    """Whether the request has the token; compared in constant time."""
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
