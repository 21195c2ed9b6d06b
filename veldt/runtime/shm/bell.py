"""Bell: wakes a sleeping process. It signals and never locks."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from veldt.runtime.shm.memory import FUTEX, SharedMemory


def _libc() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return call


_syscall = _libc()
_WAIT, _WAKE = 0, 1


class Bell:
    """Two words of shared memory: how often it rang, and whether its owner sleeps.

    A ring can be lost if it comes at the moment when the owner falls asleep. So no sleep is longer than `LONGEST`, and an
    owner that wakes up always looks for work.
    """

    LONGEST = 0.05  # seconds

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        self._words = memory.words(offset, 2)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory.map, offset))
        self._time = (ctypes.c_long * 2)()
        self._time_address = ctypes.addressof(self._time)

    def ring(self) -> None:
        words = self._words
        words[0] = (words[0] + 1) & 0x7FFFFFFF
        if words[1]:
            _syscall(FUTEX, self._address, _WAKE, 1, None, None, 0)

    def rung(self) -> int:
        """How often it rang. Read it before looking for work, and pass it to `wait` if there was none."""
        return self._words[0]

    def wait(self, since: int, seconds: float = LONGEST) -> None:
        """Sleeps until it rings, or returns at once if it has rung more often than `since`."""
        words = self._words
        words[1] = 1
        if words[0] == since:
            self._time[0], self._time[1] = 0, int(1e9 * max(0.0, min(seconds, self.LONGEST)))
            _syscall(FUTEX, self._address, _WAIT, since, self._time_address, None, 0)
        words[1] = 0


class Waker(Protocol):
    """Wakes a process: a `Bell`, or an `EventBell`."""

    def ring(self) -> None: ...
