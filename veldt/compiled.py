"""Compiles small array functions with numba, except in light processes, where importing numba would take longer than it
saves. So these functions are vectorized, which is fast in both cases."""

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LIGHT = "VELDT_LIGHT"  # set in the environment of processes that have neither numba nor torch


def njit(signature: str | list[str]) -> Callable[[F], F]:
    """`numba.njit`; in a light process, returns the function unchanged."""
    if os.environ.get(LIGHT):
        return lambda function: function
    import numba

    return cast(Callable[[F], F], numba.njit(signature, cache=True))
