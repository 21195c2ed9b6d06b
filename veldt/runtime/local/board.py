"""The board: one page-aligned row for each process, where it is seen alive, woken, and counted; and state on its way."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np

from veldt.counters import NAMES
from veldt.records.tree import Tree
from veldt.runtime.shm import Bell, Format, Memory, make_memory

ROW = 256  # bytes
# Words of a row. The first two are the bell's.
SINCE, DOING, ORDERS, COUNTS = 2, 3, 4, 8
WAITING, BUILDING, SERVING = -1, -2, -3  # what a process is doing, where it is not the step of its n-th node
# Words of the supervisor's row, which is the first.
STOPPING, HOLD, QUIT = 29, 30, 31


class Board:
    def __init__(self, fd: int, rows: int = 0) -> None:
        self.memory = Memory(fd, rows * ROW)
        self.rows = self.memory.nbytes // ROW
        self._words = [self.memory.words(i * ROW, ROW // 8) for i in range(self.rows)]
        table = self.memory.array(0, (self.rows, ROW // 8), np.int64)
        self.counts = table[:, COUNTS : COUNTS + len(NAMES)]  # [rows, names]

    def row(self, index: int) -> memoryview:
        return self._words[index]

    def bell(self, index: int) -> Bell:
        return Bell(self.memory, index * ROW)

    @property
    def stopping(self) -> bool:
        """The run is about to end: nothing long is begun or gone on with."""
        return bool(self._words[0][STOPPING])

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._words[0][STOPPING] = value

    @property
    def quit(self) -> bool:
        """Every process ends, after the step it is in."""
        return bool(self._words[0][QUIT])

    @quit.setter
    def quit(self, value: bool) -> None:
        self._words[0][QUIT] = value

    @property
    def hold(self) -> bool:
        """Workers stand still; services go on."""
        return bool(self._words[0][HOLD])

    @hold.setter
    def hold(self, value: bool) -> None:
        self._words[0][HOLD] = value


class SharedCounters:
    """`veldt.counters.Counters` of many processes: each adds to a row of its own, and a count is the sum of all rows."""

    def __init__(self, board: Board, row: int) -> None:
        self._board, self._row = board, board.row(row)
        self._at = {name: COUNTS + i for i, name in enumerate(NAMES)}

    def add(self, name: str, n: int) -> None:
        self._row[self._at[name]] += n

    def get(self, name: str) -> int:
        return int(self._board.counts[:, self._at[name] - COUNTS].sum())

    def put(self, name: str, n: int) -> None:
        self._row[self._at[name]] += n - self.get(name)

    @property
    def stopping(self) -> bool:
        """Whoever asks this in the midst of a long step is seen to be alive."""
        self._row[SINCE] = time.monotonic_ns()
        return self._board.stopping

    def state(self) -> dict[str, Any]:
        return {"counts": {name: self.get(name) for name in NAMES}}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in NAMES:
            self.put(name, int(state["counts"].get(name, 0)))


def write_state(state: dict[str, dict[str, Any]]) -> int:
    """The states of nodes in new memory, as arrays and JSON; returns its descriptor.

    Written and not mapped: the kernel then neither clears the pages nor takes a fault for each.
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
    fd = make_memory("veldt state")
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
    """What `write_state` wrote, copied out; closes the descriptor."""
    memory = Memory(fd)
    os.close(fd)
    head, text = memory.array(0, (2,), np.int64).tolist()
    start = Format([("sizes", "<i8", (2,)), ("head", "|u1", (head,)), ("json", "|u1", (text,))])
    views = start.views(memory, 0)
    state: dict[str, dict[str, Any]] = json.loads(views["json"].tobytes())
    for key, value in Format.load(views["head"].tobytes()).views(memory, start.nbytes).items():
        node, _, name = key.partition(":")
        state[node][name] = value.copy()
    return state
