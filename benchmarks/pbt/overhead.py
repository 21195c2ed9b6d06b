"""How much of the time a population is outside of training.

    python benchmarks/pbt/overhead.py apex-dqn 60000 --dir populations/overhead

Four members, two quanta each of so many env steps, one at a time. Outside: starting and ending sessions, checkpoints,
evaluations, copies, the scheduler.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import yaml

from veldt.watching.lineage import read_lineage


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("ready", type=int, help="env steps of a quantum")
    parser.add_argument("--runtime", default="local")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("populations/overhead"))
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    file, place = args.dir / "overhead.yaml", args.dir / f"{args.recipe}-{args.runtime}-{time.strftime('%H%M%S')}"
    spec = {
        "recipe": args.recipe,
        "env": "CartPole-v1",
        "population": 4,
        "steps": 2 * args.ready,
        "ready": args.ready,
        "at_once": args.at_once,
        "set": {"runtime": args.runtime},
        "tune": {"learner.lr": {"loguniform": [1e-4, 1e-3]}},
        "exploit": {"rule": "truncation", "fraction": 0.25},
    }
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    began = time.monotonic()
    command = [sys.executable, "-m", "veldt", "pbt", str(file), "--dir", str(place), "--quiet"]
    subprocess.run(command, check=True, timeout=3_600)
    wall = time.monotonic() - began
    lines = [line for line in read_lineage(place) if line["event"] == "ready"]
    training, quanta = (sum(line[name] for line in lines) for name in ("train_seconds", "seconds"))
    whole = wall * args.at_once
    print(f"{len(lines)} quanta of {training / len(lines):.1f} s: {100 * (1 - training / quanta):.1f} % of a quantum and")
    print(f"{100 * (1 - training / whole):.1f} % of the command ({wall:.0f} s, with start and figure) are outside training")


if __name__ == "__main__":
    main()
