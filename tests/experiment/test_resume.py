"""The real program, killed at random moments and started again: it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_demos import balance, recorded
from test_run import Stop, crash, flags, stopping, tiny, whole_state

from veldt.experiment.run import Run

STEPS = {10: 30_000, 2: 8_000}  # by the number of kills


# By recipe: what is not as `tiny` has it. None: a setting that the recipe has not.
UNROLLS: dict[str, Any] = {
    "runtime": "inline",
    "algorithm.unroll": 8,
    "store.capacity": "160",
    "store.min_size": 0,
    "store.samples_per_insert": 1.0,
    "learner.batch": 4,
}
SEQUENCES: dict[str, Any] = {
    "runtime": "inline",
    "algorithm.lstm": 8,
    "algorithm.head": 8,
    "algorithm.burn_in": 4,
    "algorithm.length": 8,
    "algorithm.stride": 4,
    "actor.block": 16,
    "store.min_size": 30,
}
RECIPES: dict[str, dict[str, Any]] = {
    "dqn": {"store.selector": "prioritized", "learner.prefetch": 4},
    "apex-dqn": {"runtime": "inline", "learner.prefetch": 4},
    "impala": UNROLLS,
    "impala, LSTM": UNROLLS | {"algorithm.lstm": 8, "learner.publish_lag": 3},
    "seed-vtrace": UNROLLS | {"algorithm.lstm": 8, "algorithm.history": 2},
    "r2d2": SEQUENCES | {"learner.prefetch": 4},
    "r2d3": SEQUENCES | {"demo_ratio": 0.25},  # and demonstrations
    "gorila": {"runtime": "inline", "learner.prefetch": 4, "shards": 3},
    "gorila, global": {"runtime": "inline", "replay": "global", "learner.optimizer": "adam"},
}


def start(path: Path, recipe: str, changes: dict[str, object]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "veldt", "train", recipe, "--env", "CartPole-v1", "--run", str(path), "--quiet"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *flags(**changes)], cwd=path.parent, **pipes)


def newest(path: Path) -> int:
    return max((int(p.name) for p in (path / "checkpoints").glob("[0-9]*")), default=0)


def demonstrations(recipe: str, path: Path) -> dict[str, Any]:
    """For a recipe that learns from them."""
    if recipe != "r2d3":
        return {}
    return {"demos": str(recorded(path / "demos", balance, "CartPole-v1", 3, max_length=90).path)}


def states_of(run: Run) -> Any:
    """The recurrent states of all windows in the newest checkpoint's blocks."""
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None
    envs = run.config.envs()
    envs.close()
    layout, found = run.config.schema(envs.spec).start_layout, [np.zeros(0, np.float32)]
    for file in chain(*checkpoint.manifest["blocks"].values()):
        arrays = load_file(run.checkpoints().blocks / file["file"])
        starts = {name.removeprefix("starts/"): x for name, x in arrays.items() if name.startswith("starts/")}
        if "packed" in starts:
            starts["packed"] = np.ascontiguousarray(starts["packed"]).view(layout.record)
        found += [x.ravel() for _, x in sorted(layout.columns(starts).items())]
    return np.concatenate(found)


SHORT = ("dqn", "seed-vtrace", "gorila")  # the others only in the long suite
LONG = [pytest.param(name, marks=pytest.mark.long) for name in RECIPES if name not in SHORT]


@pytest.mark.parametrize("name", [*SHORT, *LONG])
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_killed_and_started_again_ends_with_the_same_weights(tmp_path: Path, kills: int, name: str) -> None:
    recipe = name.split(",")[0]
    changes = {"steps": STEPS[kills], "checkpoint.every": 250} | RECIPES[name] | demonstrations(recipe, tmp_path)
    total = STEPS[kills] // 250
    straight = tiny(tmp_path / "straight", recipe=recipe, **changes)
    path, rng = tmp_path / "killed", np.random.default_rng(kills)
    for kill in range(kills):
        reached = newest(path)
        aim = reached + int(rng.integers(1, max(2, (total - 14) // kills)))
        process = start(path, recipe, changes)
        try:
            deadline = time.monotonic() + 120
            while newest(path) < aim:
                assert process.poll() is None, f"it ended by itself: {process.communicate()[0]}"
                assert time.monotonic() < deadline, f"kill {kill}: no checkpoint {aim} within 120 s"
                time.sleep(0.002)
            time.sleep(float(rng.random()) * 0.15)  # the moment of the kill
            assert process.poll() is None, "it ended before it was killed; make the run longer"
        finally:
            process.kill()
            process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        loaded = Run(path).checkpoints().load()
        assert loaded is not None and aim <= loaded.number < total
    process = start(path, recipe, changes)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert output == "", "quiet means quiet"
    resumed = Run(path)
    assert resumed.weights_hash() == straight.weights_hash()
    assert whole_state(resumed) == whole_state(straight)
    assert (states_of(resumed) == states_of(straight)).all()
    check_metrics(resumed, kills)
    assert not list(path.rglob(".aside*"))


def check_metrics(run: Run, kills: int) -> None:
    lines = [json.loads(text) for text in (run.path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert {"time_s", "env_steps", "learner_steps"} <= set(line)
    resumed = [at for at, line in enumerate(lines) if "resumed_from" in line]
    assert len(resumed) == kills
    for at in resumed:
        assert lines[at]["resumed_from"] == lines[at]["learner_steps"] > 0
    # What was done again after a kill is told once.
    told = run.metrics
    assert len(told) <= len(lines)
    for name in ("env_steps", "learner_steps"):
        values = [line[name] for line in told]
        assert values == sorted(values), name
    superseded = [
        line for at in resumed for line in lines[:at] if line["env_steps"] > lines[at]["env_steps"] and line in told
    ]
    assert not superseded
    evaluated = [(line["env_steps"], line["eval_learner_steps"]) for line in told if "eval_return" in line]
    evaluated.pop()  # of the last weights, which the evaluator may have played too
    assert len(evaluated) == len(set(evaluated))


@pytest.mark.parametrize("recipe", ["r2d2", "r2d3"])
def test_a_recurrent_run_that_crashed_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process. Recurrent states are in the checkpoint, and so are the priorities of demonstrations."""
    changes = RECIPES[recipe] | demonstrations(recipe, tmp_path)
    straight = tiny(tmp_path / "straight", recipe=recipe, **changes)
    with stopping(monkeypatch, 130, crash), pytest.raises(Stop):
        tiny(tmp_path / "crashed", recipe=recipe, **changes)
    loaded = Run(tmp_path / "crashed").checkpoints().load()
    assert loaded is not None and 1 <= loaded.number < 5 and loaded.manifest["nodes"]["learner"]["steps"] > 10
    resumed = tiny(tmp_path / "crashed", recipe=recipe, **changes)
    assert resumed.weights_hash() == straight.weights_hash()
    assert whole_state(resumed) == whole_state(straight)
    assert (states_of(resumed) == states_of(straight)).all() and states_of(straight).any()


CRASHING = """
import os, signal, sys
from pathlib import Path
from veldt.experiment.checkpoint import Checkpoints
save = Checkpoints._save_state
def dies(self, path, nodes, manifest):
    save(self, path, nodes, manifest)
    if manifest["number"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)  # all is written, nothing is renamed
Checkpoints._save_state = dies
from veldt.__main__ import main
main(sys.argv[1:])
"""


def test_killed_in_the_middle_of_a_checkpoint_of_a_real_run(tmp_path: Path) -> None:
    arguments = ["train", "dqn", "--env", "CartPole-v1", "--run", str(tmp_path / "r"), "--quiet", *flags()]
    command = [sys.executable, "-c", CRASHING, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    path = tmp_path / "r" / "checkpoints"
    assert (path / ".aside-000003").exists()
    loaded = Run(tmp_path / "r").checkpoints().load()
    assert loaded is not None and loaded.number == 2
    assert os.readlink(path / "latest") == "000002"
    resumed = tiny(tmp_path / "r")
    assert whole_state(resumed) == whole_state(tiny(tmp_path / "straight"))
    assert not list(path.rglob(".aside*"))
