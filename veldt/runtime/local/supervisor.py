"""The supervisor starts the processes of a program, watches them, restarts them and ends them.

    supervisor (the caller's process)
      zygote                      has imported everything, and forks the others; a light one forks those without torch
        learner                   store, learner          \\
        actor/0 ... actor/n       policy, recorder, actor   > each with a row on the board, and streams between them
        evaluator                 policy, evaluator       /

Only the supervisor handles signals. A process that dies is restarted with a new incarnation; streams, weights and the
store's blocks are in shared memory of the supervisor, so none is lost. That memory has no name on disk or in /dev/shm, and
the kernel kills every process whose parent has died, so nothing is left behind, whichever process is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veldt.counters import Counters
from veldt.errors import Diverged, ProcessFailed, UserError
from veldt.metrics import Reports, declared
from veldt.program import BLOCK_MEMORY, ROWS
from veldt.runtime.local import zygote
from veldt.runtime.local.board import BUILDING, DOING, ORDERS, SINCE, Board, SharedRows
from veldt.runtime.local.children import Child, exit_reason
from veldt.runtime.local.counts import KeptCounts
from veldt.runtime.local.orders import Orders
from veldt.runtime.local.plan import GatePlan, Plan
from veldt.runtime.local.process import MESSAGE
from veldt.runtime.local.state import write_state
from veldt.runtime.local.watchdog import Watchdog
from veldt.runtime.shm.arena import Arena
from veldt.runtime.shm.memory import SharedMemory, make_shared_memory

log = logging.getLogger("veldt")

TICK_S = 0.02  # that the supervisor waits for messages at a time
STOP_S = 2.0  # for processes to close their environments and files
BACK_OFF_S = (0.1, 10.0)  # before a process that failed repeatedly is restarted: shortest and longest wait
MAX_FAILURES = 5  # in a row, without any work between them, before the run stops
NICE = 10  # niceness of processes that serve no others
HEALTHY = 100  # env steps or updates after which a failure counts as the first again
LONG_LIFE_S = 120.0  # of running after which it does too (at least four times the longest step)


@dataclass(frozen=True)
class Options:
    """`directory` gets processes.json. `step_timeout` is how long one step of a worker may take, in seconds."""

    directory: Path | None = None
    step_timeout: float = 30.0
    first_incarnation: int = 0  # higher than any in earlier sessions of this run


class Supervisor:
    def __init__(self, plan: Plan, options: Options) -> None:
        self.plan, self.options = plan, options
        self.reports = Reports(declared(plan.nodes.values()))
        self.descriptors: dict[str, int] = {}
        self.children: dict[str, Child] = {}
        self.board: Any = None
        self.recover: dict[str, dict[str, Any]] = {}  # node -> the state that a restarted process loads
        self.orders = Orders(self)
        self.zygotes: dict[bool, zygote.Zygote] = {}  # light -> the zygote of this kind

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
        if plan.gate is not None:
            self._allocate_gate(plan.gate)
        self.board = Board(self.descriptors["board"], plan.rows)
        self.board.hold = True
        counted = [name for name, node in plan.nodes.items() if node.has(ROWS)]
        rows = {name: SharedRows(self.descriptors[f"rows {name}"], self.board, 0) for name in counted}
        self.rows = rows
        self.counters = {name: Counters(x) for name, x in rows.items() if issubclass(plan.nodes[name].node_class, Counters)}
        self.arrays = {name: Arena(self.descriptors[f"array {name}"]).zeros(*spec) for name, spec in plan.arrays.items()}
        plan.save(self.descriptors["plan"])
        for name in plan.processes:
            self.children[name] = Child(name, self.board.row(plan.row(name)), self.options.first_incarnation)
        self.kept_counts = KeptCounts(plan, self.children, self.counters, rows)
        stacks = self.descriptors["stacks"]
        self.watchdog = Watchdog(plan, self.children, self.board, stacks, self.options.step_timeout)
        for light in sorted(self.zygotes, reverse=True):  # the light one is ready first
            try:
                self._fork_all(light)
            except zygote.ZygoteDied as error:
                self._replace_zygote(light, error)
        self.wait(lambda: all(child.ready for child in self.children.values()), zygote.START_S, "start")

    def _allocate_gate(self, gate: GatePlan) -> None:
        """Allocates what outlives the gate's process: which session has which seat, and the incarnation of each seat."""
        from veldt.runtime.grpc.seats import INCARNATION, RECORD, EventBell

        self.descriptors["gate bell"] = EventBell.make()
        records = SharedMemory(self.descriptors["gate seats"], 8 * RECORD * len(gate.seats))
        for i in range(len(gate.seats)):
            records.words(8 * RECORD * i, RECORD)[INCARNATION] = self.options.first_incarnation

    def _fork_all(self, light: bool) -> None:
        """Forks all processes of a zygote, once it is ready."""
        self.zygotes[light].wait_ready()
        self.zygotes[light].share(self.descriptors)
        for child in self._children_of(light):
            self._fork(child)

    def _children_of(self, light: bool) -> list[Child]:
        """The processes that the zygote of this kind forks."""
        return [child for child in self.children.values() if (child.name in self.plan.light) == light]

    def _fork(self, child: Child) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        child.socket, child.ready, child.error, child.killed, child.pid, child.due = ours, False, None, "", 0, 0.0
        child.began, child.work = time.monotonic(), self._work(child)
        child.row[DOING], child.row[SINCE] = BUILDING, time.monotonic_ns()
        # With more processes than cores, those that serve others, such as the learner, go first.
        nice = 0 if self.keeps(child.name) else NICE
        if child.restarts and self.keeps(child.name):
            self.kept_counts.reset(child)
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
        """Waits for messages for this time at most, and handles them."""
        sockets = {child.socket.fileno(): child for child in self.children.values() if child.socket is not None}
        for fd in zygote.readable([*self._zygote_fds(), *sockets], seconds):
            if fd in sockets:
                self._receive(sockets[fd])
        for light in [*self.zygotes]:
            try:
                for event in self.zygotes[light].events():
                    self._handle_event(event, self._children_of(light))
                for child in self._children_of(light):
                    if child.due and time.monotonic() >= child.due:
                        self._fork(child)
            except zygote.ZygoteDied as error:
                self._replace_zygote(light, error)
        self.watchdog.check(self.work() if self.rows else time.monotonic_ns())

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
                child.socket.close()
                child.socket = None
                return
            message = json.loads(data)
            if "metrics" in message:
                self.reports.add(child.name, message["metrics"], message["seconds"])
            elif "log" in message:
                log.log(message["log"], "%s", message["text"])
            elif "answer" in message:
                self.orders.take(message, fds)
            elif "error" in message:
                child.error = message
            elif "ready" in message:
                child.ready, child.work = True, self._work(child)
                self._write_processes()

    def _handle_event(self, event: dict[str, Any], children: list[Child]) -> None:
        """Handles an event of a zygote: a process was forked, or has exited."""
        if "forked" in event:
            self.children[event["forked"]].pid = event["pid"]
            self._write_processes()
        elif "exited" in event:
            for child in children:
                if child.pid == event["exited"]:
                    self._receive(child)  # its last messages
                    self._reap(child, event["status"])

    def _reap(self, child: Child, status: int) -> None:
        """Schedules the restart of a process that has exited, or ends the run."""
        child.pid = 0
        if child.socket is not None:
            child.socket.close()
            child.socket = None
        error = child.error
        if error is not None:
            self._raise_if_final(child, error)
        child.failures = 1 if self._was_healthy(child) else child.failures + 1
        child.ready = False
        why = child.killed or (f"{error['type']}: {error['text']}" if error else exit_reason(status))
        if child.failures >= MAX_FAILURES:
            message = f"{child.name} failed {MAX_FAILURES} times in a row without any work between: {why}"
            raise ProcessFailed(message, error["traceback"] if error else "")
        wait = 0.0 if child.failures == 1 else min(BACK_OFF_S[1], BACK_OFF_S[0] * 2 ** (child.failures - 2))
        log.warning("%s ended (%s); restarting%s", child.name, why, f" in {wait:.1f} s" if wait else "")
        if error is not None:
            log.info("%s: %s", child.name, error["traceback"])
        child.restarts += 1
        child.incarnation += 1
        child.due = time.monotonic() + wait
        self._write_processes()

    def _raise_if_final(self, child: Child, error: dict[str, Any]) -> None:
        """An error that a restart cannot fix ends the run."""
        if error["error"] == "user" and (child.ready or not child.restarts):  # if it worked before, it may work again
            raise UserError(error["text"])
        if error["error"] == "diverged":
            raise Diverged(error["text"])
        if self.serves(child.name):
            raise ProcessFailed(f"{child.name} failed with {error['type']}: {error['text']}", error["traceback"])

    def serves(self, process: str) -> bool:
        """Whether the others rely on it: they call its nodes, or it alone has a state that is kept. An error in such a
        process would repeat, and ends the run. One of several learners is restarted."""
        called = any(channel.node in self.plan.processes[process] for channel in self.plan.channels)
        return called or [name for name in self.plan.processes if self.keeps(name)] == [process]

    def keeps(self, process: str) -> bool:
        """Whether its state is kept for a restart: a node asks for that, other processes call it, or it has blocks."""
        names = self.plan.processes[process]
        marked = any(self.plan.nodes[name].keep or self.plan.nodes[name].has(BLOCK_MEMORY) for name in names)
        return marked or any(channel.node in names for channel in self.plan.channels)

    def _was_healthy(self, child: Child) -> bool:
        """Whether it worked before it failed. A process that counts nothing is healthy if it ran for a long time."""
        long = max(LONG_LIFE_S, 4 * self.options.step_timeout)
        return child.ready and (self._work(child) - child.work >= HEALTHY or time.monotonic() - child.began > long)

    def _work(self, child: Child) -> int:
        if not any(self.plan.nodes[name].is_worker for name in self.plan.processes[child.name]):
            return self.work()  # a service counts nothing itself: its callers do
        return sum(int(rows.table[self.plan.row(child.name)].sum()) for rows in self.rows.values())

    def work(self) -> int:
        """The sum of all counts of all processes."""
        return sum(int(rows.table.sum()) for rows in self.rows.values())

    def _replace_zygote(self, light: bool, error: Exception) -> None:
        """Restarts a zygote that died, and all its processes, which died with it."""
        which = "all" if len(self.zygotes) == 1 else "its"
        while True:
            log.error("%s; restarting %s processes", str(error), which)
            self.zygotes.pop(light).close()
            for child in self._children_of(light):
                if child.socket is not None:
                    child.socket.close()
                    child.socket = None
                child.failures = 1 if self._was_healthy(child) else child.failures + 1
                child.ready, child.pid = False, 0
                child.restarts += 1
                child.incarnation += 1
                if child.failures >= MAX_FAILURES:
                    raise ProcessFailed(f"{which} processes ended {MAX_FAILURES} times without any work between: {error}")
            self.zygotes[light] = zygote.take(light)
            try:
                return self._fork_all(light)
            except zygote.ZygoteDied as again:
                error = again

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
        """Ends all processes and releases all resources."""
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
            self.orders.close()
            for fd in self.descriptors.values():
                os.close(fd)
            self.descriptors = {}
            if self.options.directory is not None:
                (self.options.directory / "processes.json").unlink(missing_ok=True)

    def _end_processes(self) -> None:
        """Asks all processes to exit, and kills those that do not in time. The zygotes reap them."""
        self.board.quit = True
        for row in range(1, self.board.rows):
            self.board.bell(row).ring()
        for seconds, last in ((STOP_S, False), (1.0, True)):
            deadline = time.monotonic() + seconds
            with contextlib.suppress(OSError):
                while self._any_running() and time.monotonic() < deadline:
                    zygote.readable(self._zygote_fds(), 0.01)
            for child in self.children.values():
                if child.pid and not last:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)

    def _any_running(self) -> bool:
        """Whether any process is still running."""
        for light in [*self.zygotes]:
            children = self._children_of(light)
            try:
                events = self.zygotes[light].events()
            except zygote.ZygoteDied:  # and all its children
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
