"""Compiles small array functions with numba, except in light processes, where importing numba would take longer than it
saves. So these functions are vectorized, which is fast in both cases.

The first command after an installation compiles them all, and says so; later ones load them from numba's cache.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LIGHT = "VELDT_LIGHT"  # set in the environment of processes that have neither numba nor torch
MOMENT_S = 0.5  # of compiling, before it is announced
_spent = 0.0  # seconds of compiling; infinite once it is announced


def njit(signature: str | list[str], **options: Any) -> Callable[[F], F]:
    """`numba.njit` with a cache; in a light process, returns the function unchanged."""
    if os.environ.get(LIGHT):
        return lambda function: function
    import numba

    def compiled(function: F) -> F:
        began = time.monotonic()
        found = numba.njit(signature, cache=True, **options)(function)
        if found.stats.cache_misses:
            _announce(time.monotonic() - began)
        return cast(F, found)

    return compiled


def _announce(seconds: float) -> None:
    """Once, and not by a process of a run, which compiles the same at the same time."""
    global _spent
    _spent += seconds
    if MOMENT_S < _spent < float("inf") and LIGHT not in os.environ:
        _spent = float("inf")
        print("veldt: compiling functions for this machine (once, about 10 s)", file=sys.stderr, flush=True)
