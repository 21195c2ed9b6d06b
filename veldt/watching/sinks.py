"""Where the metrics and the log of a run go: JSON lines and a log file. (Also `watching.events` and `watching.trackers`.)

A full disk never stops training: a line that cannot be written is dropped, with one error in the log.
"""

import contextlib
import errno
import json
import logging
import math
import os
import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from veldt.errors import UserError, writing
from veldt.foreign import plain, regular
from veldt.watching.links import number

log = logging.getLogger("veldt")
CHUNK = 1 << 20  # bytes that are read at a time


class Sink(Protocol):
    def write(self, line: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line; every line has time_s, env_steps and learner_steps. Removes a line that a kill cut short."""

    def __init__(self, path: Path) -> None:
        with writing(path):
            self._handle = regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        os.ftruncate(self._handle, _end_of_lines(self._handle))

    def write(self, line: dict[str, Any]) -> None:
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in line.items()}
        append_whole(self._handle, (json.dumps(finite) + "\n").encode())

    def sync(self) -> None:
        """What was written is on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


def append_whole(handle: int, data: bytes) -> None:
    """Appends all of the data, or raises an OSError and appends nothing: what follows half a record could not be read."""
    size = os.fstat(handle).st_size
    if os.write(handle, data) < len(data):  # the disk is full
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _end_of_lines(handle: int) -> int:
    """The byte after the last line break; the file of a long run does not fit in RAM."""
    with open(handle, "rb", closefd=False) as file:
        stop = file.seek(0, os.SEEK_END)
        while stop:
            start = max(0, stop - CHUNK)
            file.seek(start)
            if found := file.read(stop - start).rfind(b"\n") + 1:
                return start + found
            stop = start
    return 0


def parse(texts: Iterable[bytes], names: Container[str] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file that are whole; of each these metrics, or all."""
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield plain(line if names is None else {name: x for name, x in line.items() if name in names})


def read_metrics(path: Path, names: Collection[str] | None = None, having: str = "") -> list[dict[str, Any]]:
    """The lines of a metrics file, without those after a checkpoint that the run was resumed from.

    The file of a long run has a million lines, and all of their metrics would fill the RAM: `names` are those that are
    wanted beside the time and the env steps; `having` leaves out lines without this one.
    """
    wanted = None if names is None else {*names, "time_s", "env_steps", "resumed_from"}
    lines: list[dict[str, Any]] = []
    try:
        with open(path, "rb", opener=regular) as file:
            for line in parse(_having(file, having), wanted):
                if any(number(line, name) is None for name in ("time_s", "env_steps")):  # every line has them
                    continue
                if "resumed_from" in line:
                    lines = [old for old in lines if old["env_steps"] <= line["env_steps"]]
                lines.append(line)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    return lines


def _having(texts: Iterable[bytes], name: str) -> Iterable[bytes]:
    key = f'"{name}"'.encode()
    return (text for text in texts if key in text or b'"resumed_from"' in text) if name else texts


class Point(NamedTuple):
    """A point of a learning curve."""

    env_steps: float
    time_s: float
    mean_return: float
    learner_steps: float = math.nan  # NaN: unknown


EVALUATION = ("eval_return", "eval_env_steps", "eval_time_s", "eval_learner_steps", "learner_steps")  # what a point needs


def evaluations(lines: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Each at the env steps and the time of the weights that played. Lines of older versions lack these; then it is at
    those of the line, which was written when the evaluation had ended."""
    points = []
    for line in lines:
        if number(line, "eval_return") is not None:
            dated = number(line, "eval_env_steps") is not None and number(line, "eval_time_s") is not None
            steps, seconds = ("eval_env_steps", "eval_time_s") if dated else ("env_steps", "time_s")
            updates = number(line, "eval_learner_steps" if dated else "learner_steps")
            points.append(Point(line[steps], line[seconds], line["eval_return"], math.nan if updates is None else updates))
    return points


# Names for services that show settings and metrics.


def flat_dict(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings, as in a file, by dotted name."""
    out: dict[str, Any] = {}
    for name, x in values.items():
        out |= flat_dict(x, f"{prefix}{name}.") if isinstance(x, dict) else {f"{prefix}{name}": x}
    return out


GROUPS = {  # prefixes of names -> the group; the first that fits
    ("eval_", "train_", "episodes", "bad_", "evaluations"): "returns",
    ("store_", "demo_", "replay_ratio", "queue_fill", "refusing"): "store",
    ("busy/", "wait/", "cpu/", "gate_", "memory_", "restarts", "lag_", "learner_stands_s"): "system",
    ("first_update", "left_s", "resumed_from", "inference_batch"): "system",
}
CONSTANTS = frozenset(  # on every line, for readers of single lines
    ("actors", "envs", "cores", "queue", "samples_per_insert", "store_capacity", "store_min_size", "store_once")
    + ("inference_device", "memory_planned")
)
CLOCKS = ("env_steps", "time_s", "eval_env_steps", "eval_time_s", "eval_learner_steps")


def grouped(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line that change, by `group/name`. What no group has is the learner's: losses, values, entropies."""
    numbers = {name: float(x) for name, x in line.items() if isinstance(x, int | float)}
    return {group_of(name): x for name, x in numbers.items() if name not in CONSTANTS and name not in CLOCKS}


def group_of(name: str) -> str:
    group = "rates" if name.endswith("_per_s") else ""
    group = group or next((group for prefixes, group in GROUPS.items() if name.startswith(prefixes)), "learner")
    return f"{group}/{name.replace('/', '_')}"


class Metrics:
    """All sinks. One that fails, with whatever error, is logged once; it ends neither the run nor the other sinks."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks
        self._failed: set[int] = set()  # places of sinks

    def write(self, line: dict[str, Any]) -> None:
        for i, sink in enumerate(self.sinks):
            try:
                sink.write(line)
            except Exception as error:
                self._note(i, error)

    def close(self) -> None:
        for i, sink in enumerate(self.sinks):
            try:
                sink.close()
            except Exception as error:
                self._note(i, error)

    def _note(self, i: int, error: Exception) -> None:
        if i not in self._failed:
            name, known = type(self.sinks[i]).__name__, isinstance(error, OSError)  # a full disk, no network
            why = str(error) if known else f"{type(error).__name__}: {error}"
            log.error(
                "metrics cannot be written to %s (%s); training continues without them", name, why, exc_info=not known
            )
        self._failed.add(i)


class SafeFileHandler(logging.FileHandler):
    """A log file that prints no tracebacks if the disk is full."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", opener=regular)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextmanager
def log_to(path: Path, quiet: bool = False) -> Iterator[None]:
    """Writes the package's log to this file, and warnings to stderr too."""
    with writing(path):
        file = SafeFileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(logging.WARNING)
    screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handlers: list[logging.Handler] = [file] if quiet else [file, screen]
    level = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(level)
