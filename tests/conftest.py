"""How hypothesis runs here: the same examples each time; with VELDT_EXAMPLES=n, n times as many and new ones. And what
several files of tests need."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from veldt.runtime.shm.memory import make_shared_memory

# A background job starts with these ignored, and so would the runs that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests share what they build with each other, and with the processes that they start.
HERE = Path(__file__).parent
FOLDERS = [str(HERE), *(str(path) for path in sorted(HERE.iterdir()) if path.is_dir() and path.name != "__pycache__")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS + [path for path in [os.environ.get("PYTHONPATH", "")] if path])

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("same", derandomize=True, database=None, print_blob=True, suppress_health_check=SLOW)
settings.register_profile("new", print_blob=True, suppress_health_check=SLOW)
settings.load_profile("new" if "VELDT_EXAMPLES" in os.environ else "same")


@pytest.fixture
def fds() -> Iterator[list[int]]:
    """Of shared memory that has no size yet."""
    out = [make_shared_memory("veldt test") for _ in range(6)]
    yield out
    for fd in out:
        os.close(fd)
