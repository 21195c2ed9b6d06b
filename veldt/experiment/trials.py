"""The trials of a sweep: runs them in child processes, several at a time, and makes a table of the finished ones."""

import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from veldt.experiment.directory import asks
from veldt.experiment.settings import as_plain
from veldt.experiment.sweep import Spec, Trial, check_stores
from veldt.files import replace_text
from veldt.foreign import regular
from veldt.runtime.local.zygote import interpreter
from veldt.signals import interruptible
from veldt.watching.links import amount, figure, format_seconds
from veldt.watching.sinks import evaluations, read_metrics

STOP_S = 60.0  # for a last checkpoint, before a run that should stop is killed
POLL_S = 0.05
TAIL = 15  # lines of a failed run's log that are shown
RESAMPLES = 10_000


@dataclass(frozen=True)
class Failed:
    trial: Trial
    why: str
    tail: str  # the last lines of its log

    def __str__(self) -> str:
        return f"{self.trial.name} failed: {self.why}; the end of {self.trial.beside('log')}:\n{self.tail}"


CODE = (
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
        if asks(trial.config):  # which `read_spec` was allowed to
            train, evaluate = [*train, "--trust"], [*evaluate, "--trust"]
        command, environment = interpreter(CODE, str(os.getpid()), json.dumps([train, evaluate]))
        line = f"{shlex.join(['veldt', *train])} && {shlex.join(['veldt', *evaluate])}"
        with open(trial.beside("log"), "ab", opener=regular) as log:
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
            return self._failed(self.stopped or ended)
        for line in reversed(self._printed()):
            if line.startswith('{"mean_return"'):
                result = {"setting": self.trial.setting, "seed": self.trial.config.seed, **json.loads(line)}
                # Where episodes do not end, the evaluation may have fewer than `asked`.
                result |= {"asked": self.episodes, "began": self.began, "ended": time.monotonic()}
                replace_text(self.trial.beside("json"), json.dumps(result) + "\n")
                return result
        return self._failed("the evaluation printed no result")

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

    def _failed(self, why: str) -> Failed:
        return Failed(self.trial, why, "\n".join(f"    {line}" for line in self._printed()[-TAIL:]))


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
        needed = sum(sorted(trial.nbytes for trial in self.waiting)[-self.at_once :])
        check_stores(needed, self.at_once, "runs", "--at-once")

    def run(self) -> None:
        if self.waiting:
            print(f"{self.total} runs, {self.done} already finished, {self.at_once} at a time", flush=True)
        with interruptible(self._stop, "Stopping after a final checkpoint of each run"):
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
            score = f"{child.trial.name}: greedy {figure(outcome['mean_return'])} after {child.age:.0f} s"
            left = f"; about {format_seconds(self._left())} left" if self.waiting or self.running else ""
            print(f"{self.done}/{self.total} {score}{left}", flush=True)

    def _left(self) -> float:
        """Estimated seconds left, if the other runs take as long as the finished ones."""
        mean = statistics.fmean(self.took)
        work = mean * len(self.waiting) + sum(max(0.0, mean - child.age) for child in self.running)
        return work / min(self.at_once, len(self.waiting) + len(self.running))

    def _stop(self, number: int) -> None:
        self.interrupted = number


@dataclass(frozen=True)
class Score:
    greedy: float  # mean return of the last evaluation
    area: float | None  # mean return of the evaluations during training, over env steps
    reached: tuple[float, float] | None  # env steps and seconds until an evaluation first reached `reach`
    seconds: float  # of training


def score(result: dict[str, Any], lines: list[dict[str, Any]], reach: float | None) -> Score:
    points = evaluations(lines)
    first = next((p for p in points if reach is not None and p.mean_return >= reach), None)
    return Score(
        greedy=float(result["mean_return"]),
        area=mean_over([p.env_steps for p in points], [p.mean_return for p in points]),
        reached=None if first is None else (first.env_steps, first.time_s),
        seconds=float(lines[-1]["time_s"]) if lines else math.nan,  # a full disk may have lost them
    )


def mean_over(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The mean of y from the first x to the last, interpolated linearly."""
    if not xs:
        return None
    if xs[-1] == xs[0]:
        return statistics.fmean(ys)
    return float(np.trapezoid(ys, xs)) / (xs[-1] - xs[0])


def bootstrap(values: Sequence[float], level: float = 0.95, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the mean; None for a single value. Deterministic.

    It is too narrow for few values: for normal ones it covers the true mean in 74 % of cases with 3 values, in 90 % with
    10 and in 94 % with 40.
    """
    if len(values) < 2:
        return None
    x = np.asarray(values, float)
    means = x[np.random.default_rng(0).integers(0, len(x), (resamples, len(x)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def scores(spec: Spec, trials: Sequence[Trial]) -> dict[str, list[Score]]:
    out: dict[str, list[Score]] = {setting.name: [] for setting in spec.settings}
    for trial in trials:
        result = trial.result(spec.episodes)
        if result is not None:
            file = trial.path / "metrics.jsonl"
            out[trial.setting].append(score(result, read_metrics(file) if file.exists() else [], spec.reach))
    return out


def table(spec: Spec, found: dict[str, list[Score]], command: str) -> str:
    """Markdown: a row for each setting, an explanation of the columns, and the command."""
    title = f"greedy return of {amount(spec.episodes, 'episodes')}"
    head = ["setting", "seeds", title, "return over the run", "seconds per run"]
    if spec.reach is not None:
        head[4:4] = [f"env steps to {spec.reach:g}", f"seconds to {spec.reach:g}"]
    rows = [head, *([name.replace("|", "\\|"), *_row(spec, there)] for name, there in found.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])])
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [
        f"Means over seeds [95 % bootstrap intervals: percentiles of {RESAMPLES:,} resamples of the seeds. With few seeds",
        "they are too narrow: with 3 they cover the true mean about 3 times in 4, with 10 about 9 times in 10].",
        "The return over the run is the mean of its evaluations during training, over env steps. Seconds are of training.",
    ]
    if spec.reach is not None:
        notes += [
            f"To {spec.reach:g}: until the first evaluation that reached it; the median over seeds, where a run that never",
            "reached it counts as later than all others.",
        ]
    return "\n".join([f"# {spec.name}", "", *lines, "", *notes, "", f"    {command}", ""])


def _row(spec: Spec, there: list[Score]) -> list[str]:
    n = len(spec.seeds)
    seeds = str(n) if len(there) == n else f"{len(there)} of {n}"
    row = [seeds, estimate([s.greedy for s in there]), estimate([s.area for s in there if s.area is not None])]
    if spec.reach is not None:
        reached = [s.reached for s in there if s.reached is not None]
        row.append(f"{figure(_median([at[0] for at in reached], len(there)))} ({len(reached)} of {len(there)})")
        row.append(figure(_median([at[1] for at in reached], len(there))))
    return [*row, figure(statistics.fmean(s.seconds for s in there)) if there else "-"]


def _median(values: list[float], n: int) -> float:
    """The median of n numbers; missing ones count as infinite."""
    return statistics.median([*values, *[math.inf] * (n - len(values))]) if n else math.inf


def estimate(values: Sequence[float]) -> str:
    if not values:
        return "-"
    interval = bootstrap(values)
    around = "-" if interval is None else f"{figure(interval[0])}, {figure(interval[1])}"
    return f"{figure(statistics.fmean(values))} [{around}]"
