"""Pressure: names the process that grows while RAM is nearly used up, before the kernel kills one of its own choice."""

import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from veldt.bounds import at_least, between
from veldt.errors import ProcessFailed
from veldt.machine import Ram, anonymous_memory, families, format_bytes, ram, used_memory
from veldt.runtime.local.watchdog import Child

log = logging.getLogger("veldt")

LOOK_S = 0.5  # between two looks at what is left
SETTLE_S = 2.0  # after a process was killed, for the kernel to free its pages
AGAIN_S = 60.0  # between two warnings that no process of the run has grown
MOST = 4_000_000_000  # bytes to keep free, at most
GROWN = 0.25  # of what is to be kept free; who has grown by less is not to blame
SUPERVISOR = "the supervisor"


@dataclass(frozen=True)
class MemoryConfig:
    """When RAM is nearly used up, the actor or evaluator that has grown most is restarted. If that is the learner or the
    store, the run saves a checkpoint and ends."""

    limit: Annotated[float, at_least(0)] = 0.0
    """GB of RAM that all processes of the run may use together; 0: what the machine or the container has."""
    reserve: Annotated[float, between(0, 1)] = 0.05
    """Fraction of it that is kept free (at most 4 GB); 0: whoever grows is left to the kernel."""


class OutOfMemory(ProcessFailed):
    """A process that cannot be restarted without a loss has taken the RAM of the run."""


class Pressure:
    def __init__(
        self, config: MemoryConfig, children: dict[str, Child], fds: Collection[int], last: Collection[str]
    ) -> None:
        """`fds` are of shared memory. The processes named in `last` are not restarted to get RAM back."""
        self.config, self.children, self.fds, self.last = config, children, fds, last
        self.restarts = 0
        self.left = 0  # bytes
        self._next = self._warned = 0.0
        self._first: dict[tuple[str, int], int] = {}  # by name and pid: its RAM when it became ready
        self._shared = self._shared_bytes()
        self._own = anonymous_memory(os.getpid())

    def check(self, pids: Collection[int]) -> None:
        """`pids` are those of all processes but this one. Raises OutOfMemory if it cannot be helped."""
        now = time.monotonic()
        if now < self._next or not self.config.reserve:
            return
        self._next = now + LOOK_S
        self._note_first()
        total, self.left = self._ram(pids)
        reserve = min(MOST, self.config.reserve * total)
        if self.left < reserve:
            self._relieve(reserve, f"{format_bytes(max(0, self.left))} of {format_bytes(total)} of RAM")

    def _ram(self, pids: Collection[int]) -> Ram:
        if not self.config.limit:
            return ram()
        limit = int(1e9 * self.config.limit)
        return Ram(limit, limit - used_memory(pids, self.fds))

    def _note_first(self) -> None:
        ready = {(child.name, child.pid): child.pid for child in self.children.values() if child.ready and child.pid}
        if new := [pid for key, pid in ready.items() if key not in self._first]:
            sizes = _sizes(new)
            self._first = {key: self._first.get(key, sizes.get(pid, 0)) for key, pid in ready.items()}

    def _relieve(self, reserve: float, left: str) -> None:
        pids = {name: pid for name, pid in self._first if self.children[name].pid == pid}
        sizes = _sizes(pids.values())
        grown = {name: sizes[pid] - self._first[name, pid] for name, pid in pids.items()}
        small = {name: n for name, n in grown.items() if name not in self.last}
        grown[SUPERVISOR] = anonymous_memory(os.getpid()) - self._own
        worst, most = max(grown.items(), key=lambda each: each[1])
        shared = self._shared_bytes() - self._shared
        if most < GROWN * reserve and sum(small.values()) >= GROWN * reserve:  # many have grown by a little
            worst, most = max(small.items(), key=lambda each: each[1])
        elif most < GROWN * reserve:
            if shared >= GROWN * reserve:
                says = f"{left} are left, and the store has grown by {format_bytes(shared)}"
                raise OutOfMemory(f"{says}; lower store.capacity, or run it where there is more RAM.")
            return self._blame_others(left)
        says = f"{worst} has grown by {format_bytes(most)} and {left} are left"
        if worst not in small:
            raise OutOfMemory(f"{says}; give it more RAM, or lower learner.batch or store.capacity.")
        log.error("%s; restarting it", says)
        self.children[worst].end(f"it had grown by {format_bytes(most)} when {left} were left")
        self.restarts += 1
        self._next = time.monotonic() + SETTLE_S

    def _blame_others(self, left: str) -> None:
        if not self._warned or time.monotonic() - self._warned > AGAIN_S:
            self._warned = time.monotonic()
            log.warning("%s are left, and no process of this run has grown: another program has taken it", left)

    def _shared_bytes(self) -> int:
        return sum(512 * os.fstat(fd).st_blocks for fd in self.fds)


def _sizes(pids: Collection[int]) -> dict[int, int]:
    """The RAM of each process, and of what its environments have started."""
    return {pid: sum(map(anonymous_memory, family)) for pid, family in families(pids).items()}
