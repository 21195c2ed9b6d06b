"""Local: runs a program in supervised processes of this host."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from veldt.counters import OF_STATE
from veldt.program import Program
from veldt.runtime.base import array_state, load_arrays
from veldt.runtime.local.orders import Answer, read_state
from veldt.runtime.local.plan import Gate, make_plan
from veldt.runtime.local.supervisor import COLUMNS, Supervisor
from veldt.runtime.shm.memory import Arena

KEEP_S = 20.0  # between two copies of the state that a killed learner would restart from
LONGEST_FOLDER = 95  # characters, so that the path of a socket in it is short enough


@dataclass(frozen=True)
class Local:
    """`directory` gets processes.json. `step_timeout` is how long one step of a worker may take, in seconds."""

    directory: Path | None = None
    step_timeout: float = 30.0
    first_incarnation: int = 0  # higher than any in earlier sessions of this run
    queue: int = 16  # messages that may wait in a stream
    gate: Gate | None = None

    @contextmanager
    def start(self, program: Program) -> Iterator[LocalNodes]:
        with contextlib.ExitStack() as stack:
            socket = "" if self.gate is None else str(stack.enter_context(self._folder()) / "socket")
            plan = make_plan(program, self.queue, self.gate, socket)
            supervisor = Supervisor(plan, self.directory, self.step_timeout, self.first_incarnation)
            stack.callback(supervisor.stop)
            supervisor.start()
            yield LocalNodes(supervisor)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A private folder for the gate's socket."""
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
        self.supervisor = supervisor
        self.holding = False
        self._kept = [child.name for child in supervisor.children.values() if child.keeps]
        self._kept_at = time.monotonic()
        self.paused = 0.0  # seconds that the learner stopped for its state to be copied
        self._loaded: dict[str, dict[str, Any]] = {}

    def step(self) -> None:
        """Also copies, now and then, the state that a killed learner restarts from: checkpoints may be hours apart."""
        self.supervisor.board.hold = self.holding
        self.supervisor.tick()
        if time.monotonic() - self._kept_at > KEEP_S:
            self._kept_at = time.monotonic()
            self._read(self.supervisor.orders.ask_once("state", self._kept, self._kept))

    def count(self, name: str) -> int:
        return sum(counters.get(name) for counters in self.supervisor.counters.values())

    def metrics(self) -> dict[str, float]:
        children = self.supervisor.children.values()
        return self.supervisor.reports.take() | {"restarts": float(sum(child.restarts for child in children))}

    def resources(self) -> tuple[list[int], list[int]]:
        pids = [each.pid for each in self.supervisor.zygotes.values()]
        pids += [child.pid for child in self.supervisor.children.values() if child.pid]
        return pids, list(self.supervisor.descriptors.values())

    def stop(self) -> None:
        self.supervisor.board.stopping = True

    def cut(self) -> None:
        """Stops the workers after their current step; a running evaluation is cut short."""
        self.holding = self.supervisor.board.hold = self.supervisor.board.stopping = True

    def resume(self, number: int) -> None:
        self.holding = self.supervisor.board.stopping = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Has no state of a process that is being restarted, unless its state is kept: then it waits for that process."""
        answers = self.supervisor.orders.ask_all("state", self._kept)
        self.paused = max((answers[name].result for name in self._kept), default=0.0)
        return self._read(answers) | self._counts() | array_state(self.supervisor.arrays)

    def snapshot(self) -> Snapshot:
        state = self.state()
        return Snapshot(state, self._stores(state), self.paused)

    def _read(self, answers: dict[str, Answer]) -> dict[str, dict[str, Any]]:
        """The states in these answers; those that a killed process would restart from are kept."""
        out: dict[str, dict[str, Any]] = {}
        for name, answer in answers.items():
            if answer.fd is not None:
                out |= read_state(answer.fd)
                counts = {rows: np.array(row)[COLUMNS] for rows, row in answer.counts.items()}
                self.supervisor.children[name].counts = counts if name in self._kept else {}
        self._keep(out)
        return out

    def _keep(self, state: dict[str, dict[str, Any]]) -> None:
        """Keeps what a killed learner restarts from. Actors start fresh, and the blocks of stores are in shared memory."""
        nodes = [node for name in self._kept for node in self.supervisor.children[name].nodes if node in state]
        self.supervisor.recover |= {n: state[n] for n in nodes if f"arena {n}" not in self.supervisor.descriptors}

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
        supervisor.orders.ask_all("load", list(parts), parts)
        for name, counters in supervisor.counters.items():
            if name in state:
                counters.load_state(state[name])

    def stores(self) -> dict[str, Any]:
        return self._stores(self._loaded)

    def _stores(self, state: dict[str, dict[str, Any]]) -> dict[str, Any]:
        names = [name.removeprefix("arena ") for name in self.supervisor.descriptors if name.startswith("arena ")]
        return {name: MappedStore(self.supervisor, name, state[name]) for name in names if name in state}


class MappedStore:
    """The blocks of a store in another process, read and written in shared memory."""

    def __init__(self, supervisor: Supervisor, name: str, state: dict[str, Any]) -> None:
        """`state` is that of the store, or the one it is about to load."""
        node, arena = supervisor.plan.nodes[name], Arena(supervisor.descriptors[f"blocks {name}"])
        mapped = node.node_class.map_blocks((node.args, node.kwargs), arena, state)  # type: ignore[attr-defined]
        self.schema, self.oldest, self.next = mapped.schema, mapped.oldest, mapped.next
        self.blocks, self.load_blocks = mapped.blocks, mapped.load_blocks
        self._supervisor, self._name = supervisor, name

    def drop_blocks(self, first: int, stop: int) -> int:
        home = self._supervisor.plan.home(self._name)
        return int(self._supervisor.orders.call(home, "drop_blocks", self._name, (first, stop)))


@dataclass
class Snapshot:
    """The state of all nodes at one moment; blocks are read from shared memory while the stores run."""

    nodes: dict[str, dict[str, Any]]
    mapped: dict[str, Any]
    paused: float  # seconds that the learner stopped for it

    def state(self) -> dict[str, dict[str, Any]]:
        return self.nodes

    def stores(self) -> dict[str, Any]:
        return self.mapped
