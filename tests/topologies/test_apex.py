"""Ape-X DQN: its ladder, its limiter, its runs in processes, and that it learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from test_run import Stop, crash, stopping, whole_state

import veldt
from veldt.acting.policy import LocalPolicy
from veldt.counters import Counters
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.experiment.exploring import LadderConfig
from veldt.experiment.run import Run
from veldt.learning.params import LatestParams
from veldt.machine import process_age, used_memory
from veldt.program import INCARNATION, Given, Program
from veldt.storing.limiters import MinSize, SamplesPerInsert
from veldt.topologies import add_actor, add_shared, apex, make_program
from veldt.topologies.stores import make_replay

TINY: dict[str, Any] = {
    "steps": 6_000,
    "envs_per_actor": 4,
    "actor.block": 16,
    "algorithm.hidden": (16,),
    "algorithm.n": 3,
    "store.capacity": "2_000",
    "store.min_size": 200,
    "learner.batch": 16,
    "eval.every": 2_000,
    "eval.episodes": 2,
    "checkpoint.every": 2_000,
    "log.every": 0.1,
}


def tiny(path: Path, recipe: str = "apex-dqn", **changes: Any) -> Run:
    return veldt.train(recipe, env="CartPole-v1", run=path, quiet=True, **TINY | changes)


def latest(run: Run) -> dict[str, Any]:
    """The manifest of the newest checkpoint."""
    found: dict[str, Any] = json.loads((run.path / "checkpoints" / "latest" / "manifest.json").read_text().splitlines()[0])
    return found


@pytest.mark.parametrize("total", [2, 3, 16, 360])
def test_epsilons_are_the_papers(total: int) -> None:
    ladder = LadderConfig()
    found = ladder.explore(0, total, total)
    assert found == pytest.approx([0.4 ** (1 + 7 * i / (total - 1)) for i in range(total)])
    assert found[0] == pytest.approx(0.4) and found[-1] == pytest.approx(0.4**8)


def test_one_environment_alone_is_in_the_middle_of_the_ladder() -> None:
    assert LadderConfig().explore(0, 1, 1) == pytest.approx([0.4**4.5])


def explored(config: Config) -> list[float]:
    """The epsilons of all environments, those of actors that may join last, as the run and its actors build them."""
    env = config.env_spec()
    if config.inference == "central":
        node = make_program(config, env).nodes["inference"]
        return [float(x) for x in next(x for x in node.args if isinstance(x, np.ndarray))]
    program = Program()
    store, params, counters = add_shared(program, config, env)
    for i in range(config.total_actors):
        add_actor(program, config, env, i, store, params, counters)
    policies = [program.nodes[f"policy/{i}"] for i in range(config.total_actors)]
    return [float(x) for node in policies for x in next(x for x in node.args if isinstance(x, np.ndarray))]


@pytest.mark.parametrize("inference", ["local", "central"])
@pytest.mark.parametrize(("actors", "seats"), [(2, 4), (1, 1), (3, 7)])
def test_empty_seats_take_no_rungs_of_the_ladder(inference: str, actors: int, seats: int) -> None:
    values: dict[str, Any] = {"actors": actors, "envs_per_actor": 4, "inference": inference}
    alone = explored(recipes.make("apex-dqn", **values))
    joined = explored(recipes.make("apex-dqn", **values, **{"gate.listen": "127.0.0.1:0", "gate.seats": seats}))
    n = 4 * actors
    assert alone == (0.4 ** (1 + 3.0 * (np.arange(n) / (n - 1)))).tolist(), "without a gate the paper's, bit for bit"
    assert joined[:n] == alone
    rungs = (np.log(joined[n:]) / np.log(0.4) - 1) / 3
    assert len(rungs) == 4 * seats
    for taken in range(1, len(rungs) + 1):  # any number of environments that join is spread evenly: no gap over 2 / taken
        ends = np.concatenate([[0], np.sort(rungs[:taken]), [1]])
        assert np.diff(ends).min() > 1e-9 and np.diff(ends).max() < 2 / taken + 1e-9


@pytest.mark.parametrize("recipe", ["apex-dpg", "impala"])
def test_other_exploration_does_not_depend_on_seats(recipe: str) -> None:
    actor = recipes.make(recipe, "Pendulum-v1" if recipe == "apex-dpg" else "CartPole-v1").actor
    assert actor.explore(8, 4, 8).tolist() == actor.explore(8, 4, 99).tolist() == actor.explore(0, 4, 8).tolist()


def test_every_environment_of_the_run_has_a_rung_of_its_own() -> None:
    config = recipes.make("apex-dqn", actors=3, envs_per_actor=4)
    program = Program()
    apex(program, config, config.envs().spec)
    policies = [node for name, node in program.nodes.items() if node.build is LocalPolicy and "greedy" not in name]
    rungs = np.concatenate([next(x for x in node.args if isinstance(x, np.ndarray)) for node in policies])
    assert rungs == pytest.approx(config.actor.explore(0, 12, 12)) and len(set(rungs)) == 12


def test_the_papers_numbers_for_atari() -> None:
    config = recipes.make("apex-dqn-paper", "ALE/Pong-v5")
    algorithm, learner, store = config.algorithm, config.learner, config.store
    assert (algorithm.n, algorithm.gamma, algorithm.double, algorithm.dueling, algorithm.huber) == (
        3,
        0.99,
        True,
        True,
        False,
    )
    assert (learner.optimizer, learner.lr, learner.decay, learner.eps) == ("rmsprop", 0.00025 / 4, 0.95, 1.5e-7)
    assert (learner.batch, learner.clip_norm, learner.target_every, learner.trim_every) == (512, 40.0, 2_500, 100)
    assert (store.capacity, store.min_size, store.alpha, store.beta) == ("2_000_000", 50_000, 0.6, 0.4)
    assert 4 * config.actor.refresh == 400, "frames between two pulls of the weights"
    assert not store.actors_wait and store.slack > 0, "actors wait for nobody"


def test_where_actors_do_not_wait_only_samples_are_held_back() -> None:
    limiter = SamplesPerInsert.for_run(4.0, 100, burst=10, batch=20, inserts_wait=False)
    assert limiter.can_insert(10, size=1_000, inserted=10**9, sampled=0)
    assert not limiter.can_sample(20, size=1_000, inserted=1_000, sampled=10**9)
    assert not SamplesPerInsert.for_run(4.0, 100, burst=10, batch=20).can_insert(10, 1_000, 10**9, 0)


def test_no_samples_per_insert_means_no_limit_but_the_minimum() -> None:
    config = recipes.make("apex-dqn", **{"store.samples_per_insert": 0.0, "store.min_size": 7})
    assert make_replay(config, config.schema(config.envs().spec)).limiter == MinSize(7)


def test_a_run_ends_by_itself_and_is_resumed_with_its_store(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r")
    assert not psutil.Process().children(recursive=True) and not (run.path / "processes.json").exists()
    first = run.metrics
    assert first[-1]["env_steps"] >= 6_000 and first[-1]["learner_steps"] > 0 and first[-1]["restarts"] == 0
    assert [line for line in first if "eval_return" in line]
    manifest = latest(run)
    counts = manifest["nodes"]["store"]["counts"]
    covered = [file for file in manifest["blocks"]["store"] if file["stop"] > counts["oldest"]]
    assert covered[0]["first"] <= counts["oldest"] and covered[-1]["stop"] == counts["next"], "every block is saved"

    again = veldt.resume(run.path, quiet=True, steps=9_000)
    lines = again.metrics
    resumed = next(line for line in lines if "resumed_from" in line)
    assert resumed["resumed_from"] == manifest["nodes"]["learner"]["steps"] == manifest["learner_steps"]
    assert lines[-1]["env_steps"] >= 9_000 and lines[-1]["learner_steps"] > resumed["resumed_from"]
    after = json.loads((run.path / "checkpoints" / "latest" / "manifest.json").read_text().splitlines()[0])["nodes"][
        "store"
    ]
    new = after["counts"]["inserted"] - counts["inserted"]
    assert new >= 2_000, "what comes after a resume is not taken for what came before"
    assert after["counts"]["duplicates"] == 0 and after["counts"]["sampled"] > counts["sampled"]
    assert "was paused for" in (run.path / "log.txt").read_text()


def test_resume_is_exact_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"runtime": "inline", "steps": 1_500, "checkpoint.every": 400, "eval.every": 500, "store.min_size": 100}
    expected = whole_state(tiny(tmp_path / "a", **changes))
    with stopping(monkeypatch, 120, crash), pytest.raises(Stop):
        tiny(tmp_path / "b", **changes)
    assert (tmp_path / "b" / "checkpoints" / "latest").exists()
    assert whole_state(tiny(tmp_path / "b", **changes)) == expected


def test_plain_dqn_runs_in_processes_too(tmp_path: Path) -> None:
    changes = {"runtime": "local", "steps": 1_500, "actor.block": 8}
    run = tiny(tmp_path / "r", "dqn", **changes)
    assert run.metrics[-1]["env_steps"] >= 1_500 and run.metrics[-1]["learner_steps"] > 0
    assert not psutil.Process().children(recursive=True)


def test_memory_of_other_processes_and_of_shared_memory_counts_once() -> None:
    alone = used_memory()
    with psutil.Popen(["sleep", "60"]) as other:
        try:
            assert 0 < used_memory([other.pid]) < alone + 50_000_000
        finally:
            other.kill()
    assert used_memory([other.pid]) < alone + 50_000_000, "one that has ended counts nothing"


def test_the_age_of_this_process() -> None:
    before = process_age()
    began = time.monotonic()
    assert abs(before - (time.time() - psutil.Process().create_time())) < 2.0
    assert process_age() - before == pytest.approx(time.monotonic() - began, abs=0.1)


class Noisy(gym.Env[Any, Any]):
    """Draws from numpy's global generator, and leaves what it drew in a directory."""

    def __init__(self, path: str) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)
        Path(path, f"{os.getpid()}-{time.monotonic_ns()}").write_text(str(np.random.random()))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}


def test_what_the_user_registered_is_known_to_actors_and_each_draws_for_itself(tmp_path: Path) -> None:
    (tmp_path / "drawn").mkdir()
    gym.register("test/Noisy-v0", entry_point=Noisy, max_episode_steps=20, kwargs={"path": str(tmp_path / "drawn")})
    try:
        changes = {"steps": 500, "envs_per_actor": 1, "eval.every": 0, "actors": 3}
        veldt.train("apex-dqn", env="test/Noisy-v0", run=tmp_path / "r", quiet=True, **TINY | changes)
    finally:
        gym.registry.pop("test/Noisy-v0")
    theirs = [x.read_text() for x in (tmp_path / "drawn").iterdir() if not x.name.startswith(f"{os.getpid()}-")]
    assert len(theirs) >= 3 and len(set(theirs)) == len(theirs)


def test_an_actor_that_was_restarted_explores_with_other_numbers() -> None:
    """Otherwise one whose environment raises now and then would draw the same numbers again and again."""
    config = recipes.make("apex-dqn", "CartPole-v1")
    node = make_program(config, config.env_spec()).nodes["policy/0"]
    known = {"params": LatestParams(), "counters": Counters()}

    def draws(life: int) -> Any:
        return Given(known, {}, {INCARNATION.what: life}).build(node).rng.random(8)

    assert (draws(0) == draws(0)).all() and (draws(1) == draws(1)).all()
    assert not (draws(0) == draws(1)).any() and not (draws(1) == draws(2)).any()


def test_a_function_that_cannot_be_sent_is_named_and_does_no_harm_to_later_runs(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked() -> gym.Env[Any, Any]:
        with lock:
            return gym.make("CartPole-v1")

    with pytest.raises(UserError, match=r"locked.*cannot be sent to another process.*--runtime inline"):
        veldt.train("apex-dqn", env=locked, run=tmp_path / "one", quiet=True, **TINY)
    tiny(tmp_path / "two", steps=500)


def test_a_signal_to_all_processes_is_the_supervisors_alone(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    settings = TINY | {"steps": 10**9, "checkpoint.every": 0, "eval.every": 0, "algorithm.hidden": 16}
    flags = [word for name, x in settings.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    command = [sys.executable, "-m", "veldt", "train", "apex-dqn", "--run", str(run.path), "--quiet", *flags]
    with subprocess.Popen(command) as trainer:
        try:
            deadline = time.monotonic() + 60
            while not (run.path / "metrics.jsonl").exists() or not any(x["learner_steps"] > 50 for x in run.metrics):
                assert trainer.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            before = run.metrics[-1]["learner_steps"]
            for entry in json.loads((run.path / "processes.json").read_text()).values():
                os.kill(entry["pid"], signal.SIGTERM)
            assert trainer.wait(10) == 128 + signal.SIGTERM
        finally:
            trainer.kill()
    assert latest(run)["nodes"]["learner"]["steps"] >= before
    assert "restarting" not in (run.path / "log.txt").read_text()


FAST: dict[str, Any] = {  # made for CartPole; the defaults are measured in docs/results/defaults.md
    "steps": 100_000,
    "algorithm.n": 10,
    "algorithm.normalize_obs": False,
    "actor.hold": 1,
    "learner.lr": 3e-3,
    "learner.target_every": 50,
    "store.samples_per_insert": 4.0,
    "store.capacity": "20_000",
}


@pytest.mark.learning
def test_cartpole_is_solved_in_processes(tmp_path: Path) -> None:
    """No two runs in processes are the same, and the last weights of one in some thirty are bad: it may try twice."""
    found = []
    for seed in (5, 6):
        run = veldt.train("apex-dqn", env="CartPole-v1", run=tmp_path / str(seed), quiet=True, seed=seed, **FAST)
        found.append(run.evaluate(20).mean_return)
        if found[-1] >= 475:
            return
    raise AssertionError(found)
