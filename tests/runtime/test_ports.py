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
from veldt.ports import Examples, Source, call, latest, stream
from veldt.program import BLOCK_MEMORY, INCARNATION, ROWS, Program
from veldt.records.tree import Array
from veldt.runtime import Inline
from veldt.runtime.local.local import Gate, Local


class Task(NamedTuple):
    worker: int
    number: int


class Total(NamedTuple):
    version: int
    value: Array


class Ledger:
    """Adds up what workers push, hands out numbered tasks, and publishes the sum."""

    def __init__(self, memory: Any) -> None:
        found = memory is not None and memory.found
        make = np.zeros if memory is None else memory.zeros
        self.seen = make((8, 4_000), np.int64)  # channel, number -> 1 + what was pushed; it outlives the process
        self.tasks = make((8,), np.int64)  # by worker
        self.adopted = found

    @stream
    def push(self, amount: Array, at: int, source: Source | None = None) -> bool:
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


class Worker:
    """Takes a task, pushes its number, and watches the sum."""

    def __init__(self, name: int, ledger: Ledger, counters: Counters, life: int) -> None:
        self.name, self.ledger, self.counters = name, ledger, counters
        self.task: Task | None = None
        self.version, self.next = -1, 0
        self.pushed: list[int] = []

    def step(self) -> bool:
        found = self.ledger.total(self.version)
        if found is not None:
            assert found.version >= self.version
            self.version = found.version
        if self.task is None:
            self.task = self.ledger.take(self.name)
        if self.task is None or self.task.number > PUSHES:
            return False
        assert self.task.worker == self.name
        if self.ledger.push(np.full(3, 1.0, np.float32), self.task.number):
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
    from veldt.runtime.shm.arena import Arena

    runtime = Local(tmp_path, gate=Gate() if kind == "grpc" else None)
    rng = np.random.default_rng(kills)
    with runtime.start(program()) as nodes:
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
