"""Two revisions of the package against each other: `veldt bench` of each in turn, and the medians of old and new.

    git worktree add /tmp/old REVISION
    python benchmarks/revisions.py /tmp/old . --bench learner --bench "apex --seconds 5" --turns 5 --out table.json
    python benchmarks/revisions.py /tmp/old . --train "apex-dqn --learner.lr 1e-3" --seconds 12

`--train` takes the rates of a run with these flags, for revisions whose defaults differ: give the flags that make both
equal, and after a | those that only the new revision has.

Turns alternate, so that a machine that becomes slower is slower for both. The ratio is old / new for times and new / old
for rates: below 1, the new revision is slower. The spread is the least and the largest ratio within one turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TIMES = ("_us", "_s", "s_to_", "cpu_s", "USD")  # what is better when it is smaller
NOT_OURS = ("bare", "multiprocessing", "cpprb", "memcpy", "/", "bytes", "batch", "USD", "p99")


def leaves(tree: object, path: str = "") -> dict[str, float]:
    if isinstance(tree, dict):
        return {name: value for key, part in tree.items() for name, value in leaves(part, f"{path}, {key}").items()}
    return {path[2:]: float(tree)} if isinstance(tree, int | float) and not isinstance(tree, bool) else {}


def measure(checkout: Path, words: str) -> dict[str, float]:
    name, *flags = shlex.split(words)
    command = [sys.executable, "-m", "veldt", "bench", name, "--json", *flags]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/tmp", timeout=1800)
    if done.returncode:
        sys.exit(f"{checkout}: veldt bench {words} ended with {done.returncode}: {done.stderr[-2000:]}")
    return leaves(json.loads(done.stdout.splitlines()[-1])["results"])


def train(checkout: Path, words: str, seconds: float) -> dict[str, float]:
    """Rates of a run from its first second with updates on, for so many seconds."""
    with tempfile.TemporaryDirectory() as directory:
        run, environment = Path(directory) / "run", os.environ | {"PYTHONPATH": str(checkout.resolve())}
        command = [sys.executable, "-m", "veldt", "train", *shlex.split(words), "--run", str(run), "--quiet"]
        process = subprocess.Popen([*command, "--steps", str(10**9), "--eval.every", "0"], env=environment, cwd="/tmp")
        try:
            points = _watch(process, run / "metrics.jsonl", seconds)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    first, last = points[0], points[-1]
    taken = last["time_s"] - first["time_s"]
    return {f"{name}_per_s": (last[name] - first[name]) / taken for name in ("env_steps", "learner_steps")}


def _watch(process: subprocess.Popen[bytes], file: Path, seconds: float) -> list[dict[str, float]]:
    deadline = time.monotonic() + seconds + 60
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        points = [point for point in map(json.loads, whole) if point.get("learner_steps")][1:]
        if points and points[-1]["time_s"] - points[0]["time_s"] >= seconds:
            return points
    sys.exit("the run ended, or made no updates")


def smaller_is_better(name: str) -> bool:
    last = name.rsplit(", ", 1)[-1]
    return not last.endswith("per_s") and any(word in last for word in TIMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--bench", action="append", default=[], help="a benchmark and its flags")
    parser.add_argument("--train", action="append", default=[], help="a recipe and its flags")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a run")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="peers, limits and ratios too")
    parser.add_argument("--out", type=Path, help="all numbers, as JSON")
    args = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for words in args.bench + args.train:
        rows = found[words] = {}
        for turn in range(args.turns):
            order = [args.old, args.new] if turn % 2 == 0 else [args.new, args.old]
            measured = {}
            for checkout in order:
                both, _, only_new = words.partition("|")
                flags = both + only_new if checkout == args.new else both
                is_run = words in args.train
                measured[checkout] = train(checkout, flags, args.seconds) if is_run else measure(checkout, flags)
            for name in measured[args.old].keys() & measured[args.new].keys():
                rows.setdefault(name, []).append((measured[args.old][name], measured[args.new][name]))
        print(f"\n{words}\n{'':64s}{'old':>12s} {'new':>12s} {'ratio':>6s} {'spread':>13s}")
        for name, pairs in sorted(rows.items()):
            if not args.all and any(word in name.rsplit(", ", 1)[-1] for word in NOT_OURS):
                continue
            old, new = np.array(pairs).T
            if not (old > 0).all() or not (new > 0).all():
                continue
            each = old / new if smaller_is_better(name) else new / old
            ratio = np.median(old) / np.median(new) if smaller_is_better(name) else np.median(new) / np.median(old)
            short = name if len(name) < 64 else f"{name[:20]}...{name[-40:]}"
            figures = f"{np.median(old):12,.4g} {np.median(new):12,.4g} {ratio:6.2f} {each.min():6.2f}-{each.max():.2f}"
            print(f"{short:64s}{figures}")
        sys.stdout.flush()
        if args.out:
            args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
