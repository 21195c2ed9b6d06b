"""Watching a run from another process.

It reads the files of the run (config.yaml, the end of metrics.jsonl, metrics.json, processes.json) and asks the kernel
about its processes. It holds no lock and writes nothing, so the run is not disturbed.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from veldt import metrics
from veldt.errors import UserError
from veldt.foreign import ConfigLoader, plain, read_text, regular
from veldt.machine import format_bytes
from veldt.watching.links import number, percent, short
from veldt.watching.sinks import parse
from veldt.watching.view import NARROW, View, make_table

END = 1 << 19  # bytes that are read at the end of a long metrics file
FIRST_S = 0.25  # between the first two looks: CPU usage is measured from one look to the next
QUIET_S = 10.0  # age of the last line, or ten times log.every, from which it is highlighted


def watch(watched: "Watched", console: Console, every: float, once: bool) -> None:
    look = watched.look()
    if look.processes:
        time.sleep(FIRST_S)
        look = watched.look()
    if once or not look.pid:
        console.print(look.picture(console))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(look.picture(console, console.height), refresh=True)
            if not look.pid:
                return
            time.sleep(every)
            look = watched.look()


def show_running(directory: Path, console: Console) -> None:
    found = [(path, pid) for path in sorted(directory.glob("*")) if (pid := holder(path))]
    if not found:
        raise UserError(f"No run is running in {directory}/; name a run directory: veldt top runs/my-run")
    for path, pid in found:
        look = Watched(path).look()
        steps, rate = number(look.line, "env_steps") or 0, number(look.line, "env_steps_per_s")
        text = f"{path}  {steps:,.0f} of {look.steps:,} env steps"
        text += "" if rate is None else f", {short(rate)} a second"
        console.print(f"{text}, process {pid}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"\nWatch one with: veldt top {shlex.quote(str(found[0][0]))}", highlight=False, soft_wrap=True, markup=False
    )


def holder(path: Path) -> int:
    """The process that trains in this directory; 0: none does.

    It has the lock file open. Taking the lock to find out would disturb a run that is about to take it.
    """
    try:
        lock, pid = os.stat(path / ".lock", follow_symlinks=False), int(read_text(path / ".lock", 64))
        owner = os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError):
        return 0
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return pid if any(_is_file(entry, lock) for entry in entries) else 0
    except PermissionError:  # the process belongs to another user
        return pid if owner == lock.st_uid else 0
    except OSError:
        return 0


def _is_file(entry: os.DirEntry[str], file: os.stat_result) -> bool:
    try:
        return os.path.samestat(entry.stat(), file)
    except OSError:  # closed in the meantime
        return False


class Tail:
    """The newest value of each number in a metrics file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[str, Any] = {}
        self._at = 0  # all lines before this byte have been read

    def read(self) -> float | None:
        """Reads the new lines, and returns their age in seconds; None: there is no file."""
        try:
            with open(self.path, "rb", opener=regular) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._at:  # another file
                    self._at, self.latest = 0, {}
                start = max(self._at, status.st_size - END)
                file.seek(start)
                data = file.read(END)
        except OSError:
            return None
        stop = data.rfind(b"\n") + 1  # the first and the last line may be incomplete
        if stop:
            self._at = start + stop
        for line in parse(data[:stop].split(b"\n")):
            if "resumed_from" in line:  # the lines before may be of steps that were repeated
                self.latest = {}
            self.latest |= {key: x for key, x in line.items() if x is not None}
        return max(0.0, time.time() - status.st_mtime)


@dataclass(frozen=True)
class Process:
    """A process of the run, as the kernel sees it."""

    name: str
    pid: int
    state: str
    cpu: float | None = None  # cores
    memory: int | None = None  # bytes, including shared memory
    threads: int | None = None
    restarts: float | None = None


@dataclass(frozen=True)
class Look:
    path: Path
    config: dict[str, Any]
    line: dict[str, Any]
    pid: int  # of the process that trains; 0: the run is not running
    processes: list[Process]
    age: float | None  # seconds since the last line of metrics
    killed: bool  # it is not running and did not end by itself
    declarations: metrics.Declarations = field(default_factory=lambda: metrics.PACKAGE)

    @property
    def steps(self) -> int:
        return int(number(self.config, "steps") or 0)

    def picture(self, console: Console, height: int = 0) -> RenderableType:
        """In `height` lines, of which processes get what the rest leaves; 0: without a limit."""
        name = " on ".join(str(self.config[key]) for key in ("recipe", "env") if key in self.config)
        parts: list[RenderableType] = []
        if self.line:
            parts.append(View(name, self.line, self.steps, self.declarations))
        used = sum(len(console.render_lines(part)) for part in parts) + 5  # lines around the processes
        room = height - used if height else len(self.processes)
        if self.processes and room >= 2:
            parts.append(Padding(process_table(self.processes, room, console.width < NARROW), (1 if parts else 0, 0, 0, 0)))
        text, style = self._status()
        parts.append(Padding(Text(text, style), (1 if parts else 0, 0, 0, 0)))
        return Group(*parts)

    def _status(self) -> tuple[str, str]:
        """One sentence on the state of the run, and its style."""
        done = number(self.line, "env_steps")
        if self.pid:
            if done is None:
                return f"{self.path} is running as process {self.pid}; it has no metrics yet.", "dim"
            log = self.config.get("log")
            every = number(log, "every") if isinstance(log, dict) else None
            late = self.age is not None and self.age > max(QUIET_S, 10 * (every or 0.0))
            text = f"{self.path} is running as process {self.pid}; these numbers are {ago(self.age)} old."
            return text, "yellow" if late else "dim"
        if done is None:
            return "This run is not running, and has no metrics.", "yellow"
        if self.steps and done >= self.steps:
            return (
                f"This run has ended, {ago(self.age)} ago. Evaluate it with: veldt eval {shlex.quote(str(self.path))}",
                "green",
            )
        how = "was killed" if self.killed else "stopped"
        where = f"it {how} at {done:,.0f} of {self.steps:,} env steps, {ago(self.age)} ago"
        return f"This run is not running: {where}. Continue with: veldt resume {shlex.quote(str(self.path))}", "yellow"


class Watched:
    def __init__(self, path: Path) -> None:
        if not (path / "config.yaml").exists() and not holder(path):
            raise UserError(f"{path} is not a run directory: it has no config.yaml.")
        self.path = path
        self._tail = Tail(path / "metrics.jsonl")
        self._known: dict[int, psutil.Process] = {}

    def look(self) -> Look:
        pid = holder(self.path)  # first: a run that has ended has written its last line before
        age, line = self._tail.read(), dict(self._tail.latest)
        config = read_mapping(self.path / "config.yaml", lambda text: ConfigLoader(text).get_single_data())
        table = read_mapping(self.path / "processes.json", json.loads)  # is there while a run in processes is running
        processes = list(self._processes(table, pid)) if pid else []
        return Look(self.path, config, line, pid, processes, age, bool(table) and not pid, metrics.load(self.path))

    def _processes(self, table: dict[str, Any], supervisor: int) -> Iterator[Process]:
        entries = {name: entry for name, entry in table.items() if isinstance(entry, dict)}
        if number(entries.get("supervisor", {}), "pid") != supervisor:  # one process, or the file of an earlier run
            entries = {"train": {"pid": supervisor}}
        known, self._known = self._known, {}
        for name, entry in entries.items():
            pid, restarts = int(number(entry, "pid") or 0), number(entry, "restarts")
            if not pid:
                yield Process(name, pid, "starting", restarts=restarts)
                continue
            try:
                process = known.get(pid)
                if process is None or not process.is_running():  # is_running: the pid was not reused
                    process = psutil.Process(pid)
                    process.cpu_percent()
                with process.oneshot():
                    if pid != supervisor and not process.name().startswith("veldt"):
                        raise psutil.NoSuchProcess(pid)
                    cpu, memory, threads = process.cpu_percent() / 100, process.memory_info().rss, process.num_threads()
                    yield Process(name, pid, str(process.status()), cpu, memory, threads, restarts)
                self._known[pid] = process
            except (psutil.Error, ValueError, OverflowError):  # the file may hold any number
                yield Process(name, pid, "gone", restarts=restarts)


def read_mapping(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    """Empty if it cannot be read."""
    try:
        values = plain(load(read_text(path)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def process_table(processes: list[Process], room: int, narrow: bool = False) -> Table:
    """At most `room` rows; the last one then sums up the rest. `narrow`: without numbers that are seldom needed."""
    numbers = ("CPU", "memory") if narrow else ("CPU", "memory", "threads", "restarts")
    others = ("state", *numbers) if narrow else ("pid", "state", *numbers)
    table = make_table("process", *others, right=("pid", *numbers))

    def add(cells: dict[str, RenderableType]) -> None:
        table.add_row(*(cells.get(name, "") for name in ("process", *others)))

    shown = processes if len(processes) <= room else processes[: room - 1]
    for p in shown:
        cells: dict[str, RenderableType] = {
            "process": Text(p.name),
            "pid": str(p.pid or "-"),
            "state": Text(p.state, "red" if p.state in ("gone", "starting", "stopped", "zombie") else ""),
            "CPU": "-" if p.cpu is None else percent(p.cpu),
            "memory": "-" if p.memory is None else format_bytes(p.memory),
            "threads": "-" if p.threads is None else str(p.threads),
            "restarts": _restarts(p.restarts),
        }
        add(cells)
    rest = processes[len(shown) :]
    if rest:
        cpu, restarts = sum(p.cpu or 0.0 for p in rest), sum(p.restarts or 0.0 for p in rest)
        add({"process": f"{len(rest)} more", "CPU": percent(cpu), "restarts": _restarts(restarts)})
    return table


def _restarts(n: float | None) -> Text:
    return Text("" if n is None else f"{n:.0f}", "bold red" if n else "")


def ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
