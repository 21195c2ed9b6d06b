"""Prints the newest value of each metric of a run or, with --csv, all of its metrics as a table.

Example: veldt metrics runs/cart --csv --columns env_steps eval_return -o cart.csv
"""

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from veldt.errors import UserError, did_you_mean, writing
from veldt.watching.plot import read_lines

CLOCKS = ("time_s", "env_steps", "learner_steps")  # the first columns


@dataclass(frozen=True)
class Metrics:
    run: tyro.conf.Positional[Path]
    """The run's directory."""
    csv: bool = False
    """Print comma-separated values: a row for each line of metrics.jsonl, without those that a resumed run repeated."""
    columns: tuple[str, ...] = ()
    """Only these metrics, in this order; rows that have none of them, beside the clocks, are left out."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the CSV to this file."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Metrics, args=argv, prog="veldt metrics", description=__doc__)
    lines = read_lines(args.run)
    known = list(dict.fromkeys([*CLOCKS, *sorted({name for line in lines for name in line})]))
    for name in args.columns:
        if name not in known:
            raise UserError(f"{args.run} has no metric {name!r}.{did_you_mean(name, known)}")
    columns = args.columns or known
    if args.out is not None:
        with writing(args.out):
            args.out.write_text(table(lines, columns), encoding="utf-8")
        print(args.out)
    elif args.csv:
        sys.stdout.write(table(lines, columns))
    else:
        newest = {name: x for line in lines for name, x in line.items() if x is not None}
        for name in columns:
            if name in newest:
                x = newest[name]
                print(f"{name:22} {f'{x:.6g}' if isinstance(x, float) else x}")
    return 0


def table(lines: list[dict[str, Any]], columns: Sequence[str]) -> str:
    asked = set(columns) - set(CLOCKS) or set(columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(line for line in lines if any(line.get(name) is not None for name in asked))
    return text.getvalue()
