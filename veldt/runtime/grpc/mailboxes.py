"""What an actor has of a run that it reaches over gRPC: outboxes, inboxes, cells and rows."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from veldt.counters import NAMES
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.wire import ACK, DATA, PART, WANT, Formats, Frame, Refused, frame

if TYPE_CHECKING:
    from veldt.runtime.grpc.link import Link


class LinkOutbox:
    """Messages to one node of the run. It keeps them until the run says that they are in its shared memory."""

    def __init__(self, link: Link, channel: int, told: dict[str, Any]) -> None:
        self._link, self._channel = link, channel
        self._formats = Formats(wire.described(told["formats"]))
        self.window = int(told["window"])
        self._kept: deque[bytes] = deque()  # frames that are not acknowledged
        self._base = int(told["written"])  # the number of the first of them
        self._sent = 0  # how many of them are on their way

    @property
    def written(self) -> int:
        return self._base + len(self._kept)

    @property
    def settled(self) -> bool:
        return not self._kept

    def put(self, tree: Tree) -> bool:
        """False: too many are on their way; keep it and try again."""
        if len(self._kept) >= self.window:
            return False
        link = self._link
        format_, flags, parts = self._formats.pack(tree, link.compress)
        inbox, number = link.inboxes[self._channel], self._base + len(self._kept)
        ack = 0 if inbox is None else inbox.taken()
        self._kept.append(frame(DATA, *parts, channel=self._channel, format_=format_, flags=flags, number=number, ack=ack))
        link.wake()
        return True

    def next(self) -> bytes | None:
        if self._sent == len(self._kept):
            return None
        self._sent += 1
        return self._kept[self._sent - 1]

    def written_there(self, count: int) -> None:
        """The run has all messages before this number."""
        if not self._base <= count <= self._base + len(self._kept):
            if count < self._base:
                return
            raise Refused("the run acknowledges what was never sent")
        for _ in range(count - self._base):
            self._kept.popleft()
        self._sent = max(0, self._sent - (count - self._base))
        self._base = count

    def again(self, written: int) -> None:
        """The stream is a new one: what the run does not have is sent again."""
        self.written_there(written)
        self._sent = 0


class LinkInbox:
    """Answers of one node of the run."""

    def __init__(self, channel: int, told: dict[str, Any]) -> None:
        self._channel = channel
        self._formats = Formats(wire.described(told["answers"]), finite=False)
        self.slots = int(told["window"])
        self._next = int(told["tail"])  # the number of the next that comes
        self._acked = self._next
        self._trees: deque[Tree] = deque()

    @property
    def waiting(self) -> int:
        return len(self._trees)

    def peek(self) -> Tree | None:
        return self._trees[0] if self._trees else None

    def pop(self) -> None:
        self._trees.popleft()

    def taken(self) -> int:
        """How many came, which a frame that leaves now says."""
        self._acked = self._next
        return self._next

    def take(self, came: Frame) -> bool:
        if came.number < self._next:
            return False  # it came before, over an earlier stream
        if came.number > self._next:
            raise Refused("an answer is missing")
        self._trees.append(self._formats.unpack(came))
        self._next += 1
        return True

    @property
    def owed(self) -> int:
        return self._next - self._acked

    def ack(self) -> bytes:
        return frame(ACK, channel=self._channel, ack=self.taken())


class LinkCell:
    """The newest of a value (`shared.Cell`), which the run sends as soon as there is one that the actor does not have."""

    def __init__(self, link: Link, channel: int) -> None:
        self._link, self._channel = link, channel
        self._value: tuple[int, Tree] | None = None
        self._wanted = False  # and not yet here
        self._have = -1
        self._asked = False  # over this stream
        self._parts, self._tag = bytearray(), 0

    def read(self, have: int) -> tuple[int, Tree] | None:
        value = self._value
        if value is not None and value[0] == have:
            value = None
        if value is None and not self._wanted:
            self._wanted, self._asked, self._have = True, False, have
            self._link.wake()
        return value

    def write(self, tag: int, value: Tree) -> None:
        raise NotImplementedError("an actor publishes nothing")

    def next(self) -> bytes | None:
        if self._asked or not self._wanted:
            return None
        self._asked = True
        return frame(WANT, channel=self._channel, number=self._have)

    def again(self) -> None:
        self._asked, self._parts = False, bytearray()

    def take(self, came: Frame) -> bool:
        """One part of it; True: the value is whole."""
        if len(came.payload) < PART.size:
            raise Refused("a part of a value is too short")
        offset, total = PART.unpack_from(came.payload)
        part = came.payload[PART.size :]
        if offset == 0:
            self._parts, self._tag = bytearray(), came.number
        if offset != len(self._parts) or came.number != self._tag or offset + len(part) > total:
            raise Refused("a part of a value is missing")
        self._parts += part
        if len(self._parts) < total:
            return False
        self._value, self._parts = (wire.signed(self._tag), wire.unpack_value(self._parts)), bytearray()
        self._wanted = False
        return True


class LinkRows:
    """The counts of the whole run (`shared.Rows`), as far as they are known here, and what was added since."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.mine = [0] * len(NAMES)  # of this session
        self.run = [0] * len(NAMES)
        self.counted = [0] * len(NAMES)  # how much of mine is in the run's counts

    def add(self, column: int, n: int) -> None:
        self.mine[column] += int(n)  # an integer of numpy is not JSON

    def total(self, column: int) -> int:
        return self.run[column] + self.mine[column] - self.counted[column]

    @property
    def stopping(self) -> bool:
        """A process that asks this in the middle of a long step is heard by the run."""
        self._link.breathe()
        return self._link.stopping
