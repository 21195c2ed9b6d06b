"""The seams at a distance: what stands for a node in another process, and what serves it there.

A runtime gives three kinds of transport: *stream* (`put`, `peek`, `pop`), *call* (a stream there and one back), *latest*.
What is here turns the methods of a Store, a Policy and of Params into those, for any runtime. Which seam a node has is seen
by its methods; a class knows nothing of it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from veldt.metrics import STREAM
from veldt.records.block import Block, BlockId, Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import PACKED, Array, Tree

if TYPE_CHECKING:  # an actor under central inference imports no torch
    from veldt.learning.params import Weights


class Outbox(Protocol):
    def put(self, tree: Tree) -> bool: ...  # False: not now

    @property
    def written(self) -> int: ...  # messages ever put, over all lives


class Inbox(Protocol):
    def peek(self) -> Tree | None: ...  # views of the oldest message, good until it is popped
    def pop(self) -> None: ...


class Requests(Inbox, Protocol):
    """An inbox as a host has it."""

    slots: int  # messages that there is room for; known once one came

    def peek(self, ahead: int = 0) -> Tree | None: ...  # so many behind the oldest

    @property
    def waiting(self) -> int: ...


class Replies(Outbox, Protocol):
    """An outbox as a host has it."""

    def ring(self) -> None: ...  # wakes the reader for all that was put since
    def recent(self) -> list[Tree]: ...  # views of the newest messages, read or not, of whichever life


class LatestValue(Protocol):
    def write(self, tag: int, value: Array) -> None: ...
    def read(self, have: int, dtype: npt.DTypeLike) -> tuple[int, Array] | None: ...


class Channel(NamedTuple):
    """Between one process and one node of another."""

    there: Outbox
    back: Inbox | None  # only of a call


class Served(NamedTuple):
    """The other end of a channel."""

    there: Requests
    back: Replies | None


def seam(kind: type) -> str:
    """'store', 'policy', 'params', 'counters', or '' for what cannot be reached from another process."""
    for name, methods in (
        ("store", ("insert", "sample")),
        ("policy", ("send", "recv", "flush", "reset")),
        ("params", ("publish", "pull")),
        ("counters", ("add", "get", "put")),
    ):
        if all(hasattr(kind, method) for method in methods):
            return name
    return ""


class RemoteParams:
    """Params (*latest*). Nobody hosts them: every process has them mapped, and one publishes."""

    def __init__(self, latest: LatestValue) -> None:
        self._latest = latest

    def publish(self, weights: Weights) -> None:
        self._latest.write(weights.version, weights.vector)

    def pull(self, have: int) -> Weights | None:
        from veldt.learning.params import Weights

        found = self._latest.read(have, np.float32)
        return None if found is None else Weights(*found)


def block_message(block: Block, priorities: Array | None) -> Tree:
    message: Tree = {"id": np.array(block.id, np.int64), "items": block.items}
    if priorities is not None:
        message["priorities"] = np.asarray(priorities, np.float64)
    for kind, arrays in (("rows/", block.rows), ("starts/", block.starts)):
        for name, array in arrays.items():
            message[kind + name] = array.view(np.uint8) if name == PACKED else array
    return message


class Messages(NamedTuple):
    """One of each kind that may go to a node and come back, for transports that must know them beforehand."""

    there: list[Tree]
    back: list[Tree]


def store_messages(schema: Schema) -> Messages:
    starts = schema.starts
    rows, states = schema.layout.zeros(schema.rows), schema.start_layout.zeros(starts)
    block = Block(BlockId(0, 0, 0), schema, rows, states, np.zeros(starts, np.bool_))
    return Messages([block_message(block, priorities) for priorities in (None, np.zeros(starts))], [])


def policy_messages(env: EnvSpec, n: int) -> Messages:
    """For groups of n environments."""
    question, answer = {"question": np.zeros(3, np.int64)}, {"answer": np.zeros(2, np.int64)}
    step = {name: np.zeros((n, *c.shape), c.dtype) for name, c in env.step.items()}
    action = np.zeros((n, *env.action.shape), env.action.dtype)
    return Messages([question | step, question], [answer | {"action": action}, answer])


class RemoteStore:
    """A Store that takes blocks (*stream*). "Not now" of the store travels back as a stream that fills up."""

    def __init__(self, channel: Channel) -> None:
        self._out = channel.there

    def insert(self, block: Block, priorities: Array | None) -> bool:
        return self._out.put(block_message(block, priorities))

    def sample(self, *_: Any) -> Any:
        raise NotImplementedError("a store is sampled in its own process: add the learner with on=store")

    update = trim = sample


class StoreHost:
    """Brings the blocks that arrive into the store, each process's in order, for as long as it takes them.

    Processes take turns, a block each. Who is refused is first next time: where less is taken than comes, all have a share.
    """

    METRICS: ClassVar = STREAM

    def __init__(self, store: Any, channels: list[Served]) -> None:
        self._store, self._inboxes = store, [channel.there for channel in channels]
        self._schema: Schema = store.schema
        self.blocks = 0  # that came, ever
        self._looks = self._refused = 0  # at streams that had something, and how often the store would not have it
        self._fill = 0.0  # how full they were in sum
        self._turn = 0  # whose block is next

    def step(self) -> bool:
        waiting = [inbox.waiting for inbox in self._inboxes]  # and not what comes meanwhile: others share this process
        left = sum(waiting)
        if not left:
            return False
        self._looks += 1
        self._fill += max(n / self._inboxes[i].slots for i, n in enumerate(waiting) if n)
        worked = False
        while left:
            turn = self._turn
            if waiting[turn]:
                message = self._inboxes[turn].peek()
                assert message is not None
                if not self._store.insert(*self._unpack(message)):
                    self._refused += 1
                    return worked
                self._inboxes[turn].pop()
                self.blocks += 1
                waiting[turn] -= 1
                left -= 1
                worked = True
            self._turn = (turn + 1) % len(waiting)
        return worked

    def metrics(self) -> dict[str, float]:
        looks, refused, fill = self._looks, self._refused, self._fill
        self._looks, self._refused, self._fill = 0, 0, 0.0
        told = {"stream_blocks": float(self.blocks), "stream_bytes": float(self.blocks * self._schema.nbytes)}
        return told | {"queue_fill": fill / max(1, looks), "refusing": refused / max(1, looks)}

    def _unpack(self, message: Tree) -> tuple[Block, Array | None]:
        schema = self._schema
        rows, starts = (
            {
                name: message[kind + name].view(layout.record) if name == PACKED else message[kind + name]
                for name in (*layout.large, *([PACKED] if layout.record.names else []))
            }
            for kind, layout in (("rows/", schema.layout), ("starts/", schema.start_layout))
        )
        block = Block(BlockId(*message["id"].tolist()), schema, rows, starts, message["items"])
        return block, message.get("priorities")


SEND, RESET, FLUSH = 0, 1, 2


class RemotePolicy:
    """A Policy that is asked (*call*). An answer carries the number of its question: one to an earlier life is dropped."""

    def __init__(self, channel: Channel) -> None:
        assert channel.back is not None
        self._out, self._in = channel.there, channel.back
        self._asked: dict[int, int] = {}  # group -> number of the question whose answer it waits for
        self._answers: dict[int, Tree] = {}
        self._flushing: dict[int, int] = {}
        self._begin: set[int] = set()  # groups that begin anew, of which the policy does not know yet

    def send(self, group: int, step: Tree) -> bool:
        if not self._begun(group):
            return False
        number = self._ask(SEND, group, step)
        if number is not None:
            self._asked[group] = number
        return number is not None

    def recv(self, group: int) -> Tree | None:
        self._collect()
        if group not in self._answers:
            return None
        self._asked.pop(group)
        return self._answers.pop(group)

    def flush(self, group: int) -> bool:
        if group not in self._flushing:
            number = self._ask(FLUSH, group, {}) if self._begun(group) else None
            if number is None:
                return False
            self._flushing[group] = number
        self._collect()
        return self._flushing[group] < 0 and self._flushing.pop(group) < 0

    def reset(self, group: int) -> None:
        self._asked.pop(group, None)
        self._answers.pop(group, None)
        self._flushing.pop(group, None)
        self._begin.add(group)

    def _begun(self, group: int) -> bool:
        """Tells the policy that the group begins anew, if it does. False: not now."""
        if group in self._begin and self._ask(RESET, group, {}) is None:
            return False
        self._begin.discard(group)
        return True

    def _ask(self, what: int, group: int, step: Tree) -> int | None:
        number = self._out.written
        return number if self._out.put({"question": np.array([what, group, number], np.int64), **step}) else None

    def _collect(self) -> None:
        while (message := self._in.peek()) is not None:
            group, number = message["answer"].tolist()
            if self._asked.get(group) == number:
                self._answers[group] = {name: x.copy() for name, x in message.items() if name != "answer"}
            if self._flushing.get(group) == number:
                self._flushing[group] = -1
            self._in.pop()


class Question(NamedTuple):
    """One that the policy has taken, and that stays in its stream until it is answered and recorded."""

    group: int
    number: int
    channel: int


class PolicyHost:
    """Answers the questions of all processes, many at once where the policy waits for them.

    A question stays in its stream until it is answered: none is lost. None is answered twice either: what was asked has
    been recorded with the action of the first answer. Answers go out first, and what they say is recorded after that.
    """

    def __init__(self, policy: Any, channels: list[Served]) -> None:
        self._policy, self._channels = policy, channels
        self._record = getattr(policy, "record", None)
        self._taken = [0] * len(channels)  # of the questions that wait in each channel, how many were looked at
        self._done: list[set[int]] = [set() for _ in channels]  # numbers of those that can go, and wait for older ones
        self._open: dict[int, Question] = {}  # group -> what the policy was asked and has not answered
        self._unsent: list[tuple[Question, Tree]] = []  # answers that wait for room
        # What an earlier life has answered, and perhaps not taken from its stream.
        self._answered = [{tuple(x["answer"].tolist()) for x in back.recent()} for _, back in channels if back is not None]

    def step(self) -> bool:
        worked = False
        for index, (there, _) in enumerate(self._channels):
            while (message := there.peek(self._taken[index])) is not None and self._take(index, message):
                self._taken[index] += 1
                worked = True
        if self._open or self._unsent:
            worked |= self._answer()
        for index, done in enumerate(self._done):
            if done:
                self._pop(index, done)
        return worked

    @property
    def rest(self) -> float:
        """Seconds in which nothing will happen unless a question comes."""
        due: float = getattr(self._policy, "due", math.inf) if self._open else math.inf
        return due - time.monotonic()

    def _take(self, index: int, message: Tree) -> bool:
        """Hands one question to the policy. False: not now."""
        what, group, number = message["question"].tolist()
        if (group, number) in self._answered[index]:
            self._done[index].add(number)
            return True
        question = Question(group, number, index)
        if what == RESET:
            if (earlier := self._open.pop(group, None)) is not None:  # of a life that is over
                self._done[earlier.channel].add(earlier.number)
            self._policy.reset(group)
            self._done[index].add(number)
            return True
        if group in self._open:
            return False
        if what == FLUSH:
            if not self._policy.flush(group):
                return False
            self._unsent.append((question, {}))
            return True
        if not self._policy.send(group, message):
            return False
        self._open[group] = question
        return True

    def _answer(self) -> bool:
        """Sends the answers that the policy has, and lets it record them."""
        for group, question in list(self._open.items()):
            out = self._policy.recv(group)
            if out is not None:
                del self._open[group]
                self._unsent.append((question, {"action": out["action"]}))  # the rest is recorded here
        waiting, self._unsent = self._unsent, []
        for question, answer in waiting:
            back = self._channels[question.channel].back
            assert back is not None
            if back.put({"answer": np.array([question.group, question.number], np.int64), **answer}):
                self._done[question.channel].add(question.number)
            else:
                self._unsent.append((question, answer))
        for _, back in self._channels:
            if back is not None:
                back.ring()
        if self._record is not None:
            self._record()
        return len(self._unsent) < len(waiting)

    def _pop(self, index: int, done: set[int]) -> None:
        """Takes from a channel what is done, up to the oldest that is not."""
        there = self._channels[index].there
        while done and (message := there.peek()) is not None and (number := int(message["question"][2])) in done:
            there.pop()
            done.discard(number)
            self._taken[index] -= 1


PORTS = {"store": (RemoteStore, StoreHost), "policy": (RemotePolicy, PolicyHost)}
