"""One process of a program: builds its nodes, steps its workers, serves its services, obeys the supervisor.

The plan of the program comes pickled, through memory that the supervisor made and handed down, from the user's own process
to its own children. Nothing that a socket or a file brings is ever unpickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import gymnasium as gym
import numpy as np

from veldt import callables
from veldt.envs import EnvError
from veldt.errors import Diverged, UserError
from veldt.program import Node, resolve
from veldt.runtime.base import busy_parts, merge, spent
from veldt.runtime.local.board import (
    BUILDING,
    DOING,
    ORDERS,
    ROW,
    SERVING,
    SINCE,
    WAITING,
    Board,
    SharedCounters,
    read_state,
    write_state,
)
from veldt.runtime.local.zygote import ignore_signals, set_title
from veldt.runtime.remote import PORTS, Channel, Messages, RemoteParams, Served
from veldt.runtime.shm import Arena, Bell, Format, Latest, Memory, Reader, Rings, Writer
from veldt.seeds import derive

if TYPE_CHECKING:  # who does not need gRPC does not load it
    from veldt.runtime.grpc.gate import EventBell

METRICS_S = 0.25  # between two reports
MESSAGE = 1 << 17  # bytes; what an error tells is cut to fit in
SPIN = 400  # looks for work of a process that asks or answers, each after others could run, before it goes to sleep
CALL_SLOTS = 8
STREAM = 1 << 20  # bytes of blocks that may be on their way from one actor, for each block of its queue
GATE = "gate"  # the process that stands between actors without our memory and the others

log = logging.getLogger("veldt")


@dataclass(frozen=True)
class GatePlan:
    """What the process called `gate` listens for (`veldt.runtime.grpc.gate`)."""

    socket: str  # a path
    messages: dict[str, Messages]  # by node
    seats: list[str] = field(default_factory=list)  # processes of the run, and names for actors that may join
    assignments: dict[str, dict[str, Any]] = field(default_factory=dict)  # what those that join are to build
    listen: str = ""  # HOST:PORT for those that join
    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    compress: bool = False
    own_listen: bool = False  # the run's own come in there too, as if they were elsewhere


@dataclass
class Plan:
    """What every process knows of the program."""

    nodes: dict[str, Node]
    processes: dict[str, list[str]]  # process -> its nodes, in the order in which they are built
    shared: dict[str, str]  # node that no process hosts -> its seam
    channels: list[tuple[str, str, str]]  # (process, node of another one, seam of that node)
    queue: int = 16  # blocks that may be on their way from one process: they are lost to a resume, and grow old
    threads: dict[str, int] = field(default_factory=dict)  # process -> threads for tensor operations
    light: list[str] = field(default_factory=list)  # processes without torch
    functions: dict[str, bytes] = field(default_factory=dict)  # those that cannot be imported, pickled
    envs: dict[str, Any] = field(default_factory=dict)  # Gymnasium ids that the user registered
    gate: GatePlan | None = None  # for actors that share no memory with the others

    def row(self, name: str) -> int:
        """Of the board, for a process or a seat at the gate; the first is the supervisor's."""
        if name in self.processes:
            return 1 + list(self.processes).index(name)
        return 1 + len(self.processes) + self.seats.index(name)

    @property
    def seats(self) -> list[str]:
        return [] if self.gate is None else self.gate.seats

    def home(self, node: str) -> str:
        return next(process for process, nodes in self.processes.items() if node in nodes)

    def save(self, fd: int) -> None:
        """The nodes of each process are pickled apart: a light one must not load what the others need."""
        parts = {
            process: cloudpickle.dumps({name: self.nodes[name] for name in names})
            for process, names in self.processes.items()
        }
        with os.fdopen(os.dup(fd), "wb") as file:
            cloudpickle.dump((replace(self, nodes={}), parts), file)

    @staticmethod
    def load(fd: int, process: str) -> Plan:
        """As this process needs it: with its own nodes only."""
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            found: tuple[Plan, dict[str, bytes]] = cloudpickle.load(file)
        plan, parts = found
        callables.install({name: functools.partial(cloudpickle.loads, data) for name, data in plan.functions.items()})
        for name, entry in plan.envs.items():
            gym.registry.setdefault(name, entry)
        return replace(plan, nodes=cloudpickle.loads(parts[process]))


def portable(functions: dict[str, Callable[..., Any]]) -> dict[str, bytes]:
    """Functions to be sent to other processes; for each that cannot be, one that says so."""
    out: dict[str, bytes] = {}
    for name, function in functions.items():
        try:
            out[name] = cloudpickle.dumps(function)
        except Exception:  # whatever the objects raise that it refers to
            out[name] = cloudpickle.dumps(callables.NotPortable(name))
    return out


def preload(light: bool) -> None:
    """What the zygote imports, so that no child has to."""
    import importlib

    for module in ("acting.actor",) if light else ("experiment.run", "topologies.apex", "bench"):
        importlib.import_module(f"veldt.{module}")


def run(name: str, order: dict[str, Any], descriptors: dict[str, int], fds: list[int]) -> None:
    """The life of a child of the zygote, from fork to exit. `fds`: the supervisor's socket, and a state to go on from."""
    set_title(f"veldt {name}")
    ignore_signals()
    os.nice(order["nice"])
    connection = socket.socket(fileno=fds[0])
    code = 0
    try:
        Host(name, order, descriptors, connection, fds[1] if len(fds) > 1 else None).live()
    except BaseException as error:
        code = 1
        _tell_error(connection, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell_error(connection: socket.socket, error: BaseException) -> None:
    kinds: dict[type[BaseException], str] = {UserError: "user", Diverged: "diverged", EnvError: "env"}
    kind = kinds.get(type(error), "error")
    text = traceback.format_exc()
    message = {"error": kind, "text": str(error)[:4_000], "type": type(error).__name__, "traceback": text[-16_000:]}
    connection.settimeout(1.0)
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message, ensure_ascii=False).encode(errors="replace"))


class Host:
    def __init__(
        self, name: str, order: dict[str, Any], descriptors: dict[str, int], connection: socket.socket, state: int | None
    ) -> None:
        self.name, self.connection, self.descriptors = name, connection, descriptors
        connection.setblocking(False)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=descriptors["stacks"], all_threads=True)
        log.setLevel(logging.INFO)
        log.addHandler(ToSupervisor(connection, name))
        self.plan = Plan.load(descriptors["plan"], name)
        self.board = Board(descriptors["board"])
        self.index = self.plan.row(name)
        self.row, self.bell = self.board.row(self.index), self.board.bell(self.index)
        self.row[DOING], self.row[SINCE] = BUILDING, time.monotonic_ns()
        self.obeyed = order["orders"]
        seed = derive(0, name, order["incarnation"])  # what forked processes share unless they are told otherwise
        np.random.seed(seed % 2**32)
        if name not in self.plan.light:
            import torch

            torch.set_num_threads(self.plan.threads.get(name, 1))
            torch.manual_seed(seed)
        self._ring_later: list[Writer] = []
        self.gate = self._make_gate() if name == GATE else None
        self.link = self._make_link() if name in self.plan.seats else None
        self.objects = self._build(order["incarnation"])
        self.hosts = self._hosts()
        self.workers = [(i, x) for i, x in enumerate(self.objects.values()) if hasattr(x, "step")]
        self.busy = [0.0] * len(self.objects)
        self.waited = 0.0
        self.spent: dict[str, float] = {}
        self.since, self.cpu = time.perf_counter(), time.process_time()
        self.unsent: dict[str, float] = {}
        if state is not None:
            self._load(read_state(state))
        self._tell({"ready": name})

    def live(self) -> None:
        row, bell, board = self.row, self.bell, self.board
        # Where questions come through a gate, it and the actors' threads need the cores more, if there are not enough.
        crowded = len(self.plan.seats) >= len(os.sched_getaffinity(0))
        calls = self.link is None and any(seam == "policy" for *_, seam in self._mine())
        spin = SPIN if calls and not crowded else 0
        idle = 0
        told = 0.0
        gc.freeze()
        while not board.quit:
            rung = bell.rung()
            if row[ORDERS] != self.obeyed:
                self._obey()
            worked = False
            turn = began = time.perf_counter()
            if not board.hold:
                for index, worker in self.workers:
                    row[DOING], row[SINCE] = index, time.monotonic_ns()
                    did = worker.step()
                    ended = time.perf_counter()
                    if did:
                        self.busy[index] += ended - began
                        worked = True
                    began = ended
            row[DOING], row[SINCE] = SERVING, time.monotonic_ns()
            for host in self.hosts:
                worked |= host.step()
            for writer in self._ring_later:
                writer.ring()
            if worked and self.link is not None:
                self.link.step()
            if began - told > METRICS_S:
                told = began
                self._tell_metrics()
            idle = 0 if worked else idle + 1
            if 0 < idle <= spin:
                os.sched_yield()
            elif idle:
                row[DOING] = WAITING
                self._rest(rung)
            if idle and not board.hold:
                self.waited += time.perf_counter() - turn
        for thing in (*self.objects.values(), self.link, self.gate):
            if hasattr(thing, "close"):
                thing.close()

    def _rest(self, rung: int) -> None:
        """Nothing is to be done here until somebody says so, or some time is over."""
        if self.gate is not None:
            self.gate.step(Bell.LONGEST)
        elif self.link is not None:
            self.link.wait(Bell.LONGEST)
        else:
            self.bell.wait(rung, min((getattr(host, "rest", math.inf) for host in self.hosts), default=math.inf))

    def _mine(self) -> list[tuple[str, str, str]]:
        """The channels that end here, on either side."""
        mine = self.plan.processes[self.name]
        return [channel for channel in self.plan.channels if channel[0] == self.name or channel[1] in mine]

    def _build(self, incarnation: int) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for node, seam in self.plan.shared.items():
            if seam == "counters":
                known[node] = SharedCounters(self.board, self.index)
            elif self.link is not None:
                known[node] = RemoteParams(self.link.latest(node))
            else:
                known[node] = RemoteParams(Latest(self.descriptors[node]))
        for process, node, seam in self.plan.channels:
            if process == self.name and self.link is not None:
                there, answers = self.link.outbox(node), self.link.inbox(node) if seam == "policy" else None
                known[node] = PORTS[seam][0](Channel(there, answers))
            elif process == self.name:
                bell = self.board.bell(self.plan.row(self.plan.home(node)))
                # A store is told of all blocks of one step at once: each ring may wake it, and stop who is on its core.
                later = seam == "store"
                writer = Writer(self.descriptors[f"{process}>{node}"], bell, **self._room(seam), later=later)
                if later:
                    self._ring_later.append(writer)
                back = Reader(self.descriptors[f"{process}<{node}"]) if seam == "policy" else None
                known[node] = PORTS[seam][0](Channel(writer, back))
        objects: dict[str, Any] = {}
        for name in self.plan.processes[self.name]:
            made = self.plan.nodes[name]
            fds = [self.descriptors[key] for key in (f"arena {name}", f"blocks {name}") if key in self.descriptors]
            arena = Arena(*fds) if fds else None
            args, kwargs = resolve((made.args, made.kwargs), known, incarnation, arena)
            objects[name] = known[name] = made.build(*args, **kwargs)
        return objects

    def _bell_of(self, process: str) -> Rings:
        """Of a process that this one answers; those at the gate are reached through it."""
        return self._gate_bell() if process in self.plan.seats else self.board.bell(self.plan.row(process))

    def _gate_bell(self) -> EventBell:
        from veldt.runtime.grpc.gate import EventBell

        return EventBell(self.board.memory, ROW * self.plan.row(GATE), self.descriptors["gate bell"])

    def _make_link(self) -> Any:
        from veldt.runtime.grpc.link import Link

        assert self.plan.gate is not None
        address = self.plan.gate.listen if self.plan.gate.own_listen else f"unix:{self.plan.gate.socket}"
        link = Link(address, self.plan.gate.token, seat=self.name, compress=self.plan.gate.compress)
        link.connect()
        return link

    def _make_gate(self) -> Any:
        from veldt.runtime.grpc.gate import RECORD, Door, Gate, LatestReader, Port, Seat

        plan, gate, seats = self.plan, self.plan.gate, []
        assert gate is not None
        records = Memory(self.descriptors["gate seats"])
        for i, name in enumerate(gate.seats):
            ports = []
            for process, node, seam in plan.channels:
                if process == name:
                    bell = self.board.bell(plan.row(plan.home(node)))
                    there = Writer(self.descriptors[f"{process}>{node}"], bell, **self._room(seam), later=False)
                    back = Reader(self.descriptors[f"{process}<{node}"]) if seam == "policy" else None
                    formats = [[Format.of(tree) for tree in trees] for trees in gate.messages[node]]
                    room = self._room(seam)["most"]
                    ports.append(Port(node, there, formats[0], back, formats[1], room, finite=seam == "policy"))
            latest: dict[str, LatestReader] = {
                node: Latest(self.descriptors[node]) for node, seam in plan.shared.items() if seam == "params"
            }
            record, row = records.words(8 * RECORD * i, RECORD), self.board.row(plan.row(name))
            assigned = functools.partial(_assigned, gate.assignments.get(name, {}))
            seats.append(Seat(name, ports, latest, record, row, assigned, owned=name in plan.processes))
        doors = [Door(f"unix:{gate.socket}")]
        if gate.listen:
            doors.append(Door(gate.listen, gate.certificate, gate.key))
        made = Gate(seats, doors, self.board, self._gate_bell(), gate.token)
        made.start()
        for address in made.addresses[1:]:
            log.info("listening on %s", address)
        return made

    def _room(self, seam: str) -> dict[str, int]:
        """How many messages of which size may wait."""
        return {"most": CALL_SLOTS} if seam == "policy" else {"most": self.plan.queue, "budget": self.plan.queue * STREAM}

    def _hosts(self) -> list[Any]:
        hosts = []
        for node, thing in self.objects.items():
            ends = []
            for process, served, seam in self.plan.channels:
                if served == node:
                    bell = self._bell_of(process)
                    # Who asked twice is woken once: the host rings when all answers are there.
                    back = Writer(self.descriptors[f"{process}<{node}"], bell, later=True) if seam == "policy" else None
                    # The writer of a full stream is woken when it is read; the asker of a call waits for the answer.
                    there = Reader(self.descriptors[f"{process}>{node}"], None if back else bell)
                    ends.append(Served(there, back))
            if ends:
                hosts.append(PORTS[seam_of(self.plan, node)][1](thing, ends))
        return hosts

    # What the supervisor asks for, over the private socket.

    def _obey(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.connection, MESSAGE, 1)
            except BlockingIOError:
                return
            if not data:
                os._exit(0)
            self.obeyed += 1
            order = json.loads(data)
            answer: dict[str, Any] = {"answer": order["number"]}
            give: list[int] = []
            if order["do"] == "state":
                began = time.perf_counter()
                state = {name: x.state() for name, x in self.objects.items() if hasattr(x, "state")}
                give = [write_state(state)]
                answer["result"] = time.perf_counter() - began  # how long nothing else was done here
            elif order["do"] == "load":
                self._load(read_state(fds.pop()))
            else:
                answer["result"] = getattr(self.objects[order["node"]], order["do"])(*order["args"])
            self._tell(answer, give)
            for fd in give:
                os.close(fd)

    def _load(self, state: dict[str, dict[str, Any]]) -> None:
        for name, thing in self.objects.items():
            if name in state and hasattr(thing, "load_state"):
                thing.load_state(state[name])

    def _tell_metrics(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        things = [*self.objects.values(), *self.hosts, *([] if self.gate is None else [self.gate])]
        parts = [thing.metrics() for thing in things if hasattr(thing, "metrics")]
        self.unsent |= merge([*parts, *({} if self.gate is None else self.gate.told()).values()])
        names = list(self.objects)
        for part, seconds in spent({names[i]: worker for i, worker in self.workers}).items():
            self.spent[part] = self.spent.get(part, 0.0) + seconds
        kind, elapsed = self.name.partition("/")[0], now - self.since
        told = self.unsent | busy_parts({names[i]: self.busy[i] for i, _ in self.workers} | self.spent, elapsed)
        told |= {f"wait/{kind}": self.waited / elapsed, f"cpu/{kind}": (cpu - self.cpu) / elapsed}
        if self._tell({"metrics": told, "seconds": elapsed}):
            self.since, self.cpu, self.busy, self.waited = now, cpu, [0.0] * len(self.busy), 0.0
            self.unsent, self.spent = {}, {}

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        """False: the supervisor does not read at the moment. What cannot wait is sent again."""
        data = json.dumps(message).encode()
        try:
            socket.send_fds(self.connection, [data], fds or [])
        except BlockingIOError:
            if "metrics" in message:
                return False
            self.connection.settimeout(10.0)
            socket.send_fds(self.connection, [data], fds or [])
            self.connection.setblocking(False)
        return True


def _assigned(told: dict[str, Any], incarnation: int) -> dict[str, Any]:
    return told


def seam_of(plan: Plan, node: str) -> str:
    return next(seam for _, served, seam in plan.channels if served == node)


class ToSupervisor(logging.Handler):
    """What a process logs is logged by the supervisor, with the name of the process."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        super().__init__()
        self.connection, self.process = connection, name

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self.process}: {record.getMessage()}"
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps({"log": record.levelno, "text": text[:8000]}).encode())
