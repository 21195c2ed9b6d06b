"""The board: one row of shared memory for each process, with its heartbeat and its bell; and rows of counts."""

import time

import numpy as np

from veldt.runtime.shm.memory import Bell, SharedMemory
from veldt.shared import WIDTH

ROW = 256  # bytes
# Words of a row. The first two are the bell's.
SINCE, DOING, ORDERS, PROGRESS = 2, 3, 4, 5
WAITING, BUILDING, SERVING = -1, -2, -3  # values of DOING; n >= 0: in a step of the n-th node


class Flag:
    """A word of the supervisor's row, which is the first."""

    def __init__(self, word: int) -> None:
        self.word = word

    def __get__(self, board: "Board", owner: type) -> bool:
        return bool(board.flags[self.word])

    def __set__(self, board: "Board", value: bool) -> None:
        board.flags[self.word] = value


class Board:
    stopping = Flag(29)  # the run is about to end: no process should start or continue anything long
    hold = Flag(30)  # workers are not stepped; services are
    quit = Flag(31)  # every process exits after its current step

    def __init__(self, fd: int, rows: int = 0) -> None:
        self.memory = SharedMemory(fd, rows * ROW)
        self.rows = self.memory.nbytes // ROW
        self.flags = self.row(0)

    def row(self, index: int) -> memoryview:
        return self.memory.words(index * ROW, ROW // 8)

    def bell(self, index: int) -> Bell:
        return Bell(self.memory, index * ROW)


class SharedRows:
    """Counts of many processes (`shared.Rows`): each adds to its own row, and a count is the sum over rows."""

    def __init__(self, fd: int, board: Board, row: int) -> None:
        memory = SharedMemory(fd, 8 * WIDTH * board.rows)
        self.table = memory.array(0, (board.rows, WIDTH), np.int64)
        self.row = memory.words(8 * WIDTH * row, WIDTH)
        self._board, self._board_row = board, board.row(row)

    def add(self, column: int, n: int) -> None:
        self.row[column] += n

    def total(self, column: int) -> int:
        return int(self.table[:, column].sum())

    @property
    def stopping(self) -> bool:
        """Reading this in the middle of a long step is also a heartbeat, and progress."""
        self._board_row[SINCE] = time.monotonic_ns()
        self._board_row[PROGRESS] += 1
        return self._board.stopping
