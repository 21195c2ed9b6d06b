"""Long runs, watched from outside: RAM, descriptors and threads of every process, and throughput.

    python benchmarks/soak.py --minutes 20 --out soak.json
    python benchmarks/soak.py --minutes 120 --run apex-dqn --run "seed-vtrace --transport grpc"      two side by side

Prints one line a process: the slope of its memory in MB an hour (least squares after a warm-up of a quarter of the time,
with its 95 % bound), descriptors and threads at both ends; and env steps and updates a second of the last tenth of the time
against the first tenth after the warm-up. Exits with 1 if a run ended early, a process was restarted, or a figure is worse
than what --slope (MB an hour) and --ratio (last to first throughput) allow.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


class Soak:
    """One run: a recipe, and flags for it."""

    def __init__(self, words: str, folder: Path) -> None:
        self.words, self.run = words, folder / "run"
        recipe, *flags = shlex.split(words)
        how = f"--quiet --steps {10**12} --learner.no-anneal --checkpoint.every 1000000".split()
        command = [sys.executable, "-m", "veldt", "train", recipe, "--run", str(self.run), *how, *flags]
        self.trainer = subprocess.Popen(command)
        self.seen: list[dict[str, Any]] = []

    def look(self, at: float) -> None:
        if self.trainer.poll() is not None:
            sys.exit(f"{self.words}: the run ended early with code {self.trainer.returncode}")
        self.seen.append({"time": at, "processes": look(self.run)})

    def report(self, minutes: float) -> dict[str, Any]:
        """Ends the run."""
        sent = time.monotonic()
        self.trainer.send_signal(signal.SIGINT)
        code = self.trainer.wait(60)
        report: dict[str, Any] = {"run": self.words, "minutes": minutes, "exit_code": code}
        report["stop_s"] = round(time.monotonic() - sent, 2)
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        report["restarts"] = next((line["restarts"] for line in reversed(lines) if "restarts" in line), 0.0)
        warm = 60 * minutes / 4
        report["processes"] = self._processes(warm)
        for kind in ("env_steps", "learner_steps"):
            points = np.array([(line["time_s"], line[kind]) for line in lines if line["time_s"] > warm])
            tenth = max(2, len(points) // 10)
            ends = [points[:tenth], points[-tenth:]]
            first, last = ((part[-1, 1] - part[0, 1]) / (part[-1, 0] - part[0, 0]) for part in ends)
            rates = {"first": round(first, 1), "last": round(last, 1), "ratio": round(last / first, 3)}
            report[f"{kind}_per_s"] = rates
        return report

    def _processes(self, warm: float) -> dict[str, dict[str, Any]]:
        out = {}
        late = [look for look in self.seen if look["time"] > warm]
        for name in late[-1]["processes"]:
            points = [(look["time"], look["processes"][name]) for look in late if name in look["processes"]]
            times, memory = np.array([t for t, _ in points]), np.array([p["memory"] for _, p in points]) / 1e6
            hourly, bound = slope(times, memory)
            first, last = points[0][1], points[-1][1]
            out[name] = {
                "memory_mb": round(float(memory[-1]), 1),
                "mb_an_hour": round(hourly, 2),
                "at_most": round(bound, 2),
                "fds": [first["fds"], last["fds"]],
                "threads": [first["threads"], last["threads"]],
            }
        return out


def problems(report: dict[str, Any], steepest: float, least: float) -> list[str]:
    found = [f"{n:.0f} restarts"] if (n := report["restarts"]) else []
    for name, row in report["processes"].items():
        if row["mb_an_hour"] > steepest:
            found.append(f"{name} grows by {row['mb_an_hour']} MB an hour")
        found += [f"{what} of {name}: {row[what]}" for what in ("fds", "threads") if row[what][1] > row[what][0]]
    rates = {kind: report[f"{kind}_per_s"]["ratio"] for kind in ("env_steps", "learner_steps")}
    return found + [f"{kind} last / first: {ratio}" for kind, ratio in rates.items() if ratio < least]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument(
        "--run", action="append", help="a recipe and its flags, in quotes; may be repeated (default: apex-dqn)"
    )
    parser.add_argument("--slope", type=float, default=1.0, help="MB an hour that a process may grow by")
    parser.add_argument("--ratio", type=float, default=0.98, help="least last / first throughput")
    parser.add_argument("--out", type=Path, default=None, help="where to write all that was seen, as JSON")
    args = parser.parse_args()
    soaks: list[Soak] = []
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        try:
            soaks += [Soak(words, Path(directory) / str(i)) for i, words in enumerate(args.run or ["apex-dqn"])]
            while time.monotonic() - began < 60 * args.minutes:
                time.sleep(args.every)
                for soak in soaks:
                    soak.look(time.monotonic() - began)
            reports = [soak.report(args.minutes) for soak in soaks]
        finally:
            for soak in soaks:
                soak.trainer.kill()
                soak.trainer.wait(60)
    for report in reports:
        report["problems"] = problems(report, args.slope, args.ratio)
        print(f"\n{report['run']}")
        for name, row in report["processes"].items():
            print(f"{name:12} {row}")
        print(json.dumps(report))
    if args.out is not None:
        args.out.write_text(json.dumps({"reports": reports, "seen": [soak.seen for soak in soaks]}))
    sys.exit(any(report["problems"] for report in reports))


if __name__ == "__main__":
    main()
