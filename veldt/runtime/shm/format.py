"""Format: the names, types and shapes of a message's arrays, and the offset of each in shared memory."""

from __future__ import annotations

import json
import math

import numpy as np

from veldt.records.tree import Array, Tree
from veldt.runtime.shm.memory import SharedMemory

ALIGN = 8  # bytes; arrays begin at multiples of this
Bytes = bytes | memoryview


class Format:
    """The names, types and shapes of a message's arrays, and the offset of each in a slot."""

    def __init__(self, columns: list[tuple[str, str, tuple[int, ...]]]) -> None:
        self.columns, self.offsets = columns, []
        at = 0
        for _, dtype, shape in columns:
            self.offsets.append(at)
            nbytes = np.dtype(dtype).itemsize * math.prod(shape)
            at += -(-nbytes // ALIGN) * ALIGN
        self.nbytes = at

    @classmethod
    def of(cls, tree: Tree) -> Format:
        return cls([(name, x.dtype.str, x.shape) for name, x in tree.items()])

    def dump(self) -> bytes:
        return json.dumps([[name, dtype, list(shape)] for name, dtype, shape in self.columns]).encode()

    @classmethod
    def load(cls, data: bytes) -> Format:
        return cls([(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in json.loads(data)])

    def views(self, memory: SharedMemory, offset: int) -> Tree:
        parts = zip(self.columns, self.offsets, strict=True)
        return {name: memory.array(offset + at, shape, dtype) for (name, dtype, shape), at in parts}

    def split(self, data: Array) -> Tree:
        """The arrays of a message, as views of its bytes."""
        parts = zip(self.columns, self.offsets, strict=True)
        return {name: np.ndarray(shape, dtype, data.data, at) for (name, dtype, shape), at in parts}
