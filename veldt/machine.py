"""Resources of this machine: free and used RAM, cores, a GPU, and the age of this process."""

import contextlib
import mmap
import os
import platform
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

PAGE = mmap.PAGESIZE
NO_LIMIT = 1 << 60  # bytes; a control group without a limit has a larger one


def format_bytes(n: float) -> str:
    """1234567 -> `1.2 MB`."""
    for unit in ("B", "KB", "MB"):
        if abs(n) < 999.95:  # what would be rounded to 1000.0 belongs to the next unit
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


class Ram(NamedTuple):
    total: int
    free: int


def ram() -> Ram:
    """Bytes of RAM of the machine, or of the container or control group that has less left."""
    machine = psutil.virtual_memory()
    return min([Ram(int(machine.total), int(machine.available)), *_groups()], key=lambda each: each.free)


def available_memory() -> int:
    return ram().free


def _groups() -> Iterator[Ram]:
    """The control groups with a limit that this process is in; the kernel drops cached files when RAM is short."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
            names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
            for folder in (base / path.lstrip("/"), *(base / x for x in Path(path.lstrip("/")).parents)):
                with contextlib.suppress(OSError, ValueError):  # it has none, or is not seen from here
                    limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
                    stat = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                    prefix = "total_" if controllers else ""
                    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                    if limit < NO_LIMIT:
                        yield Ram(limit, limit - used + cached)


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


def anonymous_memory(pid: int) -> int:
    """Bytes of RAM of a process, without files and shared memory. No page table is walked for it. Pages that a process has
    in common with the one that forked it count in both."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
        return PAGE * (resident - shared)
    return 0  # it has ended


def families(pids: Collection[int]) -> dict[int, list[int]]:
    """Each process with all that are below it."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            below.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    out = {pid: [pid] for pid in pids}
    for family in out.values():
        for each in family:  # grows meanwhile
            family += below.get(each, [])
    return out


def process_age() -> float:
    """Seconds since this process began."""
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def find_device(name: str) -> str:
    """`auto` is a CUDA GPU where there is one, and else the CPU: small networks are slower on Apple's GPU (mps)."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.device_count() else "cpu"


def processor_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def runs_processes() -> bool:
    """Whether the local runtime works here: it needs memfd and futex."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
