"""Functions of a caller that hear of a run's progress, and what ends a run before its steps are done."""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veldt.errors import UserError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds


class Stop(Exception):
    """A callback raises it to end the run, as if its steps were done."""


@dataclass(frozen=True)
class LogLine:
    """A line of metrics."""

    run: Path
    env_steps: int
    learner_steps: int
    time_s: float
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationDone:
    """Episodes of weights that did not change meanwhile: those after `learner_steps` updates, at `env_steps`."""

    run: Path
    env_steps: int
    learner_steps: int
    mean_return: float
    mean_length: float
    best: bool  # no evaluation of the run had a higher return


@dataclass(frozen=True)
class CheckpointSaved:
    run: Path
    path: Path
    number: int
    env_steps: int


@dataclass(frozen=True)
class Callbacks:
    """Each is called between two rounds of training. It ends the run by returning False or raising `Stop`."""

    on_log: Callable[[LogLine], bool | None] | None = None
    on_evaluation: Callable[[EvaluationDone], bool | None] | None = None
    on_checkpoint: Callable[[CheckpointSaved], bool | None] | None = None


Event = LogLine | EvaluationDone | CheckpointSaved
CALLED: dict[type[Event], str] = {LogLine: "on_log", EvaluationDone: "on_evaluation", CheckpointSaved: "on_checkpoint"}


class Ending:
    """Calls the callbacks, and decides whether the run ends early; `reason` says why, empty: it goes on."""

    def __init__(self, callbacks: Callbacks, stop_return: float, stop_after: str) -> None:
        self.callbacks, self.stop_return, self.stop_after = callbacks, stop_return, stop_after
        self.reason = ""
        self._limit = seconds(stop_after) if stop_after else float("inf")
        self._began = time.monotonic()
        self._events: deque[Event] = deque()  # a thread that saves adds to it too

    def begin(self) -> None:
        self._began = time.monotonic()

    def add(self, event: Event) -> None:
        self._events.append(event)

    def check(self) -> None:
        """Delivers what happened since the last call."""
        while self._events:
            reason = self._deliver(self._events.popleft())
            self.reason = self.reason or reason
        if not self.reason and time.monotonic() - self._began >= self._limit:
            self.reason = f"the time is up (--stop-after {self.stop_after})"

    def _deliver(self, event: Event) -> str:
        """Why the run ends with this event; empty: it does not."""
        name = CALLED[type(event)]
        callback: Callable[[Any], bool | None] | None = getattr(self.callbacks, name)
        try:
            if callback is not None and callback(event) is False:
                return f"{name} returned False"
        except Stop as stop:
            return f"{name} raised Stop{f': {stop}' if str(stop) else ''}"
        if isinstance(event, EvaluationDone) and event.mean_return >= self.stop_return:
            return f"an evaluation has a mean return of {event.mean_return:.6g} (--stop-return {self.stop_return:g})"
        return ""


def seconds(text: str) -> float:
    """Of a duration: 90s, 30m, 2h, 1d, 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise UserError(f"stop_after must be a duration such as 90s, 30m, 2h or 1h30m, not {text!r}.")
    return sum(float(number) * UNITS[unit] for number, unit in parts)
