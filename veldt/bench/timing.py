"""Timing: contenders take turns, so that noise of the machine affects all of them."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from veldt.machine import processor_name

Name = TypeVar("Name")
Figures = dict[str, float]
WARM_CALLS = 200


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


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    for _ in range(WARM_CALLS):
        call()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - began)


def take_turns(rounds: int, contenders: Mapping[Name, Callable[[int], Figures]]) -> dict[Name, Figures]:
    """The medians of what each contender gives; all have one turn, whose number they get, before any has the next."""
    turns: dict[Name, list[Figures]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in contenders.items():
            turns[name].append(contender(turn))
    return {name: medians(lines) for name, lines in turns.items()}


def medians(lines: list[Figures]) -> Figures:
    return {name: statistics.median(line[name] for line in lines) for name in lines[0]}


def machine() -> dict[str, Any]:
    """The machine and versions that a figure depends on."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
