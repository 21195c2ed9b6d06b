"""The watchdog: a process that hangs is logged with its stack, and killed so that it is restarted."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

from veldt.runtime.base import Stuck
from veldt.runtime.local import zygote
from veldt.runtime.local.board import BUILDING, DOING, SERVING, SINCE, WAITING, Board
from veldt.runtime.local.children import Child
from veldt.runtime.local.plan import Plan

WATCH_S = 0.25  # between two checks
AWAY_S = 5.0  # without a check: the whole machine was suspended, so no process is killed
STUCK_S = 60.0  # without work in any process before the run stops (at least twice the longest step)

log = logging.getLogger("veldt")


class Watchdog:
    def __init__(self, plan: Plan, children: dict[str, Child], board: Board, stacks: int, step_timeout: float) -> None:
        self.plan, self.children, self.board = plan, children, board
        self.stacks, self.step_timeout = stacks, step_timeout
        self._checked_at = self._moved_at = time.monotonic()
        self._moved = -1

    def check(self, work: int) -> None:
        """`work` is the sum of all counts so far; a program without counters passes a clock instead."""
        now = time.monotonic()
        if now - self._checked_at > WATCH_S:
            away, self._checked_at = now - self._checked_at > AWAY_S, now
            self._check_all(away, work)

    def _check_all(self, away: bool, work: int) -> None:
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
            limit = zygote.START_S if doing == BUILDING else self.step_timeout
            if age > limit:
                where = self._where(child, doing)
                log.error(
                    "%s has made no progress for %.1f s, %s; killing it. Its stack:\n%s",
                    child.name,
                    age,
                    where,
                    self._stack(child),
                )
                child.killed = f"no progress for {age:.1f} s, {where}"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        moved = work + sum(child.restarts for child in self.children.values())
        if moved != self._moved or self.board.hold:
            self._moved, self._moved_at = moved, time.monotonic()
        elif (idle := time.monotonic() - self._moved_at) > max(STUCK_S, 2 * self.step_timeout):
            what = "; ".join(f"{child.name} {self._where(child, child.row[DOING])}" for child in self.children.values())
            raise Stuck(f"No process has worked for {idle:.0f} s ({what}); look at the store's limiter and capacity.")

    def _where(self, child: Child, doing: int) -> str:
        if doing == WAITING:
            return "waiting for work"
        if doing == BUILDING:
            return "building its nodes"
        if doing == SERVING:
            return "serving other processes"
        return f"in a step of {self.plan.processes[child.name][doing]}"

    def _stack(self, child: Child) -> str:
        before = os.fstat(self.stacks).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
        deadline, text = time.monotonic() + 1.0, b""
        while time.monotonic() < deadline:
            time.sleep(0.03)
            sooner, text = text, os.pread(self.stacks, 1 << 16, before)
            if text and text == sooner:  # it is complete
                return text.decode(errors="replace")
        return text.decode(errors="replace") or "(none: it does not answer signals; is it stopped?)"
