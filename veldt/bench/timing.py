"""Timing: contenders take turns, so that noise of the machine affects all of them."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def alternate(contenders: dict[str, Callable[[], object]], calls: int, rounds: int, warm_up: int = 20) -> dict[str, float]:
    """Seconds per call, the median over rounds in each of which every contender is called `calls` times.

    What a GPU has still to do at the end of a turn belongs to that turn.
    """
    busy: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    finish: Callable[[], object] = torch.cuda.synchronize if busy else lambda: None
    for call in contenders.values():
        for _ in range(warm_up):
            call()
    finish()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            began = time.perf_counter()
            for _ in range(calls):
                call()
            finish()
            times[name].append((time.perf_counter() - began) / calls)
    return {name: statistics.median(x) for name, x in times.items()}


def machine() -> dict[str, Any]:
    """The machine and versions that a figure depends on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
