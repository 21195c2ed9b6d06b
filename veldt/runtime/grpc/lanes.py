"""Lanes: messages in flight between one actor's stream and the rings of its seat."""

from __future__ import annotations

from collections import deque
from typing import Any

from veldt.runtime.grpc import wire
from veldt.runtime.grpc.seats import Port
from veldt.runtime.grpc.wire import ACK, DATA, PART, PART_BYTES, VALUE, Formats, Frame, Refused, frame
from veldt.runtime.shm.memory import Bytes, Format
from veldt.runtime.shm.ring import Reader


def read_count(reader: Reader) -> int:
    """Messages ever read. The writer may write meanwhile: `waiting` and `written` must belong to the same moment."""
    while True:
        written, waiting = reader.written, reader.waiting
        if reader.written == written:
            return written - waiting


class Lane:
    """One port of a seat that has a stream: messages in flight in both directions."""

    def __init__(self, port: Port, channel: int) -> None:
        self.port, self.channel = port, channel
        self.formats, self.answers = Formats(port.formats, port.finite), Formats(port.answers)
        self.pending: deque[tuple[Format, Bytes]] = deque()  # messages that the ring had no room for
        self.acked = port.writer.written
        self.tail = 0 if port.reader is None else read_count(port.reader)  # answers that the actor has acknowledged
        self.sent = self.tail  # answers, over this stream

    def take(self, received: Frame) -> bool:
        """Takes a message; whether it was new. A duplicate is acknowledged again."""
        port = self.port
        expected = port.writer.written + len(self.pending)
        if received.number < expected:
            self.acked = min(self.acked, expected - 1)
            return False
        if received.number > expected or len(self.pending) >= port.window:
            raise Refused("a message is missing" if received.number > expected else "more messages than the window allows")
        message = self.formats.check(received)
        if self.pending or not port.writer.put_bytes(*message):
            self.pending.append(message)
        return True

    def push(self) -> bool:
        """Moves pending messages to the ring; whether any was moved."""
        moved = False
        while self.pending and self.port.writer.put_bytes(*self.pending[0]):
            self.pending.popleft()
            moved = True
        return moved

    def acknowledged(self, ack: int) -> None:
        """The actor has all answers before this number."""
        reader = self.port.reader
        if reader is None:
            return
        if ack > reader.written:
            raise Refused("an answer is acknowledged that was never sent")
        for _ in range(ack - self.tail):
            reader.pop()
            self.tail += 1
        self.sent = max(self.sent, ack)  # some were sent over an earlier stream

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer to send."""
        return self.port.reader is not None and self.port.reader.written > self.sent

    def next_answer(self) -> bytes:
        reader = self.port.reader
        assert reader is not None
        found = reader.peek_bytes(self.sent - self.tail)
        assert found is not None, (self.sent, self.tail)
        format_, payload = self.answers.number(found[0]), found[1]
        written = self.acked = self.port.writer.written
        self.sent += 1
        return frame(DATA, payload, channel=self.channel, format_=format_, number=self.sent - 1, ack=written)

    def ack_due(self, half: bool) -> bool:
        """Whether there is something to acknowledge; with `half`: at least half a window."""
        unacknowledged = self.port.writer.written - self.acked
        return 2 * unacknowledged >= self.port.window if half else unacknowledged > 0

    def ack(self) -> bytes:
        self.acked = self.port.writer.written
        return frame(ACK, channel=self.channel, ack=self.acked)


class Sending:
    """A value that is being sent to one actor, in parts."""

    def __init__(self, channel: int, tag: int, value: bytes) -> None:
        self.channel, self.tag, self.data, self.offset = channel, tag, memoryview(value), 0

    def next_part(self) -> bytes:
        at, data = self.offset, self.data[self.offset : self.offset + PART_BYTES]
        self.offset += len(data)
        return frame(VALUE, PART.pack(at, len(self.data)), data, channel=self.channel, number=self.tag)

    @property
    def done(self) -> bool:
        return self.offset >= len(self.data)


def describe(lane: Lane) -> dict[str, Any]:
    """For the WELCOME of an actor."""
    port = lane.port
    return {
        "name": port.name,
        "formats": wire.describe(port.formats),
        "written": port.writer.written,
        "window": port.window,
        "answers": None if port.reader is None else wire.describe(port.answers),
        "tail": lane.tail,
    }
