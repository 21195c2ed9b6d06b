"""Shared memory without a name: a descriptor that is passed to other processes, and its mapping in this process."""

from __future__ import annotations

import errno
import mmap
import os
import platform

import numpy as np
import numpy.typing as npt

from veldt.errors import UserError
from veldt.records.tree import Array

PAGE = mmap.PAGESIZE
# On x86-64 stores become visible in program order. Elsewhere, and with VELDT_DEBUG=1, messages carry checksums.
CHECKED = platform.machine() not in ("x86_64", "AMD64") or os.environ.get("VELDT_DEBUG", "") not in ("", "0")
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # the number of the system call


def make_shared_memory(name: str) -> int:
    """The descriptor of new shared memory, of size 0."""
    if not hasattr(os, "memfd_create") or not FUTEX:
        raise UserError("The local runtime needs Linux on x86-64 or aarch64; use --runtime inline here.")
    return os.memfd_create(name, os.MFD_CLOEXEC)


class SharedMemory:
    """A mapped memfd. Its first user gives it a size and allocates every page, so that there is no SIGBUS later."""

    def __init__(self, fd: int, nbytes: int = 0) -> None:
        if nbytes:
            reserve(fd, nbytes)
        self.nbytes = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.nbytes)

    def words(self, offset: int, count: int) -> memoryview:
        """int64 words, of which Python reads and writes one faster than an element of an array."""
        return memoryview(self.map)[offset : offset + 8 * count].cast("q")

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.ndarray(shape, dtype, self.map, offset)


def reserve(fd: int, nbytes: int) -> None:
    """Gives a memfd this size and allocates every page."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise
        raise UserError(
            f"{nbytes / 1e6:,.1f} MB of shared memory are needed and cannot be allocated ({error.strerror}); lower "
            "store.capacity or the number of actors."
        ) from None
