"""Local: the nodes in supervised processes of one host, joined by shared memory.

    supervisor (who called us)
      zygote                      has imported everything, forks the others; a light one forks those that need no torch
        learner                   store, learner          \\
        actor/0 ... actor/n       policy, recorder, actor   > each with a row on the board, and streams between them
        evaluator                 policy, evaluator       /

Only the supervisor handles signals and decides. A process that dies is started again with a new incarnation: the streams,
the weights and the store's blocks are the supervisor's, so they are all still there. Nothing has a name on disk or in
/dev/shm, and the kernel ends every process whose parent is gone, so nothing is left behind, whatever is killed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import gymnasium as gym

from veldt import callables
from veldt.errors import Diverged, ProcessFailed, UserError
from veldt.program import Memory as OwnMemory
from veldt.program import Node, Program, Ref, walk
from veldt.records.block import Schema
from veldt.records.tree import Tree
from veldt.runtime.base import Stuck, merge
from veldt.runtime.local import zygote
from veldt.runtime.local.board import (
    BUILDING,
    DOING,
    ORDERS,
    SERVING,
    SINCE,
    WAITING,
    Board,
    SharedCounters,
    read_state,
    write_state,
)
from veldt.runtime.local.process import GATE, MESSAGE, GatePlan, Plan, portable
from veldt.runtime.remote import PORTS, Messages, seam
from veldt.runtime.shm import Arena, Memory, make_memory
from veldt.storing.slots import Slots

log = logging.getLogger("veldt")

TICK_S = 0.02  # between two looks of the supervisor
WATCH_S = 0.25
STOP_S = 2.0  # that processes get to close what they have open
ANSWER_S = 20.0  # for an answer of a process, such as its state
KEEP_S = 20.0  # between two looks at the state that a killed learner would go on from
AWAY_S = 5.0  # without a look of the supervisor: everybody stood still, and nobody is to blame
OTHERS_S = 1.0  # the same of one that can be done without
STUCK_S = 60.0  # without any work of any process before the run stops, or twice the longest step
BACK_OFF_S = (0.1, 10.0)  # the wait before a process that failed at once is started again: first and longest
IN_A_ROW = 5  # failures without any work between them before the run stops
LONGEST_FOLDER = 95  # characters: with a name in it, it must fit the path of a socket
NICE = 10  # of the processes that nobody relies on
HEALTHY = 100  # env steps or updates after which a failure counts as the first one
MEANS = ("queue_fill", "refusing", "lag_updates")  # metrics of moments, which are averaged over a line's time
LONG_LIFE_S = 120.0  # and so does one after such a life, or after four times the longest step


@dataclass(frozen=True)
class Gate:
    """gRPC, for actors that share no memory with the run: its own, if `own`, and such as join (`grpc.joined`)."""

    messages: dict[str, Messages]  # by the node they go to
    own: bool = True
    assignments: tuple[dict[str, Any], ...] = ()  # one for each seat of those that join
    listen: str = ""
    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    compress: bool = False

    def plan(self, directory: Path | None, stack: contextlib.ExitStack) -> GatePlan:
        """With a socket in a folder that is ours alone, and that goes with the stack."""
        folder = None if directory is None else directory.resolve() / ".gate"
        if folder is None or len(str(folder)) > LONGEST_FOLDER:
            folder = Path(tempfile.mkdtemp(prefix="veldt-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir(mode=0o700)
        rest = (self.listen, self.token, self.certificate, self.key, self.compress)
        return GatePlan(str(folder / "socket"), self.messages, [], {}, *rest)


@dataclass(frozen=True)
class Local:
    """`directory` gets processes.json. `step_timeout` is how long one step of a worker may take, in seconds."""

    directory: Path | None = None
    step_timeout: float = 30.0
    first_incarnation: int = 0  # above all that an earlier stretch of this run had
    queue: int = 16  # blocks that may wait between an actor and the store
    gate: Gate | None = None

    @contextlib.contextmanager
    def start(self, program: Program) -> Iterator[LocalNodes]:
        with contextlib.ExitStack() as stack:
            gate = None if self.gate is None else self.gate.plan(self.directory, stack)
            supervisor = Supervisor(make_plan(program, self.queue, gate, self.gate), self)
            try:
                supervisor.start()
                yield LocalNodes(supervisor)
            finally:
                supervisor.stop()


def make_plan(program: Program, queue: int = 16, gate: GatePlan | None = None, options: Gate | None = None) -> Plan:
    """Which nodes share a process, and which processes must be able to reach which nodes."""
    nodes = program.nodes
    seams = {name: seam(_kind(node)) for name, node in nodes.items()}
    shared = {name: x for name, x in seams.items() if x in ("params", "counters")}
    groups: dict[str, list[str]] = {}
    for name in nodes:
        if name not in shared:
            groups.setdefault(_root(nodes, name), []).append(name)
    processes = {_name(nodes, group): group for group in groups.values()}
    if gate is not None:
        processes = {GATE: [], **processes}
    channels = []
    for process, group in processes.items():
        for name in group:
            for ref in walk((nodes[name].args, nodes[name].kwargs), Ref):
                if ref.name in group or ref.name in shared:
                    continue
                if seams[ref.name] not in PORTS:
                    raise UserError(
                        f"{name} needs {ref.name}, which can be used in one process only: add it with on={ref.name}."
                    )
                channel = (process, ref.name, seams[ref.name])
                if channel not in channels:
                    channels.append(channel)
    threads = {process: max((nodes[name].threads for name in group), default=1) for process, group in processes.items()}
    light = [process for process, group in processes.items() if all(nodes[name].light for name in group)]
    if gate is not None and options is not None:
        actors = [process for process in processes if process.startswith("actor/")]
        theirs = [f"seat/{i}" for i in range(len(options.assignments))]
        channels += [(seat, node, kind) for seat in theirs for process, node, kind in channels if process == actors[0]]
        given = dict(zip(theirs, options.assignments, strict=True))
        gate = replace(gate, seats=[*(actors if options.own else []), *theirs], assignments=given)
    functions = portable(callables.local())
    return Plan(nodes, processes, shared, channels, queue, threads, light, functions, _registered(), gate)


def _registered() -> dict[str, Any]:
    """The Gymnasium ids that this process has and a new one would not: what the user's script or its imports registered."""
    found = {}
    for name, entry in gym.registry.items():
        where = entry.entry_point
        if isinstance(where, str):
            if where.startswith(("gymnasium.", "veldt.", "ale_py", "minatar")):
                continue
            module, _, attribute = where.partition(":")
            if module == "__main__":  # goes by value
                entry = copy.copy(entry)
                entry.entry_point = getattr(sys.modules["__main__"], attribute, where)
        found[name] = entry
    return found


def _kind(node: Node) -> type:
    """The class of the object that a node will be."""
    build = node.build
    while isinstance(build, functools.partial):
        build = build.func
    if isinstance(build, type):
        return build
    try:
        found = get_type_hints(build).get("return", object)
    except (NameError, TypeError):
        found = object
    return found if isinstance(found, type) else object


def _root(nodes: dict[str, Node], name: str) -> str:
    while (on := nodes[name].on) is not None:
        name = on
    return name


def _name(nodes: dict[str, Node], group: list[str]) -> str:
    """A process is called after its first worker."""
    return next((name for name in group if hasattr(_kind(nodes[name]), "step")), group[0])


class Reports:
    """What a process told since it was last asked for: shares of time as their mean, all else as told last."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, metrics: dict[str, float], seconds: float) -> None:
        """What was so for so many seconds."""
        self._last |= metrics
        for name, x in metrics.items():
            if "/" in name or name in MEANS:
                total, time_s = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + seconds * x, time_s + seconds

    def take(self) -> dict[str, float]:
        out = self._last | {name: total / max(1e-9, time_s) for name, (total, time_s) in self._sums.items()}
        self._last, self._sums = {}, {}
        return out


@dataclass
class Child:
    """A process as the supervisor knows it."""

    name: str
    row: memoryview
    incarnation: int
    socket: socket.socket | None = None
    pid: int = 0
    ready: bool = False
    restarts: int = 0
    failures: int = 0  # in a row
    work: int = 0  # its counts when it was ready
    began: float = 0.0  # when it was forked
    due: float = 0.0  # when it is to be started again
    error: dict[str, Any] | None = None  # the last it told
    killed: str = ""  # why we killed it
    reports: Reports = field(default_factory=Reports)


class Supervisor:
    def __init__(self, plan: Plan, options: Local) -> None:
        self.plan, self.options = plan, options
        self.descriptors: dict[str, int] = {}
        self.children: dict[str, Child] = {}
        self.board: Any = None
        self.recover: dict[str, dict[str, Any]] = {}  # the state of nodes that a killed process goes on from
        self.answers: dict[int, tuple[Any, int | None]] = {}
        self.asked = 0
        self.expected: set[int] = set()  # numbers of questions whose answers somebody waits for
        self.zygotes: dict[bool, zygote.Zygote] = {}  # light -> the one of this kind
        self._watched = self._moved_at = time.monotonic()
        self._moved = -1

    def start(self) -> None:
        """All processes, up to the point where their workers could begin."""
        plan = self.plan
        for light in sorted({name in plan.light for name in plan.processes}):
            self.zygotes[light] = zygote.take(light)  # at once: they import at the same time, and while we go on
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # a descriptor for each stream, and one for each process
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
        names = ["plan", "board", "stacks", *(name for name, x in plan.shared.items() if x == "params")]
        for name, node in plan.nodes.items():
            if walk((node.args, node.kwargs), OwnMemory):
                names += [f"arena {name}", f"blocks {name}"]
        for process, node_name, kind in plan.channels:
            names += [f"{process}>{node_name}"] + ([f"{process}<{node_name}"] if kind == "policy" else [])
        names += ["gate seats"] if plan.gate is not None else []
        for name in names:
            self.descriptors[name] = make_memory(f"veldt {name}")
        if plan.gate is not None:
            self._lay_out_gate(plan.gate)
        self.board = Board(self.descriptors["board"], 1 + len(plan.processes) + len(plan.seats))
        self.board.hold = True
        self.counters = SharedCounters(self.board, 0)
        plan.save(self.descriptors["plan"])
        for name in plan.processes:
            self.children[name] = Child(name, self.board.row(plan.row(name)), self.options.first_incarnation)
        for light in sorted(self.zygotes, reverse=True):  # the light one is ready first
            try:
                self._begin(light)
            except zygote.ZygoteDied as error:
                self._replace_zygote(light, error)
        self.wait(lambda: all(child.ready for child in self.children.values()), zygote.START_S, "start")

    def _lay_out_gate(self, gate: GatePlan) -> None:
        """What outlives the gate's process: who has which seat, and how often it was taken."""
        from veldt.runtime.grpc.gate import INCARNATION, RECORD, EventBell

        self.descriptors["gate bell"] = EventBell.make()
        records = Memory(self.descriptors["gate seats"], 8 * RECORD * len(gate.seats))
        for i in range(len(gate.seats)):
            records.words(8 * RECORD * i, RECORD)[INCARNATION] = self.options.first_incarnation

    def _begin(self, light: bool) -> None:
        """All processes of a zygote, when it is ready."""
        self.zygotes[light].wait_ready()
        self.zygotes[light].share(self.descriptors)
        for child in self._from(light):
            self._fork(child)

    def _from(self, light: bool) -> list[Child]:
        """The processes that the zygote of this kind forks."""
        return [child for child in self.children.values() if (child.name in self.plan.light) == light]

    def _fork(self, child: Child) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        child.socket, child.ready, child.error, child.killed, child.pid, child.due = ours, False, None, "", 0, 0.0
        child.began, child.work = time.monotonic(), self._work(child)
        child.row[DOING], child.row[SINCE] = BUILDING, time.monotonic_ns()
        # Where there are more processes than cores, those that others rely on come first: the learner.
        nice = 0 if self.serves(child.name) else NICE
        order = {"incarnation": child.incarnation, "orders": child.row[ORDERS], "nice": nice}
        fds = [theirs.fileno()]
        state = {node: self.recover[node] for node in self.plan.processes[child.name] if node in self.recover}
        if state and child.restarts:
            fds.append(write_state(state))
        try:
            self.zygotes[child.name in self.plan.light].fork(child.name, order, fds)
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)

    def tick(self, seconds: float = TICK_S) -> None:
        """Waits a moment for something to happen, and sees to what did."""
        sockets = {child.socket.fileno(): child for child in self.children.values() if child.socket is not None}
        for fd in zygote.readable([*self._zygote_fds(), *sockets], seconds):
            if fd in sockets:
                self._hear(sockets[fd])
        for light in [*self.zygotes]:
            try:
                for event in self.zygotes[light].events():
                    self._see(event, self._from(light))
                for child in self._from(light):
                    if child.due and time.monotonic() >= child.due:
                        self._fork(child)
            except zygote.ZygoteDied as error:
                self._replace_zygote(light, error)
        now = time.monotonic()
        if now - self._watched > WATCH_S:
            away, self._watched = now - self._watched > AWAY_S, now
            self._watch(away)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> bool:
        """Goes on supervising until the condition holds; False: it did not in this time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                log.info("%s: no answer after %.0f s", what, seconds)
                return False
            self.tick(0.005)
        return True

    # What processes tell.

    def _hear(self, child: Child) -> None:
        while child.socket is not None:
            try:
                data, fds, _, _ = socket.recv_fds(child.socket, MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                child.socket.close()
                child.socket = None
                return
            message = json.loads(data)
            if "metrics" in message:
                child.reports.add(message["metrics"], message["seconds"])
            elif "log" in message:
                log.log(message["log"], "%s", message["text"])
            elif "answer" in message:
                self._take_answer(message["answer"], message.get("result"), fds)
            elif "error" in message:
                child.error = message
            elif "ready" in message:
                child.ready, child.work = True, self._work(child)
                self._write_processes()

    def _take_answer(self, number: int, result: Any, fds: list[int]) -> None:
        if number in self.expected:
            self.expected.remove(number)
            self.answers[number] = result, fds[0] if fds else None
        else:  # nobody waits for it any more
            for fd in fds:
                os.close(fd)

    def _see(self, event: dict[str, Any], children: list[Child]) -> None:
        """What a zygote tells of its processes: one was forked, or has ended."""
        if "forked" in event:
            self.children[event["forked"]].pid = event["pid"]
            self._write_processes()
        elif "exited" in event:
            for child in children:
                if child.pid == event["exited"]:
                    self._hear(child)  # its last words
                    self._bury(child, event["status"])

    def _bury(self, child: Child, status: int) -> None:
        child.pid = 0
        if child.socket is not None:
            child.socket.close()
            child.socket = None
        error = child.error
        if error is not None:
            self._judge(child, error)
        child.failures = 1 if self._was_healthy(child) else child.failures + 1
        child.ready = False
        why = child.killed or (f"{error['type']}: {error['text']}" if error else _status(status))
        if child.failures >= IN_A_ROW:
            told = error["traceback"] if error else ""
            raise ProcessFailed(f"{child.name} failed {IN_A_ROW} times in a row without any work between: {why}", told)
        wait = 0.0 if child.failures == 1 else min(BACK_OFF_S[1], BACK_OFF_S[0] * 2 ** (child.failures - 2))
        log.warning("%s ended (%s); started again%s", child.name, why, f" in {wait:.1f} s" if wait else "")
        if error is not None:
            log.info("%s: %s", child.name, error["traceback"])
        child.restarts += 1
        child.incarnation += 1
        child.due = time.monotonic() + wait
        self._write_processes()

    def _judge(self, child: Child, error: dict[str, Any]) -> None:
        """An error that starting again cannot mend ends the run."""
        if error["error"] == "user" and (child.ready or not child.restarts):  # what worked before may work again
            raise UserError(error["text"])
        if error["error"] == "diverged":
            raise Diverged(error["text"])
        if self.serves(child.name):
            raise ProcessFailed(f"{child.name} failed with {error['type']}: {error['text']}", error["traceback"])

    def serves(self, process: str) -> bool:
        """Others rely on what this process holds: an error in it is ours, and would come again."""
        nodes = self.plan.processes[process]
        held = any(f"arena {node}" in self.descriptors for node in nodes)
        return held or any(node in nodes for _, node, _ in self.plan.channels)

    def _was_healthy(self, child: Child) -> bool:
        """What failed now did well before. Not all that is alive counts something: then a long life will do."""
        long = max(LONG_LIFE_S, 4 * self.options.step_timeout)
        return child.ready and (self._work(child) - child.work >= HEALTHY or time.monotonic() - child.began > long)

    def _work(self, child: Child) -> int:
        if not any(hasattr(_kind(self.plan.nodes[name]), "step") for name in self.plan.processes[child.name]):
            return int(self.board.counts.sum())  # a service counts nothing: what it works for is done by others
        return int(self.board.counts[self.plan.row(child.name)].sum())

    def _replace_zygote(self, light: bool, error: Exception) -> None:
        """Every process from it went with it, and comes back from a new one."""
        which = "all" if len(self.zygotes) == 1 else "its"
        while True:
            log.error("%s; %s processes are started again", str(error), which)
            self.zygotes.pop(light).close()
            for child in self._from(light):
                if child.socket is not None:
                    child.socket.close()
                    child.socket = None
                child.failures = 1 if self._was_healthy(child) else child.failures + 1
                child.ready, child.pid = False, 0
                child.restarts += 1
                child.incarnation += 1
                if child.failures >= IN_A_ROW:
                    raise ProcessFailed(f"{which} processes ended {IN_A_ROW} times without any work between: {error}")
            self.zygotes[light] = zygote.take(light)
            try:
                return self._begin(light)
            except zygote.ZygoteDied as again:
                error = again

    # What the supervisor looks at.

    def _watch(self, away: bool) -> None:
        """No silent hang: who does not move is named, with its stack, and replaced."""
        now = time.monotonic_ns()
        if away:
            self._moved_at = time.monotonic()
            for child in self.children.values():
                child.row[SINCE] = now
        for child in self.children.values():
            if child.pid == 0 or child.killed:
                continue
            age = (now - child.row[SINCE]) / 1e9
            doing = child.row[DOING]
            limit = zygote.START_S if doing == BUILDING else self.options.step_timeout
            if age > limit:
                where = self._where(child, doing)
                log.error(
                    "%s has not moved for %.1f s, %s; it is killed. Its stack:\n%s",
                    child.name,
                    age,
                    where,
                    self._stack(child),
                )
                child.killed = f"it had not moved for {age:.1f} s, {where}"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        moved = int(self.board.counts.sum()) + sum(child.restarts for child in self.children.values())
        if moved != self._moved or self.board.hold:
            self._moved, self._moved_at = moved, time.monotonic()
        elif (idle := time.monotonic() - self._moved_at) > max(STUCK_S, 2 * self.options.step_timeout):
            what = "; ".join(f"{child.name} {self._where(child, child.row[DOING])}" for child in self.children.values())
            raise Stuck(f"No process has worked for {idle:.0f} s ({what}); look at the store's limiter and capacity.")

    def _where(self, child: Child, doing: int) -> str:
        if doing == WAITING:
            return "waiting for work"
        if doing == BUILDING:
            return "building its nodes"
        return "serving others" if doing == SERVING else f"in a step of {self.plan.processes[child.name][doing]}"

    def _stack(self, child: Child) -> str:
        stacks = self.descriptors["stacks"]
        before = os.fstat(stacks).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
        deadline, text = time.monotonic() + 1.0, b""
        while time.monotonic() < deadline:
            time.sleep(0.03)
            sooner, text = text, os.pread(stacks, 1 << 16, before)
            if text and text == sooner:  # it has been written to the end
                return text.decode(errors="replace")
        return text.decode(errors="replace") or "(none: it does not answer signals; is it stopped?)"

    # What the supervisor asks for.

    def ask(self, name: str, what: str, node: str = "", args: tuple[Any, ...] = (), state: Any = None) -> int | None:
        """The number under which the answer will come; None: the process is not there at the moment."""
        child = self.children[name]
        if child.socket is None or not child.ready:
            return None
        self.asked += 1
        fds = [] if state is None else [write_state(state)]
        data = json.dumps({"number": self.asked, "do": what, "node": node, "args": args}).encode()
        try:
            socket.send_fds(child.socket, [data], fds)
        except OSError:
            return None
        finally:
            for fd in fds:
                os.close(fd)
        self.expected.add(self.asked)
        child.row[ORDERS] += 1
        self.board.bell(self.plan.row(name)).ring()
        return self.asked

    def ask_all(
        self, what: str, needed: Collection[str], states: dict[str, Any] | None = None
    ) -> dict[str, tuple[Any, int | None]]:
        """The answers by process. A needed one that is not there, or dies meanwhile, is asked again in its next life."""
        answers = self.ask_once(what, self.children, needed, states or {})
        deadline = time.monotonic() + ANSWER_S + self.options.step_timeout
        while missing := [name for name in needed if name not in answers]:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{', '.join(missing)} did not answer ({what})")
            self.tick(0.005)
            if all(self.children[name].ready for name in missing):
                answers |= self.ask_once(what, missing, needed, states or {})
        return answers

    def ask_once(
        self, what: str, names: Collection[str], needed: Collection[str], states: dict[str, Any]
    ) -> dict[str, tuple[Any, int | None]]:
        asked = [(name, self.ask(name, what, state=states.get(name))) for name in names]
        numbers = {name: number for name, number in asked if number is not None}
        lives = {name: self.children[name].incarnation for name in numbers}

        def settled(some: Collection[str]) -> bool:
            return all(numbers[x] in self.answers or self.children[x].incarnation != lives[x] for x in some)

        self.wait(lambda: settled([name for name in numbers if name in needed]), ANSWER_S, what)
        self.wait(lambda: settled(numbers), OTHERS_S, what)
        self.expected -= set(numbers.values())
        return {name: self.answers.pop(number) for name, number in numbers.items() if number in self.answers}

    @property
    def zygote_pid(self) -> int:
        return self.zygotes[False].pid

    def _zygote_fds(self) -> list[int]:
        return [each.socket.fileno() for each in self.zygotes.values()]

    def _write_processes(self) -> None:
        if self.options.directory is None:
            return
        table = {
            child.name: {"pid": child.pid, "restarts": child.restarts, "nodes": self.plan.processes[child.name]}
            for child in self.children.values()
        }
        aside = self.options.directory / ".aside-processes.json"
        with contextlib.suppress(OSError):
            zygotes = {each.name: {"pid": each.pid} for each in self.zygotes.values()}
            whole = {"supervisor": {"pid": os.getpid()}, **zygotes, **table}
            aside.write_text(json.dumps(whole, indent=1) + "\n")
            os.replace(aside, self.options.directory / "processes.json")

    def stop(self) -> None:
        """Ends all processes and gives everything back."""
        try:
            if self.board is not None:
                self._end_processes()
        finally:
            while self.zygotes:
                self.zygotes.popitem()[1].close()
            for child in self.children.values():
                if child.socket is not None:
                    child.socket.close()
                    child.socket = None
            for _, fd in self.answers.values():
                if fd is not None:
                    os.close(fd)
            for fd in self.descriptors.values():
                os.close(fd)
            self.answers, self.descriptors = {}, {}
            if self.options.directory is not None:
                (self.options.directory / "processes.json").unlink(missing_ok=True)

    def _end_processes(self) -> None:
        """They are asked to, and those that do not are killed; the zygote sees to it that none is left as a zombie."""
        self.board.quit = True
        for row in range(1, self.board.rows):
            self.board.bell(row).ring()
        for seconds, last in ((STOP_S, False), (1.0, True)):
            deadline = time.monotonic() + seconds
            with contextlib.suppress(OSError):
                while self._reap() and time.monotonic() < deadline:
                    zygote.readable(self._zygote_fds(), 0.01)
            for child in self.children.values():
                if child.pid and not last:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> bool:
        """Whether any process is left."""
        for light in [*self.zygotes]:
            children = self._from(light)
            try:
                events = self.zygotes[light].events()
            except zygote.ZygoteDied:  # and all that it forked
                self.zygotes.pop(light).close()
                events = []
                for child in children:
                    child.pid, child.due = 0, math.inf
            for event in events:
                for child in children:
                    if child.name == event.get("forked"):
                        child.pid = event["pid"]
                    elif child.pid and child.pid == event.get("exited"):
                        child.pid, child.due = 0, math.inf
        return any(child.pid or (child.socket is not None and not child.due) for child in self.children.values())


def _status(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


class LocalNodes:
    """See `runtime.base.Nodes`."""

    live = True

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.holding = False
        self._kept_at = time.monotonic()
        self.paused = 0.0  # seconds that the learner stood still to give its state
        self._loaded: dict[str, dict[str, Any]] = {}

    def count(self, name: str) -> int:
        return self.supervisor.counters.get(name)

    def metrics(self) -> dict[str, float]:
        children = self.supervisor.children.values()
        out = merge(child.reports.take() for child in children)
        return out | {"restarts": float(sum(child.restarts for child in children))}

    def memory(self) -> tuple[list[int], list[int]]:
        supervisor = self.supervisor
        pids = [each.pid for each in supervisor.zygotes.values()]
        pids += [child.pid for child in supervisor.children.values()]
        return [pid for pid in pids if pid], list(supervisor.descriptors.values())

    def step(self) -> None:
        self.supervisor.board.hold = self.holding
        self.supervisor.tick()
        self.refresh()

    def refresh(self) -> None:
        """Takes, now and then, the state that a killed learner would go on from: checkpoints may be hours apart."""
        if time.monotonic() - self._kept_at > KEEP_S:
            self._kept_at = time.monotonic()
            needed = [name for name in self.supervisor.children if self.supervisor.serves(name)]
            for _, fd in self.supervisor.ask_once("state", needed, needed, {}).values():
                if fd is not None:
                    self._keep(read_state(fd))

    def cut(self) -> None:
        """Workers stand still; of what they do only an evaluation is cut short."""
        self.holding = self.supervisor.board.hold = self.supervisor.board.stopping = True

    def reset(self, number: int) -> None:
        self.holding = self.supervisor.board.stopping = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Of a process that is being started again there is none, unless others rely on it: that one is waited for."""
        out: dict[str, dict[str, Any]] = {}
        needed = [name for name in self.supervisor.children if self.supervisor.serves(name)]
        answers = self.supervisor.ask_all("state", needed)
        self.paused = max((answers[name][0] for name in needed), default=0.0)
        for _, fd in answers.values():
            if fd is not None:
                out |= read_state(fd)
        for name, kind in self.supervisor.plan.shared.items():
            if kind == "counters":
                out[name] = self.supervisor.counters.state()
        self._keep(out)
        return out

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        supervisor = self.supervisor
        for name, kind in supervisor.plan.shared.items():
            if kind == "counters" and name in state:
                supervisor.counters.load_state(state[name])
        parts = {
            process: {node: state[node] for node in nodes if node in state}
            for process, nodes in supervisor.plan.processes.items()
        }
        self._loaded = state
        self._keep(state)
        supervisor.ask_all("load", list(parts), parts)

    def _keep(self, state: dict[str, dict[str, Any]]) -> None:
        """What a killed learner goes on from. Actors begin anew, and stores have their memory."""
        supervisor = self.supervisor
        for process, nodes in supervisor.plan.processes.items():
            if supervisor.serves(process):
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
    """The blocks of a store that runs in another process, read and written where they lie. `state` is what that store told,
    or was told, of itself."""

    def __init__(self, supervisor: Supervisor, name: str, state: dict[str, Any]) -> None:
        self._supervisor, self._name = supervisor, name
        node = supervisor.plan.nodes[name]
        (self.schema,) = walk((node.args, node.kwargs), Schema)
        self._slots = Slots(self.schema, len(state["items"]), Arena(supervisor.descriptors[f"blocks {name}"]))
        self.oldest, self.next = int(state["counts"]["oldest"]), int(state["counts"]["next"])

    def blocks(self, since: int, most: int) -> tuple[int, int, Tree]:
        """As a store's own, but what went while it was copied is left out."""
        first = max(since, self.oldest)
        stop = min(self.next, first + most)
        first, arrays = self._slots.read(first, stop)
        return first, stop, arrays

    def load_blocks(self, first: int, blocks: Tree) -> None:
        self._slots.put_back(first, blocks, self.oldest, self.next)

    def drop_blocks(self, first: int, stop: int) -> int:
        supervisor = self._supervisor
        number = supervisor.ask(supervisor.plan.home(self._name), "drop_blocks", self._name, (first, stop))
        if number is None or not supervisor.wait(lambda: number in supervisor.answers, ANSWER_S, "drop_blocks"):
            raise ProcessFailed(f"{self._name} does not answer")
        return int(supervisor.answers.pop(number)[0])


@dataclass
class Snapshot:
    """The state of all nodes at one moment; the blocks are read from the stores' memory while these go on."""

    nodes: dict[str, dict[str, Any]]
    mapped: dict[str, Any]
    paused: float  # seconds that the learner stood still for it

    def state(self) -> dict[str, dict[str, Any]]:
        return self.nodes

    def stores(self) -> dict[str, Any]:
        return self.mapped
