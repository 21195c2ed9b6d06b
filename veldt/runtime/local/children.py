"""A process as the supervisor knows it, and what it has reported."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass, field
from typing import Any

MEANS = ("queue_fill", "refusing", "lag_updates")  # metrics of moments, which are averaged over a line's time


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
    counts: dict[str, list[int]] = field(default_factory=dict)  # its rows of counts, of the state that was kept


def exit_reason(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
