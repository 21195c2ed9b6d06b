"""Proxies and services: a store and a policy behind rings are the same store and the same policy."""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_valid
from oracles import examples, make_block, read_source

from veldt.acting.actor import Policy
from veldt.learning.params import LatestParams, Weights
from veldt.ports import Source, ports_of
from veldt.records.block import Block, Schema, Window
from veldt.records.tree import Tree, spec
from veldt.runtime.proxies import CallerEnds, Proxy
from veldt.runtime.services import CallService, ServiceEnds, StreamService
from veldt.runtime.shm.memory import Latest, make_shared_memory
from veldt.runtime.shm.ring import Reader, Writer
from veldt.storing.limiters import MinSize, Queue
from veldt.storing.replay import Replay
from veldt.storing.ring import UnrollQueue
from veldt.storing.selectors import Prioritized
from veldt.storing.store import Store

COLUMNS = {"obs": spec((33,), np.float32), "reward": spec((), np.float64), "action": spec((2,), np.int64)}
SCHEMA = Schema(COLUMNS, Window(history=2, length=2, lookahead=1, stride=2), 8, {"h": spec((3,), np.float32)})
S = SCHEMA.starts


def store_proxy(writer: Writer) -> Any:
    return Proxy(ports_of(Store), CallerEnds(stream=writer))


def store_service(store: Any, inboxes: list[Reader]) -> StreamService:
    return StreamService(store, ports_of(Store), inboxes)


def block(sequence: int, actor: int = 0, schema: Schema = SCHEMA) -> Block:
    return make_block(schema, Source(actor, sequence), [bool((sequence + 1) >> s & 1) for s in range(schema.starts)])


def same(one: Block, other: Block) -> bool:
    parts = [(one.rows, other.rows), (one.starts, other.starts), ({"": one.items}, {"": other.items})]
    equal = all(a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for a, b in parts for k in a)
    return equal and all(a.keys() == b.keys() for a, b in parts)


class Shelf:
    """A store that keeps copies of what came, for as long as it has room."""

    def __init__(self, schema: Schema = SCHEMA, room: int = 10**9) -> None:
        self.schema, self.room = schema, room
        self.blocks: list[tuple[Block, Any]] = []
        self.sources: list[Source] = []

    def insert(self, block: Block, priorities: Any, source: Source) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        rows, starts = ({name: x.copy() for name, x in tree.items()} for tree in (block.rows, block.starts))
        copy = Block(block.schema, rows, starts, block.items.copy())
        self.blocks.append((copy, None if priorities is None else priorities.copy()))
        self.sources.append(source)
        return True


# A store.


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        Schema({"obs": spec((5, 5), np.float64)}, Window(), 4),  # nothing that is packed, no state
        Schema({"x": spec((), np.int32), "y": spec((3,), np.float32)}, Window(), 4, {"h": spec((40,), np.float32)}),
    ],
)
def test_blocks_arrive_as_they_were_sent(schema: Schema, fds: list[int]) -> None:
    shelf = Shelf(schema)
    remote, host = store_proxy(Writer(fds[0])), store_service(shelf, [Reader(fds[0])])
    assert not host.step()
    sent: list[tuple[Block, Any]] = []
    for sequence in range(10):
        one = block(sequence, schema=schema)
        priorities = None if sequence % 3 == 0 else np.arange(schema.starts) + sequence * 0.5
        if not remote.insert(one, priorities):  # slots must grow first, or are all full
            assert host.step() and remote.insert(one, priorities)
        sent.append((one, priorities))
    assert host.step() and not host.step()
    for (theirs, p), (ours, q) in zip(shelf.blocks, sent, strict=True):
        assert same(theirs, ours)
        assert (p is None) == (q is None) and (q is None or (p == q).all())


def test_a_store_that_is_full_holds_up_its_writers_and_loses_nothing(fds: list[int]) -> None:
    """ "Not now" fills the ring, then the writer is told, and memory stays as it is."""
    shelf = Shelf(room=3)
    writer = Writer(fds[0], budget=8 * SCHEMA.nbytes)
    remote, host = store_proxy(writer), store_service(shelf, [Reader(fds[0])])
    sent = 0
    while sent < 100 and remote.insert(block(sent), None):
        sent += 1
        host.step()
    assert len(shelf.blocks) == 3 and sent == 3 + writer.slots and writer.slots < 8
    size = os.fstat(fds[0]).st_size
    for _ in range(100):
        assert not remote.insert(block(sent), None) and not host.step()
    assert os.fstat(fds[0]).st_size == size
    shelf.room = 1
    assert host.step() and not host.step()
    assert remote.insert(block(sent), None) and not remote.insert(block(sent + 1), None)
    shelf.room = 1000
    assert host.step()
    assert shelf.sources == [Source(0, number) for number in range(sent + 1)]
    assert all(same(one, block(i)) for i, (one, _) in enumerate(shelf.blocks))
    assert os.fstat(fds[0]).st_size == size


def test_a_writer_that_never_stops_does_not_keep_the_host(fds: list[int]) -> None:
    """What came before a step is brought in by it, what comes meanwhile by the next: the learner has its turn."""
    remote = store_proxy(Writer(fds[0]))
    numbers = itertools.count()

    class Busy(Shelf):
        def insert(self, block_: Block, priorities: Any, source: Source) -> bool:
            assert len(self.blocks) < 1000, "a step that never ends"
            assert remote.insert(block(next(numbers)), None)
            return super().insert(block_, priorities, source)

    shelf = Busy()
    host = store_service(shelf, [Reader(fds[0])])
    for _ in range(3):
        assert remote.insert(block(next(numbers)), None)
    for step in range(1, 5):
        assert host.step() and len(shelf.blocks) == 3 * step


def test_every_process_is_served_and_its_blocks_stay_in_order(fds: list[int]) -> None:
    shelf = Shelf()
    remotes = [store_proxy(Writer(fd)) for fd in fds]
    host = store_service(shelf, [Reader(fd) for fd in fds])
    for sequence in range(5):
        for actor, remote in enumerate(remotes):
            if (sequence + actor) % 2 == 0:
                assert remote.insert(block(sequence, actor), None)
        host.step()
    for actor in range(len(fds)):
        came = [(source, read_source(one)) for source, (one, _) in zip(shelf.sources, shelf.blocks, strict=True)]
        sent = [Source(actor, n) for n in range(5) if (n + actor) % 2 == 0]
        assert [one for source, one in came if source.channel == actor] == sent
        assert [source.number for source, one in came if one.channel == actor] == list(range(len(sent))), "without gaps"


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_store_that_takes_less_than_comes_is_shared_by_all(room: int, fds: list[int]) -> None:
    """Every process has blocks waiting at all times, and the store takes so many of them in each step."""

    class Narrow(Shelf):
        left = 0

        def insert(self, block_: Any, priorities: Any, source: Source) -> bool:
            self.left -= 1
            return self.left >= 0 and super().insert(block_, priorities, source)

    shelf = Narrow()
    remotes = [store_proxy(Writer(fd, max_slots=4)) for fd in fds]
    host = store_service(shelf, [Reader(fd) for fd in fds])
    sequences = [0] * len(fds)
    for _ in range(60):
        for actor, remote in enumerate(remotes):
            while remote.insert(block(sequences[actor], actor), None):
                sequences[actor] += 1
        shelf.left = room
        assert host.step()
    taken = [sum(source.channel == actor for source in shelf.sources) for actor in range(len(fds))]
    assert len(fds) > 1 and sum(taken) == 60 * room and max(taken) - min(taken) <= 1, taken
    assert host.metrics()["refusing"] == 1.0 and host.metrics()["queue_fill"] == 0.0


@pytest.mark.parametrize("kind", ["replay", "queue"])
def test_a_store_behind_a_ring_becomes_the_same_store(kind: str, fds: list[int]) -> None:
    """Also where the host is killed after it inserted a block and before it took it from the ring."""

    def make_store() -> Any:
        if kind == "queue":
            return UnrollQueue(SCHEMA, Queue(1000), 64)
        return Replay(SCHEMA, Prioritized(64 * S), MinSize(1), 100, 64)

    ours, theirs = make_store(), make_store()
    remote, host = store_proxy(Writer(fds[0])), store_service(theirs, [Reader(fds[0])])
    for sequence in range(40):
        priorities = None if sequence % 5 == 0 else np.linspace(0, 2, S) + sequence
        if not remote.insert(block(sequence), priorities):
            assert host.step() and remote.insert(block(sequence), priorities)
        assert ours.insert(block(sequence), priorities)
        if sequence % 7 == 6:
            reader = Reader(fds[0])
            reader.pop = lambda: 1 / 0  # type: ignore[method-assign]
            with pytest.raises(ZeroDivisionError):
                store_service(theirs, [reader]).step()
            assert host.step()
    host.step()
    assert theirs.duplicates == 5 and theirs.inserted == ours.inserted
    check_valid(theirs)
    for one, other in ((ours.rows, theirs.rows), (ours.starts, theirs.starts)):
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert (ours.items == theirs.items).all()
    if kind == "replay":
        assert (ours.selector.save() == theirs.selector.save()).all()


def test_a_store_is_sampled_from_another_process(fds: list[int]) -> None:
    """Draws, priorities and trims through rings leave the store as direct calls do."""
    ours, theirs = (Replay(SCHEMA, Prioritized(64 * S), MinSize(1), 100, 64, seed=3) for _ in range(2))
    for number in range(20):
        assert ours.insert(block(number), None) and theirs.insert(block(number), None)
    ports = ports_of(Store)
    remote: Any = Proxy(ports, CallerEnds(Writer(fds[0]), Writer(fds[1]), Reader(fds[2])), {"schema": SCHEMA})
    services = [StreamService(theirs, ports, [Reader(fds[0])])]
    services.append(CallService(theirs, ports, [ServiceEnds(Reader(fds[1]), Writer(fds[2]))]))  # type: ignore[arg-type]
    for number in range(10):
        assert remote.sample(8) is None, "not yet"
        until = time.monotonic() + 5
        while (found := remote.sample(8)) is None and time.monotonic() < until:
            for service in services:
                service.step()
        expected = ours.sample(8)
        assert found is not None and expected is not None
        for a, b in zip(found, expected, strict=True):
            for x, y in zip(*((z.values() if isinstance(z, dict) else [z]) for z in (a, b)), strict=True):
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
        priorities = np.arange(8) + number + 0.5
        remote.update(found.keys, priorities), remote.trim()
        ours.update(expected.keys, priorities), ours.trim()
        for service in services:
            service.step()
    assert (ours.selector.save() == theirs.selector.save()).all()


# Params.


def test_the_newest_weights_are_pulled_once(fds: list[int]) -> None:
    ours, theirs = LatestParams(Latest(fds[0])), LatestParams(Latest(fds[0]))
    assert theirs.pull(-1) is None
    ours.publish(Weights(3, np.arange(5, dtype=np.float32)))
    found = theirs.pull(-1)
    assert found is not None and found.version == 3 and found.vector.dtype == np.float32
    assert found.vector.tolist() == [0, 1, 2, 3, 4] and theirs.pull(3) is None


# A policy.


class Sums:
    """A policy whose action is what it was sent plus a number of its life; it may make everybody wait."""

    due = math.inf

    def __init__(self, life: int = 0, patience: int = 0) -> None:
        self.life, self.patience = life, patience
        self.ready: dict[int, Tree] = {}
        self.log: list[tuple[Any, ...]] = []
        self.asked = 0

    def later(self) -> bool:
        self.asked += 1
        return bool(self.asked % (self.patience + 1))

    def send(self, group: int, step: Tree) -> bool:
        if self.later():
            return False
        assert group not in self.ready
        self.log.append(("send", group, *step["obs"].tolist()))
        self.ready[group] = {"action": step["obs"] + self.life}
        return True

    def recv(self, group: int) -> Tree | None:
        return None if self.later() else self.ready.pop(group, None)

    def record(self) -> None:
        pass

    def flush(self, group: int) -> bool:
        if self.later():
            return False
        self.log.append(("flush", group))
        return True

    def reset(self, group: int) -> None:
        self.ready.pop(group, None)
        self.log.append(("reset", group))


def step(*values: float) -> Tree:
    return {"obs": np.array(values, np.float64), "first": np.zeros(len(values), np.bool_)}


def client(fds: list[int], at: int = 0, **kwargs: Any) -> Any:
    return Proxy(ports_of(Policy), CallerEnds(None, Writer(fds[at], **{"max_slots": 8, **kwargs}), Reader(fds[at + 1])))


def server(policy: Any, fds: list[int], *at: int, **kwargs: Any) -> CallService:
    ends = [ServiceEnds(Reader(fds[i]), Writer(fds[i + 1], **kwargs)) for i in at or (0,)]
    service = CallService(policy, ports_of(Policy), ends)
    service.used = True  # look for calls at every step
    return service


def send(one: Any, host: CallService, group: int, *values: float) -> None:
    """Where the first question is a reset, the next is larger, and waits until it is taken."""
    if not one.send(group, step(*values)):
        serve(host)
        assert one.send(group, step(*values))


def serve(host: CallService, times: int = 50) -> None:
    for _ in range(times):
        host.step()


@pytest.mark.parametrize("patience", [0, 1, 2])
def test_answers_reach_the_group_that_asked(patience: int, fds: list[int]) -> None:
    policy = Sums(life=100, patience=patience)
    clients, host = [client(fds, at) for at in (0, 2, 4)], server(policy, fds, 0, 2, 4)
    for number in range(20):
        for who, one in enumerate(clients):
            for group in (2 * who, 2 * who + 1):  # groups have different sizes
                assert one.send(group, step(*[1000 * group + number] * (1 + group)))
                assert one.recv(group) is None
        serve(host)
        for who, one in enumerate(clients):
            for group in (2 * who + 1, 2 * who):
                out = one.recv(group)
                assert out is not None and out.keys() == {"action"}
                assert out["action"].tolist() == [1000 * group + number + 100] * (1 + group)
                assert one.recv(group) is None
    assert len(policy.log) == 20 * 6 and not host.step()


def test_an_answer_keeps_until_it_is_asked_for(fds: list[int]) -> None:
    one, host = client(fds), server(Sums(), fds, max_slots=2)
    assert one.send(0, step(7))
    for number in range(5):  # their answers pass through the slot that the first one lay in
        assert one.send(1, step(number))
        serve(host)
        assert one.recv(1)["action"].tolist() == [number]  # type: ignore[index]
    assert one.recv(0)["action"].tolist() == [7]  # type: ignore[index]


def test_a_full_stream_of_questions_says_not_now(fds: list[int]) -> None:
    one, host = client(fds), server(Sums(), fds)
    sent = 0
    while one.send(sent, step(sent)):
        sent += 1
    assert sent == 8
    size = os.fstat(fds[0]).st_size
    serve(host)
    assert one.send(8, step(8.0)) and os.fstat(fds[0]).st_size == size
    serve(host)
    assert [one.recv(group)["action"].tolist() for group in range(9)] == [[group] for group in range(9)]  # type: ignore[index]


def test_a_new_life_of_the_client_drops_answers_to_the_old_one(fds: list[int]) -> None:
    policy = Sums()
    one, host = client(fds), server(policy, fds)
    assert one.send(0, step(1)) and one.send(1, step(2))
    serve(host, 1)  # one question is answered, the answer not read; the other is not even answered
    again = client(fds)
    again.reset(0)
    again.reset(1)
    assert again.recv(0) is None and again.recv(1) is None
    assert again.send(0, step(3)) and again.send(1, step(4))
    serve(host)
    assert again.recv(1)["action"].tolist() == [4] and again.recv(0)["action"].tolist() == [3]  # type: ignore[index]
    assert policy.log == [("send", 0, 1), ("send", 1, 2), ("reset", 0), ("reset", 1), ("send", 0, 3), ("send", 1, 4)]


def test_a_new_life_of_the_server_answers_what_was_asked(fds: list[int]) -> None:
    one, first = client(fds), server(Sums(life=10), fds)
    assert one.send(0, step(1))
    first.step()
    # It takes two more questions, and dies before it knows the answers.
    first._recv = [recv and (lambda group: None) for recv in first._recv]
    assert one.send(1, step(2)) and one.send(2, step(3))
    serve(first)
    assert [entry[:2] for entry in first._node.log] == [("send", 0), ("send", 1), ("send", 2)]
    serve(server(Sums(life=20), fds))
    actions = [one.recv(group)["action"].tolist() for group in range(3)]  # type: ignore[index]
    assert actions == [[11], [22], [23]]


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("what", ["send", "flush"])
def test_no_question_is_answered_twice(what: str, collected: bool, fds: list[int]) -> None:
    """The server dies after an answer and before it took the question from the stream. The next one would choose another
    action than that which was taken, and record it."""
    one, first, second = client(fds), server(Sums(life=10), fds), Sums(life=20)
    assert one.send(0, step(0))
    serve(first)
    assert one.recv(0) is not None
    assert one.send(0, step(1)) if what == "send" else not one.flush(0)
    first._callers[0].calls.pop = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        first.step()

    def collect() -> None:
        if what == "flush":
            assert one.flush(0)
        else:
            out = one.recv(0)
            assert out is not None and out["action"].tolist() == [11]

    if collected:
        collect()
    serve(server(second, fds))
    assert second.log == []
    if not collected:
        collect()
    assert one.send(0, step(2))
    serve(server(second, fds))
    assert one.recv(0)["action"].tolist() == [22]  # type: ignore[index]


def test_answers_that_nobody_reads_hold_up_the_server_and_do_not_end_it(fds: list[int]) -> None:
    """Lives of a client that ask and die fill the stream of answers; the answers that found no room are not lost."""
    policy = Sums()
    host = server(policy, fds, max_slots=2)
    for life in range(4):
        one = client(fds)
        assert one.send(0, step(life))
        serve(host)
    assert not host.step()
    assert one.recv(0) is None, "the answer to this life is not there yet"
    serve(host)
    out = one.recv(0)
    assert out is not None and out["action"].tolist() == [3]
    assert [entry[2] for entry in policy.log] == [0, 1, 2, 3], "each was asked once"


def test_an_answer_larger_than_all_before_waits_until_they_are_read(fds: list[int]) -> None:
    policy = Sums()
    one, host = client(fds), server(policy, fds)
    assert not one.flush(0)
    serve(host)
    assert one.send(1, step(*range(500)))
    serve(host)
    assert one.recv(1) is None, "its slots cannot grow before the answer to the flush is read"
    serve(host)
    out = one.recv(1)
    assert out is not None and out["action"].tolist() == list(range(500))
    assert one.flush(0) and len(policy.log) == 2


@pytest.mark.parametrize("patience", [0, 2])
def test_flush_and_reset_reach_the_policy_in_order(patience: int, fds: list[int]) -> None:
    policy = Sums(patience=patience)
    one, host = client(fds), server(policy, fds)
    one.reset(0)
    send(one, host, 0, 1)
    serve(host)
    assert one.recv(0) is not None
    assert not one.flush(0) and not one.flush(0), "not before the policy has said so"
    serve(host)
    assert one.flush(0), "and then once"
    assert not one.flush(0)
    serve(host)
    assert one.flush(0)
    one.reset(0)
    one.reset(0)
    assert not one.flush(0), "what begins anew has nothing to flush: the policy hears of the reset first"
    serve(host)
    assert one.flush(0)
    assert one.send(0, step(2))
    serve(host)
    assert one.recv(0) is not None
    assert policy.log == [
        ("reset", 0),
        ("send", 0, 1),
        ("flush", 0),
        ("flush", 0),
        ("reset", 0),
        ("reset", 0),
        ("flush", 0),
        ("send", 0, 2),
    ]


def test_a_reset_forgets_the_answer_that_is_on_its_way(fds: list[int]) -> None:
    one, host = client(fds), server(Sums(), fds)
    assert one.send(0, step(1))
    assert not one.flush(0)
    one.reset(0)
    serve(host)
    assert one.recv(0) is None
    assert one.send(0, step(5)), "a new question"
    assert one.recv(0) is None, "and not the old answer to it"
    serve(host)
    assert one.recv(0)["action"].tolist() == [5]  # type: ignore[index]


@given(st.lists(st.sampled_from(["send", "serve", "recv", "client", "server", "flush", "reset"]), max_size=60))
@settings(max_examples=100 * examples(1), deadline=None)
def test_whoever_begins_anew_the_next_question_gets_its_own_answer(events: list[str]) -> None:
    fds = [make_shared_memory("veldt test") for _ in range(2)]
    one, host, number, asked = client(fds), server(Sums(), fds), 0, None
    try:
        for event in [*events, "reset", "serve", *["send", "serve", "recv"] * 3]:
            if event == "send" and asked is None and one.send(0, step(number)):
                asked, number = number, number + 1
            elif event == "serve":
                serve(host, 12)
            elif event == "recv" and (out := one.recv(0)) is not None:
                assert out["action"].tolist() == [asked]
                asked = None
            elif event == "client":
                one, asked = client(fds), None
                one.reset(0)
            elif event == "server":
                host = server(Sums(), fds)
            elif event == "flush":
                one.flush(0)
            elif event == "reset":
                one.reset(0)
                asked = None
        assert asked is None and number > 0, "the last question was answered"
    finally:
        for fd in fds:
            os.close(fd)
