"""A node class that the package has never seen works inline, in processes that are killed, and over gRPC."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from veldt.counters import Counters
from veldt.errors import UserError
from veldt.ports import Examples, Source, call, latest, ports_of, stream
from veldt.program import BLOCK_MEMORY, INCARNATION, ROWS, Program
from veldt.records.tree import Array
from veldt.runtime import Inline
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import GateSettings
from veldt.runtime.proxies import CallerEnds, Proxy
from veldt.runtime.services import CallService, ServiceEnds, StreamService
from veldt.runtime.shm.memory import make_shared_memory
from veldt.runtime.shm.ring import Reader, Writer


class Task(NamedTuple):
    worker: int
    number: int


class Total(NamedTuple):
    version: int
    value: Array


class Ledger:
    """Adds up what workers push, hands out numbered tasks, and publishes the sum."""

    def __init__(self, memory: Any) -> None:
        make = np.zeros if memory is None else memory.zeros
        self.seen = make((8, 4_000), np.int64)  # channel, number -> 1 + what was pushed; it outlives the process
        self.tasks = make((8,), np.int64)  # by worker
        self.closed: dict[int, float] = {}  # until when a push is refused

    @stream
    def push(self, amount: Array, at: int, source: Source | None = None) -> bool:
        if at % 500 == 0 and time.monotonic() < self.closed.setdefault(at, time.monotonic() + 0.1):
            return False  # in this time the ring fills up
        assert (amount == at).all(), (amount, at)
        place = (0, int(np.count_nonzero(self.seen[0]))) if source is None else tuple(source)
        assert self.seen[place] in (0, 1 + at), (place, self.seen[place], at)
        self.seen[place] = 1 + at
        return True

    @call
    def take(self, worker: int) -> Task | None:
        if time.monotonic_ns() % 3 == 0:
            return None  # not yet
        self.tasks[worker] += 1
        return Task(worker, int(self.tasks[worker]))

    @latest
    def total(self, have: int = -1) -> Total | None:
        sums = np.array([int((self.seen - (self.seen > 0)).sum())])
        return Total(int(np.count_nonzero(self.seen)), sums)


PUSHES = 1_500  # of each worker
BEHIND = 100  # pushes that the published sum may lack before a worker waits for it


class Worker:
    """Takes a task, pushes its number, and waits for the sum to follow."""

    def __init__(self, name: int, ledger: Ledger, counters: Counters, life: int) -> None:
        self.name, self.ledger, self.counters = name, ledger, counters
        self.task: Task | None = None
        self.version, self.pushed = -1, 0

    def step(self) -> bool:
        found = self.ledger.total(self.version)
        if found is not None:
            assert found.version >= self.version and found.value[0] >= found.version, "an older sum, or parts of two"
            self.version = found.version
        if self.task is None:
            self.task = self.ledger.take(self.name)
        if self.task is None or self.task.number > PUSHES or self.pushed > self.version + BEHIND:
            return False
        assert self.task.worker == self.name
        if self.ledger.push(np.full(3, self.task.number, np.float32), self.task.number):
            self.pushed += 1
            self.counters.add("env_steps", 100)  # so much work between two kills that a restart is no failure
            self.task = None
        return True


def program(workers: int = 2) -> Program:
    out = Program()
    counters = out.add("counters", Counters, ROWS)
    examples = {"push": Examples([(np.zeros(3, np.float32), 0)]), "take": Examples([(0,)], [Task(0, 0)])}
    ledger = out.add("ledger", Ledger, BLOCK_MEMORY, examples=examples)
    for i in range(workers):
        out.add(f"worker/{i}", Worker, i, ledger, counters, INCARNATION, elsewhere=True)
    return out


def test_inline() -> None:
    with Inline().start(program()) as nodes:
        ledger = nodes.objects["ledger"]
        deadline = time.monotonic() + 20
        while nodes.count("env_steps") < 200 * PUSHES and time.monotonic() < deadline:
            nodes.host.step()
        assert np.count_nonzero(ledger.seen) == 2 * PUSHES
        assert ledger.total().value[0] == PUSHES * (PUSHES + 1)


@pytest.mark.parametrize(("kind", "kills"), [("shm", 0), ("shm", 12), ("grpc", 0), ("grpc", 12)])
def test_in_processes_that_are_killed(kind: str, kills: int, tmp_path: Path) -> None:
    """Every push of a task that was taken arrives once, whoever is killed; a killed worker may lose the task it had."""
    from veldt.runtime.shm.memory import Arena

    runtime = Local(tmp_path, gate=GateSettings() if kind == "grpc" else None)
    rng = np.random.default_rng(kills)
    with runtime.start(program()) as nodes:
        assert ("gate" in nodes.supervisor.children) == (kind == "grpc")
        deadline, killed = time.monotonic() + 100, 0
        fd = nodes.supervisor.descriptors["arena ledger"]
        kill_at = 400
        while time.monotonic() < deadline:
            nodes.step()
            if os.fstat(fd).st_size == 0:
                continue
            arena = Arena(fd)
            seen, tasks = arena.zeros((8, 4_000), np.int64), arena.zeros((8,), np.int64)
            if tasks[:2].min() > PUSHES:
                break
            if killed < kills and nodes.count("env_steps") > kill_at:
                children = list(nodes.supervisor.children.values())
                child = children[rng.integers(len(children))]
                if child.pid and child.ready:
                    os.kill(child.pid, signal.SIGKILL)
                    killed, kill_at = killed + 1, nodes.count("env_steps") + 1_500
        assert tasks[:2].min() > PUSHES, (tasks, killed)
        wanted = 2 * PUSHES - 2 * killed
        while np.count_nonzero(seen) < wanted and time.monotonic() < deadline:
            nodes.step()
        for channel in range(2):
            values = seen[channel][seen[channel] > 0] - 1
            assert len(set(values)) == len(values), "a task was pushed twice"
            assert (np.diff(values) > 0).all(), "pushes changed their order"
        assert np.count_nonzero(seen) >= wanted, (np.count_nonzero(seen), killed)
        assert killed == kills
        assert sum(child.restarts for child in nodes.supervisor.children.values()) <= kills, "a node failed by itself"


# What a port may be, and how its arguments travel.


class Shelf:
    """Everything that an argument may be."""

    def __init__(self, open_: bool = True) -> None:
        self.open, self.log = open_, []  # type: ignore[var-annotated]

    @stream
    def put(self, x: Array, at: int = 7, name: dict[str, Array] | None = None, weight: float = 0.5) -> bool:
        if not self.open:
            return np.False_  # type: ignore[return-value]
        self.log.append((x.tolist(), at, None if name is None else sorted(name), weight))
        return True

    @stream
    def release(self) -> None:
        self.open = True

    @call
    def wait(self, key: int, deep: Total) -> Total | None:
        return None if key == 0 else Total(deep.version + key, deep.value * 2)

    @call
    def scale(self, x: dict[str, Array], by: float) -> dict[str, Array]:
        return {name: x[name] * by for name in x}

    @call
    def negate(self, key: int, x: dict[str, Array]) -> dict[str, Array]:
        return {name: -x[name] for name in x}


def shelf(fds: list[int], node: Any, senders: int = 1) -> tuple[list[Any], list[Any]]:
    """Proxies in as many callers, and the services of the node."""
    ports, rings = ports_of(Shelf), [fds[3 * i : 3 * i + 3] for i in range(senders)]
    proxies = [Proxy(ports, CallerEnds(Writer(a), Writer(b), Reader(c))) for a, b, c in rings]
    streams = StreamService(node, ports, [Reader(a) for a, _, _ in rings])
    calls = CallService(node, ports, [ServiceEnds(Reader(b), Writer(c)) for _, b, c in rings])
    calls.used = True
    return proxies, [streams, calls]


def serve(services: list[Any], times: int = 5) -> None:
    for _ in range(times):
        for service in services:
            service.step()


def test_arguments_may_be_left_out_named_and_none(fds: list[int]) -> None:
    node = Shelf()
    (one,), services = shelf(fds, node)
    assert one.put(np.ones(1)) and one.put(np.ones(1), 3, {"b": np.zeros(2), "a": np.zeros(1)}, 2.0)
    serve(services)
    assert one.put(weight=1.5, x=np.zeros(1))
    serve(services)
    assert node.log == [([1.0], 7, None, 0.5), ([1.0], 3, ["a", "b"], 2.0), ([0.0], 7, None, 1.5)]
    for wrong in (lambda: one.put(), lambda: one.put(np.ones(1), nonsense=1), lambda: one.put(1, 2, None, 4, 5)):
        with pytest.raises(TypeError, match="takes the arguments x, at, name, weight"):
            wrong()
    with pytest.raises(AttributeError, match="'log' of a node in another process"):
        one.log  # noqa: B018


def test_a_refusal_of_one_port_holds_up_no_other(fds: list[int]) -> None:
    """What one sender puts is refused until another's release arrives."""
    node = Shelf(open_=False)
    (one, other), services = shelf(fds, node, senders=2)
    assert one.put(np.ones(1)) and other.put(np.zeros(1))
    serve(services)
    assert node.log == []
    third = Shelf(open_=False)
    (_, last), services = shelf(fds, third, senders=2)
    last.release()
    serve(services)
    assert third.open is False, "it waits behind what its own sender has put"
    node = Shelf(open_=False)
    fresh = [make_shared_memory("veldt test") for _ in range(6)]
    (one, other), services = shelf(fresh, node, senders=2)
    assert one.put(np.ones(1))
    other.release()
    serve(services)
    assert node.log == [([1.0], 7, None, 0.5)]
    for fd in fresh:
        os.close(fd)


def test_a_restarted_caller_replaces_the_call_that_it_had_open(fds: list[int]) -> None:
    node = Shelf()
    (one,), services = shelf(fds, node)
    assert one.wait(0, Total(1, np.ones(2))) is None and one.wait(3, Total(1, np.ones(2))) is None
    serve(services)
    assert one.wait(3, Total(1, np.ones(2))) == (4, pytest.approx([2, 2])), "one that is open holds up no other"
    (again,), _ = shelf(fds, node)
    again_service = services[1]
    assert again.wait(0, Total(5, np.ones(2))) is None
    node.wait = lambda key, deep: Total(deep.version, deep.value)  # type: ignore[method-assign]
    again_service._ports = [(port, getattr(node, port.name)) for port, _ in again_service._ports]
    serve(services)
    found = again.wait(0, Total(5, np.ones(2)))
    assert found is not None and found.version == 5, "the answer to its own call"


def test_each_call_has_its_own_arguments_however_often_a_slot_is_used(fds: list[int]) -> None:
    (one,), services = shelf(fds, Shelf())
    for i in range(100):
        x = {"a": np.array([i, 1.0]), "b": np.array([2.0])}
        assert one.scale(x, 0.5 * i) is None and one.negate(5, x) is None
        serve(services, 1)
        found, negated = one.scale(x, 0.5 * i), one.negate(5, x)
        assert {name: v.tolist() for name, v in found.items()} == {"a": [0.5 * i * i, 0.5 * i], "b": [i]}
        assert {name: v.tolist() for name, v in negated.items()} == {"a": [-i, -1.0], "b": [-2.0]}


def test_what_cannot_travel_is_refused_when_the_ports_are_read() -> None:
    class Bad:
        @call
        def nothing(self) -> None: ...

    class Worse:
        @stream
        def put(self, x: object) -> bool: ...

    with pytest.raises(TypeError, match="a call must return something"):
        ports_of(Bad)
    with pytest.raises(TypeError, match="cannot travel between processes"):
        ports_of(Worse)


class Idler:
    """Counts nothing, and says nothing of what it did."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def step(self) -> Any:
        self.rows.add(0, 1)


def test_a_worker_that_is_given_rows_runs_and_need_not_say_what_it_did() -> None:
    plan = Program()
    plan.add("idler", Idler, ROWS)
    with Local().start(plan) as nodes:
        deadline = time.monotonic() + 20
        while nodes.supervisor.work() < 3 and time.monotonic() < deadline:
            nodes.step()
        assert nodes.supervisor.work() >= 3


def test_gates_say_what_they_need() -> None:
    plan = Program()
    plan.add("ledger", Ledger, BLOCK_MEMORY)
    with pytest.raises(UserError, match="elsewhere=True"), Local(gate=GateSettings()).start(plan):
        pass
    plan = Program()
    ledger = plan.add("ledger", Ledger, BLOCK_MEMORY, examples={"take": Examples([(0,)], [Task(0, 0)])})
    plan.add("worker", Worker, 0, ledger, None, 0, elsewhere=True)
    with pytest.raises(UserError, match="needs one node of Counters; it has 0"), Local(gate=GateSettings()).start(plan):
        pass
