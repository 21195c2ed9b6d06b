"""The zygote: a process that has imported everything, and forks one child for each process of the program.

A child starts in about 10 ms and shares the zygote's pages; a fresh interpreter takes two seconds and 200 MB. The zygote is
started with exec, not forked from the caller: the caller may have threads and CUDA, the zygote must not.

    supervisor --exec--> keeper --fork--> zygote        --fork--> child, child, ...
               --exec--> keeper --fork--> light zygote  --fork--> child, child, ...

The light one imports neither torch nor numba: it starts in half a second, and children that only step environments are
small.

The kernel kills zygote and children when their parent dies (PR_SET_PDEATHSIG). What an environment started, with fork or
exec, is not told; but each of these processes adopts the orphans below it (PR_SET_CHILD_SUBREAPER), so when a child dies,
its processes become the zygote's, which kills them. The keeper does the same for all when the zygote or the supervisor
dies; it imports and does nothing else. Only if the keeper itself is killed may such a process survive.

Supervisor and zygote exchange JSON messages and descriptors over a private socket pair.
"""

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

from setproctitle import setproctitle

from veldt.compiled import LIGHT
from veldt.errors import ProcessFailed

MAX_FDS = 200  # in one message
IDLE_S = 3600.0  # between two polls of an idle zygote
MESSAGE = 1 << 16
START_S = 120.0  # to import everything; the first time ever, numba compiles
ASK_S = 1.0  # between two questions whether a zygote is there
WIPE_S = 3.0  # for a keeper to kill all that is left
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END = getattr(
    signal, "SIGRTMIN", 0
)  # asks a keeper to end, with all below it; also sent by the kernel when the supervisor dies
KILL = getattr(signal, "SIGKILL", 0)
NAMES = {False: "zygote", True: "light zygote"}


class ZygoteDied(ProcessFailed):
    """The process that forks all others has died."""


class Zygote:
    """The supervisor's end. Start it as early as possible: its imports take as long as the caller's."""

    def __init__(self, light: bool = False) -> None:
        self.name = NAMES[light]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        code = "from veldt.runtime.local.zygote import main; main()"
        command, environment = interpreter(code, str(theirs.fileno()), str(os.getpid()))
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **environment, **threads, LIGHT: "1" if light else ""}
        # In a new session, so that Ctrl-C in the terminal reaches only the supervisor.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.socket, self.pid, self.ready = ours, 0, False
        self._asked, self._heard = 0.0, time.monotonic()  # when it was asked whether it is there, or 0; its last answer
        self.useful = False  # a process that it forked became ready
        self.failures = 0  # zygotes before it, in a row, that were not useful

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.ready:
            if self._receive(max(0.0, deadline - time.monotonic())) is None:
                raise ZygoteDied(f"the {self.name} was not ready after {START_S:.0f} s")

    def share(self, descriptors: dict[str, int]) -> None:
        """Gives all children forked from now on these descriptors, by name."""
        names = list(descriptors)
        for first in range(0, len(names), MAX_FDS):
            part = names[first : first + MAX_FDS]
            self._send({"share": part}, [descriptors[name] for name in part])

    def fork(self, name: str, order: dict[str, Any], fds: list[int]) -> None:
        """`events` reports the pid of this child and, later, its exit status."""
        self._send({"fork": name, "order": order}, fds)

    def events(self) -> list[dict[str, Any]]:
        """Events since the last call: {"forked": name, "pid": n}, {"failed": name, "why": text} where that could not be
        forked, and {"exited": pid, "status": n}."""
        out = []
        while (message := self._receive(0.0)) is not None:
            out.append(message)
        return out

    def check(self, seconds: float) -> None:
        """Asks now and then whether it is there. Raises ZygoteDied if it has not answered for this long, though `events`
        was called: it may be stopped."""
        now = time.monotonic()
        if self._asked and now - self._asked > seconds:
            raise ZygoteDied(f"the {self.name} has not answered for {now - self._asked:.1f} s")
        if not self._asked and now - self._heard > ASK_S:
            self._send({"ask": True}, [])
            self._asked = now

    def close(self) -> None:
        """Kills it, and all below it."""
        for number in (END, signal.SIGCONT):
            self.process.send_signal(number)
        try:
            self.process.wait(WIPE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WIPE_S)
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
        except ConnectionResetError:  # it died with unread messages
            data = b""
        if not data:
            raise ZygoteDied(f"the {self.name} died with exit status {self.process.wait(5.0)}")
        message: dict[str, Any] = json.loads(data)
        self._asked, self._heard = 0.0, time.monotonic()
        if "ready" in message:
            self.ready, self.pid = True, message["ready"]
        return message


def interpreter(code: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a new interpreter that runs this code and imports from our path. (-P: modules in
    the working directory, such as the user's own json.py, are imported only if it is on our path.)"""
    code = f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop('VELDT_PATH')); {code}"
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    return [sys.executable, "-P", "-c", code, *arguments], {**os.environ, "VELDT_PATH": paths}


def readable(fds: Iterable[int], seconds: float) -> list[int]:
    """The descriptors that can be read or have ended; waits this long for the first. (select is limited to 1024.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(1e3 * seconds))]


_early: dict[bool, Zygote] = {}  # light -> the zygote of this kind


def start_early(light: bool = False) -> None:
    if light not in _early:
        _early[light] = Zygote(light)


def take(light: bool = False) -> Zygote:
    return _early.pop(light, None) or Zygote(light)


def discard() -> None:
    """Ends zygotes that were started early and not taken."""
    while _early:
        _early.popitem()[1].close()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent(parent: int, number: int = KILL) -> None:
    """Makes the kernel send this signal when the parent dies. `parent` is the expected pid: it may be dead already. Only
    Linux can."""
    if sys.platform != "linux":
        return
    _prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def children() -> list[int]:
    """Of this process, with those that it adopted."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fork_with_keeper(parent: int, handle: int) -> None:
    """Returns in a forked process, the zygote. This one becomes its keeper, and never returns."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals = {signal.SIGCHLD, END, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    me, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(me)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(handle)
    die_with_parent(parent, END)
    setproctitle("veldt keeper")
    status = 0
    while (number := signal.sigwait(signals)) != END:
        if number == signal.SIGCHLD and (found := os.waitpid(pid, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(found[1])
            break
    deadline = time.monotonic() + WIPE_S
    with contextlib.suppress(ChildProcessError):  # until there are none
        while time.monotonic() < deadline:
            kill(children())
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            signal.sigtimedwait(signals, 0.01)
    if status == -signal.SIGKILL:
        os.kill(me, signal.SIGKILL)  # as the zygote
    os._exit(status if status >= 0 else 128 - status)


def ignore_signals() -> None:
    """Leaves signals to the supervisor, even if they are sent to the whole process group. (A handler that does nothing, not
    SIG_IGN, which an environment's own child processes would inherit.)"""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def main() -> None:
    """The zygote's process: imports, then forks children on request, and reaps them."""
    handle, parent = int(sys.argv[1]), int(sys.argv[2])
    fork_with_keeper(parent, handle)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ignore_signals()
    light = bool(os.environ.get(LIGHT))
    setproctitle(f"veldt {NAMES[light]}")
    if not light:
        import torch

        torch.set_num_threads(1)
    from veldt.runtime.local import process

    process.preload(light)
    gc.collect()
    gc.freeze()  # these objects are never garbage: so children do not copy their pages during collections
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "the zygote has threads"
    if light and (heavy := {"torch", "numba"} & sys.modules.keys()):
        names = " and ".join(sorted(heavy))
        print(f"veldt: a plugin has imported {names}: actors will use more RAM than needed", file=sys.stderr)
    if not light:
        assert not torch.cuda.is_initialized(), "the zygote has initialised CUDA"  # type: ignore[no-untyped-call]
    Server(socket.socket(fileno=handle), process.run).serve()


class Server:
    """The zygote's end of the socket."""

    def __init__(self, connection: socket.socket, run: Callable[..., None]) -> None:
        self.socket, self.run = connection, run
        self.descriptors: dict[str, int] = {}
        self.forked: set[int] = set()  # pids
        self.wakeup, self.alarm = os.pipe()
        os.set_blocking(self.alarm, False)
        signal.set_wakeup_fd(self.alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self._send({"ready": os.getpid()})
        while True:
            ready = readable([self.socket.fileno(), self.wakeup], IDLE_S)
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
                self._reap()
            if self.socket.fileno() in ready:
                try:
                    data, fds, _, _ = socket.recv_fds(self.socket, MESSAGE, MAX_FDS)
                except ConnectionResetError:  # the supervisor died with unread messages
                    data = b""
                if not data:
                    os._exit(0)  # the supervisor has died, and the kernel is about to kill us
                self._handle(json.loads(data), fds)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if "ask" in message:
            return self._send({"here": True})
        if "share" in message:
            self.descriptors |= dict(zip(message["share"], fds, strict=True))
            return
        name, me = message["fork"], os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little RAM: the others go on
            for fd in fds:
                os.close(fd)
            return self._send({"failed": name, "why": str(error)})
        if pid == 0:
            die_with_parent(me)
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.socket.close()
            os.close(self.wakeup)
            os.close(self.alarm)
            self.run(name, message["order"], self.descriptors, fds)
            os._exit(0)
        for fd in fds:
            os.close(fd)
        self.forked.add(pid)
        self._send({"forked": name, "pid": pid})

    def _reap(self) -> None:
        """Reports which children have exited, and kills what they left: that has become ours, and what it leaves will."""
        with contextlib.suppress(ChildProcessError):  # there are none
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self.forked:
                    self.forked.remove(found[0])
                    self._send({"exited": found[0], "status": os.waitstatus_to_exitcode(found[1])})
        kill(pid for pid in children() if pid not in self.forked)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.socket.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)
