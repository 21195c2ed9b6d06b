"""A long run of Ape-X DQN, watched from outside: RAM, descriptors and threads of every process, and throughput.

    python benchmarks/soak.py --minutes 20 --out soak.json

Prints one line a process: the slope of its memory in MB an hour (least squares after a warm-up of a quarter of the time,
with its 95 % bound), descriptors and threads at both ends; and env steps and updates a second of the last tenth of the time
against the first tenth after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil


def look(run: Path) -> dict[str, dict[str, float]]:
    """RAM in bytes, descriptors and threads of every process of a run."""
    try:
        table = json.loads((run / "processes.json").read_text())
    except (OSError, ValueError):
        return {}
    found = {}
    for name, entry in table.items():
        try:
            process = psutil.Process(entry["pid"])
            # Private pages only: the store's shared pages would count when they are first touched.
            memory = process.memory_full_info().uss
            found[name] = {"memory": memory, "fds": process.num_fds(), "threads": process.num_threads()}
        except (psutil.Error, ValueError):
            pass
    return found


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Least-squares slope an hour, and the upper end of its 95 % interval."""
    x, n = times / 3600, len(times)
    fit, residuals, *_ = np.polyfit(x, values, 1, full=True)
    spread = np.sqrt(float(residuals[0]) / max(1, n - 2) / np.sum((x - x.mean()) ** 2)) if len(residuals) else 0.0
    return float(fit[0]), float(fit[0] + 2.0 * spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--out", type=Path, default=None, help="where to write all that was seen, as JSON")
    parser.add_argument("flags", nargs="*", help="more flags for veldt train apex-dqn, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "veldt", "train", "apex-dqn", "--run", str(run), "--quiet", "--steps", str(10**12)]
        command += ["--learner.no-anneal", "--checkpoint.every", "1000000", *args.flags]
        trainer = subprocess.Popen(command)
        began, seen = time.monotonic(), []
        try:
            while time.monotonic() - began < 60 * args.minutes:
                time.sleep(args.every)
                if trainer.poll() is not None:
                    sys.exit(f"the run ended early with code {trainer.returncode}")
                seen.append({"time": time.monotonic() - began, "processes": look(run)})
        finally:
            trainer.send_signal(signal.SIGINT)
            stopped = time.monotonic()
            code = trainer.wait(60)
            stopped = time.monotonic() - stopped
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        restarts = lines[-1].get("restarts", 0.0)
    report = {"minutes": args.minutes, "exit_code": code, "stop_s": round(stopped, 2), "restarts": restarts}
    report["processes"] = processes = {}
    warm = 60 * args.minutes / 4
    late = [look for look in seen if look["time"] > warm]
    for name in late[-1]["processes"]:
        points = [(look["time"], look["processes"][name]) for look in late if name in look["processes"]]
        times, memory = np.array([t for t, _ in points]), np.array([p["memory"] for _, p in points]) / 1e6
        hourly, bound = slope(times, memory)
        first, last = points[0][1], points[-1][1]
        processes[name] = {
            "memory_mb": round(float(memory[-1]), 1),
            "mb_an_hour": round(hourly, 2),
            "at_most": round(bound, 2),
            "fds": [first["fds"], last["fds"]],
            "threads": [first["threads"], last["threads"]],
        }
    for kind in ("env_steps", "learner_steps"):
        points = np.array([(line["time_s"], line[kind]) for line in lines if line["time_s"] > warm])
        tenth = max(2, len(points) // 10)
        ends = [points[:tenth], points[-tenth:]]
        rates = [(part[-1, 1] - part[0, 1]) / (part[-1, 0] - part[0, 0]) for part in ends]
        report[f"{kind}_per_s"] = {
            "first": round(rates[0], 1),
            "last": round(rates[1], 1),
            "ratio": round(rates[1] / rates[0], 3),
        }
    for name, row in processes.items():
        print(f"{name:12} {row}")
    print(json.dumps(report))
    if args.out is not None:
        args.out.write_text(json.dumps({"report": report, "seen": seen}))


if __name__ == "__main__":
    main()
