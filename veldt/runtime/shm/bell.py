"""Bell: wakes a process that sleeps until something happens. It signals and never locks."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from veldt.runtime.shm.memory import FUTEX, Memory


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
    """Two words of shared memory: how often it rang, and whether its owner sleeps. It signals and never locks.

    A ring may get lost when it comes in the very moment in which the owner falls asleep, so no sleep is longer than
    `LONGEST`, and whoever wakes looks for work again.
    """

    LONGEST = 0.05  # seconds

    def __init__(self, memory: Memory, offset: int) -> None:
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
        """To be asked before looking for work, and told to `wait` if there was none."""
        return self._words[0]

    def wait(self, since: int, seconds: float = LONGEST) -> None:
        """Sleeps until it rings, unless it has rung `since`."""
        words = self._words
        words[1] = 1
        if words[0] == since:
            self._time[0], self._time[1] = 0, int(1e9 * max(0.0, min(seconds, self.LONGEST)))
            _syscall(FUTEX, self._address, _WAIT, since, self._time_address, None, 0)
        words[1] = 0


class Rings(Protocol):
    """What wakes a process: its `Bell`, or something like it."""

    def ring(self) -> None: ...
