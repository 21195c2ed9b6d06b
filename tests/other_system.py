"""Makes this process look like macOS or Windows to Veldt, then runs `veldt` commands, one for each line of stdin.

python other_system.py darwin < commands

Third-party libraries are imported before: they choose by the system too. Tests do not import this file.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import os
import shlex
import signal
import socket
import sys
import time
from typing import Any

LIBRARIES = (
    "numpy torch torch.utils.tensorboard gymnasium numba psutil yaml rich.live tyro safetensors.torch matplotlib.pyplot "
    "scipy setproctitle cloudpickle asyncio multiprocessing subprocess tempfile pydoc logging.handlers imageio"
)
# Neither has these; Windows lacks the second part too.
GONE: dict[str, dict[Any, str]] = {
    "darwin": {
        os: "sched_getaffinity sched_setaffinity memfd_create posix_fallocate pidfd_open eventfd eventfd_read "
        "eventfd_write EFD_NONBLOCK EFD_CLOEXEC MFD_CLOEXEC",
        signal: "SIGRTMIN SIGRTMAX pidfd_send_signal",
        time: "CLOCK_BOOTTIME",
        socket: "",
    },
    "win32": {
        os: "O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY sysconf getuid geteuid getgid fork forkpty register_at_fork "
        "setsid getpgid killpg mkfifo chown fchmod posix_spawn wait3 wait4 getloadavg uname WNOHANG",
        signal: "SIGHUP SIGKILL SIGALRM SIGCHLD SIGUSR1 SIGUSR2 SIGSTOP SIGCONT SIGQUIT setitimer ITIMER_REAL "
        "pthread_sigmask SIG_BLOCK sigwait sigtimedwait",
        time: "clock_gettime CLOCK_MONOTONIC",
        socket: "AF_UNIX SOCK_SEQPACKET socketpair send_fds recv_fds",
    },
}
MODULES = {"darwin": [], "win32": ["fcntl", "resource", "termios", "pwd", "grp", "tty", "pty"]}


def imitate(system: str) -> None:
    for name in LIBRARIES.split():
        importlib.import_module(name)
    for each in {"darwin": ["darwin"], "win32": ["darwin", "win32"]}[system]:
        for module, names in GONE[each].items():
            for name in names.split():
                if hasattr(module, name):
                    delattr(module, name)
    for name in MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.platform = system
    really_open, really_list = builtins.open, os.listdir

    def refuse(path: Any) -> None:
        own = sys._getframe(2).f_globals["__name__"].startswith("psutil")  # which reads other files there
        if isinstance(path, str | os.PathLike) and str(path).startswith(("/proc", "/sys")) and not own:
            raise FileNotFoundError(2, "there is no such file on this system", str(path))

    def opening(path: Any, *args: Any, **options: Any) -> Any:
        refuse(path)
        return really_open(path, *args, **options)

    def listing(path: Any = ".") -> Any:
        refuse(path)
        return really_list(path)

    builtins.open = io.open = opening  # type: ignore[assignment]
    os.listdir = listing  # type: ignore[assignment]
    if system == "win32":

        class NoLibrary:
            def __init__(self, name: str | None, *args: Any, **options: Any) -> None:
                raise TypeError("bad argument type for built-in operation")

        ctypes.CDLL = NoLibrary  # type: ignore[assignment, misc]


if __name__ == "__main__":
    imitate(sys.argv[1])
    from veldt.__main__ import main

    for line in sys.stdin:
        code = main(shlex.split(line))
        print(f"exit {code}: {line.strip()}", flush=True)
