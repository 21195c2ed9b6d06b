"""What a host's share of a run costs the learner's host: eight single actors against a site of eight.

    python benchmarks/sites/weights.py --env MinAtar/Breakout-v0 --seconds 40 --turns 2

Runs take turns. Each has one actor of its own, and eight that join over TCP on this machine.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

PORT = 7790
COLUMNS = ("env_steps", "published", "gate_bytes_out", "gate_bytes_in", "gate_frames_in", "gate_frames_out")


def measure(env: str, seconds: float, actors: int, site: bool, flags: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = Path(folder) / "run"
        gate = ["--gate.listen", f"127.0.0.1:{PORT}", "--gate.seats", str(actors)]
        how = ["--steps", "100_000_000", "--eval.every", "0", "--checkpoint.every", "0", "--actors", "1", *flags]
        train = start(stack, "train", "apex-dqn", "--env", env, "--run", str(run), *gate, *how)
        wait_for(lambda: lines(run), train)
        join = ["--connect", f"127.0.0.1:{PORT}", "--token-file", str(run / "token")]
        commands = [[*join, "--actors", str(actors)]] if site else [join] * actors
        joined = [start(stack, "actor", *command) for command in commands]
        # All are connected, and have all sent blocks: some are silent for seconds while they import.
        wait_for(lambda: lines(run)[-1].get("gate_actors", 0) == actors, train)
        begun = lines(run)[-1]["gate_frames_in"] + 30 * actors
        wait_for(lambda: lines(run)[-1]["gate_frames_in"] > begun and lines(run)[-1]["gate_actors"] == actors, train)
        time.sleep(5.0)
        first = lines(run)[-1]
        began = cpu_of(joined)
        time.sleep(seconds)
        last, memory, ended = lines(run)[-1], memory_of(joined), cpu_of(joined)
        time_s = last["time_s"] - first["time_s"]
        out = {name: (last[name] - first[name]) / time_s for name in COLUMNS}
        between = [line["cpu/gate"] for line in lines(run) if first["time_s"] < line["time_s"] <= last["time_s"]]
        out |= {"cpu/gate": sum(between) / len(between), "cpu/joined": (ended - began) / time_s}
        return out | {"memory_of_joined": memory, "load": os.getloadavg()[0]}


def start(stack: contextlib.ExitStack, *command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "veldt", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait, 60)
    stack.callback(process.kill)
    stack.callback(time.sleep, 0.3)
    stack.callback(process.terminate)
    return process


def lines(run: Path) -> list[dict[str, Any]]:
    try:
        whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    except OSError:
        return []
    return [json.loads(line) for line in whole.splitlines()]


def wait_for(condition: Any, train: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline and train.poll() is None, "the run did not start"
        time.sleep(0.1)


def family(joined: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    found = [psutil.Process(process.pid) for process in joined]
    return [*found, *(child for process in found for child in process.children(recursive=True))]


def memory_of(joined: list[subprocess.Popen[bytes]]) -> float:
    return float(sum(process.memory_full_info().pss for process in family(joined)))


def cpu_of(joined: list[subprocess.Popen[bytes]]) -> float:
    times = [process.cpu_times() for process in family(joined)]
    return float(sum(each.user + each.system for each in times))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="MinAtar/Breakout-v0")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    options, more = parser.parse_known_args()
    for turn in range(options.turns):
        for site in (False, True):
            found = measure(options.env, options.seconds, options.actors, site, more)
            shown = {name: round(x, 3) if x < 100 else round(x) for name, x in found.items()}
            print(turn, "site" if site else "single", json.dumps(shown), flush=True)
