"""Rates: how fast the counts of a run grow, and how many cores its processes use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from veldt.metrics import PACKAGE, Declarations

SHORTEST_S = 0.2  # the kernel counts CPU time in ticks of 10 ms: over a shorter time it is too coarse


class Rates:
    """The rates of all declared counts, each over `seconds` or a little more.

    A line may lack a count. A count that has become smaller belongs to a restarted process, and its rate starts again.
    """

    def __init__(self, seconds: float, declarations: Declarations = PACKAGE) -> None:
        self.seconds = seconds
        self._rates = {metric.name: metric.rate for metric in declarations.values() if metric.rate}
        self._counts: dict[str, tuple[float, float]] = {}  # name -> (time, count) at the start of the rate
        self._cpu: tuple[float, dict[int, float]] = (0.0, {})  # time, and CPU seconds by process

    def begin(self, line: dict[str, Any], pids: Iterable[int]) -> None:
        now = time.monotonic()
        self._counts = {name: (now, line[name]) for name in self._rates if name in line}
        self._cpu = now, cpu_seconds(pids)

    def of(self, line: dict[str, Any], pids: Iterable[int]) -> dict[str, float]:
        now, out = time.monotonic(), {}
        for name, rate in self._rates.items():
            if name not in line:
                continue
            since, before = self._counts.get(name, (now, line[name]))
            if now > since and line[name] >= before:
                out[rate] = (line[name] - before) / (now - since)
            if name not in self._counts or line[name] < before or now - since >= self.seconds:
                self._counts[name] = now, line[name]
        since, earlier = self._cpu
        cpu = cpu_seconds(pids)
        if now - since >= SHORTEST_S:
            out["cpu/all"] = sum(x - earlier[pid] for pid, x in cpu.items() if pid in earlier) / (now - since)
        if now - since >= max(self.seconds, SHORTEST_S):
            self._cpu = now, cpu
        return out


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """CPU time of this process and of those of the others that still exist."""
    tick, out = os.sysconf("SC_CLK_TCK"), {}
    for pid in (os.getpid(), *pids):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        out[pid] = (int(fields[11]) + int(fields[12])) / tick
    return out
