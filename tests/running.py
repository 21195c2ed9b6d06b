"""Running a program until a condition holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veldt.program import Program


def run_until(runtime: Any, program: Program, done: Callable[[Any], bool] = lambda nodes: False) -> None:
    """Asks `done` before each step of the nodes."""
    with runtime.start(program) as nodes:
        while not done(nodes):
            nodes.step()
