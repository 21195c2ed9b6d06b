"""Lanes: what is on its way between one actor's stream and the rings of its seat."""

from __future__ import annotations

from collections import deque
from typing import Any

from veldt.runtime.grpc import wire
from veldt.runtime.grpc.seats import Port
from veldt.runtime.grpc.wire import ACK, DATA, PART, PART_BYTES, VALUE, Formats, Frame, Refused, frame
from veldt.runtime.shm.format import Bytes, Format
from veldt.runtime.shm.ring import Reader


def read_so_far(reader: Reader) -> int:
    """Messages that were ever read. Its writer goes on meanwhile, so what is waiting belongs to one number of written."""
    while True:
        written, waiting = reader.written, reader.waiting
        if reader.written == written:
            return written - waiting


class Lane:
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


class Sending:
    """A value on its way to one actor, in parts."""

    def __init__(self, channel: int, tag: int, value: bytes) -> None:
        self.channel, self.tag, self.data, self.offset = channel, tag, memoryview(value), 0

    def part(self) -> bytes:
        at, data = self.offset, self.data[self.offset : self.offset + PART_BYTES]
        self.offset += len(data)
        return frame(VALUE, PART.pack(at, len(self.data)), data, channel=self.channel, number=self.tag)

    @property
    def done(self) -> bool:
        return self.offset >= len(self.data)


def describe(lane: Lane) -> dict[str, Any]:
    port = lane.port
    return {
        "name": port.name,
        "formats": wire.describe(port.formats),
        "written": port.there.written,
        "window": port.window,
        "answers": None if port.back is None else wire.describe(port.answers),
        "tail": lane.tail,
    }
