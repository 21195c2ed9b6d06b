"""The run's end of one actor's stream. What is wrong with a stream closes that stream and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import ACK_S, BEAT_S, grpc
from veldt.runtime.grpc.lanes import Lane, Sending
from veldt.runtime.grpc.seats import Seat
from veldt.runtime.grpc.wire import ACK, BEAT, BYE, DATA, END, HELLO, TOLD, WANT, Frame, Refused, frame

if TYPE_CHECKING:
    from veldt.runtime.grpc.gate import Gate

STATUS_S = 0.25  # between two reports of the run's counts


class ActorStream:
    """One actor's stream, from the first frame to the end. What is wrong with it closes it and nothing else."""

    def __init__(self, gate: Gate, context: Any) -> None:
        self.gate, self.context = gate, context
        self.seat: Seat | None = None
        self.lanes: list[Lane] = []
        self.wants: dict[int, int] = {}  # name of a value -> the version that the actor has
        self.sending: list[Sending] = []
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
            if came.channel >= len(self.seat.cells):
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
