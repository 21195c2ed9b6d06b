"""veldt top: watches a run from another terminal.

It reads what the run writes (config.yaml, the end of metrics.jsonl, processes.json) and what the kernel tells about its
processes. It holds no lock and writes nothing, so the run does not notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro
import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from veldt.cli.parse import parse
from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.watching.view import View, number, percent, short

END = 1 << 19  # bytes: of a longer metrics file only so much of its end is read
FIRST_S = 0.25  # between the two looks that it takes to see how busy a process is
QUIET_S = 10.0  # without a line, or ten times log.every, before that is pointed out


@dataclass(frozen=True)
class Top:
    run: tyro.conf.Positional[Path | None] = None
    """The run's directory. Without one, the runs of runs/ that are running are listed."""
    every: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Print one picture and end."""


def run(argv: list[str]) -> int:
    example = (
        "Watches a run from another terminal: its chain link by link, its processes, its bottleneck.\n\n"
        "Example: veldt top runs/my-run"
    )
    args = parse(Top, argv, prog="veldt top", description=example)
    if not 0.05 <= args.every <= 3_600:
        raise UserError(f"every must be from 0.05 to 3600 seconds, not {args.every:g}.")
    console = Console()
    if args.run is None:
        show_running(Path("runs"), console)
    else:
        watch(Watched(args.run), console, args.every, args.once or not console.is_terminal)
    return 0


def watch(seen: Watched, console: Console, every: float, once: bool) -> None:
    """Shows the run again and again until it is over, or once."""
    look = seen.look()
    if look.processes:  # how busy they are shows from one look to the next
        time.sleep(FIRST_S)
        look = seen.look()
    if once or not look.pid:
        console.print(look.picture(console))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(look.picture(console, console.height), refresh=True)
            if not look.pid:
                return
            time.sleep(every)
            look = seen.look()


def show_running(directory: Path, console: Console) -> None:
    found = [(path, pid) for path in sorted(directory.glob("*")) if (pid := holder(path))]
    if not found:
        raise UserError(f"No run is running in {directory}/; say which directory to look at: veldt top runs/my-run")
    for path, pid in found:
        look = Watched(path).look()
        steps, rate = number(look.line, "env_steps") or 0, number(look.line, "env_steps_per_s")
        text = f"{path}  {steps:,.0f} of {look.steps:,} env steps"
        text += "" if rate is None else f", {short(rate)} a second"
        console.print(f"{text}, process {pid}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"\nWatch one with: veldt top {found[0][0]}", highlight=False, soft_wrap=True, markup=False)


def holder(path: Path) -> int:
    """The process that trains in this directory; 0: there is none.

    It is the one that has the lock file open. Trying the lock would tell as well, but could get in the way of a run that
    is about to take it.
    """
    try:
        lock, pid = os.stat(path / ".lock"), int((path / ".lock").read_text())
        owner = os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError):
        return 0
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return pid if any(_is_file(entry, lock) for entry in entries) else 0
    except PermissionError:  # somebody else's, into which we cannot look
        return pid if owner == lock.st_uid else 0
    except OSError:
        return 0


def _is_file(entry: os.DirEntry[str], file: os.stat_result) -> bool:
    try:
        return os.path.samestat(entry.stat(), file)
    except OSError:  # closed meanwhile
        return False


class Tail:
    """The newest value of each number in a metrics file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[str, Any] = {}
        self._at = 0  # all lines before this byte are known

    def read(self) -> float | None:
        """Reads what is new, and returns how many seconds ago it was written; None: there is no file."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._at:  # another file
                    self._at, self.latest = 0, {}
                start = max(self._at, status.st_size - END)
                file.seek(start)
                data = file.read(END)
        except OSError:
            return None
        stop = data.rfind(b"\n") + 1  # the one who writes may be in the middle of a line, and so may be our start
        if stop:
            self._at = start + stop
        for text in data[:stop].splitlines():
            self._take(text)
        return max(0.0, time.time() - status.st_mtime)

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            return
        if isinstance(line, dict):
            if "resumed_from" in line:  # what came before may have been done again
                self.latest = {}
            self.latest |= {key: x for key, x in line.items() if x is not None}


@dataclass(frozen=True)
class Process:
    """A process of the run, as the kernel sees it."""

    name: str
    pid: int
    state: str
    cpu: float | None = None  # cores
    memory: int | None = None  # bytes, with what it shares with others
    threads: int | None = None
    restarts: int | None = None


@dataclass(frozen=True)
class Look:
    """What was seen of a run at one moment."""

    path: Path
    config: dict[str, Any]
    line: dict[str, Any]
    pid: int  # of the process that trains; 0: it is not running
    processes: list[Process]
    age: float | None  # seconds since the last line of metrics
    killed: bool  # it is not running and had no time to say goodbye

    @property
    def steps(self) -> int:
        return int(number(self.config, "steps") or 0)

    def picture(self, console: Console, height: int = 0) -> RenderableType:
        """`height` is how many lines there are to draw on, and processes get what is left of them; 0: all that it takes."""
        name = " on ".join(str(self.config[key]) for key in ("recipe", "env") if key in self.config)
        parts: list[RenderableType] = []
        if self.line:
            parts.append(View(name, self.line, self.steps))
        used = sum(len(console.render_lines(part)) for part in parts) + 5  # with what stands around the processes
        room = height - used if height else len(self.processes)
        if self.processes and room >= 2:
            parts.append(Padding(process_table(self.processes, room), (1 if parts else 0, 0, 0, 0)))
        text, style = self._status()
        parts.append(Padding(Text(text, style), (1 if parts else 0, 0, 0, 0)))
        return Group(*parts)

    def _status(self) -> tuple[str, str]:
        """One sentence on how the run is, and its style."""
        done = number(self.line, "env_steps")
        if self.pid:
            if done is None:
                return f"{self.path} is running as process {self.pid}; there are no numbers yet.", "dim"
            log = self.config.get("log")
            every = number(log, "every") if isinstance(log, dict) else None
            late = self.age is not None and self.age > max(QUIET_S, 10 * (every or 0.0))
            text = f"{self.path} is running as process {self.pid}; these numbers are {ago(self.age)} old."
            return text, "yellow" if late else "dim"
        if done is None:
            return "This run is not running, and there are no numbers of it.", "yellow"
        if self.steps and done >= self.steps:
            return f"This run has ended, {ago(self.age)} ago. Evaluate it with: veldt eval {self.path}", "green"
        how = "was killed" if self.killed else "stopped"
        where = f"it {how} at {done:,.0f} of {self.steps:,} env steps, {ago(self.age)} ago"
        return f"This run is not running: {where}. Go on with: veldt resume {self.path}", "yellow"


class Watched:
    """A run, seen from outside."""

    def __init__(self, path: Path) -> None:
        if not (path / "config.yaml").exists() and not holder(path):
            raise UserError(f"{path} is not a run directory: it has no config.yaml.")
        self.path = path
        self._tail = Tail(path / "metrics.jsonl")
        self._config: dict[str, Any] = {}
        self._config_at = 0  # when it was written
        self._known: dict[int, psutil.Process] = {}

    def look(self) -> Look:
        pid = holder(self.path)  # first: what a run writes before it ends is then seen below
        age = self._tail.read()
        table = self._table()
        processes = list(self._processes(table, pid)) if pid else []
        return Look(self.path, self._read_config(), dict(self._tail.latest), pid, processes, age, bool(table) and not pid)

    def _read_config(self) -> dict[str, Any]:
        file = self.path / "config.yaml"
        with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            written = file.stat().st_mtime_ns
            if written != self._config_at:
                values = yaml.safe_load(file.read_text())
                self._config, self._config_at = values if isinstance(values, dict) else {}, written
        return self._config

    def _table(self) -> dict[str, Any]:
        """processes.json: who there is, while a run in processes is running."""
        try:
            table = json.loads((self.path / "processes.json").read_text())
        except (OSError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}

    def _processes(self, table: dict[str, Any], pid: int) -> Iterator[Process]:
        entries = {name: entry for name, entry in table.items() if isinstance(entry, dict)}
        if number(entries.get("supervisor", {}), "pid") != pid:  # it runs in one process; or that file is an earlier run's
            entries = {"train": {"pid": pid}}
        pids = {int(number(entry, "pid") or 0) for entry in entries.values()}
        self._known = {pid: process for pid, process in self._known.items() if pid in pids}
        for name, entry in entries.items():
            restarts = number(entry, "restarts")
            yield self._process(name, int(number(entry, "pid") or 0), None if restarts is None else int(restarts), pid)

    def _process(self, name: str, pid: int, restarts: int | None, supervisor: int) -> Process:
        if not pid:
            return Process(name, pid, "starting", restarts=restarts)
        try:
            process = self._known.get(pid)
            if process is None or not process.is_running():  # is_running: the pid is not another's by now
                process = self._known[pid] = psutil.Process(pid)
                process.cpu_percent()
            with process.oneshot():
                if pid != supervisor and not process.name().startswith("veldt"):
                    raise psutil.NoSuchProcess(pid)
                cpu, memory, threads = process.cpu_percent() / 100, process.memory_info().rss, process.num_threads()
                return Process(name, pid, str(process.status()), cpu, memory, threads, restarts)
        except psutil.Error:
            self._known.pop(pid, None)
            return Process(name, pid, "gone", restarts=restarts)


def process_table(processes: list[Process], room: int) -> Table:
    """At most so many rows; the last one then stands for the rest."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim underline")
    table.add_column("process", style="cyan", no_wrap=True)
    for name in ("pid", "state", "CPU", "memory", "threads", "restarts"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    shown = processes if len(processes) <= room else processes[: room - 1]
    for p in shown:
        table.add_row(
            Text(p.name),
            str(p.pid or "-"),
            Text(p.state, "red" if p.state in ("gone", "starting", "stopped", "zombie") else ""),
            "-" if p.cpu is None else percent(p.cpu),
            "-" if p.memory is None else format_bytes(p.memory),
            "-" if p.threads is None else str(p.threads),
            Text("" if p.restarts is None else str(p.restarts), "bold red" if p.restarts else ""),
        )
    rest = processes[len(shown) :]
    if rest:
        cpu, restarts = sum(p.cpu or 0.0 for p in rest), sum(p.restarts or 0 for p in rest)
        count = Text(str(restarts), "bold red" if restarts else "")
        table.add_row(f"{len(rest)} more", "", "", percent(cpu), "", "", count)
    return table


def ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
