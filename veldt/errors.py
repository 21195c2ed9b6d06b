"""Errors that are the user's to mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One sentence that says what is wrong and what to do. The CLI prints it and exits with code 2."""


class Diverged(Exception):
    """The loss was not finite many times in a row. The CLI prints this and exits with code 1."""


class ProcessFailed(RuntimeError):
    """A process of the run failed in a way that starting it again does not mend. `told` is its own traceback."""

    def __init__(self, message: str, told: str = "") -> None:
        super().__init__(message)
        self.told = told


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean a, b?' or nothing."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""
