"""Local: runs a program in supervised processes of this host."""

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from veldt.counters import OF_STATE
from veldt.errors import ProcessFailed
from veldt.program import BLOCK_MEMORY, Program
from veldt.runtime.base import array_state, load_arrays
from veldt.runtime.local.board import ORDERS
from veldt.runtime.local.plan import GateSettings, make_plan
from veldt.runtime.local.pressure import MemoryConfig
from veldt.runtime.local.supervisor import COLUMNS, Answer, Supervisor
from veldt.runtime.local.watchdog import Restarts
from veldt.runtime.shm.memory import Arena, Latest, write_state

log = logging.getLogger("veldt")

KEEP_S = 20.0  # between two copies of the state that a killed learner would restart from
ANSWER_S = 20.0  # to wait for an answer that is needed
OTHERS_S = 1.0  # to wait for an answer that is not
RESTART_S = 1.5  # at least, for a process to be restarted when the run ends
LONGEST_FOLDER = 95  # characters, so that the path of a socket in it is short enough


@dataclass(frozen=True)
class Local:
    """`directory` gets processes.json. `step_timeout` is how long one step of a worker may take, in seconds."""

    directory: Path | None = None
    step_timeout: float = 30.0
    first_incarnation: int = 0  # higher than any in earlier sessions of this run
    queue: int = 16  # messages that may wait in a stream
    gate: GateSettings | None = None
    restarts: Restarts = field(default_factory=Restarts)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @contextmanager
    def start(self, program: Program) -> Iterator["LocalNodes"]:
        with contextlib.ExitStack() as stack:
            path = "" if self.gate is None else str(stack.enter_context(self._folder()) / "socket")
            plan = make_plan(program, self.queue, self.gate, path)
            settings = (self.step_timeout, self.first_incarnation, self.restarts, self.memory)
            supervisor = Supervisor(plan, self.directory, *settings)
            stack.callback(supervisor.stop)
            supervisor.start()
            yield LocalNodes(supervisor)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = None if self.directory is None else self.directory.resolve() / ".gate"
        if folder is None or len(str(folder)) > LONGEST_FOLDER:
            folder = Path(tempfile.mkdtemp(prefix="veldt-"))
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class LocalNodes:
    """See `runtime.base.Nodes`."""

    live = True

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor, self._answers = supervisor, supervisor.answers
        self.holding = False
        self._kept = [child.name for child in supervisor.children.values() if child.keeps]
        self._kept_at = time.monotonic()
        self.paused = 0.0  # seconds that the learner stopped for its state to be copied
        self._loaded: dict[str, dict[str, Any]] = {}
        self._asked = 0  # orders ever given

    def step(self) -> None:
        """Also copies, now and then, the state that a killed learner restarts from: checkpoints may be hours apart."""
        self.supervisor.board.hold = self.holding
        self.supervisor.tick()
        if time.monotonic() - self._kept_at > KEEP_S:
            self._kept_at = time.monotonic()
            self._read(self.ask_once("state", self._kept, self._kept))

    def count(self, name: str) -> int:
        return sum(counters.get(name) for counters in self.supervisor.counters.values())

    def metrics(self) -> dict[str, float]:
        supervisor, pressure = self.supervisor, self.supervisor.pressure
        out = {"restarts": float(sum(child.restarts for child in supervisor.children.values()))}
        if pressure.left:
            out |= {"memory_left": float(pressure.left), "memory_restarts": float(pressure.restarts)}
        return supervisor.reports.take() | out

    def resources(self) -> tuple[list[int], list[int]]:
        return self.supervisor.pids(), list(self.supervisor.descriptors.values())

    def stop(self) -> None:
        self.supervisor.board.stopping = True

    def cut(self) -> None:
        """Stops the workers after their current step; a running evaluation is cut short."""
        self.holding = self.supervisor.board.hold = self.supervisor.board.stopping = True

    def resume(self, number: int) -> None:
        self.holding = self.supervisor.board.stopping = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Has no state of a process that is being restarted, unless its state is kept: then it waits for that process."""
        answers = self.ask_all("state", self._kept)
        self.paused = max((answers[name].result for name in self._kept), default=0.0)
        return self._read(answers) | self._counts() | self._arrays()

    def snapshot(self) -> "Snapshot":
        state = self.state()
        return Snapshot(state, self._stores(state), self.paused)

    def salvage(self, seconds: float) -> "Snapshot":
        """A snapshot at the end of the run, whatever its processes do.

        One that does not answer in this time is killed. If its state is kept, it is restarted on hold, and has as long to
        answer again. If it does not, its stores are left out, and the rest is as it was kept last.
        """
        supervisor, children = self.supervisor, self.supervisor.children
        self.cut()
        supervisor.ending = True
        answers = self.ask_once("state", children, children, seconds=seconds)
        deadline = time.monotonic() + max(RESTART_S, seconds)
        for child in children.values():
            if child.name not in answers and child.pid:
                child.signal(signal.SIGKILL)
        while (late := [name for name in self._kept if name not in answers]) and time.monotonic() < deadline:
            for name in late:
                children[name].due = min(children[name].due, time.monotonic())
            supervisor.tick(0.005)
            if all(children[name].ready for name in late):
                answers |= self.ask_once("state", late, late, seconds=max(0.0, deadline - time.monotonic()))
        state = supervisor.recover | self._read(answers) | self._counts() | self._arrays()
        for name in late:
            if lost := [node for node in children[name].nodes if supervisor.plan.nodes[node].keep and node not in state]:
                raise ProcessFailed(f"{name} does not answer, and no state of {', '.join(lost)} was kept")
            log.warning("%s does not answer: the last state that was kept is saved, without its stores", name)
        return Snapshot(state, self._stores(state), 0.0)

    def _read(self, answers: dict[str, Answer]) -> dict[str, dict[str, Any]]:
        """The states in these answers; those that a killed process would restart from are kept."""
        out: dict[str, dict[str, Any]] = {}
        for name, answer in answers.items():
            out |= answer.state
            if name in self._kept:
                counts = {rows: np.array(row)[COLUMNS] for rows, row in answer.counts.items()}
                self.supervisor.children[name].counts = counts
        self._keep(out)
        return out

    def _keep(self, state: dict[str, dict[str, Any]]) -> None:
        """Keeps what a killed learner restarts from. Actors start fresh, and the blocks of stores are in shared memory."""
        nodes = [node for name in self._kept for node in self.supervisor.children[name].nodes if node in state]
        self.supervisor.recover |= {n: state[n] for n in nodes if f"arena {n}" not in self.supervisor.descriptors}

    def _arrays(self) -> dict[str, dict[str, Any]]:
        return array_state(self.supervisor.arrays, self.supervisor.plan.unsaved)

    def _counts(self) -> dict[str, dict[str, Any]]:
        """All counts: those that belong to a process's state as they were when that was taken."""
        out: dict[str, dict[str, Any]] = {}
        for name, counters in self.supervisor.counters.items():
            out[name] = state = counters.state()
            for child in self.supervisor.children.values():
                now = self.supervisor.rows[name].table[child.index, COLUMNS]
                for count, change in zip(OF_STATE, child.counts.get(name, now) - now, strict=True):
                    state["counts"][count] += int(change)
        return out

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        supervisor = self.supervisor
        self._loaded = state
        self._keep(state)
        load_arrays(supervisor.arrays, state)
        for name in supervisor.counters:  # those that belong to a process's state start anew
            supervisor.rows[name].table[:, COLUMNS] = 0
        parts = {}
        for child in supervisor.children.values():
            child.counts = {}
            parts[child.name] = {node: state[node] for node in child.nodes if node in state}
        self.ask_all("load", list(parts), parts)
        for name, counters in supervisor.counters.items():
            if name in state:
                counters.load_state(state[name])

    def cell(self, name: str) -> Latest:
        return Latest(self.supervisor.descriptors[f"cell {name}"])

    def stores(self) -> dict[str, Any]:
        return self._stores(self._loaded)

    def _stores(self, state: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The blocks of stores in other processes, read and written in shared memory. `state` is that of the stores, or the
        one that they are about to load."""
        out: dict[str, Any] = {}
        for name, node in self.supervisor.plan.nodes.items():
            if name not in state or not node.has(BLOCK_MEMORY):
                continue
            arena = Arena(self.supervisor.descriptors[f"blocks {name}"])
            out[name] = node.node_class.map_blocks((node.args, node.kwargs), arena, state[name])  # type: ignore[attr-defined]
            out[name].drop_blocks = functools.partial(self._drop_blocks, name)
        return out

    def _drop_blocks(self, name: str, first: int, stop: int) -> int:
        number = self.give(self.supervisor.plan.home(name), "drop_blocks", name, (first, stop))
        if number is None or not self.supervisor.wait(lambda: number in self._answers, ANSWER_S, "drop_blocks"):
            raise ProcessFailed(f"{name} does not answer")
        return int(self._answers.pop(number).result)

    # Orders to processes, and their answers.

    def give(self, name: str, what: str, node: str = "", args: tuple[Any, ...] = (), state: Any = None) -> int | None:
        """The number under which the answer will come; None: the process is not there at the moment."""
        child = self.supervisor.children[name]
        if child.socket is None or not child.ready:
            return None
        self._asked += 1
        fds = [] if state is None else [write_state(state)]
        data = json.dumps({"number": self._asked, "do": what, "node": node, "args": args}).encode()
        try:
            socket.send_fds(child.socket, [data], fds)
        except OSError:
            return None
        finally:
            for fd in fds:
                os.close(fd)
        self.supervisor.expected.add(self._asked)
        child.row[ORDERS] += 1
        self.supervisor.board.bell(child.index).ring()
        return self._asked

    def ask_all(self, what: str, needed: Collection[str], states: dict[str, Any] | None = None) -> dict[str, Answer]:
        """The answers by process. A needed process that is down, or dies meanwhile, is asked again after its restart."""
        supervisor = self.supervisor
        answers = self.ask_once(what, supervisor.children, needed, states)
        deadline = time.monotonic() + ANSWER_S + supervisor.step_timeout
        while missing := [name for name in needed if name not in answers]:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{', '.join(missing)} did not answer ({what})")
            supervisor.tick(0.005)
            if all(supervisor.children[name].ready for name in missing):
                answers |= self.ask_once(what, missing, needed, states)
        return answers

    def ask_once(
        self,
        what: str,
        names: Collection[str],
        needed: Collection[str],
        states: dict[str, Any] | None = None,
        seconds: float = ANSWER_S,
    ) -> dict[str, Answer]:
        children, wait = self.supervisor.children, self.supervisor.wait
        given = {name: self.give(name, what, state=(states or {}).get(name)) for name in names}
        numbers = {name: number for name, number in given.items() if number is not None}
        incarnations = {name: children[name].incarnation for name in numbers}

        def settled(names: Collection[str]) -> bool:
            return all(numbers[x] in self._answers or children[x].incarnation != incarnations[x] for x in names)

        began = time.monotonic()
        wait(lambda: settled([name for name in numbers if name in needed]), seconds, what)
        wait(lambda: settled(numbers), max(0.0, began + OTHERS_S - time.monotonic()), what)
        self.supervisor.expected -= set(numbers.values())
        return {name: self._answers.pop(number) for name, number in numbers.items() if number in self._answers}


class Snapshot(NamedTuple):
    """The state of all nodes at one moment; blocks are read from shared memory while the stores run."""

    nodes: dict[str, dict[str, Any]]
    mapped: dict[str, Any]
    paused: float  # seconds that the learner stopped for it

    def state(self) -> dict[str, dict[str, Any]]:
        return self.nodes

    def stores(self) -> dict[str, Any]:
        return self.mapped
