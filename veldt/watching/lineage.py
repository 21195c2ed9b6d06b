"""The lineage of a population: lineage.jsonl, one JSON object a line, written before what it says is done.

    {"event": "born", "member": 3, "tuned": {"learner.lr": 0.01}}
    {"event": "ready", "member": 3, "quantum": 2, "env_steps": 40000, "learner_steps": 9000, "checkpoint": 2,
     "returns": [31.0, ...], "fitness": 28.4, "tuned": {"learner.lr": 0.01}, "seconds": 4.1, "train_seconds": 3.7,
     "copied": {"member": 5, "quantum": 2, "checkpoint": 2, "fitness": 180.2}, "next": {"learner.lr": 0.0031}}

`tuned` are the values that it was trained with, `next` those that it goes on with. Without `copied` it kept its own
weights. A member that failed has no returns, and `failed` says why.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.foreign import LARGE, read_bytes
from veldt.watching.sinks import JsonLines, parse

FILE = "lineage.jsonl"
Line = dict[str, Any]

COPIED = {"member": int, "quantum": int, "checkpoint": int}
BORN = {"member": int, "tuned": dict}
READY = {**BORN, "quantum": int, "env_steps": int, "learner_steps": int, "checkpoint": int, "returns": list, "next": dict}


def read_lineage(directory: Path) -> list[Line]:
    """Empty: there is none yet."""
    path = directory / FILE
    try:
        lines = list(parse(read_bytes(path, LARGE).split(b"\n")))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    for number, line in enumerate(lines, 1):
        if not _is_line(line):
            raise UserError(f"{path} cannot be used: its line {number} is not one that veldt pbt writes.")
    return lines


def _is_line(line: Line) -> bool:
    if line.get("event") == "born":
        return _has(line, BORN)
    copied, returns = line.get("copied", {}), line.get("returns")
    numbers = isinstance(returns, list) and all(isinstance(x, int | float) for x in returns)
    sound = isinstance(copied, dict) and (not copied or _has(copied, COPIED))
    return line.get("event") == "ready" and _has(line, READY) and numbers and sound


def _has(line: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    fits = all(isinstance(line.get(name), kind) and not isinstance(line.get(name), bool) for name, kind in kinds.items())
    return fits and all(line[name] >= 0 for name, kind in kinds.items() if kind is int)


class Lineage:
    """The file, for writing: what `add` returns from is on the disk."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._file = JsonLines(self.path)

    def add(self, line: Line) -> None:
        try:
            self._file.write(line)
            self._file.sync()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({os.strerror(error.errno or 0)}).") from None

    def close(self) -> None:
        self._file.close()


def ancestors(lines: list[Line], member: int) -> list[tuple[int, int]]:
    """Where the present weights of a member were trained: (member, quantum), the oldest first."""
    ready = {(line["member"], line["quantum"]): line for line in lines if line["event"] == "ready"}
    at, quantum = member, max((quantum for who, quantum in ready if who == member), default=0)
    path: list[tuple[int, int]] = []
    while True:
        if copied := ready.get((at, quantum), {}).get("copied"):  # what it trained in this quantum is gone
            at, quantum = copied["member"], copied["quantum"]
        if not quantum or len(path) > len(ready):
            return path[::-1]
        path.append((at, quantum))
        quantum -= 1
