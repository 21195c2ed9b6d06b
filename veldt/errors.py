"""Errors that the command line prints without a traceback of its own, and words in its sentences."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """One sentence that says what is wrong and what to do. The CLI prints it and exits with code 2."""


class Untrusted(UserError):
    """A file asks for something that its user must allow, such as to import code. The CLI adds the command that does."""


class Diverged(Exception):
    """The loss was not finite many times in a row. The CLI prints this and exits with code 1."""


class EnvError(RuntimeError):
    """An environment raised; its own traceback is the cause."""


class ProcessFailed(RuntimeError):
    """A process of the run failed, and restarting it does not help. `traceback` is that of the process."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """An OSError within is a UserError: this file cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}).") from None


def count(n: int, what: str) -> str:
    """'1 episode', '1,000 episodes'."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def did_you_mean(word: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """' Did you mean a, b?', or all those `listed` if no known word is close."""
    if close := difflib.get_close_matches(word[:100], list(known), n=3, cutoff=0.51):
        return f" Did you mean {', '.join(close)}?"
    return f" There are: {', '.join(listed)}." if listed else ""
