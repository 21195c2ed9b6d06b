"""Sends the state of nodes between processes: arrays and JSON in shared memory."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from veldt.records.tree import Tree
from veldt.runtime.shm.format import Format
from veldt.runtime.shm.memory import SharedMemory, make_shared_memory


def write_state(state: dict[str, dict[str, Any]]) -> int:
    """Writes the states of nodes to new shared memory; returns its descriptor.

    Uses write() instead of a mapping: the kernel then neither clears the pages nor takes a fault for each.
    """
    rest: dict[str, dict[str, Any]] = {}
    tree: Tree = {}
    for node, part in state.items():
        rest[node] = {name: value for name, value in part.items() if not isinstance(value, np.ndarray)}
        tree |= {f"{node}:{name}": value for name, value in part.items() if isinstance(value, np.ndarray)}
    text = np.frombuffer(json.dumps(rest).encode(), np.uint8)
    head = np.frombuffer(Format.of(tree).dump(), np.uint8)
    whole: Tree = {"sizes": np.array([len(head), len(text)], np.int64), "head": head, "json": text, **tree}
    layout = Format.of(whole)
    fd = make_shared_memory("veldt state")
    try:
        os.ftruncate(fd, layout.nbytes)
        for value, offset in zip(whole.values(), layout.offsets, strict=True):
            left = memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            while len(left):
                done = os.pwrite(fd, left, offset)
                left, offset = left[done:], offset + done
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_state(fd: int) -> dict[str, dict[str, Any]]:
    """A copy of what `write_state` wrote; closes the descriptor."""
    memory = SharedMemory(fd)
    os.close(fd)
    head, text = memory.array(0, (2,), np.int64).tolist()
    start = Format([("sizes", "<i8", (2,)), ("head", "|u1", (head,)), ("json", "|u1", (text,))])
    views = start.views(memory, 0)
    state: dict[str, dict[str, Any]] = json.loads(views["json"].tobytes())
    for key, value in Format.load(views["head"].tobytes()).views(memory, start.nbytes).items():
        node, _, name = key.partition(":")
        state[node][name] = value.copy()
    return state
