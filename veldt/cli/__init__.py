"""The command line: one module per command, each with `run(argv)`; `parse` makes dataclasses from flags.

May import all other packages; only `veldt.__main__` imports it.
"""

from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def parse(kind: type[T], argv: list[str], prog: str, description: str | None, default: T | None = None, **more: Any) -> T:
    """An instance of the dataclass `kind` from flags. For a wrong flag or value tyro prints what is wrong and which flags
    are close, and exits with code 2; for --help it prints all flags and exits with code 0."""
    if default is not None:
        more["default"] = default
    value: T = tyro.cli(kind, args=argv, prog=prog, description=description, **more)
    return value
