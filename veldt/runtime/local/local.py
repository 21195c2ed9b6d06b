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

from veldt.program import Program
from veldt.runtime.base import array_state, load_arrays
from veldt.runtime.local.orders import Answer
from veldt.runtime.local.plan import GatePlan, make_plan
from veldt.runtime.local.state import read_state
from veldt.runtime.local.supervisor import Options, Supervisor
from veldt.runtime.shm.arena import Arena

KEEP_S = 20.0  # between two copies of the state that a killed learner would restart from
LONGEST_FOLDER = 95  # characters, so that the path of a socket in it is short enough


@dataclass(frozen=True)
class Gate:
    """gRPC, for actors that share no memory with the run: its own, if `own`, and those that join (`experiment.joined`)."""

    own: bool = True
    assignments: tuple[dict[str, Any], ...] = ()  # one for each seat for an actor that joins
    listen: str = ""
    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    compress: bool = False

    def plan(self, directory: Path | None, stack: contextlib.ExitStack) -> GatePlan:
        """The plan, with a socket in a private folder that is removed with the stack."""
        folder = None if directory is None else directory.resolve() / ".gate"
        if folder is None or len(str(folder)) > LONGEST_FOLDER:
            folder = Path(tempfile.mkdtemp(prefix="veldt-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        folder.mkdir(mode=0o700)
        joining = {f"seat/{i}": assignment for i, assignment in enumerate(self.assignments)}
        options = (self.listen, self.token, self.certificate, self.key, self.compress)
        return GatePlan(str(folder / "socket"), joining, *options)


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
            gate = None if self.gate is None else self.gate.plan(self.directory, stack)
            plan = make_plan(program, self.queue, gate, self.gate is None or self.gate.own)
            supervisor = Supervisor(plan, Options(self.directory, self.step_timeout, self.first_incarnation))
            try:
                supervisor.start()
                yield LocalNodes(supervisor)
            finally:
                supervisor.stop()


class LocalNodes:
    """See `runtime.base.Nodes`."""

    live = True

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.holding = False
        self._kept_at = time.monotonic()
        self.paused = 0.0  # seconds that the learner stopped for its state to be copied
        self._loaded: dict[str, dict[str, Any]] = {}

    def step(self) -> None:
        self.supervisor.board.hold = self.holding
        self.supervisor.tick()
        self._refresh()

    def count(self, name: str) -> int:
        return sum(counters.get(name) for counters in self.supervisor.counters.values())

    def metrics(self) -> dict[str, float]:
        children = self.supervisor.children.values()
        return self.supervisor.reports.take() | {"restarts": float(sum(child.restarts for child in children))}

    def resources(self) -> tuple[list[int], list[int]]:
        supervisor = self.supervisor
        pids = [each.pid for each in supervisor.zygotes.values()]
        pids += [child.pid for child in supervisor.children.values()]
        return [pid for pid in pids if pid], list(supervisor.descriptors.values())

    def _refresh(self) -> None:
        """Copies, every `KEEP_S`, the state that a killed learner would restart from: checkpoints may be hours apart."""
        if time.monotonic() - self._kept_at > KEEP_S:
            self._kept_at = time.monotonic()
            needed = self._kept_processes()
            self._read(self.supervisor.orders.ask_once("state", needed, needed, {}))

    def _kept_processes(self) -> list[str]:
        return [name for name in self.supervisor.children if self.supervisor.keeps(name)]

    def _read(self, answers: dict[str, Answer]) -> dict[str, dict[str, Any]]:
        """The states in these answers; those that a killed process would restart from are kept."""
        out: dict[str, dict[str, Any]] = {}
        for name, answer in answers.items():
            if answer.fd is not None:
                out |= read_state(answer.fd)
                if self.supervisor.keeps(name):
                    self.supervisor.children[name].counts = answer.counts
        self._keep(out)
        return out

    def cut(self) -> None:
        """Stops the workers after their current step; a running evaluation is cut short."""
        self.holding = self.supervisor.board.hold = self.supervisor.board.stopping = True

    def resume(self, number: int) -> None:
        self.holding = self.supervisor.board.stopping = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Has no state of a process that is being restarted, unless its state is kept: then it waits for that process."""
        needed = self._kept_processes()
        answers = self.supervisor.orders.ask_all("state", needed)
        self.paused = max((answers[name].result for name in needed), default=0.0)
        states = self._read(answers)
        return states | self.supervisor.kept_counts.states() | array_state(self.supervisor.arrays)

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        supervisor = self.supervisor
        parts = {
            process: {node: state[node] for node in nodes if node in state}
            for process, nodes in supervisor.plan.processes.items()
        }
        self._loaded = state
        self._keep(state)
        load_arrays(supervisor.arrays, state)
        supervisor.kept_counts.forget()
        supervisor.orders.ask_all("load", list(parts), parts)
        for name, counters in supervisor.counters.items():
            if name in state:
                counters.load_state(state[name])

    def _keep(self, state: dict[str, dict[str, Any]]) -> None:
        """Keeps what a killed learner restarts from. Actors start fresh, and the blocks of stores are in shared memory."""
        supervisor = self.supervisor
        for process, nodes in supervisor.plan.processes.items():
            if supervisor.keeps(process):
                kept = {n: state[n] for n in nodes if n in state and f"arena {n}" not in supervisor.descriptors}
                supervisor.recover |= kept

    def snapshot(self) -> Snapshot:
        state = self.state()
        return Snapshot(state, self._stores(state), self.paused)

    def stores(self) -> dict[str, Any]:
        return self._stores(self._loaded)

    def _stores(self, state: dict[str, dict[str, Any]]) -> dict[str, Any]:
        names = [name.removeprefix("arena ") for name in self.supervisor.descriptors if name.startswith("arena ")]
        return {name: MappedStore(self.supervisor, name, state[name]) for name in names if name in state}

    def stop(self) -> None:
        self.supervisor.board.stopping = True


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
