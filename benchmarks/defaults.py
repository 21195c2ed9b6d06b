"""How far the default flags carry: recipes x environments x seeds, several runs at once, one JSON line a run.

    python benchmarks/defaults.py --recipes dqn apex-dqn --envs CartPole-v1 Acrobot-v1 --seeds 100 101 102 --out table.jsonl
    python benchmarks/defaults.py --show table.jsonl

Each run is `veldt train RECIPE --env ENV --seed SEED` and then 20 episodes of its last weights, on `--cores` cores of its
own. A run that is in the file already is not repeated. `--variant NAME flag=value ...` gives flags to all runs, for tuning.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ONE = """
import json, sys, time
import veldt
job = json.loads(sys.argv[1])
began = time.perf_counter()
run = veldt.train(job["recipe"], env=job["env"], run=sys.argv[2], quiet=True, seed=job["seed"], **job["flags"])
seconds = time.perf_counter() - began
found = run.evaluate(episodes=job["episodes"], seed=10_000 + job["seed"])
last = [line for line in run.metrics if "env_steps" in line][-1]
job |= {"returns": [float(x) for x in found.returns], "seconds": seconds, "env_steps": last["env_steps"]}
job |= {"curve": [[point.env_steps, point.mean_return] for point in run.evaluations]}
print("\\n" + json.dumps(job))
"""


def value(text: str) -> Any:
    try:
        return json.loads(text.replace("_", "") if text.replace("_", "").isdigit() else text)
    except ValueError:
        return text


def work(jobs: queue.Queue[dict[str, Any]], cores: list[int], out: Path, lock: threading.Lock, limit: float) -> None:
    environment = os.environ | {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return
        label = f"{job['recipe']:12s} {job['env']:24s} seed {job['seed']} {job['variant']}"
        with tempfile.TemporaryDirectory() as directory:
            pinned = ["taskset", "-c", ",".join(map(str, cores)), sys.executable]
            command = [*pinned, "-c", ONE, json.dumps(job), f"{directory}/run"]
            began = time.monotonic()
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                print(f"{label}: not done after {limit:.0f} s", flush=True)
                continue
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            print(f"{label}: failed: {done.stderr.strip()[-600:]}", flush=True)
            continue
        found = json.loads(lines[-1])
        with lock, out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        mean = float(np.mean(found["returns"]))
        print(f"{label}: {mean:8.1f}  {found['seconds']:.0f} s of {time.monotonic() - began:.0f}", flush=True)


def show(path: Path) -> None:
    """Mean over seeds of the mean return, the range over seeds, and the median seconds."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        job = json.loads(line)
        cells.setdefault((job["env"], job["recipe"], job["variant"]), []).append(job)
    print("| environment | recipe | variant | mean | worst | median | best | seeds | env steps | seconds |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for (env, recipe, variant), jobs in sorted(cells.items()):
        means = [float(np.mean(job["returns"])) for job in jobs]
        numbers = " | ".join(f"{x:.1f}" for x in (np.mean(means), min(means), np.median(means), max(means)))
        seconds, steps = np.median([job["seconds"] for job in jobs]), np.median([job["env_steps"] for job in jobs])
        print(f"| {env} | {recipe} | {variant} | {numbers} | {len(jobs)} | {steps:,.0f} | {seconds:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[])
    parser.add_argument("--envs", nargs="+", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--variant", nargs="+", action="append", default=[], metavar="NAME flag=value")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--cores", type=int, default=2, help="of one run")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of one run")
    parser.add_argument("--out", type=Path, default=Path("defaults.jsonl"))
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show:
        show(args.show)
        return
    done = set()
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            job = json.loads(line)
            done.add((job["recipe"], job["env"], job["seed"], job["variant"]))
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    for seed in args.seeds:  # all cells have one seed before any has two
        for name, *flags in args.variant or [["default"]]:
            for env in args.envs:
                for recipe in args.recipes:
                    if (recipe, env, seed, name) in done:
                        continue
                    given = {key: value(text) for key, _, text in (flag.partition("=") for flag in flags)}
                    job = {"recipe": recipe, "env": env, "seed": seed, "variant": name, "flags": given}
                    jobs.put(job | {"episodes": args.episodes})
    cores, lock, threads = sorted(os.sched_getaffinity(0)), threading.Lock(), []
    for i in range(0, len(cores) - args.cores + 1, args.cores):
        thread = threading.Thread(target=work, args=(jobs, cores[i : i + args.cores], args.out, lock, args.limit))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    if args.out.exists():
        show(args.out)


if __name__ == "__main__":
    main()
