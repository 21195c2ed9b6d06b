"""EventBell: a bell for a process that sleeps in an event loop."""

from __future__ import annotations

import contextlib
import os

from veldt.runtime.shm.memory import Memory


class EventBell:
    """A `Bell` for a process that sleeps in an event loop: its words are those of a Bell, and it is woken by an eventfd."""

    def __init__(self, memory: Memory, offset: int, fd: int) -> None:
        self._words = memory.words(offset, 2)
        self.fd = fd

    @staticmethod
    def make() -> int:
        """A descriptor for it."""
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        words = self._words
        words[0] = (words[0] + 1) & 0x7FFFFFFF
        if words[1]:
            with contextlib.suppress(BlockingIOError):  # it was rung so often that it will wake for certain
                os.eventfd_write(self.fd, 1)

    # The rest is its owner's.

    def asleep(self, value: bool) -> None:
        """Whether it has to be woken, or looks anyway."""
        self._words[1] = value

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
