"""The board: one row of shared memory for each process, with its heartbeat and its bell; and rows of counts."""

from __future__ import annotations

import os
import time

import numpy as np

from veldt.runtime.shm.bell import Bell
from veldt.runtime.shm.memory import SharedMemory
from veldt.shared import WIDTH

ROW = 256  # bytes
# Words of a row. The first two are the bell's.
SINCE, DOING, ORDERS = 2, 3, 4
WAITING, BUILDING, SERVING = -1, -2, -3  # values of DOING; n >= 0: in a step of the n-th worker
# Words of the supervisor's row, which is the first.
STOPPING, HOLD, QUIT = 29, 30, 31


class Board:
    def __init__(self, fd: int, rows: int = 0) -> None:
        self.memory = SharedMemory(fd, rows * ROW)
        self.rows = self.memory.nbytes // ROW
        self._words = [self.memory.words(i * ROW, ROW // 8) for i in range(self.rows)]

    def row(self, index: int) -> memoryview:
        return self._words[index]

    def bell(self, index: int) -> Bell:
        return Bell(self.memory, index * ROW)

    @property
    def stopping(self) -> bool:
        """The run is about to end: no process should start or continue anything long."""
        return bool(self._words[0][STOPPING])

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._words[0][STOPPING] = value

    @property
    def quit(self) -> bool:
        """Every process exits after its current step."""
        return bool(self._words[0][QUIT])

    @quit.setter
    def quit(self, value: bool) -> None:
        self._words[0][QUIT] = value

    @property
    def hold(self) -> bool:
        """Workers are not stepped; services are."""
        return bool(self._words[0][HOLD])

    @hold.setter
    def hold(self, value: bool) -> None:
        self._words[0][HOLD] = value


class SharedRows:
    """Counts of many processes (`shared.Rows`): each adds to its own row, and a count is the sum over rows."""

    def __init__(self, fd: int, board: Board, row: int) -> None:
        memory = SharedMemory(fd, 0 if os.fstat(fd).st_size else 8 * WIDTH * board.rows)
        self.table = memory.array(0, (board.rows, WIDTH), np.int64)
        self.row = memory.words(8 * WIDTH * row, WIDTH)
        self._board, self._board_row = board, board.row(row)

    def add(self, column: int, n: int) -> None:
        self.row[column] += n

    def total(self, column: int) -> int:
        return int(self.table[:, column].sum())

    @property
    def stopping(self) -> bool:
        """Reading this in the middle of a long step is also a heartbeat."""
        self._board_row[SINCE] = time.monotonic_ns()
        return self._board.stopping
