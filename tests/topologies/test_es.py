"""Evolution strategies as runs: in one thread and in processes, with any number of workers, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import veldt
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.prepare import prepare
from veldt.experiment.run import Run
from veldt.runtime import Inline
from veldt.runtime.local.local import Local
from veldt.topologies import make_program

TINY: dict[str, Any] = {
    "steps": 15_000,
    "envs_per_actor": 4,
    "algorithm.hidden": (8,),
    "learner.pairs": 8,
    "learner.table": 100_000,
    "learner.noiseless": 0.1,
    "learner.anneal": True,
    "eval.every": 0,
    "checkpoint.every": 2_000,
    "log.every": 0.2,
}
EXACT: dict[str, Any] = {"learner.cap": 60, "learner.observe": 0.5, "actor.noise": 0.05}


def tiny(path: Path, env: str = "CartPole-v1", **changes: Any) -> Run:
    return veldt.train("es", env=env, run=path, quiet=True, **TINY | changes)


def state_of(run: Run) -> dict[str, Any]:
    """Weights, statistics, optimizer and counts of the newest checkpoint."""
    found = run.checkpoints().load()
    assert found is not None
    from safetensors.numpy import load_file

    arrays = {name: x.tobytes() for name, x in load_file(found.path / "state.safetensors").items()}
    weights = {name: x.tobytes() for name, x in found.weights().items()}
    nodes = {name: found.manifest["nodes"][name] for name in ("master", "counters")}
    return {"arrays": arrays, "weights": weights, "nodes": nodes}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An uninterrupted run in one thread, with one worker."""
    run = tiny(tmp_path_factory.mktemp("es") / "straight", runtime="inline", actors=1, **EXACT)
    line = run.metrics[-1]
    assert line["learner_steps"] > 10 and line["env_steps"] >= TINY["steps"]
    return state_of(run)


@pytest.mark.parametrize(("runtime", "actors"), [("inline", 3), ("local", 1), ("local", 2), ("local", 4)])
def test_a_run_does_not_depend_on_how_many_workers_there_are(
    straight: dict[str, Any], tmp_path: Path, runtime: str, actors: int
) -> None:
    assert state_of(tiny(tmp_path / "run", runtime=runtime, actors=actors, **EXACT)) == straight


def command(path: Path, **changes: Any) -> list[str]:
    words = [sys.executable, "-m", "veldt", "train", "es", "--env", "CartPole-v1", "--run", str(path), "--quiet"]
    for name, value in (TINY | EXACT | changes).items():
        name = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(name if value else f"{name.rpartition('.')[0]}.no-{name.rpartition('.')[2]}")
        else:
            words += [name, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def end(process: subprocess.Popen[bytes]) -> None:
    """The command and all its processes."""
    with_children = [process.pid]
    try:
        with_children += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        pass
    for pid in with_children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait(10)


def killed_and_resumed(path: Path, aim: int, extra: float, **changes: Any) -> None:
    """Kills all its processes after checkpoint `aim`, and lets the same command go on."""
    process = subprocess.Popen(command(path, **changes), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (path / "checkpoints" / f"{aim:06d}" / "manifest.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, "no such checkpoint"
            time.sleep(0.002)
        time.sleep(extra)  # the moment of the kill
    finally:
        end(process)


def test_killed_as_a_whole_it_ends_with_the_same_weights(straight: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "killed"
    killed_and_resumed(path, 2, 0.02, runtime="local", actors=2)
    assert "resumed_from" not in (path / "metrics.jsonl").read_text()
    subprocess.run(command(path, runtime="local", actors=2), check=True, timeout=180)
    assert "resumed_from" in (path / "metrics.jsonl").read_text()
    assert state_of(Run(path)) == straight


@pytest.mark.long
@pytest.mark.parametrize("trial", range(5))
def test_killed_as_a_whole_many_times(straight: dict[str, Any], tmp_path: Path, trial: int) -> None:
    path, rng = tmp_path / "killed", np.random.default_rng(trial)
    for aim in sorted(rng.choice(np.arange(1, 6), 2, replace=False).tolist()):
        killed_and_resumed(path, aim, float(rng.random()) * 0.1, runtime="local", actors=2)
    subprocess.run(command(path, runtime="local", actors=2), check=True, timeout=180)
    assert state_of(Run(path)) == straight


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.long)])
def test_killed_workers_cost_no_generation(kills: int) -> None:
    """Weights after the last generation are those of a run in which nothing was killed."""
    steps = 2_500 * kills
    config = recipes.make("es", "CartPole-v1", actors=2, runtime="local", **TINY | EXACT | {"steps": steps})
    spec = config.env_spec()
    with Inline().start(make_program(config, spec)) as nodes:
        while nodes.count("env_steps") < steps:
            nodes.step()
        expected = nodes.state()["master"]
        generations = nodes.count("learner_steps")
    rng = np.random.default_rng(kills)
    with Local().start(make_program(config, spec)) as nodes:
        children, killed = nodes.supervisor.children, set[int]()
        deadline = time.monotonic() + 60 + 4 * kills
        while nodes.count("env_steps") < steps or nodes.metrics()["restarts"] < kills:
            assert time.monotonic() < deadline, (nodes.count("env_steps"), len(killed), nodes.metrics())
            if len(killed) < kills and nodes.count("env_steps") > len(killed) * steps // (kills + 1):
                victim = children[f"worker/{rng.integers(2)}"]
                if victim.pid and victim.ready and victim.pid not in killed:  # its death may not have been noticed yet
                    victim.signal(signal.SIGKILL)
                    killed.add(victim.pid)
            nodes.step()
        assert len(killed) == kills == nodes.metrics()["restarts"]
        assert nodes.count("learner_steps") == generations
        found = nodes.state()["master"]
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert np.asarray(x).tobytes() == np.asarray(found[name]).tobytes(), name


def test_a_killed_master_goes_on_from_its_state(straight: dict[str, Any], tmp_path: Path) -> None:
    config = recipes.make("es", "CartPole-v1", actors=1, runtime="local", **TINY | EXACT)
    with Local().start(make_program(config, config.env_spec())) as nodes:
        deadline = time.monotonic() + 120
        killed = False
        while nodes.count("env_steps") < TINY["steps"]:
            assert time.monotonic() < deadline
            if not killed and nodes.count("env_steps") > 5_000:
                nodes._read(nodes.ask_once("state", nodes._kept, nodes._kept))  # what it is restarted from
                nodes.supervisor.children["master"].signal(signal.SIGKILL)
                killed = True
            nodes.step()
        found = nodes.state()["master"]
    assert killed
    weights = {name.removeprefix("weights/"): x for name, x in found.items() if name.startswith("weights/")}
    assert {name: x.tobytes() for name, x in weights.items()} == straight["weights"]
    assert int(found["env_steps"]) == straight["nodes"]["master"]["env_steps"]


def test_noise_is_the_same_in_master_and_workers_byte_for_byte(tmp_path: Path) -> None:
    """All processes map one table; what is in it follows from the seed."""
    from veldt.learning.evolution import fill_noise
    from veldt.seeds import derive

    config = recipes.make("es", "CartPole-v1", actors=2, runtime="local", **TINY | {"seed": 9})
    expected = np.zeros(TINY["learner.table"], np.float32)
    fill_noise(expected, derive(9, "master"))
    with Local().start(make_program(config, config.env_spec())) as nodes:
        deadline = time.monotonic() + 60
        while nodes.count("learner_steps") < 1 and time.monotonic() < deadline:
            nodes.step()
        assert nodes.supervisor.arrays["noise"].tobytes() == expected.tobytes()
        inode = os.fstat(nodes.supervisor.descriptors["array noise"]).st_ino
        for name in ("master", "worker/0", "worker/1"):
            maps = Path(f"/proc/{nodes.supervisor.children[name].pid}/maps").read_text().splitlines()
            assert any(line.split()[4] == str(inode) for line in maps), name
        assert "/arrays" not in nodes.state(), "a table that follows from the seed is in no checkpoint"


def test_in_mode_first_a_run_in_one_thread_resumes_exactly(tmp_path: Path) -> None:
    how: dict[str, Any] = {"runtime": "inline", "actors": 2, "learner.mode": "first", "steps": 9_000}
    whole = tiny(tmp_path / "whole", **how)

    def stop(saved: Any) -> bool:
        return saved.number < 2

    veldt.train("es", run=tmp_path / "part", quiet=True, on_checkpoint=stop, **TINY | how)
    part = tmp_path / "part"
    for path in (part / "checkpoints").glob("[0-9]*"):
        manifest = json.loads((path / "manifest.json").read_text().splitlines()[0])
        if not manifest["scheduled"]:
            import shutil

            shutil.rmtree(path)
    assert Run(part).checkpoints().load() is not None
    assert state_of(tiny(part, **how)) == state_of(whole)


def test_what_a_run_leaves_can_be_used_as_any(tmp_path: Path) -> None:
    how: dict[str, Any] = {"eval.every": 20_000, "eval.episodes": 2, "actors": 2, "runtime": "local", "log.every": 0.5}
    run = tiny(tmp_path / "run", **how, steps=100_000)  # long enough for rates, which are taken over a second
    line = run.metrics[-1]
    assert any(x.get("episodes_per_s", 0) > 0 and x["bytes_per_s"] > 0 for x in run.metrics)
    assert any(0 < x.get("update_ratio", 0) < 1 for x in run.metrics)  # 0 where all returns of a generation were equal
    assert "mean_weights_return" in line and "best_pair_return" in line
    assert len(run.evaluations) >= 2
    assert len(run.evaluate(episodes=3).returns) == 3
    policy = veldt.load(run.path, which="best")
    action, state = policy(np.zeros(4, np.float32))
    assert action in (0, 1) and state is None
    with pytest.raises(UserError, match="ES has no value"):
        policy.value(np.zeros(4, np.float32))
    more = tiny(tmp_path / "more", init_from=str(run.path), runtime="inline", steps=300)
    assert more.weights_hash() != run.weights_hash()


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("Pendulum-v1", {"algorithm.bins": 10, "steps": 2_000}),
        ("veldt/MaskedCartPole-v0", {"algorithm.lstm": 4, "steps": 300}),
        (
            "MinAtar/Breakout-v1",
            {"steps": 100, "learner.table": 1_000_000, "learner.reference": 16, "algorithm.hidden": (16, 16)},
        ),
        ("veldt/Catch-v0", {"algorithm.network_from": "networks_of_es:small", "steps": 300}),
    ],
    ids=str,
)
def test_environments_and_networks(env: str, changes: dict[str, Any], tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", env, runtime="inline", **{"learner.pairs": 2, "learner.optimizer": "sgd", **changes})
    assert run.metrics[-1]["learner_steps"] >= 1
    run.policy(env=run.config.env_spec())


def test_grpc_carries_it_too(straight: dict[str, Any], tmp_path: Path) -> None:
    assert state_of(tiny(tmp_path / "run", runtime="local", actors=2, transport="grpc", **EXACT)) == straight


@pytest.mark.parametrize(
    ("env", "changes", "why"),
    [
        ("CartPole-v1", {"inference": "central"}, "no --inference central"),
        ("CartPole-v1", {"gate.listen": "127.0.0.1:0", "runtime": "local"}, "no actors that join"),
        ("CartPole-v1", {"learner.table": 50}, "raise learner.table"),
        ("CartPole-v1", {"algorithm.bins": 10}, "algorithm.bins is for continuous actions"),
        ("CartPole-v1", {"algorithm.batch_norm": True}, "algorithm.batch_norm is for the package's convolutional"),
        ("CartPole-v1", {"store.capacity": "7"}, "store.capacity has no effect here"),
        ("CartPole-v1", {"learner.sgd_momentum": 0.5}, "it needs --learner.optimizer sgd"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(env: str, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        tiny(tmp_path / "run", env, **changes)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_ram_plan_counts_the_table_and_the_lanes() -> None:
    def planned(**changes: Any) -> int:
        config = recipes.make("es", "CartPole-v1", runtime="inline", **changes)
        return prepare(config).ram

    least = planned(**{"learner.table": 1_000_000})
    assert planned(**{"learner.table": 26_000_000}) - least == pytest.approx(100e6, abs=20e6)
    wide = {"learner.table": 1_000_000, "algorithm.hidden": (512, 512), "envs_per_actor": 64}
    assert planned(**wide) - least > 2 * 64 * 4 * 512 * 512, "each lane has weights of its own"
