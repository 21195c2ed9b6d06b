"""The run's end of the stream of an actor or a site. An error in a stream closes that stream and nothing else."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import ACK_S, HEARTBEAT_S, grpc
from veldt.runtime.grpc.seats import STEPS, Lane, Seat, statuses
from veldt.runtime.grpc.wire import Frame, Refused, frame

if TYPE_CHECKING:
    from veldt.runtime.grpc.gate import Gate

STATUS_S = 0.25  # between two reports of the run's counts


class ActorStream:
    def __init__(self, gate: "Gate", context: Any, own: bool) -> None:
        """`own`: it comes from a process of the run."""
        self.gate, self.context, self.own = gate, context, own
        self.seats: list[Seat] = []  # one, or those of a site; none before hello
        self.lanes: list[Lane] = []  # of all seats, in order: a frame's channel is a number of one
        self._owners: list[Seat] = []  # of the lanes
        self.wants: dict[int, int] = {}  # cell -> the version that the actor has
        self.sending: dict[int, Iterator[bytes]] = {}  # cell -> frames with its value
        self.received_at = self.sent_at = self.status_at = time.monotonic()
        self.writing = 0.0  # when the current write began; 0: none
        self.status = b""  # the last one sent
        self.first = b""  # WELCOME
        self.ending = False  # END is to be sent
        self.left = False  # the actor has given up its seat
        self.end: asyncio.Future[tuple[grpc.StatusCode, str] | None] = gate.loop.create_future()
        self._something_to_send = asyncio.Event()

    @property
    def seat(self) -> Seat | None:
        return self.seats[0] if self.seats else None

    def take_seats(self, seats: Sequence[Seat]) -> None:
        owned = [(lane, seat) for seat in seats for lane in seat.lanes]
        if len(owned) > wire.MAX_CHANNELS:
            raise Refused(f"{len(seats)} actors have more than {wire.MAX_CHANNELS} channels")
        self.seats, self.lanes, self._owners = list(seats), [lane for lane, _ in owned], [seat for _, seat in owned]
        for number, lane in enumerate(self.lanes):
            lane.channel = number

    def close(self, code: grpc.StatusCode | None = None, why: str = "") -> None:
        if not self.end.done():
            self.end.set_result(None if code is None else (code, why))

    def wake(self) -> None:
        self._something_to_send.set()

    async def run(self) -> None:
        reader, writer = (self.gate.loop.create_task(self._guard(part)) for part in (self._read, self._write))
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

    async def _guard(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
            self.close()
        except Refused as error:
            self.gate.refuse(self, str(error))
            self.close(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.UsageError):
            self.close()  # the stream is broken
        except Exception as error:
            self.gate.fail(error)
            self.close(grpc.StatusCode.INTERNAL, "the gate failed")

    async def _read(self) -> None:
        while (data := await self.context.read()) is not grpc.aio.EOF and not self.end.done():
            self.received_at = time.monotonic()
            self.gate.frames_in += 1
            self.gate.bytes_in += len(data)
            self._take(wire.parse(data))

    def _take(self, received: Frame) -> None:
        kind = received.kind
        if not self.seats:
            if kind != wire.HELLO:
                raise Refused("no hello")
            self.gate.admit(self, wire.load_json(received.payload))
        elif kind in (wire.DATA, wire.ACK):
            if received.channel >= len(self.lanes):
                raise Refused("a message has an unknown channel")
            lane = self.lanes[received.channel]
            steps = lane.take(received) if kind == wire.DATA else None
            lane.acknowledged(received.ack)
            if steps is not None:
                self._owners[received.channel].record[STEPS] += steps
            elif kind == wire.DATA:
                self.gate.duplicates += 1
            if steps is not None and lane.reader is not None:
                self.gate.spin()
            elif lane.ack_due(half=True):
                self.wake()
        elif kind == wire.WANT:
            if received.channel >= len(self.seats[0].cells):
                raise Refused("a value has an unknown name")
            self.wants[received.channel] = received.number
            self._poll_values(self.seats[0])
        elif kind == wire.REPORT:
            if received.channel >= len(self.seats):
                raise Refused("a report of an unknown seat")
            seat, (counts, metrics) = self.seats[received.channel], wire.load_report(received.payload)
            self.gate.add_report(seat, seat.take_report(counts, metrics))
        elif kind == wire.LEAVE:
            self.left = True
            self.close()
        elif kind != wire.HEARTBEAT:
            raise Refused("an actor sent a frame of a kind that only the run sends")

    def poll(self) -> bool:
        """Moves pending messages to their rings; whether there is an answer to send."""
        found = False
        for lane in self.lanes:
            if lane.pending and lane.push() and lane.ack_due(half=True):
                self.wake()
            found |= lane.has_answer
        if found:
            self.wake()
        return found

    def _poll_values(self, seat: Seat) -> None:
        """Starts sending values of which the actor wants a newer version."""
        for channel, have in list(self.wants.items()):
            found = self.gate.value(list(seat.cells.values())[channel], have)
            if found is not None:
                del self.wants[channel]
                self.sending[channel] = _value_frames(channel, *found)
                self.wake()

    async def _write(self) -> None:
        while True:
            while not self.end.done() and (data := self._next()):
                await self._send(data)
            if self.ending:
                self.ending = False
                await self._send(frame(wire.END))  # the actor closes the stream; closed here, END might be lost
            if self.end.done():
                return
            await self._something_to_send.wait()
            self._something_to_send.clear()

    async def _send(self, data: bytes) -> None:
        self.writing = time.monotonic()
        await self.context.write(data)
        self.writing, self.sent_at = 0.0, time.monotonic()
        self.gate.frames_out += 1
        self.gate.bytes_out += len(data)

    def _next(self) -> bytes | None:
        """The frame to send now: answers first, values last."""
        if not self.seats:
            return None
        if self.first:
            data, self.first = self.first, b""
            return data
        for lane in self.lanes:
            if lane.has_answer:
                return lane.next_answer()
        now = time.monotonic()
        for lane in self.lanes:  # of many, one may be idle while others are busy: a ring of its actor waits for this
            if lane.ack_due(half=now - lane.acked_at < ACK_S):
                return lane.ack()
        if self._status_due(now):
            self.status_at, self.status = now, statuses(self.seats, self.gate.flags)
            return frame(wire.HEARTBEAT, self.status)
        for channel, frames in list(self.sending.items()):
            if (part := next(frames, None)) is not None:
                return part
            del self.sending[channel]
        return None

    def _status_due(self, now: float) -> bool:
        if now - self.sent_at > HEARTBEAT_S or self.gate.flags != self.status[0]:
            return True
        return now - self.status_at > STATUS_S and statuses(self.seats, self.gate.flags) != self.status

    def tick(self, now: float) -> None:
        """Checks timeouts, and wakes the writer: something may be due."""
        if not self.seats:
            if now - self.received_at > self.gate.handshake:
                self.close(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        elif now - self.received_at > self.gate.silence or (self.writing and now - self.writing > self.gate.silence):
            self.close(grpc.StatusCode.DEADLINE_EXCEEDED, "the actor stopped responding")
        else:
            self.poll()
            self._poll_values(self.seats[0])
            self.wake()


def _value_frames(channel: int, tag: int, value: bytes) -> Iterator[bytes]:
    for at in range(0, len(value), wire.PART_BYTES):
        part = memoryview(value)[at : at + wire.PART_BYTES]
        yield frame(wire.VALUE, wire.PART.pack(at, len(value)), part, channel=channel, number=tag)
