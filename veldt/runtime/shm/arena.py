"""Arena: arrays that outlive the process that made them, such as a store's blocks."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from veldt.errors import UserError
from veldt.machine import available_memory
from veldt.records.tree import Array
from veldt.runtime.shm.memory import PAGE, reserve

LARGE = 64 << 20  # bytes; larger arrays are checked against free RAM: the kernel may kill a process that asks for too much


class Arena:
    """Arrays in shared memory that outlives this process. A successor that asks for the same arrays in the same order finds
    their contents."""

    def __init__(self, fd: int, blocks: int | None = None) -> None:
        self.fd, self._blocks = fd, blocks
        self.found = os.fstat(fd).st_size > 0  # an earlier incarnation has made the arrays
        self._at = 0

    def apart(self) -> Arena:
        """The arena for blocks: separate shared memory, if there is one, which other processes can map without the rest."""
        return self if self._blocks is None else Arena(self._blocks)

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> Array:
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        stop = self._at + -(-max(1, nbytes) // PAGE) * PAGE
        if os.fstat(self.fd).st_size < stop:
            if nbytes > LARGE and nbytes > available_memory():
                free = available_memory() / 1e6
                raise UserError(
                    f"{nbytes / 1e6:,.1f} MB of shared memory are needed, {free:,.1f} MB are free; lower store.capacity."
                )
            reserve(self.fd, stop)
        # Each array has a mapping of its own, which is unmapped with the array.
        array: Array = np.ndarray(shape, dtype, mmap.mmap(self.fd, stop - self._at, offset=self._at))
        self._at = stop
        return array
