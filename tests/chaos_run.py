"""The run that a schedule of faults plays against: the real command, what it writes, and what it may leave behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent
STEP_S = 5.0  # that a step may take
SAVED = 20_000  # env steps between two checkpoints
LIMIT_GB = 3.0  # RAM of the run
CLOCK = """
import mmap, os, struct, time
if path := os.environ.get("CHAOS_CLOCK"):
    with open(path, "rb") as file:
        _offset = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    _real = time.time
    time.time = lambda: _real() + struct.unpack("d", _offset)[0]
"""  # as sitecustomize.py: every Python process of the run has a wall clock that jumps


def drive() -> None:
    """The command's process: `veldt train`, with a learner that checks what it learns from."""
    sys.path.insert(0, str(HERE))
    import chaos

    import veldt.experiment.prepare as preparing
    from veldt import files
    from veldt.__main__ import command

    make, save = preparing.make_program, files.save_file

    def make_program(*args: Any) -> Any:
        program = make(*args)
        program.nodes["learner"] = dataclasses.replace(program.nodes["learner"], build=chaos.Inspector)
        return program

    def save_file(*args: Any, **kwargs: Any) -> Any:
        if Path(os.environ["CHAOS"], "full-disk").exists():  # where no small disk can be mounted
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(*args, **kwargs)

    preparing.make_program, files.save_file = make_program, save_file
    command()


class Run:
    """`veldt train` in a directory; after each end it may be started again, and goes on."""

    def __init__(self, recipe: str, seed: int, folder: Path, flags: list[str]) -> None:
        self.folder, self.path, self.orders = folder, folder / "disk" / "run", folder / "orders"
        for each in (folder / "disk", self.orders, folder / "site"):
            each.mkdir(parents=True)
        self.mounted = mount(folder / "disk")
        (folder / "site" / "sitecustomize.py").write_text(CLOCK)
        (folder / "clock").write_bytes(bytes(8))
        with open(folder / "clock", "r+b") as file:
            self.clock = mmap.mmap(file.fileno(), 8)
        self.proxy = Proxy()
        settings = {"env": "orders:Pole", "run": self.path, "steps": 10**9, "seed": seed, "step-timeout": STEP_S}
        settings |= {"log.every": 0.2, "checkpoint.every": SAVED, "eval.every": 5_000, "eval.episodes": 10}
        settings |= {"memory.limit": LIMIT_GB, "gate.listen": f"127.0.0.1:{self.proxy.to}", "gate.seats": 1, "max-bad": 1}
        words = [word for name, x in settings.items() for word in (f"--{name}", str(x))]
        self.command = ["train", recipe, "--quiet", *words, "--learner.no-anneal", *flags]
        paths = [str(folder / "site"), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CHAOS": str(self.orders)}
        self.environment["CHAOS_CLOCK"] = str(folder / "clock")
        self.output = open(folder / "output.txt", "ab")  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None
        self.joined: subprocess.Popen[bytes] | None = None
        self.elsewhere: set[int] = set()  # pids of actors that joined
        self.line: dict[str, Any] = {}  # the newest value of each metric
        self.members: dict[int, psutil.Process] = {}  # all that ever belonged to it
        self.at = 0  # bytes of its metrics that were read

    def start(self) -> None:
        code = "import chaos_run; chaos_run.drive()"
        self.process = self._popen([sys.executable, "-c", code, *self.command])

    def join(self) -> None:
        """Starts the actor that joins, if it is not there."""
        if (self.joined is None or self.joined.poll() is not None) and (self.path / "token").exists():
            flags = ["--connect", f"127.0.0.1:{self.proxy.at}", "--token-file", str(self.path / "token")]
            words = [sys.executable, "-m", "veldt", "actor", *flags, "--env", "orders:Pole", "--patience", "300"]
            self.joined = self._popen(words)
            self.elsewhere.add(self.joined.pid)

    def _popen(self, words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=self.output, stderr=self.output, start_new_session=True
        )

    def read(self) -> list[dict[str, Any]]:
        """The lines of metrics since the last call."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                file.seek(self.at)
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.at += len(whole) + 1 if whole else 0
        lines = [json.loads(text) for text in whole.splitlines() if text]
        for line in lines:
            self.line |= line
        return lines

    def table(self) -> dict[str, dict[str, Any]]:
        """Its processes, by name; empty while it is away."""
        try:
            table: dict[str, dict[str, Any]] = json.loads((self.path / "processes.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return table if self.process is not None and table["supervisor"]["pid"] == self.process.pid else {}

    def manifest(self) -> dict[str, Any]:
        """Of its newest checkpoint."""
        found = sorted((self.path / "checkpoints").glob("[0-9]*/manifest.json"))
        out: dict[str, Any] = json.JSONDecoder().raw_decode(found[-1].read_text())[0] if found else {"env_steps": 0}
        return out

    def saved(self) -> int:
        return int(self.manifest()["env_steps"])

    def note_members(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                self.members.setdefault(each.pid, each)

    def left(self) -> list[psutil.Process]:
        """Those that are there though the command is not."""
        return [each for each in self.members.values() if alive(each)]

    def orphans(self) -> list[str]:
        """Processes that an environment started and that have outlived their actor. Those of one that joined, which has
        no supervisor, are ended here."""
        found = (file.name.split("-")[1:] for file in self.orders.glob("started-*"))
        gone = [
            (pid, int(parent))
            for pid, parent in found
            if psutil.pid_exists(int(pid)) and not psutil.pid_exists(int(parent))
        ]
        for pid, parent in gone:
            if parent in self.elsewhere:
                os.kill(int(pid), signal.SIGKILL)
        return [pid for pid, parent in gone if parent not in self.elsewhere]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def set_clock(self, offset: float) -> None:
        self.clock[:] = struct.pack("d", offset)

    def fill_disk(self) -> None:
        if not self.mounted:
            return (self.orders / "full-disk").touch()
        with open(self.path.parent / "ballast", "wb", 0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass  # no room for this much

    def free_disk(self) -> None:
        (self.orders / "full-disk" if not self.mounted else self.path.parent / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        for process in (self.joined, self.process):
            if process is not None:
                process.kill()
                process.wait(30)
        self.orphans()
        self.proxy.close()
        self.output.close()
        self.clock.close()
        if self.mounted:
            subprocess.run(["umount", "-l", self.path.parent], check=False, timeout=30)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mount(path: Path) -> bool:
    """A small disk, where that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(path)]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


class Proxy:
    """Stands between the gate and an actor that joins: cuts, swallows and refuses."""

    def __init__(self) -> None:
        self.to = free_port()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.at = self.listener.getsockname()[1]
        self.swallows = self.refuses = False
        self.open: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        for each in list(self.open):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is gone

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                if self.refuses:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self.to), 5.0)
            except OSError:
                client.close()
                continue
            for source, sink in ((client, server), (server, client)):
                source.settimeout(None)
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        self.open.add(source)
        try:
            while chunk := source.recv(1 << 16):
                while self.swallows:
                    time.sleep(0.02)
                sink.sendall(chunk)
        except OSError:
            pass
        finally:
            self.open.discard(source)
            for each in (source, sink):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            source.close()

    def close(self) -> None:
        self.listener.close()
        self.swallows = False
        self.cut()


def free_port() -> int:
    """One that is not handed out by the kernel on its own, so that it stays free while the run is away."""
    while True:
        port = random.SystemRandom().randint(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
