"""Ctrl-C and SIGTERM, for commands that have to finish something before they stop."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible(stop: Callable[[int], None], message: str = "") -> Iterator[None]:
    """The first signal calls `stop` with its number and prints the message; a second one ends the process at once.

    Does nothing outside the main thread, which alone receives signals.
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
        stop(number)
        if message:
            os.write(2, f"\n{message}; once more to stop at once.\n".encode())  # print() is not safe in a handler

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
