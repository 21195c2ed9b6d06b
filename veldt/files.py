"""Writes files atomically, and verifies them: safetensors, their hashes, and syncing to disk."""

import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import psutil
from safetensors.numpy import save_file

from veldt.errors import writing
from veldt.foreign import read_text, regular
from veldt.records.tree import Tree

MANIFEST = "manifest.json"


class Corrupt(Exception):
    """A file is missing, truncated, or differs from what its manifest says."""


def check_room(directory: Path, nbytes: int) -> None:
    """Raises an OSError if the disk has no room for arrays of this many bytes."""
    need, free = int(1.2 * nbytes) + 65536, shutil.disk_usage(directory).free
    if free < need:
        raise OSError(f"{need:,} bytes are needed in {directory}, {free:,} are free")


def write_arrays(path: Path, arrays: Tree) -> dict[str, Any]:
    """Writes and syncs a safetensors file; returns its fingerprint."""
    check_room(path.parent, sum(x.nbytes for x in arrays.values()))
    save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    written = fingerprint(path)
    if written is None:
        raise OSError(f"{path} cannot be read back")
    return written


def fingerprint(path: Path) -> dict[str, Any] | None:
    """The sha256 and the size of a regular file; None if it cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"sha256": digest, "bytes": file.tell()}
    except OSError:
        return None


def sync_directory(directory: Path) -> None:
    """Flushes a directory to disk, so that files created or renamed in it survive a crash. Windows cannot."""
    if sys.platform == "win32":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that the file is the old or the new text, never a mixture."""
    aside = path.with_name(f".aside-{path.name}")
    with writing(path):
        aside.unlink(missing_ok=True)
        with open(aside, "x", opener=regular) as file:
            file.write(text)
        os.replace(aside, path)


@contextlib.contextmanager
def locked(file: TextIO) -> Iterator[None]:
    """Holds a lock on an open file, or raises an OSError: another process has it. The kernel drops it when its holder dies.

    Windows has no such lock: there a second file holds the pid, and is ignored once no such process is there.
    """
    try:
        import fcntl
    except ImportError:
        with _claimed(Path(f"{file.name}-pid")):
            yield
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    if path.exists() and not _is_held(path):
        path.unlink()
    with open(path, "x", opener=regular) as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _is_held(path: Path) -> bool:
    """Whether the process that wrote its pid there is alive; one that began later has the same pid by chance."""
    try:
        return psutil.Process(int(read_text(path, 64))).create_time() <= path.stat().st_mtime + 1
    except (psutil.NoSuchProcess, ValueError):
        return False
