"""Ctrl-C at random moments of whole runs, in good states and bad ones: how long the end takes. Prints the longest times.

pytest -m long -s tests/runtime/test_interrupts.py
VELDT_MOMENTS=4 pytest -m long -s tests/runtime/test_interrupts.py        fewer moments of each recipe
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import chaos_run
import numpy as np
import psutil
import pytest

from veldt.experiment.run import Run

HERE = Path(__file__).parents[1]
SOON = 5.0  # seconds
MOMENTS = int(os.environ.get("VELDT_MOMENTS", 20))
# Each with what else it takes to be small, and a process that can be stuck.
RECIPES = {
    "dqn": [],
    "apex-dqn": [],
    "impala": [],
    "seed-vtrace": ["--transport", "grpc"],
    "r2d2": [],
}
STATES = ("any", "learner stopped", "environment hangs", "disk full")


class Started:
    """`veldt train` on `orders.Pole`, on a small disk where one can be mounted."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.path, self.orders = folder, folder / "disk" / "run", folder / "orders"
        for each in (folder / "disk", self.orders):
            each.mkdir(parents=True)
        self.mounted = chaos_run.mount(folder / "disk")
        settings = {"env": "orders:Pole", "run": self.path, "steps": 10**9, "log.every": 0.1, "checkpoint.every": 5_000}
        words = [word for name, x in settings.items() for word in (f"--{name}", str(x))]
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "veldt", "train", recipe, "--quiet", *words, *RECIPES[recipe]],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "CHAOS": str(self.orders)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def line(self) -> dict[str, Any]:
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
                return dict(json.loads(file.read().splitlines()[-1]))
        except (OSError, IndexError, ValueError):
            return {}

    def fill(self) -> None:
        with open(self.folder / "disk" / "ballast", "wb", 0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)
        if self.mounted:
            subprocess.run(["umount", "-l", self.folder / "disk"], check=False, timeout=30)


@contextlib.contextmanager
def started(folder: Path, recipe: str) -> Iterator[Started]:
    run = Started(folder, recipe)
    try:
        yield run
    finally:
        run.close()


def interrupt(folder: Path, recipe: str, state: str, moment: float) -> float:
    """Seconds from Ctrl-C to the end. `moment`: seconds after the process was started, or the run is in its state."""
    with started(folder, recipe) as run:
        if state != "any":
            chaos.wait_until(lambda: run.line().get("learner_steps", 0) > 20, 120, "it learns")
        if state == "disk full":
            if not run.mounted:
                pytest.skip("no small disk can be mounted here")
            run.fill()
        elif state == "environment hangs":
            (run.orders / "hang").touch()
            chaos.wait_until(lambda: list(run.orders.glob("hang-*")), 30, "one hangs")
        elif state == "learner stopped" and recipe != "dqn":  # which has one process
            table = json.loads((run.path / "processes.json").read_text())
            os.kill(table["learner"]["pid"], signal.SIGSTOP)
        time.sleep(moment)  # the moment of the fault
        members = psutil.Process(run.process.pid).children(recursive=True)
        told = run.line().get("env_steps", 0)
        os.killpg(run.process.pid, signal.SIGINT)
        sent = time.monotonic()
        output, _ = run.process.communicate(timeout=60)
        took = time.monotonic() - sent
        # Interrupted before its first line, Python ends itself with the signal. Without room on the disk it is an error.
        codes = (130, -signal.SIGINT, 2) if state in ("any", "disk full") else (130,)
        before_us = "Fatal Python error: init_import_site" in output  # Python itself was still starting
        assert before_us or run.process.returncode in codes, (recipe, state, moment, run.process.returncode, output)
        assert state == "any" or "Traceback" not in output, output
        chaos.wait_until(lambda: not any(map(chaos.alive, members)), 1, "all are gone")
        if told and state != "disk full":
            checkpoint = Run(run.path).checkpoints().load()
            assert checkpoint is not None and checkpoint.weights()
            assert checkpoint.manifest["env_steps"] >= told, "nothing that was told is lost"
    return took


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ctrl_c_ends_a_run_soon_at_any_moment(tmp_path: Path, recipe: str, state: str) -> None:
    """Of the first twelve seconds, the start too; and in bad states, of which fewer moments are tried."""
    times = MOMENTS if state == "any" else max(1, MOMENTS // 10)
    rng = np.random.default_rng(len(recipe) + len(state))
    took = []
    for i in range(times):
        moment = float(rng.random()) * (12.0 if state == "any" else 1.0)
        took.append(interrupt(tmp_path / f"{i}", recipe, state, moment))
    print(f"\nCtrl-C, {recipe}, {state}: {times} moments, the end came after {chaos.percentiles(took)}")
    assert max(took) <= SOON


def interrupt_start(folder: Path, moment: float) -> None:
    """Ctrl-C so many seconds after the command has taken over from Python, which cannot be interrupted well before that."""
    command = [sys.executable, "-m", "veldt", "train", "dqn", "--run", "run", "--steps", "1_000_000", "--quiet"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        chaos.wait_until(lambda: catches(process.pid, signal.SIGTERM), 60, "it handles signals")
        time.sleep(moment)  # the moment of the fault
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, (moment, process.returncode, output)
    told = [line for line in output.splitlines() if line]
    assert len(told) <= 1 and "Traceback" not in output, (moment, output)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; Python has none of its own for SIGTERM."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in text.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    "moments", [pytest.param(3, id="few"), pytest.param(20, id="many", marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_ctrl_c_while_the_command_imports_ends_it_with_one_line(tmp_path: Path, moments: int) -> None:
    for moment in (np.random.default_rng(moments).random(moments) * 3.0).tolist():
        interrupt_start(tmp_path, moment)
