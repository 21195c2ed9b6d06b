"""Learning curves of named groups of runs: against env steps and against time.

    python benchmarks/compare.py -o curves.png "apex-dqn=runs/apex-0,runs/apex-1" "TD3=td3-0.jsonl,td3-1.jsonl"

Each is a run directory, or a file of JSON lines with env_steps, time_s and eval_return. A run's evaluations are drawn at
the env steps and the time of the weights that played.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from veldt.watching.plot import Curve, draw
from veldt.watching.sinks import read_metrics


def read(path: Path) -> Curve:
    return Curve.of(read_metrics(path / "metrics.jsonl" if path.is_dir() else path), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", help="NAME=PATH,PATH,...")
    parser.add_argument("-o", "--out", type=Path, default=Path("curves.png"))
    parser.add_argument("--at", type=float, nargs="*", default=[], help="env steps at which to print mean and range")
    parser.add_argument("--seconds", type=float, nargs="*", default=[], help="seconds likewise")
    args = parser.parse_args()
    groups = {}
    for text in args.groups:
        name, _, paths = text.partition("=")
        groups[name] = [read(Path(path)) for path in paths.split(",")]
    for column, points, unit in (("env_steps", args.at, "steps"), ("time_s", args.seconds, "s")):
        for at in points:
            for name, curves in groups.items():
                found = [np.interp(at, getattr(curve, column), curve.returns) for curve in curves]
                if any(at > 1.05 * getattr(curve, column)[-1] for curve in curves):
                    continue  # not all runs have come this far
                print(f"{name} at {at:,.0f} {unit}: {np.mean(found):.1f} ({min(found):.1f} to {max(found):.1f})")
    draw(groups, args.out)


if __name__ == "__main__":
    main()
