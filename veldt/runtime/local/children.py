"""Child: the supervisor's record of a process."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Child:
    """The supervisor's record of a process."""

    name: str
    row: memoryview
    incarnation: int
    socket: socket.socket | None = None
    pid: int = 0
    ready: bool = False
    restarts: int = 0
    failures: int = 0  # in a row
    work: int = 0  # its total count when it became ready
    began: float = 0.0  # when it was forked
    due: float = 0.0  # when it is to be restarted
    error: dict[str, Any] | None = None  # the last that it reported
    killed: str = ""  # why we killed it
    counts: dict[str, list[int]] = field(default_factory=dict)  # its rows of counts at the time of the kept state


def exit_reason(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (", perhaps because the machine ran out of RAM" if name == "SIGKILL" else "")
