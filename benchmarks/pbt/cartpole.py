"""Population-based training against the same members without copies, on CartPole-v1 with IMPALA.

    python benchmarks/pbt/cartpole.py --seeds 0 1 2 3 4 --dir populations/cartpole
    python benchmarks/pbt/cartpole.py --seeds 0 1 2 3 4 --dir populations/cartpole --table

Both arms have the same initial settings, seeds and env steps. Without copies they are a random search.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from veldt.watching.lineage import read_lineage

REACH = 475.0
ARMS: dict[str, Any] = {
    "PBT": {"rule": "truncation", "fraction": 0.25},
    "without copies": {"rule": "none"},
}


def spec(seed: int, arm: str, steps: int, ready: int) -> dict[str, Any]:
    return {
        "recipe": "impala",
        "env": "CartPole-v1",
        "population": 8,
        "seed": seed,
        "steps": steps,
        "ready": ready,
        "episodes": 10,
        "set": {"runtime": "inline"},
        "tune": {
            "learner.lr": {"loguniform": [1e-5, 1e-1]},
            "algorithm.entropy_cost": {"loguniform": [1e-4, 1e-1]},
        },
        "exploit": ARMS[arm],
        "explore": {"factors": [0.8, 1.2], "resample": 0.1},
    }


def place(directory: Path, arm: str, seed: int) -> Path:
    return directory / f"{arm.replace(' ', '-').lower()}-{seed}"


def row(directory: Path, arm: str, seed: int, quanta: int) -> dict[str, Any] | None:
    lines = [line for line in read_lineage(place(directory, arm, seed)) if line["event"] == "ready"]
    last = [line for line in lines if line["quantum"] == quanta]
    if not last:
        return None
    final = [line["fitness"] if line["fitness"] is not None else float("nan") for line in last]
    reached = next((line for line in lines if (line["fitness"] or 0) >= REACH), None)
    until = lines[: lines.index(reached) + 1] if reached else []
    return {
        "best": max(final),
        "median": statistics.median(final),
        "worst": min(final),
        "solved": sum(x >= REACH for x in final),
        "copies": sum("copied" in line for line in lines),
        "steps": reached["env_steps"] if reached else None,
        "seconds": sum(line["seconds"] for line in until) if reached else None,
    }


def table(directory: Path, seeds: list[int], quanta: int) -> None:
    print(
        "| arm | seed | best | median | worst | members at 475 | copies | env steps of a member to 475 | seconds to 475 |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for arm in ARMS:
        for seed in seeds:
            if found := row(directory, arm, seed, quanta):
                reached = "-" if found["steps"] is None else f"{found['steps']:,} | {found['seconds']:.0f}"
                reached = "- | -" if reached == "-" else reached
                cells = f"{found['best']:.0f} | {found['median']:.0f} | {found['worst']:.0f} | {found['solved']} of 8"
                print(f"| {arm} | {seed} | {cells} | {found['copies']} | {reached} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--dir", type=Path, default=Path("populations/cartpole"))
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--ready", type=int, default=6_000)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for arm in ARMS:
            directory = place(args.dir, arm, seed)
            file = args.dir / f"{directory.name}.yaml"
            file.write_text(yaml.safe_dump(spec(seed, arm, args.steps, args.ready), sort_keys=False))
            if not args.table:
                began = time.monotonic()
                command = [sys.executable, "-m", "veldt", "pbt", str(file), "--dir", str(directory), "--quiet"]
                subprocess.run(command, check=True, timeout=3_600)
                print(f"{directory.name}: {time.monotonic() - began:.0f} s", flush=True)
    table(args.dir, args.seeds, args.steps // args.ready)


if __name__ == "__main__":
    main()
