"""The supervisor starts the processes of a program, watches them, restarts them and ends them.

Only the supervisor handles signals. A process that dies is restarted with a new incarnation; streams, weights and the
store's blocks are in shared memory of the supervisor, so none is lost. That memory has no name on disk or in /dev/shm, and
every process dies with its parent, as does what an environment started (see `zygote`), so nothing is left behind.
"""

import contextlib
import json
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from veldt.counters import COLUMN, OF_STATE, Counters
from veldt.errors import Diverged, ProcessFailed, UserError
from veldt.files import replace_text
from veldt.metrics import Reports, declared
from veldt.program import BLOCK_MEMORY, ROWS
from veldt.runtime.local import zygote
from veldt.runtime.local.board import BUILDING, DOING, ORDERS, PROGRESS, SINCE, Board, SharedRows
from veldt.runtime.local.plan import GatePlan, Plan
from veldt.runtime.local.pressure import MemoryConfig, Pressure
from veldt.runtime.local.process import MESSAGE
from veldt.runtime.local.watchdog import Child, Restarts, Watchdog, exit_reason
from veldt.runtime.shm.memory import Arena, EventBell, SharedMemory, make_shared_memory, read_state, write_state

log = logging.getLogger("veldt")

TICK_S = 0.02  # that the supervisor waits for messages at a time
STOP_S = 2.0  # for processes to close their environments and files
ZYGOTE_S = 5.0  # in which a zygote has to answer (or longer, if a step may take longer)
TABLE_S = 1.0  # after which a table of processes that could not be written is
NICE = 10  # niceness of processes that serve no others
HEALTHY = 20  # steps of its workers after which a failure of a process counts as the first again
COLUMNS = [COLUMN[count] for count in OF_STATE]  # counts that go back with the state of a process that is restarted


class Answer(NamedTuple):
    result: Any
    counts: dict[str, list[int]]  # its rows of counts, with its state
    state: dict[str, dict[str, Any]]  # by node


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        directory: Path | None,
        step_timeout: float,
        first_incarnation: int,
        restarts: Restarts,
        memory: MemoryConfig,
    ) -> None:
        self.plan, self.directory, self.step_timeout, self.first = plan, directory, step_timeout, first_incarnation
        self.restarts, self.memory = restarts, memory
        self.reports = Reports(declared(plan.nodes.values()))
        self.descriptors: dict[str, int] = {}
        self.children: dict[str, Child] = {}
        self.recover: dict[str, dict[str, Any]] = {}  # node -> the state that a restarted process loads
        self.expected: set[int] = set()  # numbers of orders that are not answered yet
        self.answers: dict[int, Answer] = {}
        self.zygotes: dict[bool, zygote.Zygote] = {}  # light -> the zygote of this kind
        self._table_due = math.inf  # when the table of processes is to be written again
        self.ending = False  # the last checkpoint is taken: no failure matters any more

    def start(self) -> None:
        """Starts all processes; returns when they are ready. Workers are on hold."""
        plan = self.plan
        for light in sorted({name in plan.light for name in plan.processes}):
            self.zygotes[light] = zygote.take(light)  # first: they import in parallel with what follows
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # each stream and each process needs a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
        for name in plan.descriptors():
            self.descriptors[name] = make_shared_memory(f"veldt {name}")
        for name in plan.evented:
            self.descriptors[f"bell {name}"] = EventBell.make()
        if plan.gate is not None:
            self._allocate_gate(plan.gate)
        self.board = Board(self.descriptors["board"], plan.rows)
        self.board.hold = True
        counted = {name: node.node_class for name, node in plan.nodes.items() if node.has(ROWS)}
        self.rows = {name: SharedRows(self.descriptors[f"rows {name}"], self.board, 0) for name in counted}
        self.counters = {name: Counters(self.rows[name]) for name, kind in counted.items() if issubclass(kind, Counters)}
        self.arrays = {name: Arena(self.descriptors[f"array {name}"]).zeros(*spec) for name, spec in plan.arrays.items()}
        plan.save(self.descriptors["plan"])
        for name, nodes in plan.processes.items():
            row, light, keeps, optional = plan.row(name), name in plan.light, plan.keeps(name), plan.optional(name)
            self.children[name] = Child(name, nodes, row, self.board.row(row), self.first, light, keeps, optional)
        self.watchdog = Watchdog(self.children, self.board, self.descriptors["stacks"], self.step_timeout)
        for light in sorted(self.zygotes, reverse=True):  # the light one is ready first
            try:
                self._fork_all(light)
            except zygote.ZygoteDied as error:
                self._replace_zygote(light, error)
        children = self.children.values()
        last = [name for name in plan.processes if plan.has_state(name)]
        self.pressure = Pressure(self.memory, self.children, self.descriptors.values(), last)
        self.wait(lambda: all(x.ready or (x.optional and x.failures) for x in children), zygote.START_S, "start")

    def _allocate_gate(self, gate: GatePlan) -> None:
        """Allocates what outlives the gate's process: which session has which seat, and the incarnation of each seat."""
        from veldt.runtime.grpc.seats import INCARNATION, RECORD

        self.descriptors["gate bell"] = EventBell.make()
        records = SharedMemory(self.descriptors["gate seats"], 8 * RECORD * len(gate.seats))
        for i in range(len(gate.seats)):
            records.words(8 * RECORD * i, RECORD)[INCARNATION] = self.first

    def _fork_all(self, light: bool) -> None:
        self.zygotes[light].wait_ready()
        self.zygotes[light].share(self.descriptors)
        for child in self._children_of(light):
            self._fork(child)

    def _children_of(self, light: bool) -> list[Child]:
        return [child for child in self.children.values() if child.light == light]

    def _fork(self, child: Child) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        child.socket, child.ready, child.error, child.killed, child.pid, child.due = ours, False, None, "", 0, 0.0
        child.began, child.work = time.monotonic(), self._work(child)
        child.row[DOING], child.row[SINCE] = BUILDING, time.monotonic_ns()
        # With more processes than cores, those that serve others, such as the learner, go first.
        order = {"incarnation": child.incarnation, "orders": child.row[ORDERS], "nice": 0 if child.keeps else NICE}
        fds = [theirs.fileno()]
        if child.restarts:
            self._reset_counts(child)
            if state := {node: self.recover[node] for node in child.nodes if node in self.recover}:
                fds.append(write_state(state))
        try:
            self.zygotes[child.light].fork(child.name, order, fds)
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)

    def _reset_counts(self, child: Child) -> None:
        """A process is restarted from its kept state, or from none, and so are the counts that belong to that state. Other
        counts, such as env steps, are of what has happened. Blocks in shared memory are as they were."""
        nodes = [self.plan.nodes[name] for name in child.nodes]
        loads = any(hasattr(node.node_class, "load_state") and not node.has(BLOCK_MEMORY) for node in nodes)
        for name in self.counters if child.keeps and loads else ():
            self.rows[name].table[child.index, COLUMNS] = child.counts.get(name, 0)

    def tick(self, seconds: float = TICK_S) -> None:
        """Waits for messages for this time at most, and handles them."""
        sockets = {child.socket.fileno(): child for child in self.children.values() if child.socket is not None}
        for fd in zygote.readable([*self._zygote_fds(), *sockets], seconds):
            if fd in sockets:
                self._receive(sockets[fd])
        for light in [*self.zygotes]:
            try:
                for child, status in self._exits(light):
                    self._reap(child, status)
                for child in self._children_of(light):
                    if child.due and time.monotonic() >= child.due:
                        self._fork(child)
                self.zygotes[light].check(max(ZYGOTE_S, self.step_timeout))
            except zygote.ZygoteDied as error:
                self._replace_zygote(light, error)
        self.watchdog.check(self.work() if self.rows else time.monotonic_ns())
        if not self.ending:
            self.pressure.check(self.pids())
        if time.monotonic() > self._table_due:
            self._write_processes()

    def pids(self) -> list[int]:
        pids = [each.pid for each in self.zygotes.values()] + [child.pid for child in self.children.values()]
        return [pid for pid in pids if pid]

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> bool:
        """Supervises until the condition holds; False: it did not within this time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                log.info("%s: no answer after %.0f s", what, seconds)
                return False
            self.tick(0.005)
        return True

    # Messages of processes and zygotes.

    def _receive(self, child: Child) -> None:
        while child.socket is not None:
            try:
                data, fds, _, _ = socket.recv_fds(child.socket, MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                return child.close()
            message = json.loads(data)
            if "metrics" in message:
                self.reports.add(child.name, message["metrics"], message["seconds"])
            elif "log" in message:
                log.log(message["log"], "%s", message["text"])
            elif "answer" in message:
                number, state = message["answer"], read_state(fds[0]) if fds else {}
                if number in self.expected:  # otherwise it came too late
                    self.expected.remove(number)
                    self.answers[number] = Answer(message.get("result"), message.get("counts", {}), state)
            elif "error" in message:
                child.error = message
            elif "ready" in message:
                child.ready, child.work = True, self._work(child)
                self.zygotes[child.light].useful = True
                self._write_processes()

    def _zygote_fds(self) -> list[int]:
        return [each.socket.fileno() for each in self.zygotes.values()]

    def _exits(self, light: bool) -> Iterator[tuple[Child, int]]:
        """The processes of a zygote that have exited, or could not be forked, with their status. Those that it has forked
        get their pids."""
        for event in self.zygotes[light].events():
            for child in self._children_of(light):
                if child.name == event.get("forked"):
                    child.pid = event["pid"]
                    self._write_processes()
                elif child.name == event.get("failed"):
                    child.killed = f"it could not be forked: {event['why']}"
                    yield child, 1
                elif child.pid and child.pid == event.get("exited"):
                    child.pid = 0
                    yield child, event["status"]

    def _reap(self, child: Child, status: int) -> None:
        """Schedules the restart of a process that has exited, or ends the run."""
        self._receive(child)  # its last messages
        error, was_ready = child.error, child.ready
        self._note_end(child)
        why = child.killed or (f"{error['type']}: {error['text']}" if error else exit_reason(status))
        wait = self.restarts.wait(child.failures)
        child.due = math.inf if self.ending and not child.keeps else time.monotonic() + wait
        if not self.ending:
            self._raise_if_final(child, why, was_ready)
        log.warning("%s ended (%s); restarting%s", child.name, why, f" in {wait:.1f} s" if wait else "")
        if error is not None:
            log.info("%s: %s", child.name, error["traceback"])
        self._write_processes()

    def _raise_if_final(self, child: Child, why: str, was_ready: bool) -> None:
        """An error that a restart cannot fix ends the run. So does any in a process that the others rely on, since it would
        repeat: they call its nodes, or it alone has a state that is kept. One of several learners is restarted. A process
        that the run can do without ends it only if the user's settings do not allow its first start."""
        error, first = child.error, child.restarts == 1
        if child.optional and (was_ready or not first):
            return
        if error is not None:
            if error["error"] == "user" and (was_ready or first):  # if it worked before, it may work again
                raise UserError(error["text"])
            if error["error"] == "diverged":
                raise Diverged(error["text"])
            if self.plan.is_called(child.name) or [x for x in self.children.values() if x.keeps] == [child]:
                raise ProcessFailed(f"{child.name} failed with {error['type']}: {error['text']}", error["traceback"])
        if child.failures >= self.restarts.limit and not child.optional:
            message = f"{child.name} failed {child.failures} times in a row without any work in between: {why}"
            raise ProcessFailed(message, error["traceback"] if error else "")

    def _note_end(self, child: Child) -> None:
        """A failure is the first in a row if the process worked before. A service did if the run did, and any process if it
        ran for long."""
        child.close()
        long = time.monotonic() - child.began > max(self.restarts.window, 4 * self.step_timeout)
        healthy = child.ready and (long or self._work(child) - child.work >= HEALTHY)
        child.failures = 1 if healthy else child.failures + 1
        child.ready, child.pid = False, 0
        child.restarts += 1
        child.incarnation += 1

    def _work(self, child: Child) -> int:
        if not any(self.plan.nodes[name].is_worker for name in child.nodes):
            return self.work()  # a service makes no steps itself: its callers do
        return int(child.row[PROGRESS])

    def work(self) -> int:
        return sum(int(rows.table.sum()) for rows in self.rows.values())

    def _replace_zygote(self, light: bool, error: Exception) -> None:
        """Restarts a zygote that died, and all its processes, which died with it: that is no failure of theirs. A zygote is
        healthy if a process that it forked became ready."""
        which = "all" if len(self.zygotes) == 1 else "its"
        while True:
            log.error("%s; restarting %s processes", str(error), which)
            failed = self.zygotes.pop(light)
            failed.close()
            for child in self._children_of(light):
                failures = child.failures
                self._note_end(child)
                child.failures = failures
            unused = 0 if failed.useful else failed.failures + 1
            if unused >= self.restarts.limit:
                raise ProcessFailed(f"the {failed.name} failed {unused} times before any process was ready: {error}")
            self.zygotes[light] = zygote.take(light)
            self.zygotes[light].failures = unused
            try:
                return self._fork_all(light)
            except zygote.ZygoteDied as again:
                error = again

    def _write_processes(self) -> None:
        if self.directory is None:
            return
        table: dict[str, Any] = {"supervisor": {"pid": os.getpid()}}
        table |= {each.name: {"pid": each.pid} for each in self.zygotes.values()}
        for child in self.children.values():
            table[child.name] = {"pid": child.pid, "restarts": child.restarts, "nodes": child.nodes}
        try:
            replace_text(self.directory / "processes.json", json.dumps(table, indent=1) + "\n")
            self._table_due = math.inf
        except UserError:  # the disk is full
            self._table_due = time.monotonic() + TABLE_S

    def stop(self) -> None:
        try:
            if self.children:
                self._end_processes()
        finally:
            while self.zygotes:
                self.zygotes.popitem()[1].close()
            for child in self.children.values():
                child.close()
            for fd in self.descriptors.values():
                os.close(fd)
            self.descriptors = {}
            if self.directory is not None:
                (self.directory / "processes.json").unlink(missing_ok=True)

    def _end_processes(self) -> None:
        """Asks all processes to exit, and kills those that do not in time. The zygotes reap them."""
        self.board.quit = True
        for row in range(1, self.board.rows):
            self.board.bell(row).ring()
        self._wait_for_end(STOP_S)
        for child in self.children.values():
            if child.pid:
                child.signal(signal.SIGKILL)
        self._wait_for_end(1.0)

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while self._any_running() and time.monotonic() < deadline:
                zygote.readable(self._zygote_fds(), 0.01)

    def _any_running(self) -> bool:
        for light in [*self.zygotes]:
            try:
                gone = [child for child, _ in self._exits(light)]
            except zygote.ZygoteDied:
                self.zygotes.pop(light).close()
                gone = self._children_of(light)
            for child in gone:
                child.pid, child.due = 0, math.inf
        return any(x.pid or (x.socket is not None and not x.due) for x in self.children.values())
