"""Latest: the newest version of a value, for one writer and many readers. Weights are published this way."""

from __future__ import annotations

import os
import zlib

import numpy as np

from veldt.records.tree import Array, Tree
from veldt.runtime.shm.memory import CHECKED, PAGE, Format, SharedMemory

VERSION, SIZE, TAG, CHECKSUM = 0, 1, 2, 4  # words; there are two tags and two checksums, one for each slot
LENGTH, FORMAT = 6, 56  # the word with the length of the format, and the byte where the format begins


class Latest:
    """Two slots: the parity of the version says which one is complete.

    A reader keeps its copy only if the version has not changed meanwhile. A writer that is killed has not changed it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._slots: list[Array] = []  # empty: it is not mapped

    def _map(self) -> bool:
        """False: nothing was written yet."""
        if not self._slots and os.fstat(self.fd).st_size:
            memory = SharedMemory(self.fd)
            if memory.words(0, 1)[VERSION]:
                self._open(memory)
        return bool(self._slots)

    def _open(self, memory: SharedMemory) -> None:
        self._words = memory.words(0, PAGE // 8)
        self.format = Format.load(memory.map[FORMAT : FORMAT + self._words[LENGTH]])
        size = self._words[SIZE]
        self._slots = [memory.array(PAGE + i * (-(-size // PAGE) * PAGE), (size,), np.uint8) for i in range(2)]

    def _lay_out(self, format_: Format) -> None:
        described = format_.dump()
        assert FORMAT + len(described) <= PAGE, described
        memory = SharedMemory(self.fd, PAGE + 2 * (-(-format_.nbytes // PAGE) * PAGE))
        words = memory.words(0, PAGE // 8)
        words[SIZE], words[LENGTH] = format_.nbytes, len(described)
        memory.map[FORMAT : FORMAT + len(described)] = described
        self._open(memory)

    def write(self, tag: int, value: Tree) -> None:
        """`tag` identifies the value. All values have the format of the first one."""
        format_ = Format.of(value)
        if not self._map():
            self._lay_out(format_)
        assert format_.columns == self.format.columns, (format_.columns, self.format.columns)
        version = self._words[VERSION] + 1
        slot = self._slots[version & 1]
        for x, at in zip(value.values(), format_.offsets, strict=True):
            slot[at : at + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        self._words[TAG + (version & 1)] = tag
        self._words[CHECKSUM + (version & 1)] = zlib.crc32(slot.data) if CHECKED else -1
        self._words[VERSION] = version

    def read(self, have: int) -> tuple[int, Tree] | None:
        """(tag, copy of the value). None: the newest has the tag `have`, or ten copies in a row were overwritten."""
        found = self.read_bytes(have)
        return None if found is None else (found[0], self.format.views(found[1].data))

    def read_bytes(self, have: int) -> tuple[int, Array] | None:
        """Like `read`, with the bytes of all arrays as they are in the slot."""
        if not self._slots and not self._map():
            return None
        words = self._words
        for _ in range(10):
            version = words[VERSION]
            tag = words[TAG + (version & 1)]
            if tag == have and words[VERSION] == version:
                return None
            checksum = words[CHECKSUM + (version & 1)]
            value = self._slots[version & 1].copy()
            if words[VERSION] == version and (checksum < 0 or zlib.crc32(value.data) == checksum):
                return tag, value
        return None
