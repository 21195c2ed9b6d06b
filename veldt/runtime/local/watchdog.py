"""What the supervisor knows of each process. One that hangs is logged with its stack and killed: then it is restarted."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from veldt.bounds import above, at_least
from veldt.records.tree import Array
from veldt.runtime.base import Stuck
from veldt.runtime.local import zygote
from veldt.runtime.local.board import BUILDING, DOING, SERVING, SINCE, WAITING, Board

WATCH_S = 0.25  # between two checks
SHORTEST_S = 0.1  # before the second restart in a row
SUSPENDED_S = 5.0  # without a check: the whole machine was suspended, so no process is killed
STUCK_S = 60.0  # without work in any process before the run stops (at least twice the longest step)
OTHERWISE = {WAITING: "waiting for work", BUILDING: "building its nodes", SERVING: "serving other processes"}

log = logging.getLogger("veldt")


@dataclass(frozen=True)
class Restarts:
    """How often and how soon a process that ended is restarted. A process that the run can do
    without is always restarted."""

    limit: Annotated[int, above(0)] = 5
    """Consecutive failures of one process, without any work in between, after which the run saves a checkpoint and ends."""
    delay: Annotated[float, at_least(0)] = 10.0
    """Maximum delay in seconds before a process that keeps failing is restarted; the first restart is immediate."""
    window: Annotated[float, above(0)] = 120.0
    """Seconds of running after which the count of failures starts again, whatever the process did (at least four times
    step_timeout)."""

    def wait(self, failures: int) -> float:
        """Seconds before the next start of a process that failed this many times in a row."""
        return 0.0 if failures <= 1 else min(self.delay, SHORTEST_S * 2 ** min(failures - 2, 30))


@dataclass(eq=False)
class Child:
    name: str
    nodes: list[str]
    index: int  # of its row on the board
    row: memoryview
    incarnation: int
    light: bool  # forked from the light zygote
    keeps: bool  # its state is kept for a restart
    optional: bool = False  # the run goes on without it
    socket: socket.socket | None = None
    pid: int = 0
    ready: bool = False
    restarts: int = 0
    failures: int = 0  # in a row
    work: int = 0  # its progress when it became ready
    began: float = 0.0  # when it was forked
    due: float = 0.0  # when it is to be restarted
    error: dict[str, Any] | None = None  # the last that it reported
    killed: str = ""  # why we killed it
    counts: dict[str, Array] = field(default_factory=dict)  # those that belong to its state, when that was kept

    @property
    def doing(self) -> str:
        doing = self.row[DOING]
        return f"in a step of {self.nodes[doing]}" if doing >= 0 else OTHERWISE[doing]

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def end(self, why: str) -> None:
        """Kills it, so that it is restarted."""
        self.killed = why
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def exit_reason(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (", perhaps because the machine ran out of RAM" if name == "SIGKILL" else "")


class Watchdog:
    def __init__(self, children: dict[str, Child], board: Board, stacks: int, step_timeout: float) -> None:
        self.children, self.board, self.stacks, self.step_timeout = children, board, stacks, step_timeout
        self._checked_at = self._moved_at = time.monotonic()
        self._moved = -1

    def check(self, work: int) -> None:
        """`work` is the sum of all counts so far; a program without counters passes a clock instead."""
        now = time.monotonic()
        if now - self._checked_at <= WATCH_S:
            return
        suspended, self._checked_at = now - self._checked_at > SUSPENDED_S, now
        if suspended:
            self._moved_at = now
        for child in self.children.values():
            if suspended:
                child.row[SINCE] = time.monotonic_ns()
            if child.pid and not child.killed:
                self._kill_if_late(child)
        moved = work + sum(child.restarts for child in self.children.values() if not child.optional)
        if moved != self._moved or self.board.hold:
            self._moved, self._moved_at = moved, time.monotonic()
        elif (idle := time.monotonic() - self._moved_at) > max(STUCK_S, 2 * self.step_timeout):
            what = "; ".join(f"{child.name} {child.doing}" for child in self.children.values())
            raise Stuck(f"No process has worked for {idle:.0f} s ({what}); look at the store's limiter and capacity.")

    def excuse(self) -> None:
        """What the processes wait for is elsewhere: that they do nothing is no fault of theirs."""
        self._moved_at = time.monotonic()

    def _kill_if_late(self, child: Child) -> None:
        age = (time.monotonic_ns() - child.row[SINCE]) / 1e9
        if age > (zygote.START_S if child.row[DOING] == BUILDING else self.step_timeout):
            why = f"no progress for {age:.1f} s, {child.doing}"
            log.error("%s has made %s; killing it. Its stack:\n%s", child.name, why, self._stack(child))
            child.end(why)

    def _stack(self, child: Child) -> str:
        before = os.fstat(self.stacks).st_size
        child.signal(signal.SIGUSR1)
        deadline, text = time.monotonic() + 1.0, b""
        while time.monotonic() < deadline:
            time.sleep(0.03)
            sooner, text = text, os.pread(self.stacks, 1 << 16, before)
            if text and text == sooner:  # it is complete
                return text.decode(errors="replace")
        return text.decode(errors="replace") or "(none: it does not answer signals; is it stopped?)"
