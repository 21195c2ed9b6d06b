"""Ctrl-C, SIGTERM and SIGHUP, for commands that have to finish something before they stop."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LATE_S = 1.0  # after the signal, and again


@contextmanager
def exits_at_once() -> Iterator[Callable[[], None]]:
    """A signal ends the process with one line, while there is nothing to save. (An exception would come out of the import
    of a C++ library, which may abort.) Yields what ends this earlier."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"veldt: interrupted\n")
        os._exit(128 + number)  # the kernel kills our children

    wanted = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    handled = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in handled}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    try:
        yield restore
    finally:
        restore()


@contextmanager
def interruptible(stop: Callable[[int], None], message: str = "", late: Callable[[], None] | None = None) -> Iterator[None]:
    """The first signal calls `stop` with its number and prints the message; a second one ends the process at once. `late`
    is called every LATE_S after that until the block is left. Both may raise.

    SIGHUP says that the terminal was closed; under nohup it stays ignored. Does nothing outside the main thread, which
    alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            os._exit(128 + number)  # the kernel kills our children
        came = number
        if late is not None:
            signal.setitimer(signal.ITIMER_REAL, LATE_S, LATE_S)
        stop(number)
        if message:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{message}; repeat to stop immediately.\n".encode())  # print() is not safe in a handler

    handled = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    if not hasattr(signal, "SIGALRM"):  # Windows: a long step is waited for
        late = None
    before: dict[signal.Signals, Any] = {number: signal.signal(number, handle) for number in handled}
    if late is not None:
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: late())
    try:
        yield
    finally:
        if late is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
