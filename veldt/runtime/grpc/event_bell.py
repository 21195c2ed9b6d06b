"""EventBell: a bell for a process that sleeps in an event loop."""

from __future__ import annotations

import contextlib
import os

from veldt.runtime.shm.memory import SharedMemory


class EventBell:
    """A `Bell` for a process that sleeps in an event loop: the same words in shared memory, but an eventfd wakes it."""

    def __init__(self, memory: SharedMemory, offset: int, fd: int) -> None:
        self._words = memory.words(offset, 2)
        self.fd = fd

    @staticmethod
    def make() -> int:
        """A new eventfd."""
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        words = self._words
        words[0] = (words[0] + 1) & 0x7FFFFFFF
        if words[1]:
            with contextlib.suppress(BlockingIOError):  # the counter is full: it wakes anyway
                os.eventfd_write(self.fd, 1)

    # For the owner only.

    def set_asleep(self, value: bool) -> None:
        """Whether a ring has to wake the owner, or the owner is polling."""
        self._words[1] = value

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
