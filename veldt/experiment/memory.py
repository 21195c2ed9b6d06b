"""How much memory a store takes, known before the run; and how much there is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from veldt.errors import UserError
from veldt.records.block import Schema
from veldt.watching.text import format_bytes as format_bytes


@dataclass(frozen=True)
class Size:
    """How large a store will be."""

    capacity: int  # items
    slots: int  # blocks
    nbytes: int


LEAF_BYTES = 11  # a leaf of the sum tree, its part of the nodes above (8 / 7 of it), and the item flag
TREE_BYTES = 1024  # a sum tree rounds every level up to a cache line
NETWORK_COPIES = 15  # weights, target, gradient, moments, published, at the policies; and what layers need to work
LIBRARIES = 20_000_000  # bytes that libraries take when first used
BLOCK_BYTES = 32  # a block's source and commit word, and 8 more: checkpoints hold the number of slots that this gives
PROCESS = 30_000_000  # bytes that a process has for itself, beside what it shares with the one it was forked from
ZYGOTE = 130_000_000  # bytes of that one
LIGHT_PROCESS, LIGHT_ZYGOTE = 12_000_000, 40_000_000  # the same of processes without torch
STREAM = 1 << 20  # bytes of blocks that may be on their way from one actor, for each block of its queue


def plan_size(capacity: str | int, schema: Schema, slack: float = 0.0) -> Size:
    """The slots and bytes for a capacity in steps (`100_000`) or in bytes (`2GB`)."""
    block = schema.nbytes + LEAF_BYTES * schema.starts + BLOCK_BYTES
    amount, unit = parse_capacity(capacity)
    if unit:
        slots = int((amount - TREE_BYTES) // block)
        if slots < 2:
            raise UserError(
                f"A store of {capacity} holds less than two blocks of {format_bytes(block)}; give it at least "
                f"{format_bytes(2 * block + TREE_BYTES)}."
            )
        items = int(slots * schema.starts / (1 + slack))
    else:
        items = max(1, int(amount) // schema.window.stride)
        slots = max(2, -(-int(items * (1 + slack)) // schema.starts))
    return Size(items, slots, slots * block + TREE_BYTES)


def plan_rest(schema: Schema, sampled: int, parameters: int) -> int:
    """About how many bytes a run needs beside its store: two samples of so many windows, copies of the network.

    Measured on two cores: 1 % less than CartPole took, 1 % less than MinAtar, 2 % less than Atari.
    """
    window = schema.window.rows * schema.layout.nbytes + schema.start_layout.nbytes
    return 2 * sampled * window + 4 * NETWORK_COPIES * parameters + LIBRARIES


def used_memory(others: Iterable[int] = (), shared: Iterable[int] = ()) -> int:
    """Bytes in memory of this process, of others by pid, and of memory shared by descriptor; what is shared counts once."""
    others, shared = list(others), list(shared)
    if not others:
        return int(psutil.Process().memory_info().rss)
    return sum(map(_own_memory, (os.getpid(), *others))) + sum(512 * os.fstat(fd).st_blocks for fd in shared)


def _own_memory(pid: int) -> int:
    """A process's part of the memory it shares with others, and all of its own; without what is shared by descriptor."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return 1024 * (kilobytes.get("Pss", 0) - kilobytes.get("Pss_Shmem", 0))


def plan_processes(schema: Schema, actors: int, evaluator: bool, queue: int, central: bool = False) -> int:
    """About how many bytes it takes to run the nodes in processes of their own."""
    stream = queue * min(STREAM, schema.nbytes + 9 * schema.starts + 1024)
    if central:  # one process records for all actors, which have no torch
        return ZYGOTE + LIGHT_ZYGOTE + (evaluator + 2) * PROCESS + actors * LIGHT_PROCESS + stream
    return ZYGOTE + (actors + evaluator + 1) * PROCESS + actors * stream


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_capacity(text: str | int) -> tuple[float, str]:
    """(amount, unit); the amount is in bytes where there is a unit, in steps where there is none."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?) ?([a-z]*)", str(text).strip().lower())
    if not match or match[2] not in UNITS or float(match[1].replace("_", "")) * UNITS[match[2]] < 1:
        raise UserError(f"store.capacity {text!r} is neither steps nor bytes; write it as 100_000 or as 2GB.")
    return float(match[1].replace("_", "")) * UNITS[match[2]], match[2]


def available_memory() -> int:
    """Bytes that can still be had: of the machine, or of the container if that has less."""
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        cached = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        files = int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))  # given up when memory is wanted
        available = min(available, int(limit.read_text()) - int(used.read_text()) + files)
    except (OSError, ValueError):  # no cgroup, or no limit
        pass
    return available


def check_memory(size: Size, available: int, rest: int = 0) -> None:
    """Refuses a store that cannot fit, before anything is allocated. `available` is what is left beside `rest`."""
    if available < 0:
        raise UserError(
            f"The run needs about {format_bytes(rest)} beside its store, but {format_bytes(available + rest)} of memory is "
            "free; use fewer --actors, or --runtime inline."
        )
    if size.nbytes > 0.9 * available:
        half = format_bytes(0.5 * available).replace(" ", "")
        raise UserError(
            f"The store needs {format_bytes(size.nbytes)} for {size.capacity:,} items, but {format_bytes(available)} of "
            f"memory is free; lower store.capacity, for example to {half}."
        )
