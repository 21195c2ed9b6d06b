"""Resources of this machine: free and used RAM, cores, and the age of this process."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def format_bytes(n: float) -> str:
    """1234567 -> `1.2 MB`."""
    for unit in ("B", "KB", "MB"):
        if abs(n) < 999.95:  # what would be rounded to 1000.0 belongs to the next unit
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def available_memory() -> int:
    """Free bytes of RAM: of the machine, or of the container if that has less."""
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or no limit
        cached = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        # The kernel drops cached files when RAM is short.
        files = int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
        available = min(available, int(limit.read_text()) - int(used.read_text()) + files)
    return available


def used_memory(others: Iterable[int] = (), shared: Iterable[int] = ()) -> int:
    """Bytes of RAM of this process, of others by pid, and of shared memory by descriptor; shared pages count once."""
    others, shared = list(others), list(shared)
    if not others:
        return int(psutil.Process().memory_info().rss)
    return sum(map(_own_memory, (os.getpid(), *others))) + sum(512 * os.fstat(fd).st_blocks for fd in shared)


def _own_memory(pid: int) -> int:
    """A process's private RAM and its share of pages it has in common with others, without shared memory (memfd)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return 1024 * (kilobytes.get("Pss", 0) - kilobytes.get("Pss_Shmem", 0))


def process_age() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
