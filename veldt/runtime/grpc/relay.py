"""Relay: the process of a site between the rings of its actors and the one stream to the run.

It is the gate's counterpart, and like the gate it has no state of its own. A message stays in its actor's ring until the
run has it, and an answer is acknowledged once it is in its actor's ring. The numbers of both are those of the rings, moved
by a constant: so the relay may be killed at any moment, and its successor goes on with the same session and loses and
repeats nothing.

    actor -- rings -- Relay == stream == gate -- rings -- store or policy

Weights come once for all actors, when one of them asks for newer ones than the site has.
"""

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from veldt.counters import NAMES
from veldt.ports import PORT, REPLY
from veldt.records.tree import Array, Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.link import Link
from veldt.runtime.grpc.session import Session
from veldt.runtime.grpc.wire import DATA, Formats, Frame, Refused, frame
from veldt.runtime.local.board import SharedRows
from veldt.runtime.shm.memory import EventBell, Latest
from veldt.runtime.shm.ring import Reader, Writer

HOLD, STOPPING, QUIT = ORDERS = range(3)  # what the run wants of the site: elements of an array
NUMBER = 1  # of a call: its place in the header of a message


class LanePlan(NamedTuple):
    """One channel of one seat, as the run described it when the session began."""

    there: list[Any]  # columns of the formats of messages, and of answers
    back: list[Any]
    written: int  # messages and answers of earlier sessions
    answered: int


@dataclass(frozen=True)
class SitePlan:
    """What the relay of a site needs to go on with a session."""

    address: str
    session: str
    token: str
    certificate: bytes
    compress: bool
    patience: float
    actors: tuple[str, ...]  # their processes, by seat
    lanes: tuple[dict[str, LanePlan], ...]  # by seat, and by name
    checks: dict[str, Any] = field(default_factory=dict)  # of answers, by lane, and of values, by cell: why one is refused


class Carried:
    """A node of the run that actors of the site call; it exists there. Here it gives their rings to the relay."""

    def __init__(self, relay: "Relay", name: str) -> None:
        self._relay, self._name = relay, name

    def carry(self, caller: str, row: int, stream: Reader | None, calls: Reader | None, replies: Writer | None) -> None:
        """`row` is the caller's, of counts."""
        self._relay.add(self._name, caller, row, stream, calls, replies)


class Forward:
    """One channel of an actor (a `Box`): from its ring to the stream, and answers from the stream to its ring."""

    def __init__(
        self, session: Session, channel: int, port: dict[str, Any], plan: LanePlan, ring: Reader, replies: Writer | None
    ) -> None:
        self._session, self._channel, self._window, self._plan = session, channel, int(port["window"]), plan
        self._ring, self._replies = ring, replies
        self._formats = Formats(wire.parse_formats(port["formats"]))
        self.answer_formats = Formats(wire.parse_formats(port["answers"] or []), finite=False)
        if [self._formats.described, self.answer_formats.described] != [plan.there, plan.back] or self._window < 1:
            raise Refused("other formats than before")
        self._sent = 0  # messages sent over this stream that are still in the ring
        self._acked, self.acked_at = self._next, 0.0
        self.check: Any = None
        self._acknowledged(int(port["written"]))

    @property
    def _next(self) -> int:
        """The number of the next answer."""
        return self._plan.answered + (0 if self._replies is None else self._replies.written)

    @property
    def settled(self) -> bool:
        return not self._ring.waiting

    def next_frame(self) -> bytes | None:
        if self._sent >= self._window or (message := self._ring.peek(self._sent)) is None:
            return None
        if self._replies is not None:
            message = _renumbered(message, PORT, NUMBER, self._plan.written)
        format_, flags, parts = self._formats.pack(message, self._session.compress)
        number, ack = self._plan.written + self._ring.popped + self._sent, self._next
        self._sent, self._acked, self.acked_at = self._sent + 1, ack, time.monotonic()
        return frame(DATA, *parts, channel=self._channel, format_=format_, flags=flags, number=number, ack=ack)

    def take(self, received: Frame) -> bool:
        self._acknowledged(received.ack)
        if received.kind == wire.ACK or received.number < self._next:
            return False
        if received.number > self._next or self._replies is None:
            raise Refused("a reply is missing")
        answer = self.answer_formats.unpack(received)
        if self.check is not None and (why := self.check(answer)):
            raise Refused(why)
        if not self._replies.put(_renumbered(answer, REPLY, 0, -self._plan.written)):
            raise Refused("more replies than requests")
        if self.ack_due(half=True):
            self._session.wake()
        return False  # it is where it belongs

    def _acknowledged(self, count: int) -> None:
        """The run has all messages before this number."""
        done = count - self._plan.written - self._ring.popped
        if done > self._ring.waiting:
            raise Refused("the run acknowledges a message that was never sent")
        for _ in range(done):
            self._ring.pop()
        self._sent = max(0, self._sent - max(0, done))

    def resend(self, written: int) -> None:
        self._acknowledged(written)
        self._sent = 0

    def ack_due(self, half: bool) -> bool:
        unacknowledged = self._next - self._acked
        return 2 * unacknowledged >= self._window if half else unacknowledged > 0

    def ack(self) -> bytes:
        self._acked, self.acked_at = self._next, time.monotonic()
        return frame(wire.ACK, channel=self._channel, ack=self._acked)


def _renumbered(message: Tree, column: str, place: int, by: int) -> Tree:
    header = message[column].copy()
    header[place] += by
    return {**message, column: header}


class Relay:
    """The worker of a site's first process. It works inside `step` and `rest` alone, which the process calls in turn."""

    EVENT_LOOP: ClassVar = True  # it sleeps in one

    def __init__(self, plan: SitePlan, counters: Any, orders: Array, cells: dict[str, Any]) -> None:
        """`cells` are nodes that each have a cell, by the name that this has in the run."""
        self._plan, self._rows, self._orders = plan, counters.rows, orders
        self._cells: dict[str, Latest] = {name: node.cell for name, node in cells.items()}
        self._have = dict.fromkeys(cells, -1)  # versions of the values that this process has put there
        self._rings: dict[tuple[str, str], tuple[Reader, Writer | None]] = {}  # by actor and lane
        self._counts: dict[str, memoryview] = {}  # rows by actor
        settings = (plan.address, plan.token, plan.certificate, "", plan.compress, plan.patience)
        self.link = Link(*settings, actors=len(plan.actors), make_box=self._make_box, id_=plan.session)
        self._begun = False

    def add(
        self, node: str, actor: str, row: int, stream: Reader | None, calls: Reader | None, replies: Writer | None
    ) -> None:
        assert isinstance(self._rows, SharedRows)
        self._counts[actor] = memoryview(self._rows.table[row])
        if stream is not None:
            self._rings[actor, f"{node} stream"] = stream, None
        if calls is not None:
            self._rings[actor, f"{node} calls"] = calls, replies

    def wake_by(self, bell: EventBell) -> None:
        def rung() -> None:
            bell.clear()
            self.link.wake()

        bell.set_asleep(True)
        self.link.watch(bell.fd, rung)

    def step(self) -> bool:
        self._begin()
        self.link.wake()
        return self._follow(self.link.step())

    def rest(self, seconds: float) -> None:
        self._begin()  # one that is restarted while the run is on hold makes no step until the run says that it goes on
        self._follow(self.link.wait(seconds))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.link.begin()

    def close(self) -> None:
        self.link.close()

    def report(self, seat: int, metrics: dict[str, float]) -> None:
        """Of the actor that has this seat."""
        if self.link.session.seats:
            self.link.session.seats[seat].add(metrics)

    def _make_box(self, session: Session, seat: int, lane: str, channel: int, port: dict[str, Any]) -> Any:
        actor, plan = self._plan.actors[seat], self._plan.lanes[seat].get(lane)
        if plan is None or (actor, lane) not in self._rings:
            raise Refused("other channels than before")
        ring, replies = self._rings[actor, lane]
        box = Forward(session, channel, port, plan, ring, replies if plan.back else None)
        box.check = self._plan.checks.get(lane)
        return box

    def _follow(self, arrived: bool) -> bool:
        """Passes on what is new on either side; whether there was anything."""
        session = self.link.session
        self._orders[HOLD], self._orders[STOPPING] = session.hold, session.stopping
        self._orders[QUIT] |= session.quit
        if not session.seats:
            return arrived
        own, run, counted = self._rows.row, session.rows.run, session.rows.counted
        for i in range(len(NAMES)):  # so that the sum over the site's rows is the count of the run
            own[i] = run[i] - counted[i]
        for seat, actor in zip(session.seats, self._plan.actors, strict=True):
            seat.counts[:] = self._counts[actor][: len(NAMES)].tolist()
        for name, cell in self._cells.items():
            arrived |= self._fetch(name, cell, session)
        return arrived

    def _fetch(self, name: str, cell: Latest, session: Session) -> bool:
        """Gets a newer value if an actor wants one; whether it has come."""
        if self._have[name] >= 0 and not cell.wanted:
            return False
        source = session.cells[name]
        source.check = self._plan.checks.get(name)
        found = source.read(self._have[name])
        if found is None:
            return False
        cell.write(*found)
        self._have[name] = found[0]
        return True
