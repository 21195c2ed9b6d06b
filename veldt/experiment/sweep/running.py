"""Sweep: runs the trials of a sweep in child processes, several at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from veldt.errors import UserError
from veldt.experiment.settings import as_plain
from veldt.experiment.sweep.spec import Spec, Trial
from veldt.experiment.sweep.table import number
from veldt.files import replace_text
from veldt.machine import available_memory, format_bytes
from veldt.signals import interruptible
from veldt.watching.links import format_seconds

STOP_S = 60.0  # for a last checkpoint, before a run that should stop is killed
POLL_S = 0.05
TAIL = 15  # lines of a failed run's log that are shown


@dataclass(frozen=True)
class Failed:
    trial: Trial
    why: str
    tail: str  # the last lines of its log

    def __str__(self) -> str:
        return f"{self.trial.name} failed: {self.why}; the end of {self.trial.beside('log')}:\n{self.tail}"


# The child imports from our sys.path; -P keeps the working directory out of it.
CODE = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('VELDT_PATH')); "
    "from veldt.runtime.local.zygote import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from veldt.__main__ import main; train, evaluate = json.loads(sys.argv[2]); sys.exit(main(train) or main(evaluate))"
)


class Child:
    """A run in progress: a process that trains, then evaluates."""

    def __init__(self, trial: Trial, episodes: int, timeout_s: float) -> None:
        self.trial, self.episodes, self.timeout_s = trial, episodes, timeout_s
        self.began = time.monotonic()
        self.stopped, self.kill_at = "", math.inf  # why `stop` was called, and when it is killed
        trial.path.parent.mkdir(parents=True, exist_ok=True)
        trial.beside("json").unlink(missing_ok=True)
        replace_text(trial.beside("yaml"), yaml.safe_dump(as_plain(trial.config), sort_keys=False))
        config, run = str(trial.beside("yaml")), str(trial.path)
        train = ["train", trial.config.recipe, "--config", config, "--run", run, "--quiet"]
        evaluate = ["eval", run, "--episodes", str(episodes), "--json"]
        command = [sys.executable, "-P", "-c", CODE, str(os.getpid()), json.dumps([train, evaluate])]
        environment = {**os.environ, "VELDT_PATH": json.dumps([path for path in sys.path if isinstance(path, str)])}
        line = f"{shlex.join(['veldt', *train])} && {shlex.join(['veldt', *evaluate])}"
        with open(trial.beside("log"), "ab") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} $ {line}\n".encode())
            log.flush()
            self.from_byte = log.tell()
            # In a new session: Ctrl-C in the terminal reaches only the sweep.
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def outcome(self) -> dict[str, Any] | Failed | None:
        """The result or the failure once the process has ended, else None. Stops it at its timeout."""
        code = self.process.poll()
        if code is None:
            if self.age > self.timeout_s:
                self.stop(f"it took longer than {self.timeout_s:g} s (timeout_s)")
            if time.monotonic() > self.kill_at:
                self.process.kill()
            return None
        if code != 0:
            ended = f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
            return Failed(self.trial, self.stopped or ended, self._tail())
        return self._result()

    def stop(self, why: str) -> None:
        """Terminates it, so that it writes a last checkpoint; kills it after STOP_S."""
        if not self.stopped:
            self.stopped, self.kill_at = why, time.monotonic() + STOP_S
            self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)

    def _printed(self) -> list[str]:
        with open(self.trial.beside("log"), "rb") as log:
            log.seek(self.from_byte)
            return log.read().decode(errors="replace").splitlines()

    def _tail(self) -> str:
        return "\n".join(f"    {line}" for line in self._printed()[-TAIL:])

    def _result(self) -> dict[str, Any] | Failed:
        for line in reversed(self._printed()):
            if line.startswith('{"mean_return"'):
                result = {"setting": self.trial.setting, "seed": self.trial.config.seed, **json.loads(line)}
                # Where episodes do not end, the evaluation may have fewer than `asked`.
                result |= {"asked": self.episodes, "began": self.began, "ended": time.monotonic()}
                replace_text(self.trial.beside("json"), json.dumps(result) + "\n")
                return result
        return Failed(self.trial, "the evaluation printed no result", self._tail())


class Sweep:
    """Runs what is not finished, at most `at_once` runs at a time."""

    def __init__(self, spec: Spec, trials: Sequence[Trial], at_once: int) -> None:
        self.spec, self.at_once = spec, at_once
        self.waiting = deque(trial for trial in trials if trial.result(spec.episodes) is None)
        self.total, self.done = len(trials), len(trials) - len(self.waiting)
        self.running: list[Child] = []
        self.failed: list[Failed] = []
        self.took: list[float] = []  # seconds of each run that finished in this sweep
        self.interrupted = 0  # signal number

    def check_memory(self) -> None:
        """Raises a UserError if the largest stores that may run together do not fit into RAM."""
        needed, available = sum(sorted(trial.nbytes for trial in self.waiting)[-self.at_once :]), available_memory()
        if needed > 0.9 * available:
            raise UserError(
                f"The stores of {self.at_once} runs at once need {format_bytes(needed)}, but {format_bytes(available)} of "
                "memory is free; lower --at-once or store.capacity."
            )

    def run(self) -> None:
        if self.waiting:
            print(f"{self.total} runs, {self.done} already finished, {self.at_once} at a time", flush=True)
        with interruptible(self._stop, "Stopping after a last checkpoint of each run"):
            try:
                while self.running or (self.waiting and not self.interrupted):
                    self._start()
                    self._collect()
                    time.sleep(POLL_S)
            finally:
                for child in self.running:
                    child.kill()

    def _start(self) -> None:
        if self.interrupted:
            for child in self.running:
                child.stop("the sweep was stopped")
        while self.waiting and len(self.running) < self.at_once and not self.interrupted:
            trial = self.waiting.popleft()
            begun = any((trial.path / "checkpoints").glob("[0-9]*"))
            print(f"{trial.name}: {'resumed' if begun else 'started'}", flush=True)
            self.running.append(Child(trial, self.spec.episodes, self.spec.timeout_s))

    def _collect(self) -> None:
        for child in list(self.running):
            outcome = child.outcome()
            if outcome is None:
                continue
            self.running.remove(child)
            if isinstance(outcome, Failed):
                if not self.interrupted:
                    self.failed.append(outcome)
                    print(f"{child.trial.name}: failed, {outcome.why}", flush=True)
                continue
            self.done += 1
            self.took.append(child.age)
            score = f"{child.trial.name}: greedy {number(outcome['mean_return'])} after {child.age:.0f} s"
            left = f"; about {format_seconds(self._left())} left" if self.waiting or self.running else ""
            print(f"{self.done}/{self.total} {score}{left}", flush=True)

    def _left(self) -> float:
        """Estimated seconds left, if the other runs take as long as the finished ones."""
        mean = statistics.fmean(self.took)
        work = mean * len(self.waiting) + sum(max(0.0, mean - child.age) for child in self.running)
        return work / min(self.at_once, len(self.waiting) + len(self.running))

    def _stop(self, number: int) -> None:
        self.interrupted = number
