"""Rates: what follows from two looks at the counts of a run and at the clocks of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

COUNTS = {  # in a line of metrics -> what their rates are called, before _per_s
    "env_steps": "env_steps",
    "learner_steps": "learner_steps",
    "stream_blocks": "blocks",
    "stream_bytes": "bytes",
    "store_inserted": "inserted",
    "store_sampled": "sampled",
    "published": "published",
}


LEAST_S = 0.2  # CPU time is told in ticks of 10 ms for each process: of less time it says nothing


class Rates:
    """Each rate is over `seconds` or a little more. A count may be missing, and begins anew when its process does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._counts: dict[str, tuple[float, float]] = {}  # name -> (time, count) from which on a rate is taken
        self._cpu: tuple[float, dict[int, float]] = (0.0, {})  # time, and CPU seconds by process

    def begin(self, line: dict[str, Any], pids: Iterable[int]) -> None:
        now = time.monotonic()
        self._counts = {name: (now, line[name]) for name in COUNTS if name in line}
        self._cpu = now, cpu_seconds(pids)

    def of(self, line: dict[str, Any], pids: Iterable[int]) -> dict[str, float]:
        now, out = time.monotonic(), {}
        for name, rate in COUNTS.items():
            if name not in line:
                continue
            since, before = self._counts.get(name, (now, line[name]))
            if now > since and line[name] >= before:
                out[f"{rate}_per_s"] = (line[name] - before) / (now - since)
            if name not in self._counts or line[name] < before or now - since >= self.seconds:
                self._counts[name] = now, line[name]
        since, earlier = self._cpu
        cpu = cpu_seconds(pids)
        if now - since >= LEAST_S:
            out["cpu/all"] = sum(x - earlier[pid] for pid, x in cpu.items() if pid in earlier) / (now - since)
        if now - since >= max(self.seconds, LEAST_S):
            self._cpu = now, cpu
        return out


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Of this process and others, those that are still there."""
    tick, out = os.sysconf("SC_CLK_TCK"), {}
    for pid in (os.getpid(), *pids):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        out[pid] = (int(fields[11]) + int(fields[12])) / tick
    return out
