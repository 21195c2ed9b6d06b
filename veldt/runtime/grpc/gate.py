"""Gate: the run's end of all streams, a process between them and the rings in shared memory.

The gate has no state of its own: message numbers are those of the rings, and the records of seats are in shared memory. So
it may be killed at any moment, and its successor continues from the rings. A message is acknowledged when it is in its
ring, sent again until then, and dropped if it is a duplicate: each arrives once, and in order.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
import math
import os
import re
import resource
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import veldt
from veldt.errors import UserError
from veldt.metrics import GATE
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import HANDSHAKE_S, KEEPALIVE, METHOD, POLL_S, SERVICE, SILENCE_S, Door, grpc, is_unix
from veldt.runtime.grpc.seats import Seat, statuses
from veldt.runtime.grpc.streams import ActorStream
from veldt.runtime.grpc.wire import HOLD, QUIT, STATUS, STOPPING, WELCOME, Refused, frame
from veldt.runtime.local.board import Board
from veldt.runtime.shm.memory import EventBell, Latest

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
        bell: EventBell,
        token: str = "",
        own_token: str = "",
        reconnect: float = RECONNECT_S,
        silence: float = SILENCE_S,
        handshake: float = HANDSHAKE_S,
    ) -> None:
        for door in doors:
            door.check(token)
        self.seats, self.doors = list(seats), list(doors)
        self.reconnect, self.silence, self.handshake = reconnect, silence, handshake
        self._token, self._own_token, self._board, self._bell = token, own_token, board, bell
        self._streams: list[ActorStream] = []  # all that are open; one without a seat has not said hello
        self._values: dict[int, tuple[int, bytes]] = {}  # cell -> its newest value, packed for sending
        self._reports: dict[str, dict[str, float]] = {}  # seat -> metrics
        self.frames_in = self.frames_out = self.bytes_in = self.bytes_out = self.refused = 0
        self.duplicates = self.reconnects = 0
        self._logged_at: dict[str, float] = {}  # who was refused -> when that was logged last
        self._spins = 0
        self._stepped_at = time.monotonic()
        self.flags = 0
        self._error: BaseException | None = None
        self._servers: list[Any] = []
        self.addresses: list[str] = []  # of the doors, with their actual ports
        largest = max((lane.formats.largest for seat in seats for lane in seat.lanes), default=0)
        self._options = [
            *KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.max_receive_message_length", max(64 << 10, wire.JSON_BYTES, largest) + wire.HEADER.size),
            ("grpc.max_send_message_length", wire.MAX_BYTES),
            ("grpc.server_handshake_timeout_ms", int(1000 * handshake)),
            ("grpc.max_connection_idle_ms", int(1000 * handshake)),  # without a stream
            ("grpc.max_concurrent_streams", 2),
            ("grpc.max_allowed_incoming_connections", _most_connections() + 4 * len(self.seats)),
            ("grpc.so_reuseport", 0),
        ]
        self.loop = asyncio.new_event_loop()

    def start(self) -> None:
        self.loop.run_until_complete(self._start())
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
        for stream in self._streams:
            stream.ending = True
            stream.wake()
        until = time.monotonic() + 1.0
        while self._streams and time.monotonic() < until:
            self.loop.call_later(0.01, self.loop.stop)
            self.loop.run_forever()
        for stream in self._streams:
            stream.close(grpc.StatusCode.UNAVAILABLE, "the gate closes")
        for server in self._servers:
            self.loop.run_until_complete(server.stop(0.2))
        self._bell.set_asleep(False)
        self.loop.remove_reader(self._bell.fd)
        self.loop.run_until_complete(asyncio.sleep(0.01))  # gRPC's last callbacks
        self.loop.close()
        for door in self.doors:
            if is_unix(door.address):
                with contextlib.suppress(OSError):
                    os.unlink(door.address.removeprefix("unix:"))

    def metrics(self) -> dict[str, float]:
        names = ("frames_in", "frames_out", "bytes_in", "bytes_out", "refused", "duplicates", "reconnects")
        totals = {f"gate_{name}": float(getattr(self, name)) for name in names}
        waiting = [len(lane.pending) for stream in self._streams for lane in stream.lanes]
        return totals | {"gate_actors": float(len(self.connected)), "gate_pending": float(sum(waiting))}

    def take_reports(self) -> dict[str, dict[str, float]]:
        reports, self._reports = self._reports, {}
        return reports

    @property
    def connected(self) -> list[str]:
        return [seat.name for stream in self._streams for seat in stream.seats]

    # For streams.

    def admit(self, stream: ActorStream, hello: dict[str, Any]) -> None:
        """Gives a site as many seats as it has actors: its own if it reconnects, else free ones. Closes the stream if there
        are too few."""
        protocol, version, session = hello.get("protocol"), hello.get("veldt"), str(hello.get("session"))
        name, again, actors = hello.get("seat", ""), hello.get("again", False), hello.get("actors", 1)
        if (protocol, version) != (wire.PROTOCOL, veldt.__version__):
            stream.close(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the run has veldt {veldt.__version__} (protocol {wire.PROTOCOL}), the actor has {ascii(version)[:32]} "
                f"(protocol {ascii(protocol)[:32]}); install the same on both",
            )
            return
        valid = re.fullmatch("[0-9a-f]{32}", session) and int(session, 16) > 0
        if not valid or not isinstance(name, str) or not isinstance(again, bool):
            raise Refused("a hello without a session")
        if type(actors) is not int or not 0 < actors <= wire.MAX_ACTORS or (name and actors > 1):
            raise Refused("a hello with an invalid number of actors")
        own = [seat for seat in self.seats if seat.session == session and (stream.own or not seat.owned)]
        if len(own) == actors:
            self.reconnects += 1
        elif again:
            stream.close(grpc.StatusCode.NOT_FOUND, "the session has ended, and its seat was given to another actor")
            return
        else:
            others = [seat for seat in self._find_free(name, stream.own) if seat not in own]
            free = [*own, *others][:actors]  # a gate that was killed may have given some
            if len(free) < actors:
                stream.close(grpc.StatusCode.RESOURCE_EXHAUSTED, self._too_few(name, actors, len(free)))
                return
            for seat in free:
                if seat not in own:
                    seat.claim(session)
            own = [seat for seat in self.seats if seat in free]
        self._assign(stream, own)

    def refuse(self, stream: ActorStream, why: str) -> None:
        self.refused += 1
        now, who = time.monotonic(), ", ".join(seat.name for seat in stream.seats[:3]) or "an actor"
        if now - self._logged_at.get(who, -math.inf) > 10.0:  # a faulty actor must not fill the log
            self._logged_at[who] = now
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

    def spin(self) -> None:
        """Polls for the reply to a call for a while, instead of sleeping."""
        if not self._spins:
            self._bell.set_asleep(False)
            self.loop.call_soon(self._spin)
        self._spins = SPIN

    def _spin(self) -> None:
        self._spins -= 1
        if self._spins > 0 and not self._poll():
            self.loop.call_soon(self._spin)
            return
        self._spins = 0
        self._bell.set_asleep(True)
        self._poll()  # replies that came before the bell was set to wake us

    def _rung(self) -> None:
        self._bell.clear()
        self._poll()

    def _poll(self) -> bool:
        return any([stream.poll() for stream in self._streams])

    # Seats.

    def _find_free(self, name: str, own: bool) -> list[Seat]:
        """The seats of the run's own processes are for them alone."""
        now, taken = time.monotonic(), {id(seat) for stream in self._streams for seat in stream.seats}
        found = []
        for seat in self.seats:
            if seat.owned and not own:
                continue
            free = id(seat) not in taken and (not seat.session or now - seat.lost_at > self.reconnect)
            if (seat.name == name and (free or seat.owned)) or (not name and free and not seat.owned):
                found.append(seat)
        return found

    def _too_few(self, name: str, actors: int, free: int) -> str:
        seats = f"the run has {len(self.seats)}"
        if name:
            return f"the seat {name[:64]!a} is not free; {seats}"
        return f"no seat is free; {seats}" if actors == 1 else f"{actors} seats are needed and {free} are free; {seats}"

    def _assign(self, stream: ActorStream, seats: list[Seat]) -> None:
        """Gives seats to a stream, and closes one that had any of them."""
        for earlier in self._streams:
            if lost := [seat.name for seat in earlier.seats if seat in seats]:
                earlier.close(grpc.StatusCode.ABORTED, f"another actor has taken the seat {lost[0]}")
                earlier.take_seats([])
        for seat in seats:
            for lane in seat.lanes:
                lane.restart()
        stream.take_seats(seats)
        stream.status = statuses(seats, self.flags)
        welcome = {
            "protocol": wire.PROTOCOL,
            "veldt": veldt.__version__,
            "seats": [seat.describe() for seat in seats],
            "latest": list(seats[0].cells),
            "status": STATUS.unpack(stream.status),
            "lz4": wire.lz4 is not None,
        }
        stream.first = frame(WELCOME, wire.dump_json(welcome))
        stream.wake()

    # The servers.

    async def _start(self) -> None:
        for door in self.doors:
            serve = functools.partial(self._serve, is_unix(door.address))
            handler = grpc.stream_stream_rpc_method_handler(serve)
            server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=2 * len(self.seats) + 64)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
            if is_unix(door.address):
                _clear_socket(Path(door.address.removeprefix("unix:")))
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

    async def _serve(self, private: bool, _: Any, context: Any) -> None:
        """`private`: only processes of this user reach the door, which need no token."""
        metadata = context.invocation_metadata()
        own = private or _is_authorized(metadata, self._own_token)
        if not own and not _is_authorized(metadata, self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong or missing")
        stream = ActorStream(self, context, own)
        self._streams.append(stream)
        try:
            await stream.run()
        finally:
            self._streams.remove(stream)
            for seat in stream.seats:
                if stream.left:
                    seat.release()
                else:
                    seat.lost_at = time.monotonic()

    def _tick(self) -> None:
        now = time.monotonic()
        gap, self._stepped_at = now - self._stepped_at, now
        board = self._board
        self.flags = STOPPING * board.stopping | HOLD * board.hold | QUIT * board.quit
        for stream in self._streams:
            if gap > 1.0:  # this process did not run: the actors were not silent
                stream.received_at += gap
                stream.writing = stream.writing and stream.writing + gap
            stream.tick(now)


def _is_authorized(metadata: Any, token: str) -> bool:
    """Whether the request has the token; compared in constant time. Nobody has an empty one."""
    given = [value for key, value in metadata or () if key == "authorization"]
    if not token or len(given) != 1 or not isinstance(given[0], str):
        return False
    return hmac.compare_digest(given[0].encode(), f"Bearer {token}".encode())


def _most_connections() -> int:
    """That may be open at a time, of anybody: half of the files that this process may open, after it has raised that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _clear_socket(path: Path) -> None:
    """Makes the folder of a socket, which only this user may enter, and removes the socket of an earlier gate."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(
            f"The folder of a socket must be accessible to you alone: chmod 700 {path.parent}, or choose a new one."
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"{path} exists and is not a socket; choose another path.")
        path.unlink()
