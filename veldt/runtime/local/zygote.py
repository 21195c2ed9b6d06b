"""The zygote: a process that has imported everything, and forks one child for each process of the program.

A child is up in some 10 ms and shares the zygote's pages, where a fresh interpreter takes two seconds and 200 MB. The
zygote is started with exec, not forked from whoever calls us: that one may have threads and CUDA, the zygote has neither.

    supervisor --exec--> zygote        --fork--> child, child, ...
               --exec--> light zygote  --fork--> child, child, ...

The light one has neither torch nor numba: it is there in half a second, and a child that only steps environments is small.

Each is told by the kernel to die when its parent does (PR_SET_PDEATHSIG), so a SIGKILL of the supervisor or of the zygote
takes everything below with it. They speak over a private socket pair: JSON, and descriptors beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from veldt.compiled import LIGHT
from veldt.errors import ProcessFailed

MOST_FDS = 200  # in one message
IDLE_S = 3600.0  # of the zygote, which then looks again
PAD = 200  # bytes of the command line that a title may be written over
MESSAGE = 1 << 16
START_S = 120.0  # to import everything; the first time ever, numba compiles
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


Run = Callable[[str, dict[str, Any], dict[str, int], list[int]], None]  # name, order, shared descriptors, its own


class ZygoteDied(ProcessFailed):
    """The process that all others come from has gone."""


class Zygote:
    """The supervisor's end. `start` it as early as possible: its imports take as long as ours."""

    def __init__(self, light: bool = False) -> None:
        self.name = zygote_name(light)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            **threads,
            "VELDT_PATH": json.dumps([path for path in sys.path if isinstance(path, str)]),
            LIGHT: "1" if light else "",
        }
        # -P: what lies in the working directory, such as the user's own json.py, is not imported unless it is on our path.
        code = (
            "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('VELDT_PATH')); "
            "from veldt.runtime.local.zygote import main; main()"
        )
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid()), " " * PAD]
        # A session of its own: a Ctrl-C in the terminal reaches the supervisor alone.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.socket = ours
        self.ready = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.ready:
            if self._receive(max(0.0, deadline - time.monotonic())) is None:
                raise ZygoteDied(f"the {self.name} was not ready after {START_S:.0f} s")

    def share(self, descriptors: dict[str, int]) -> None:
        """Descriptors that every child forked from now on has, by name."""
        names = list(descriptors)
        for first in range(0, len(names), MOST_FDS):
            part = names[first : first + MOST_FDS]
            self._send({"share": part}, [descriptors[name] for name in part])

    def fork(self, name: str, order: dict[str, Any], fds: list[int]) -> None:
        """`events` will tell the pid, and later the exit status, of this child."""
        self._send({"fork": name, "order": order}, fds)

    def events(self) -> list[dict[str, Any]]:
        """What happened since: {"forked": name, "pid": n} and {"exited": pid, "status": n}."""
        out = []
        while (message := self._receive(0.0)) is not None:
            out.append(message)
        return out

    def close(self) -> None:
        """Ends it, and every child with it."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.socket.close()

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            socket.send_fds(self.socket, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise ZygoteDied(f"the {self.name} cannot be reached ({error}), exit status {self.process.poll()}") from None

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        if not readable([self.socket.fileno()], seconds):
            return None
        try:
            data = self.socket.recv(MESSAGE)
        except ConnectionResetError:  # it had not read all that it was told
            data = b""
        if not data:
            raise ZygoteDied(f"the {self.name} died with exit status {self.process.wait(5.0)}")
        message: dict[str, Any] = json.loads(data)
        self.ready |= "ready" in message
        return message if message else None


def readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Those that can be read, or have ended, waiting so long for the first. (select takes no more than 1024.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(1e3 * seconds))]


def zygote_name(light: bool) -> str:
    return "light zygote" if light else "zygote"


_early: dict[bool, Zygote] = {}  # light -> the one of this kind


def start_early(light: bool = False) -> None:
    """Starts the zygote of a kind before it is known what it will be asked for."""
    if light not in _early:
        _early[light] = Zygote(light)


def take(light: bool = False) -> Zygote:
    """The one that was started early, or a new one."""
    return _early.pop(light, None) or Zygote(light)


def discard() -> None:
    """Ends those that were started early and turned out not to be needed."""
    while _early:
        _early.popitem()[1].close()


def prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent goes. `parent` is who it was: it may be gone already."""
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def ignore_signals() -> None:
    """Only the supervisor acts on signals, also where they are sent to the whole group. (A handler that does nothing: what
    is ignored outright would be ignored by an environment's own processes as well.)"""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def set_title(title: str) -> None:
    """What ps and top show: the kernel's short name, and the command line, which is written over."""
    prctl(PR_SET_NAME, ctypes.c_char_p(title.encode()[:15]))
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
        if end - start > PAD:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, title.encode()[: end - start - 1], min(len(title.encode()), end - start - 1))


def main() -> None:
    """The zygote itself: imports, then forks on demand, and reaps."""
    handle, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    ignore_signals()
    light = bool(os.environ.get(LIGHT))
    set_title(f"veldt {zygote_name(light)}")
    if not light:
        import torch

        torch.set_num_threads(1)
    from veldt.runtime.local import process

    process.preload(light)
    gc.collect()
    gc.freeze()  # what is here now will never be garbage: no child touches these pages to find out
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "the zygote has threads"
    if light and (heavy := {"torch", "numba"} & sys.modules.keys()):
        names = " and ".join(sorted(heavy))
        print(f"veldt: a plugin has imported {names}: actors will need more memory than they should", file=sys.stderr)
    if not light:
        assert not torch.cuda.is_initialized(), "the zygote has initialised CUDA"  # type: ignore[no-untyped-call]
    Server(socket.socket(fileno=handle), process.run).serve()


class Server:
    """The zygote's own end."""

    def __init__(
        self, connection: socket.socket, run: Callable[[str, dict[str, Any], dict[str, int], list[int]], None]
    ) -> None:
        self.socket, self.run = connection, run
        self.descriptors: dict[str, int] = {}
        self.wakeup, alarm = os.pipe()
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.alarm = alarm

    def serve(self) -> None:
        self._tell({"ready": True})
        while True:
            ready = readable([self.socket.fileno(), self.wakeup], IDLE_S)
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
                self._reap()
            if self.socket.fileno() in ready:
                try:
                    data, fds, _, _ = socket.recv_fds(self.socket, MESSAGE, MOST_FDS)
                except ConnectionResetError:  # the supervisor has not even read what we told
                    data = b""
                if not data:
                    os._exit(0)  # the supervisor is gone, and the kernel is about to say so
                self._obey(json.loads(data), fds)

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        if "share" in message:
            self.descriptors |= dict(zip(message["share"], fds, strict=True))
            return
        name = message["fork"]
        me, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(me)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.socket.close()
            os.close(self.wakeup)
            os.close(self.alarm)
            self.run(name, message["order"], self.descriptors, fds)
            os._exit(0)
        for fd in fds:
            os.close(fd)
        self._tell({"forked": name, "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell({"exited": pid, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.socket.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)
