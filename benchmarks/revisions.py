"""Two revisions of the package against each other: `veldt bench` of each in turn, and the medians of old and new.

    git worktree add /tmp/old REVISION
    python benchmarks/revisions.py /tmp/old . --bench learner --bench "apex --seconds 5" --turns 5 --out table.json

Turns alternate, so that a machine that becomes slower is slower for both. The ratio is old / new for times and new / old
for rates: below 1, the new revision is slower. The spread is the least and the largest ratio within one turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
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


def smaller_is_better(name: str) -> bool:
    last = name.rsplit(", ", 1)[-1]
    return not last.endswith("per_s") and any(word in last for word in TIMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--bench", action="append", required=True, help="a benchmark and its flags")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="peers, limits and ratios too")
    parser.add_argument("--out", type=Path, help="all numbers, as JSON")
    args = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for words in args.bench:
        rows = found[words] = {}
        for turn in range(args.turns):
            order = [args.old, args.new] if turn % 2 == 0 else [args.new, args.old]
            measured = {checkout: measure(checkout, words) for checkout in order}
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
