"""Link: the actor's end of its stream to the run.

What is put stays here until the run says that it has it, and is sent again over the next stream if one breaks; answers that
came before are dropped. So every message arrives once, and in order (see gate.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

import veldt
from veldt.counters import NAMES
from veldt.errors import UserError
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
    LinkLost,
    check_address,
    check_token,
    grpc,
    is_loopback,
    is_unix,
)
from veldt.runtime.grpc.mailboxes import LinkCell, LinkInbox, LinkOutbox, LinkRows
from veldt.runtime.grpc.wire import (
    ACK,
    BEAT,
    BYE,
    DATA,
    END,
    HELLO,
    HOLD,
    QUIT,
    STATUS,
    STOPPING,
    TOLD,
    VALUE,
    WELCOME,
    Frame,
    Refused,
    frame,
)
from veldt.runtime.proxies import CallerEnds
from veldt.shared import Cell

TOLD_S = 0.1  # between two reports of counts


# The run does not want this actor, or not like this; to try again does not help.
_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}


class Link:
    """The actor's end of its stream. All is done in `step` and `wait`, which the actor calls as often as it can."""

    def __init__(
        self,
        address: str,
        token: str = "",
        ca: bytes = b"",
        seat: str = "",
        compress: bool = False,
        patience: float = 60.0,
        silent: float = SILENT_S,
    ) -> None:
        check_address(address)
        if not is_unix(address):
            if not token:
                raise UserError(f"{address} is reached with a token; give the run's token file.")
            check_token(token)
            if not ca and not is_loopback(address):
                raise UserError(f"{address} is another host, where a token needs TLS; give the run's certificate.")
        if compress:
            wire.check_compression()
        self.address, self.seat, self.compress, self.patience, self.silent = address, seat, compress, patience, silent
        self._token, self._ca = token, ca
        self.session = secrets.token_hex(16)
        self.incarnation = 0
        self.reconnects = -1
        self.flags = 0
        self.rows = LinkRows(self)
        self.outboxes: list[LinkOutbox] = []
        self.inboxes: list[LinkInbox | None] = []
        self._cells: list[LinkCell] = []
        self._channels: dict[str, int] = {}
        self._cells_at: dict[str, int] = {}
        self._welcome: dict[str, Any] | None = None
        self._largest = 4 << 20
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._stream: asyncio.Task[None] | None = None
        self._up = False
        self._wake: asyncio.Future[None] | None = None  # what the writer waits for
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self._why = "it does not answer"
        self._came = self._waiting = self._closing = False
        self._heard = self._spoke = self._stepped = self._lost = self._opened = time.monotonic()
        self._told_at, self._told = 0.0, [0] * len(NAMES)
        self._metrics: dict[str, float] = {}
        self._bye = 0  # 1: it is to be said; 2: it was

    def connect(self) -> dict[str, Any]:
        """Waits for the run, and returns its welcome."""
        assert self._main is None, "connected already"
        self._lost = time.monotonic()
        self._main = self._loop.create_task(self._live())
        while self._welcome is None:
            self.wait(1.0)
        return self._welcome

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
        return self._cells[self._cells_at[name]]

    @property
    def connected(self) -> bool:
        return self._up

    @property
    def hold(self) -> bool:
        return bool(self.flags & HOLD)

    @property
    def stopping(self) -> bool:
        return bool(self.flags & STOPPING)

    @property
    def quit(self) -> bool:
        return bool(self.flags & QUIT)

    def tell(self, metrics: dict[str, float]) -> None:
        """Goes to the run with the next counts."""
        self._metrics |= {name[:128]: float(x) for name, x in metrics.items() if -1e300 < x < 1e300}
        assert len(self._metrics) <= wire.MOST_METRICS, len(self._metrics)

    def step(self) -> bool:
        """Sends what was put and takes what came, without waiting; whether something came."""
        self._tick()
        loop = self._loop
        loop.call_soon(loop.call_soon, loop.stop)  # two rounds: one sees that something came, the next takes it
        loop.run_forever()
        return self._result()

    def wait(self, seconds: float) -> bool:
        """As `step`, but waits until something comes or the time is over."""
        loop, until = self._loop, time.monotonic() + seconds
        self._waiting = True
        try:
            while not self._came and self._error is None and (now := time.monotonic()) < until:
                self._tick()
                self._stop_by(loop.time() + min(until - now, LOOK_S))
                loop.run_forever()
        finally:
            self._waiting = False
        return self._result()

    def breathe(self) -> None:
        """A step, if the last was a while ago."""
        if self._main is not None and time.monotonic() - self._stepped > BEAT_S / 2:
            came = self.step()
            self._came |= came

    def wake(self) -> None:
        """There is something to send."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Brings to the run what it does not have yet, and says goodbye; waits a second for that, at most."""
        if self._loop.is_closed():
            return
        self._closing, until = True, time.monotonic() + 1.0
        if self._timer is not None:
            self._timer.cancel()
        while self._up and self._bye < 2 and time.monotonic() < until:
            self._bye = self._bye or int(self.settled or self.quit or time.monotonic() > until - 0.5)
            self.wake()
            self._run(0.01)
        while self._up and time.monotonic() < until:  # the run ends the stream; ended here, the last words may be lost
            self._run(0.01)
        if self._main is not None:
            self._main.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        self._run(0.01)  # what gRPC still has to say about the stream
        self._loop.close()

    @property
    def settled(self) -> bool:
        """Whether the run has all that was put."""
        return all(outbox.settled for outbox in self.outboxes)

    def _run(self, seconds: float) -> None:
        self._loop.call_later(seconds, self._loop.stop)
        self._loop.run_forever()

    def _stop_by(self, when: float) -> None:
        """The loop stops then, or earlier. A timer that was not needed serves the next who waits."""
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._stop)

    def _stop(self) -> None:
        self._timer = None
        self._loop.stop()

    def _result(self) -> bool:
        if self._error is not None:
            raise self._error
        came, self._came = self._came, False
        return came

    def _tick(self) -> None:
        """What is due by the clock."""
        now = time.monotonic()
        if now - self._stepped > 1.0:  # the actor was busy: the others did not fall silent, they were not listened to
            self._heard = self._opened = now
        self._stepped = now
        if self._up:
            if now - self._heard > self.silent:
                self._drop("it fell silent")
            elif self._wake is not None and self._due(now):
                self.wake()
            return
        if now - self._opened > (GREET_S if self._welcome is None else self.silent):
            self._drop("it does not answer")
        if self._error is None and not self._closing and now - self._lost > self.patience:
            self._error = LinkLost(f"The run at {self.address} cannot be reached for {self.patience:.0f} s: {self._why}.")

    def _drop(self, why: str) -> None:
        self._why = why
        if self._stream is not None:
            self._stream.cancel()

    # The stream.

    async def _live(self) -> None:
        pause = 0.1
        while self._error is None:
            self._stream = self._loop.create_task(self._connect())
            try:
                await self._stream
            except asyncio.CancelledError:
                if self._closing:
                    raise
            except grpc.aio.AioRpcError as error:
                self._failed(error.code(), error.details() or "")
            except Refused as error:
                self._why = f"what it says cannot be understood ({error})"
            except Exception as error:
                self._error = error
            self._stream = None
            if self._up:
                self._up, self._lost, pause = False, time.monotonic(), 0.1
            if self._waiting:
                self._loop.stop()
            if self.quit and self._error is None:
                return
            await asyncio.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _failed(self, code: grpc.StatusCode, details: str) -> None:
        self._why = details[:500] or code.name
        if code not in _FINAL:
            return
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION):
            self._error = UserError(f"The run at {self.address} refuses this actor: {self._why}")
        else:
            self._error = LinkLost(f"The run at {self.address} has closed the stream: {self._why}")

    async def _connect(self) -> None:
        """The life of one stream."""
        self._opened = time.monotonic()
        options = [
            *KEEPALIVE,
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", self._largest),
            ("grpc.max_send_message_length", wire.MOST_BYTES),
            ("grpc.enable_retries", 0),
        ]
        if self._ca:
            channel = grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(self._ca), options)
        else:
            channel = grpc.aio.insecure_channel(self.address, options)
        writer: asyncio.Task[None] | None = None
        try:
            metadata = (("authorization", f"Bearer {self._token}"),) if self._token else ()
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=metadata)
            await call.write(self._hello())
            data = await call.read()
            if data is grpc.aio.EOF:
                raise Refused("no welcome")
            self._welcomed(wire.parse(data))
            writer = self._loop.create_task(self._write(call))
            while (data := await call.read()) is not grpc.aio.EOF:
                self._take(data)
                if self._came and self._waiting:  # whoever waits for it goes first, and what it sends then
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        except asyncio.InvalidStateError:  # the stream ended before something was written
            self._failed(await call.code(), await call.details() or "")
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await channel.close()

    def _hello(self) -> bytes:
        told = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": self.session, "seat": self.seat}
        return frame(HELLO, wire.dump_json(told | {"again": self._welcome is not None}))

    def _welcomed(self, came: Frame) -> None:
        if came.kind != WELCOME:
            raise Refused("no welcome")
        told = wire.load_json(came.payload, self._largest)
        again = self._welcome is not None
        try:
            self._meet(told)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Refused(f"no welcome: {error!r}") from None
        if not again:
            self._welcome = told
        self.reconnects += 1
        self._up, self._came = True, True
        self._heard = self._spoke = time.monotonic()
        if self._waiting:
            self._loop.stop()

    def _meet(self, told: dict[str, Any]) -> None:
        if self._welcome is None:
            self.seat, self.incarnation = str(told["seat"]), int(told["incarnation"])
            ports = told["ports"]
            self._channels = {str(port["name"]): i for i, port in enumerate(ports)}
            self.inboxes = [LinkInbox(i, port) if port["answers"] is not None else None for i, port in enumerate(ports)]
            self.outboxes = [LinkOutbox(self, i, port) for i, port in enumerate(ports)]
            self._cells_at = {str(name): i for i, name in enumerate(told["latest"])}
            self._cells = [LinkCell(self, i) for i in range(len(self._cells_at))]
            largest = max((inbox._formats.largest for inbox in self.inboxes if inbox is not None), default=0)
            self._largest = max(self._largest, largest + wire.HEADER.size)
            if self.compress and not told["lz4"]:
                self._error = UserError("The run's host cannot decompress: pip install 'veldt[lz4]' there.")
        else:
            if told["incarnation"] != self.incarnation:
                raise LinkLost(f"The seat {self.seat} of the run at {self.address} was given to another actor.")
            for outbox, port in zip(self.outboxes, told["ports"], strict=True):
                outbox.again(int(port["written"]))
            for latest in self._cells:
                latest.again()
        self._told = [0] * len(NAMES)  # the run gets them again
        self._told_at = 0.0
        self._status(STATUS.pack(*map(int, told["status"])))

    def _status(self, payload: bytes | memoryview) -> None:
        if len(payload) != STATUS.size:
            raise Refused("a status is of the wrong size")
        flags, *counts = STATUS.unpack(payload)
        if flags != self.flags:
            self._came = True
        self.flags = flags
        self.rows.run, self.rows.counted = counts[: len(NAMES)], counts[len(NAMES) :]

    def _take(self, data: bytes) -> None:
        came = wire.parse(data)
        self._heard = time.monotonic()
        kind = came.kind
        if kind in (DATA, ACK):
            if came.channel >= len(self.outboxes):
                raise Refused("a message has no known channel")
            self.outboxes[came.channel].written_there(came.ack)
            if kind == ACK:
                self._came = True
            else:
                inbox = self.inboxes[came.channel]
                if inbox is None:
                    raise Refused("an answer where nothing is asked")
                self._came |= inbox.take(came)
                if 2 * inbox.owed >= inbox.slots:
                    self.wake()
        elif kind == BEAT:
            self._status(came.payload)
        elif kind == VALUE:
            if came.channel >= len(self._cells):
                raise Refused("a value has no known name")
            self._came |= self._cells[came.channel].take(came)
        elif kind == END:
            self.flags |= QUIT
            self._came = True
        else:
            raise Refused("a frame that only an actor sends")
        if self._came and self._waiting:
            self._loop.stop()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                while (data := self._next()) is not None:
                    await call.write(data)
                    self._spoke = time.monotonic()
                if self._bye:
                    await call.write(frame(BYE))
                    await call.done_writing()
                    self._bye = 2
                    self._loop.stop()
                    return
                self._wake = self._loop.create_future()
                await self._wake
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # who reads learns it too
        except Exception as error:
            self._error, self._bye = self._error or error, 2
            if self._waiting:
                self._loop.stop()
        finally:
            self._wake = None

    def _next(self) -> bytes | None:
        """The frame to send now: messages first."""
        for outbox in self.outboxes:
            if (data := outbox.next()) is not None:
                return data
        for latest in self._cells:
            if (data := latest.next()) is not None:
                return data
        now = time.monotonic()
        for inbox in self.inboxes:
            if inbox is not None and inbox.owed and (2 * inbox.owed >= inbox.slots or now - self._spoke > ACK_S):
                return inbox.ack()
        if self._news() and (now - self._told_at > TOLD_S or self._bye):
            told = {"counts": self.rows.mine, "metrics": self._metrics}
            self._told, self._metrics, self._told_at = list(self.rows.mine), {}, now
            return frame(TOLD, wire.dump_json(told))
        if now - self._spoke > BEAT_S:
            return frame(BEAT)
        return None

    def _news(self) -> bool:
        return bool(self._metrics) or self._told != self.rows.mine

    def _due(self, now: float) -> bool:
        """Whether the clock alone makes something to send."""
        if now - self._spoke > BEAT_S or (now - self._told_at > TOLD_S and self._news()):
            return True
        return now - self._spoke > ACK_S and any(inbox is not None and inbox.owed for inbox in self.inboxes)
