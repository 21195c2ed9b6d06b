"""Runs the commands of README.md and docs/*.md as they stand, one after the other, in an empty directory with the examples.

    python benchmarks/docs_commands.py                            # all, which takes about half an hour on two cores
    python benchmarks/docs_commands.py --list                     # what would run, and why the rest would not
    python benchmarks/docs_commands.py --dir there --only plot    # those with this word, after a run of all

A block of commands after `<!-- not run: REASON -->` is not run: it needs hours, a GPU, other machines or root.
tests/test_docs_commands.py checks the flags of all commands, and runs the quick ones.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PROGRAMS = ("veldt", "make", "pip", "python", "tensorboard", "openssl")
MARK = re.compile(r"<!-- not run: (.+?) -->")


class Command(NamedTuple):
    file: str
    line: int
    text: str  # without its comment
    reason: str  # why it is not run; empty: it is


def documents(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def commands(path: Path, root: Path = ROOT) -> list[Command]:
    """The commands of the indented blocks of a document."""
    found: list[Command] = []
    reason, text, first, fenced = "", "", 0, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        if mark := MARK.fullmatch(line.strip()):
            reason = mark[1]
        elif line.strip() and not line.startswith("    "):  # prose: the mark was of the block before
            reason = ""
        if fenced or not line.startswith("    "):
            continue
        first = first if text else number
        text += without_comment(re.sub(r"^\s*\w*\$ ", "", line).strip())  # `$ ` or `host$ ` before a command
        if text.endswith("\\"):
            text = text[:-1]
            continue
        if text.partition(" ")[0] in PROGRAMS:
            found.append(Command(str(path.relative_to(root)), first, " ".join(text.split()), reason))
        text = ""
    return found


def without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)# .*$", "", line)


def run(command: Command, directory: Path, limit_s: float) -> str:
    """Empty, or what went wrong."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=directory,
            env=os.environ
            | {"PATH": paths, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {limit_s:.0f} s"
    return "" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stdout[-2_000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--only", default="", help="run only commands that contain this")
    parser.add_argument("--dir", type=Path, help="where to run; kept (default: a new directory that is removed)")
    parser.add_argument("--limit-s", type=float, default=1_200.0, help="seconds that a command may take")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.dir or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("examples", "benchmarks"):
            if not (directory / name).exists():
                (directory / name).symlink_to(ROOT / name)
        for command in (found for path in documents() for found in commands(path)):
            if args.only not in command.text:
                continue
            where = f"{command.file}:{command.line}: {command.text}"
            if command.reason or args.list:
                print(f"{where}\n    {f'not run: {command.reason}' if command.reason else 'run'}", flush=True)
                continue
            began = time.monotonic()
            wrong = run(command, directory, args.limit_s)
            failed += bool(wrong)
            print(f"{where}\n    {wrong or f'{time.monotonic() - began:.0f} s'}", flush=True)
    print(f"{failed} failed" if failed else "all ran")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
