"""Shared by benchmarks of whole runs: rates of a running program, runs of `veldt train`, bare loops, scripts of peers."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.program import Program
from veldt.runtime.local.local import Local
from veldt.watching.sinks import evaluations

WARM_S = 2.0
GAUGE_S = 0.25
SOLVED = 475.0  # CartPole, the mean of 20 greedy episodes
NEVER = 1e9  # seconds
PEERS = Path("benchmarks/peers")


@dataclasses.dataclass(frozen=True)
class WholeRuns:
    """Settings of benchmarks of whole runs."""

    seconds: float = 8.0
    """Seconds of one turn."""
    rounds: int = 3
    """Turns that each contender gets."""
    actors: int = 2
    """Actor processes."""
    envs: int = 8
    """Environments of each actor."""
    seeds: int = 3
    """Runs for the time until CartPole is solved."""
    rllib_python: str = ""
    """A Python that has RLlib; without it RLlib is left out."""


def measure(
    program: Program,
    seconds: float,
    counters: tuple[str, ...],
    gauges: tuple[str, ...] = (),
    begins: str = "learner_steps",  # the run is about to be warm when this counter has begun to grow
) -> dict[str, float]:
    """Growth of counters per second once a run is warm, and means of metrics."""
    seen: dict[str, list[float]] = {name: [] for name in gauges}
    looked = 0.0
    with Local().start(program) as nodes:
        while not nodes.count(begins):
            nodes.step()
        warm = time.perf_counter() + WARM_S
        while time.perf_counter() < warm:
            nodes.step()
        began, before = time.perf_counter(), [nodes.count(name) for name in counters]
        while (now := time.perf_counter()) - began < seconds:
            nodes.step()
            if gauges and now - looked > GAUGE_S:
                looked, metrics = now, nodes.metrics()
                for name in gauges:
                    seen[name] += [metrics[name]] if name in metrics else []
        taken, after = time.perf_counter() - began, [nodes.count(name) for name in counters]
    rates = {name: (b - a) / taken for name, a, b in zip(counters, before, after, strict=True)}
    return rates | {name: statistics.fmean(values or [float("nan")]) for name, values in seen.items()}


def train(recipe: str, seed: int, eval_every: int) -> tuple[float, float]:
    """Seconds from the command `veldt train` to the first update, and to the first evaluation that solves CartPole."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["train", recipe, "--env", "CartPole-v1", "--seed", str(seed), "--run", f"{directory}/run", "--quiet"]
        every = ["--eval.every", str(eval_every)]
        subprocess.run([sys.executable, "-m", "veldt", *command, *every], check=True, timeout=300)
        lines = [json.loads(line) for line in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "first_update_s" in line)
    began = first["first_update_s"] - first["first_update_time_s"]  # when the run's clock started
    solved = (began + point.time_s for point in evaluations(lines) if point.mean_return >= SOLVED)
    return first["first_update_s"], next(solved, NEVER)


def bare(module: str, envs: int, seconds: float) -> list[Any]:
    """What the functions bare_learner and bare_actor of a module print, side by side."""
    names = ("bare_learner", "bare_actor")
    return side_by_side([f"from {module} import {name}; {name}({envs}, {seconds})" for name in names], seconds)


def side_by_side(codes: list[str], seconds: float) -> list[Any]:
    """Runs pieces of Python in parallel, each in a process of one thread, for about this many seconds; returns the JSON
    they print."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    loops = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) for code in codes
    ]
    return [json.loads(loop.communicate(timeout=60 + 4 * seconds)[0]) for loop in loops]


def run_json(python: str, script: Path, *flags: str) -> dict[str, Any]:
    """Runs a peer's script; returns the JSON on its last line."""
    if not script.exists():
        raise UserError(f"{script} was not found; run this from the root of the repository.")
    done = subprocess.run([python, str(script), *flags], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise UserError(f"{script} failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
