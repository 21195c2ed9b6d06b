"""The run's end of one actor's stream. An error in a stream closes that stream and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import ACK_S, HEARTBEAT_S, grpc
from veldt.runtime.grpc.lanes import Lane, Sending
from veldt.runtime.grpc.seats import Seat
from veldt.runtime.grpc.wire import ACK, DATA, END, HEARTBEAT, HELLO, LEAVE, REPORT, WANT, Frame, Refused, frame

if TYPE_CHECKING:
    from veldt.runtime.grpc.gate import Gate

STATUS_S = 0.25  # between two reports of the run's counts


class ActorStream:
    """One actor's stream, from the first frame to the end."""

    def __init__(self, gate: Gate, context: Any) -> None:
        self.gate, self.context = gate, context
        self.seat: Seat | None = None
        self.lanes: list[Lane] = []
        self.wants: dict[int, int] = {}  # name of a value -> the version that the actor has
        self.sending: list[Sending] = []
        self.opened_at = self.received_at = self.sent_at = self.status_at = time.monotonic()
        self.writing = 0.0  # when the current write began; 0: none
        self.status = b""  # the last one sent
        self.first: bytes | None = None  # WELCOME
        self.ending = self.ended = False  # END is to be sent; was sent
        self.left = False  # the actor has given up its seat
        self.end: asyncio.Future[tuple[grpc.StatusCode, str] | None] = gate.loop.create_future()
        self._wake: asyncio.Future[None] | None = None

    def close(self, code: grpc.StatusCode | None = None, why: str = "") -> None:
        if not self.end.done():
            self.end.set_result(None if code is None else (code, why))

    def wake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def run(self) -> None:
        reader, writer = (self.gate.loop.create_task(part) for part in (self._read(), self._write()))
        try:
            end = await self.end
        finally:
            self.close()
            self.wake()
            reader.cancel()
            await asyncio.wait([writer], timeout=1.0)  # a cancelled write would lose the status
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if end is not None:
            await self.context.abort(*end)

    async def _read(self) -> None:
        gate, context = self.gate, self.context
        try:
            while (data := await context.read()) is not grpc.aio.EOF and not self.end.done():
                self.received_at = time.monotonic()
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
            gate.fail(error)
            self.close(grpc.StatusCode.INTERNAL, "the gate failed")

    def _take(self, received: Frame) -> None:
        kind = received.kind
        if self.seat is None:
            if kind != HELLO:
                raise Refused("no hello")
            self.gate.admit(self, wire.load_json(received.payload))
        elif kind in (DATA, ACK):
            if received.channel >= len(self.lanes):
                raise Refused("a message has an unknown channel")
            lane = self.lanes[received.channel]
            new = kind == DATA and lane.take(received)
            lane.acknowledged(received.ack)
            if new and lane.port.reader is not None:
                self.gate.spin()
            elif lane.ack_due(half=True):
                self.wake()
        elif kind == WANT:
            if received.channel >= len(self.seat.cells):
                raise Refused("a value has an unknown name")
            self.wants[received.channel] = wire.signed(received.number)
            self.poll_values()
        elif kind == REPORT:
            report = wire.load_json(received.payload)
            counts, metrics = wire.report_counts(report), wire.report_metrics(report)
            self.seat.set_counts(counts)
            self.gate.add_report(self.seat, metrics)
        elif kind == LEAVE:
            self.left = True
            self.close()
        elif kind != HEARTBEAT:
            raise Refused("an actor sent a frame of a kind that only the run sends")

    def poll(self) -> bool:
        """Moves pending messages to their rings; whether there is an answer to send."""
        found = False
        for lane in self.lanes:
            if lane.pending and lane.push() and lane.ack_due(half=True):
                self.wake()
            if lane.has_answer:
                found = True
        if found:
            self.wake()
        return found

    def poll_values(self) -> None:
        """Starts sending values of which the actor wants a newer version."""
        assert self.seat is not None
        for channel, have in list(self.wants.items()):
            if any(sending.channel == channel for sending in self.sending):
                continue
            found = self.gate.value(list(self.seat.cells.values())[channel], have)
            if found is not None:
                del self.wants[channel]
                self.sending.append(Sending(channel, *found))
                self.wake()

    async def _write(self) -> None:
        gate = self.gate
        try:
            while True:
                while (data := self._next()) is not None and not self.end.done():
                    await self._send(data)
                if self.ending and not self.ended:
                    self.ended = True
                    await self._send(frame(END))  # the actor closes the stream; closed here, END might be lost
                if self.end.done():
                    return
                self._wake = gate.loop.create_future()
                await self._wake
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.UsageError):
            self.close()
        except Exception as error:
            gate.fail(error)
            self.close(grpc.StatusCode.INTERNAL, "the gate failed")

    async def _send(self, data: bytes) -> None:
        self.writing = time.monotonic()
        await self.context.write(data)
        self.writing, self.sent_at = 0.0, time.monotonic()
        self.gate.frames_out += 1
        self.gate.bytes_out += len(data)

    def _next(self) -> bytes | None:
        """The frame to send now: answers first, values last."""
        if self.seat is None:
            return None
        if self.first is not None:
            data, self.first = self.first, None
            return data
        for lane in self.lanes:
            if lane.has_answer:
                return lane.next_answer()
        now = time.monotonic()
        for lane in self.lanes:
            if lane.ack_due(half=now - self.sent_at < ACK_S):
                return lane.ack()
        if self.status_due(now):
            self.status_at, self.status = now, self.gate.status(self.seat)
            return frame(HEARTBEAT, self.status)
        if self.sending:
            data = self.sending[0].next_part()
            if self.sending[0].done:
                del self.sending[0]
            return data
        return None

    def status_due(self, now: float) -> bool:
        assert self.seat is not None
        if now - self.sent_at > HEARTBEAT_S:
            return True
        if self.gate.flags != self.status[0]:
            return True
        return now - self.status_at > STATUS_S and self.gate.status(self.seat) != self.status

    def tick(self, now: float) -> None:
        """Checks timeouts, and wakes the writer when something is due."""
        if self.seat is None:
            if now - self.opened_at > self.gate.handshake:
                self.close(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        elif now - self.received_at > self.gate.silence or (self.writing and now - self.writing > self.gate.silence):
            self.close(grpc.StatusCode.DEADLINE_EXCEEDED, "the actor fell silent")
        else:
            self.poll()
            if self.wants:
                self.poll_values()
            if self.status_due(now) or any(lane.ack_due(half=False) for lane in self.lanes):
                self.wake()
