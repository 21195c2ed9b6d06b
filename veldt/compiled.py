"""Small functions of arrays, compiled by numba, but not in a light process: there it would take longer to import than they
ever save. So they are written in whole arrays, which are quick in both."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LIGHT = "VELDT_LIGHT"  # set in the environment of processes that have neither numba nor torch


def njit(signature: str | list[str]) -> Callable[[F], F]:
    """`numba.njit`, or in a light process the function as it is."""
    if os.environ.get(LIGHT):
        return lambda function: function
    import numba

    return cast(Callable[[F], F], numba.njit(signature, cache=True))
