"""veldt demos: verifies and describes a demonstration set."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from veldt.demos.set import Demos
from veldt.machine import format_bytes
from veldt.records.tree import Array
from veldt.watching.links import amount

BINS = 10
WIDTH = 40  # of the longest bar


@dataclass(frozen=True)
class Flags:
    dir: tyro.conf.Positional[Path]
    """The directory of the set."""
    json: bool = False
    """Print one JSON object on the last line: env, episodes, steps, returns, lengths and more."""


def run(argv: list[str]) -> int:
    example = "Verifies and describes a demonstration set that veldt record made.\n\nExample: veldt demos demos/cart"
    args = tyro.cli(Flags, args=argv, prog="veldt demos", description=example)
    demos = Demos.open(args.dir)
    print("\n".join(describe(demos)))
    if args.json:
        print(json.dumps(numbers(demos)))
    return 0


def describe(demos: Demos) -> list[str]:
    seen = ", ".join(f"{name} {c}" for name, c in demos.columns.items() if name.startswith("obs"))
    protocol = demos.protocol.get("name") if demos.protocol else ""
    wanted = f" of {demos.wanted:,} wanted" if len(demos) < demos.wanted else ""
    discarded = f", {demos.discarded:,} discarded" if demos.discarded else ""
    lines = [
        f"{demos.path}: {amount(len(demos), 'episodes')}{wanted}{discarded}, {amount(demos.steps, 'steps')}, "
        f"{format_bytes(demos.nbytes)}",
        f"environment: {demos.env}{f' (protocol {protocol})' if protocol else ''}: {seen}; actions {demos.action_space}",
        f"played by: {demos.policy}, seed {demos.seed}",
    ]
    for name, x in (("returns", demos.returns), ("lengths", demos.lengths)):
        lines.append(f"{name}: mean {x.mean():.1f}, min {x.min():.1f}, max {x.max():.1f}, sd {x.std():.1f}")
    return [*lines, "", *histogram(demos.returns)]


def histogram(x: Array) -> list[str]:
    low, high = float(x.min()), float(x.max())
    bins = BINS if high > low else 1
    place = np.minimum((x - low) / (high - low) * bins, bins - 1).astype(np.int64) if high > low else np.zeros(len(x), int)
    counts = np.bincount(place, minlength=bins)
    edges = [f"{low + (high - low) * i / bins:.4g}" for i in range(bins + 1)]
    names = [f"{a} to {b}" for a, b in pairwise(edges)] if bins > 1 else edges[:1]
    wide = max(map(len, names))
    return [
        f"  {name:>{wide}}  {'#' * int(np.ceil(WIDTH * count / counts.max())):{WIDTH}}  {count:,}".rstrip()
        for name, count in zip(names, counts.tolist(), strict=True)
    ]


def numbers(demos: Demos) -> dict[str, Any]:
    columns = {name: {"shape": list(c.shape), "dtype": str(c.dtype)} for name, c in demos.columns.items()}
    return {
        "env": demos.env,
        "protocol": demos.protocol,
        "policy": demos.policy,
        "seed": demos.seed,
        "episodes": len(demos),
        "discarded": demos.discarded,
        "steps": demos.steps,
        "bytes": demos.nbytes,
        "mean_return": float(demos.returns.mean()),
        "mean_length": float(demos.lengths.mean()),
        "returns": demos.returns.tolist(),
        "lengths": demos.lengths.tolist(),
        "columns": columns,
        "action_space": demos.action_space,
    }
