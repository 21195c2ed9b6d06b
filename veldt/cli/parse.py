"""Typed flags from dataclasses, and one sentence for what cannot be parsed."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from typing import Any, TypeVar

import tyro

from veldt.errors import UserError

T = TypeVar("T")


def parse(kind: type[T], argv: list[str], prog: str, description: str, default: T | None = None) -> T:
    """An instance of the dataclass `kind` from flags. --help prints and exits; a wrong flag is a UserError."""
    options: dict[str, Any] = {} if default is None else {"default": default}
    if "-h" in argv or "--help" in argv:
        tyro.cli(kind, args=["--help"], prog=prog, description=description, **options)
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
            found: tuple[T, list[str]] = tyro.cli(
                kind, args=argv, prog=prog, description=description, return_unknown_args=True, **options
            )
    except SystemExit:
        raise UserError(f"{_plain(text.getvalue())} Try: {prog} --help") from None
    value, unknown = found
    if unknown:
        raise UserError(_unknown(kind, unknown[0], prog, options))
    return value


def _unknown(kind: type[Any], word: str, prog: str, options: dict[str, Any]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is not expected here. Try: {prog} --help"
    flag = word.partition("=")[0].replace("_", "-")
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=prog, **options)
    known = sorted({name.replace("_", "-") for name in re.findall(r"--[a-z][a-z0-9._-]*", text.getvalue())})
    # Compared by their last part: --lr is meant for --learner.lr.
    tails = {name: name.lstrip("-").rpartition(".")[2] for name in known}
    tail = flag.lstrip("-").rpartition(".")[2]
    close = [name for name in known if tails[name] == tail] + difflib.get_close_matches(flag, known, n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(dict.fromkeys(close))}?" if close else f" Try: {prog} --help"
    return f"There is no flag {flag}.{hint}"


def _plain(text: str) -> str:
    """The message inside the parser's frame, on one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip(" │|") for line in text.splitlines() if not re.fullmatch(r"[\s─╭╮╰╯│+-]*|.*[╭╰].*", line)]
    words = " ".join(line for line in lines if line and not line.startswith(("For full helptext", "usage:")))
    words = re.sub(r"\s+", " ", words).partition(" Argument helptext")[0]
    words = re.sub(r"^(Value error|Invalid choice|Missing argument|Parsing error|Required options) ", "", words)
    words = re.sub(r"\(required\).*", "", words).strip()
    return words[:1].upper() + words[1:].strip().rstrip(".") + "."
