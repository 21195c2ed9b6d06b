"""Shared memory without a name: a descriptor that is passed to other processes, and a mapping of it."""

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


def make_memory(name: str) -> int:
    """A descriptor of new memory that has no size yet."""
    if not hasattr(os, "memfd_create") or not FUTEX:
        raise UserError("The local runtime needs Linux on x86-64 or aarch64; use --runtime inline here.")
    return os.memfd_create(name, os.MFD_CLOEXEC)


class Memory:
    """A memfd, mapped. Its first user gives it a size, and every page of it is there from then on: no SIGBUS later."""

    def __init__(self, fd: int, nbytes: int = 0) -> None:
        if nbytes:
            reserve(fd, nbytes)
        self.nbytes = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.nbytes)

    def words(self, offset: int, count: int) -> memoryview:
        """int64 words; Python reads and writes one of them faster than an element of an array."""
        return memoryview(self.map)[offset : offset + 8 * count].cast("q")

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.ndarray(shape, dtype, self.map, offset)


def reserve(fd: int, nbytes: int) -> None:
    """Gives a memfd this size, with every page really there."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise
        raise UserError(
            f"{nbytes / 1e6:,.1f} MB of shared memory are needed and cannot be had ({error.strerror}); lower "
            "store.capacity or the number of actors."
        ) from None
