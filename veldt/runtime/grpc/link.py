"""Link: the end of an actor or a site of its stream to the run. It connects again when the stream breaks; the session
outlives that."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from veldt.errors import UserError
from veldt.runtime.grpc import connection, wire
from veldt.runtime.grpc.connection import ACK_S, HEARTBEAT_S, SILENCE_S, LinkLost, grpc
from veldt.runtime.grpc.session import Session
from veldt.runtime.grpc.wire import Refused

# Ends of a stream after which retrying does not help: the user has to change something; the run does not want this actor.
_REFUSED = ("UNAUTHENTICATED", "FAILED_PRECONDITION")
_FINAL = ("INVALID_ARGUMENT", "ABORTED", "NOT_FOUND", "UNIMPLEMENTED")


class Link:
    """The actor's end of its stream. It works only inside `step` and `wait`, which the actor calls as often as it can."""

    def __init__(
        self,
        address: str,
        token: str = "",
        ca: bytes = b"",
        seat: str = "",
        compress: bool = False,
        patience: float = 60.0,
        silence: float = SILENCE_S,
        **session: Any,
    ) -> None:
        """`session`: further arguments of `Session`, for a site."""
        connection.check_address(address)
        if not connection.is_unix(address):
            if not token:
                raise UserError(f"{address} needs a token; give the run's token file.")
            connection.check_token(token)
            if not ca and not connection.is_loopback(address):
                raise UserError(f"{address} is another host, where a token needs TLS; give the run's certificate.")
        if compress and wire.lz4 is None:
            raise UserError("Compression needs the package lz4: pip install 'veldt[lz4]'.")
        self.address, self.patience, self.silence = address, patience, silence
        self.credentials = token, ca
        self.session = Session(self, seat, compress, **session)
        self.reconnects = -1
        self.connected = False
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._stream: asyncio.Task[None] | None = None
        self._something_to_send = asyncio.Event()
        self._error: BaseException | None = None
        self._why = "it does not answer"
        self._arrived = self._waiting = self._closing = False
        self._leaving = False  # LEAVE is to be sent
        self._stepped_at = self._woken_at = self._lost_at = self._heard_at = time.monotonic()

    def begin(self) -> None:
        """Connects in `step` and `wait`."""
        assert self._main is None, "connected already"
        self._lost_at = time.monotonic()
        self._main = self._loop.create_task(self._keep_connected())

    def connect(self) -> dict[str, Any]:
        """Waits for the run, and returns its welcome."""
        self.begin()
        while self.session.welcome is None:
            self.wait(1.0)
        return self.session.welcome

    def step(self) -> bool:
        """Sends what was put and takes what arrived, without waiting; whether something arrived."""
        self._tick()
        loop = self._loop
        loop.call_soon(loop.call_soon, loop.stop)  # two rounds: one polls the stream, the next handles what arrived
        loop.run_forever()
        return self._result()

    def wait(self, seconds: float) -> bool:
        """Like `step`, but waits until something arrives or the time is over."""
        until, self._waiting = time.monotonic() + seconds, True
        try:
            while not self._arrived and self._error is None and (now := time.monotonic()) < until:
                self._tick()
                self._run_loop(min(until - now, connection.POLL_S))
        finally:
            self._waiting = False
        return self._result()

    def keep_alive(self) -> None:
        """A step if the last one was a while ago, so that the run does not take a busy actor for a dead one."""
        if self._main is not None and time.monotonic() - self._stepped_at > HEARTBEAT_S / 2:
            arrived = self.step()
            self._arrived |= arrived

    def wake(self) -> None:
        self._something_to_send.set()

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Calls `ready` while it waits, when this descriptor can be read."""
        self._loop.add_reader(fd, ready)

    def detach(self) -> None:
        """Ends the stream and keeps the seats: another process goes on with this session."""
        self._closing = True
        self._end()

    def close(self) -> None:
        """Sends what the run does not have yet and gives up the seats; waits at most a second for that."""
        if self._loop.is_closed():
            return
        self._closing, until = True, time.monotonic() + 1.0
        while self.connected and time.monotonic() < until:  # the run ends the stream; ended here, LEAVE might be lost
            self._leaving |= self.session.settled or self.session.quit or time.monotonic() > until - 0.5
            self.wake()
            self._run_loop(0.01)
        self._end()

    def _end(self) -> None:
        if self._main is not None:
            self._main.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        self._run_loop(0.01)  # gRPC's last callbacks
        self._loop.close()

    def _run_loop(self, seconds: float) -> None:
        timer = self._loop.call_later(seconds, self._loop.stop)
        self._loop.run_forever()
        timer.cancel()

    def _result(self) -> bool:
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, False
        return arrived

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._stepped_at > 1.0:  # the actor was busy and did not read: the run was not silent
            self._heard_at = now
        self._stepped_at = now
        if now - self._heard_at > (connection.HANDSHAKE_S if self.session.welcome is None else self.silence):
            self._why = "it stopped responding" if self.connected else "it does not answer"
            if self._stream is not None:
                self._stream.cancel()
        elif now - self._woken_at > ACK_S:  # an acknowledgement, a report or a heartbeat may be due
            self._woken_at = now
            self.wake()
        if not self.connected and not self._closing and now - self._lost_at > self.patience:
            why = f"The run at {self.address} could not be reached for {self.patience:.0f} s: {self._why}."
            self._error = self._error or LinkLost(why)

    # The stream.

    async def _keep_connected(self) -> None:
        pause = 0.1
        while self._error is None:
            self._stream = self._loop.create_task(self._run_stream())
            try:
                await self._stream
            except asyncio.CancelledError:
                if self._closing:
                    raise
            except grpc.aio.AioRpcError as error:
                self._failed(error.code(), error.details() or "")
            except Refused as error:  # it would send the same again
                why = connection.printable(str(error))
                self._error = LinkLost(f"The run at {self.address} sent an invalid frame: {why}.")
            except Exception as error:
                self._error = error
            self._stream = None
            if self.connected:
                self.connected, self._lost_at, pause = False, time.monotonic(), 0.1
            if self._waiting:
                self._loop.stop()
            if self.session.quit and self._error is None:
                return
            await asyncio.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _failed(self, code: grpc.StatusCode, details: str) -> None:
        self._why = connection.printable(details) or code.name
        if code.name in _REFUSED:
            self._error = UserError(f"The run at {self.address} refuses this actor: {self._why}")
        elif code.name in _FINAL:
            self._error = LinkLost(f"The run at {self.address} has closed the stream: {self._why}")

    async def _run_stream(self) -> None:
        self._heard_at = time.monotonic()
        options = [
            *connection.KEEPALIVE,
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", self.session.largest_frame),
            ("grpc.max_send_message_length", wire.MAX_BYTES),
            ("grpc.enable_retries", 0),
        ]
        token, ca = self.credentials
        if ca:
            channel = grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(ca), options)
        else:
            channel = grpc.aio.insecure_channel(self.address, options)
        writer: asyncio.Task[None] | None = None
        try:
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            call = channel.stream_stream(f"/{connection.SERVICE}/{connection.METHOD}")(metadata=metadata)
            await call.write(self.session.hello())
            while (data := await call.read()) is not grpc.aio.EOF:
                self._take(data)
                writer = writer or self._loop.create_task(self._write(call))
                if self._arrived and self._waiting:  # the actor runs first, and then what it sends
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        except asyncio.InvalidStateError:  # the stream ended before something was written
            self._failed(await call.code(), await call.details() or "")
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await channel.close()

    def _take(self, data: bytes) -> None:
        received = wire.parse(data)
        if self.connected:
            self._arrived |= self.session.take(received)
        else:
            self.session.accept(received)
            self.reconnects += 1
            self.connected = self._arrived = True
        self._heard_at = time.monotonic()
        if self._arrived and self._waiting:
            self._loop.stop()

    async def _write(self, call: Any) -> None:
        session = self.session
        try:
            while True:
                while (data := session.next_frame(self._leaving)) is not None:
                    await call.write(data)
                    session.sent_at = time.monotonic()
                if self._leaving:
                    await call.write(wire.frame(wire.LEAVE))
                    await call.done_writing()
                    return
                await self._something_to_send.wait()
                self._something_to_send.clear()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader gets the same error
        except Exception as error:
            self._error = self._error or error
            if self._waiting:
                self._loop.stop()
