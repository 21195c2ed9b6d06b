"""The real program under faults: what is killed, stopped, hung, poisoned or starved, and what must still be true.

An oracle checks every window that is sampled. The long variants print their figures: pytest -m long -s -k name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import psutil
import pytest
from chaos import Checker, Moody, Verdict, child, config_of, family, percentiles, play, program_of, steps_of, wait

from veldt.__main__ import main
from veldt.envs.small import Counter
from veldt.errors import ProcessFailed, UserError
from veldt.experiment.run import Run
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.shm.ring import Reader

HERE = Path(__file__).parents[1]
RECIPES = ["apex-dqn", "impala", "seed-vtrace"]  # a store that is sampled, a queue, and central inference
R2D2 = {"r2d2": {}, "r2d2, central": {"inference": "central"}}
KILLED = [*RECIPES, *(pytest.param(name, marks=pytest.mark.long) for name in R2D2)]
# Where central inference makes little difference it is only in the long suite.
FEW = ["apex-dqn", "impala", pytest.param("seed-vtrace", marks=pytest.mark.long)]


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veldt")


def lives(short: int, long: int) -> Any:
    """So many faults in the normal suite, and in the long one."""
    return [short, pytest.param(long, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


def command(path: Path, **changes: Any) -> list[str]:
    settings = chaos.SMALL | {"env": "veldt/Counter-v0", "run": path} | changes
    return ["train", "apex-dqn", "--quiet", *(word for name, x in settings.items() for word in (f"--{name}", str(x)))]


@contextlib.contextmanager
def started(path: Path, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    """The real command, in a process group of its own."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "veldt", *command(path, **changes)],
        cwd=path.parent,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def processes_of(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads((path / "processes.json").read_text())
    except FileNotFoundError:
        return {}
    return table


def env_steps(path: Path) -> int:
    """As the newest line of metrics says."""
    try:
        lines = (path / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["env_steps"])
    except (FileNotFoundError, IndexError, ValueError):
        return 0


# The oracle itself.


def test_the_oracle_finds_every_number_that_is_not_what_happened() -> None:
    env, rows = Counter(), []
    obs, _ = env.reset(seed=7)
    record: dict[str, Any] = {"reward": 0.0, "discount": 1.0, "first": True, "last": False}
    for i in range(400):
        rows.append({**record, "obs": obs, "action": i % 3, "valid": True})
        if record["last"]:
            obs, _ = env.reset()
            record = {"reward": 0.0, "discount": 1.0, "first": True, "last": False}
        else:
            obs, reward, terminated, truncated, _ = env.step(np.int64(i % 3))
            record = {"reward": reward, "discount": 1.0 - terminated, "first": False, "last": terminated or truncated}
    starts = [i for i in range(395) if not rows[i]["last"]]
    windows = {name: np.array([[rows[i + k][name] for k in range(4)] for i in starts]) for name in rows[0]}
    assert not chaos.corrupt(windows).any()
    for name in ("obs", "reward", "discount", "first", "last", "action"):
        for k in range(4):
            changed = {key: x.copy() for key, x in windows.items()}
            at = changed[name][:, k]
            changed[name][:, k] = ~at if at.dtype == bool else at + (np.arange(4) == 2) if name == "obs" else at + 1
            told = chaos.corrupt(changed)
            # An action shows in the observation that follows it in the episode, which the window may not have.
            shown = ~windows["last"][:, k] if name == "action" and k < 3 else np.full(len(starts), name != "action")
            assert (told == shown).all(), (name, k)


def test_the_oracle_finds_every_recurrent_state_that_cannot_be() -> None:
    obs = np.zeros((4, 2, 4), np.int64)
    obs[:, 0, 3] = [2, 1, 0, 0]
    rows = {"obs": obs, "first": np.array([[0, 0], [0, 1], [1, 0], [0, 1]], bool), "valid": np.ones((4, 2), bool)}
    rows["valid"][3, 0] = False  # before the stream
    state = np.array([[0.5], [-0.1], [0.0], [0.0]]) * np.ones(8)
    starts = {"state/h": state, "state/c": state, "state/taken": np.array([[0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0.0]])}
    assert not chaos.corrupt_starts(rows, starts).any()
    for name, x in starts.items():
        for i in range(4):
            other = x.copy()
            other[i] = other[(i + 2) % 4]  # zero where it is not, and the other way
            assert chaos.corrupt_starts(rows, starts | {name: other}).tolist() == [j == i for j in range(4)], (name, i)
    wrong = {"state/taken": starts["state/taken"][[1, 0, 2, 3]]}
    assert chaos.corrupt_starts(rows, starts | wrong).tolist() == [True, True, False, False]


# Killed processes.


@pytest.mark.parametrize("name", KILLED)
@pytest.mark.parametrize("kills", lives(6, 60))
def test_killed_actors_come_back_and_no_window_is_corrupt(kills: int, name: str) -> None:
    recipe = name.split(",")[0]
    config = config_of(actors=4, recipe=recipe, **R2D2.get(name, {}))
    rng = np.random.default_rng(kills)
    took: list[float] = []
    sampled = config.store.selector != "fifo"
    share = 1.0 if sampled else 1 / 8  # a window has as many steps, and comes once
    central = config.inference == "central"

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        began, begun = time.monotonic(), nodes.count("env_steps")
        for kill in range(kills):
            actor = f"actor/{rng.integers(4)}"
            recorder = "inference" if central else actor
            victim = "inference" if central and kill % 3 == 2 else actor
            most = 3_000 if kills < 60 else 15_000
            yield from wait(verdict.more(int(rng.integers(300, most) * share)), 30, f"before {kill}")
            life = child(nodes, victim).incarnation
            chaos.kill(nodes, victim)
            killed = time.monotonic()
            yield from wait(lambda: child(nodes, victim).incarnation > life, 5, "its end is seen")  # noqa: B023
            steps, stream = steps_of(nodes, actor), Reader(nodes.supervisor.descriptors[f"{recorder}>store"])
            of_its_life = stream.written
            yield from wait(lambda: steps_of(nodes, actor) > steps, 10, "a step of its next life")  # noqa: B023
            took.append(time.monotonic() - killed)
            yield from wait(lambda: steps_of(nodes, actor) > steps + 150, 10, "it is well")  # noqa: B023
            assert stream.popped > of_its_life, "the store has blocks of its new life"
            assert child(nodes, victim).incarnation == life + 1
        yield from wait(verdict.more(int(3_000 * share)), 30, "after the last kill")
        elapsed = time.monotonic() - began
        assert verdict.seen["restarts"] == kills
        assert chaos.check_blocks(nodes.snapshot()) > 500 or not sampled, "a queue may be empty"
        rate = (nodes.count("env_steps") - begun) / elapsed
        print(
            f"\n{kills} kills: restarts {percentiles(took)}; {verdict.seen['checked']:,.0f} windows checked, 0 corrupt; "
            f"{rate:,.0f} env steps/s, about {100 * sum(took) / (4 * elapsed):.1f} % of all lost"
        )

    play(Local(), program_of(config, Checker, 256 if sampled else 8), scenario, 60 + 10 * kills)
    assert np.percentile(took, 95) <= 4.0


@pytest.mark.parametrize("name", ["r2d2, central", pytest.param("r2d2", marks=pytest.mark.long)])
@pytest.mark.parametrize("kills", lives(3, 30))
def test_an_r2d2_learns_on_whoever_is_killed(kills: int, name: str) -> None:
    """The real learner: after each kill there are more env steps of all actors, and more updates. Blocks stay sound."""
    config = config_of(recipe="r2d2", **{"store.samples_per_insert": 4.0} | R2D2[name])
    victims = ["actor/0", *(["inference"] if config.inference == "central" else []), "actor/1"]
    took: list[float] = []
    rng = np.random.default_rng(kills)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 10, 30, "it learns")
        for kill in range(kills):
            victim = victims[kill % len(victims)]
            begins, delay = time.monotonic(), float(rng.random()) * 0.2
            yield from wait(lambda: time.monotonic() > begins + delay, 5, "a random moment")  # noqa: B023
            life = child(nodes, victim).incarnation
            chaos.kill(nodes, victim)
            killed = time.monotonic()
            yield from wait(lambda: child(nodes, victim).incarnation > life, 5, "its end is seen")  # noqa: B023
            steps = {actor: steps_of(nodes, actor) for actor in ("actor/0", "actor/1")}
            updates, total = nodes.count("learner_steps"), nodes.count("env_steps")
            yield from wait(lambda: all(steps_of(nodes, x) > y + 150 for x, y in steps.items()), 20, "all step")  # noqa: B023
            yield from wait(lambda: nodes.count("learner_steps") > updates + 10, 20, "updates")  # noqa: B023
            took.append(time.monotonic() - killed)
            assert nodes.count("env_steps") >= total + 300
        assert chaos.check_blocks(nodes.snapshot()) > 500
        told = nodes.metrics()
        assert told.get("skipped_updates", 0.0) == 0 and nodes.state()["store"]["counts"]["duplicates"] == 0
        assert sum(one.restarts for one in nodes.supervisor.children.values()) == kills, "no other one has ended"
        print(f"\n{kills} kills, {name}: 150 steps of each actor and 10 updates after {percentiles(took)}")

    play(Local(), program_of(config), scenario, 60 + 10 * kills)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_process_killed_while_it_is_built_and_several_at_once(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(verdict.more(300), 20, "it runs")
        for _ in range(3):  # the successor is killed as soon as it is seen
            pid = chaos.kill(nodes, "actor/0")
            yield from wait(lambda: child(nodes, "actor/0").pid not in (0, pid), 10, "a new life")  # noqa: B023
        pids = {name: chaos.kill(nodes, name) for name in nodes.supervisor.children}
        state = nodes.snapshot().state()  # asked of processes that are dying
        assert {"store", "counters"} <= set(state)
        for name, pid in pids.items():
            yield from wait(lambda: child(nodes, name).pid not in (0, pid), 10, "all come back")  # noqa: B023
        goals = {name: steps_of(nodes, name) + 150 for name in ("actor/0", "actor/1")}
        yield from wait(lambda: all(steps_of(nodes, name) > goal for name, goal in goals.items()), 20, "all step")
        verdict.seen.clear()
        yield from wait(verdict.more(1_000), 20, "all is well")

    play(Local(), program_of(config_of(recipe=recipe), Checker, 8), scenario)
    assert "actor/0 ended (killed by SIGKILL, perhaps because the machine ran out of RAM); restarting" in caplog.text


@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("kills", lives(2, 10))
def test_a_killed_learner_goes_on_from_the_last_snapshot(kills: int, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    keeps_all = {"store.capacity": "400_000", "store.samples_per_insert": 4.0} if recipe == "apex-dqn" else {}
    program = program_of(config_of(recipe=recipe, **keeps_all))
    program.nodes["learner"] = dataclasses.replace(program.nodes["learner"], build=chaos.Witness)
    took: list[float] = []
    lost: list[int] = []
    rng = np.random.default_rng(kills)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 30, 20, "it learns")
        actors = {name: child(nodes, name).pid for name in ("actor/0", "actor/1")}
        for kill in range(kills):
            state = nodes.snapshot().state()
            saved, before = state["learner"], state["store"]["counts"]
            aim = saved["steps"] + int(rng.integers(110, 200))
            yield from wait(lambda: nodes.count("learner_steps") >= aim, 20, "some more")  # noqa: B023
            done, life = nodes.count("learner_steps"), child(nodes, "learner").incarnation
            chaos.kill(nodes, "learner")
            killed = time.monotonic()
            if kill % 2:  # a checkpoint is asked for while it is away
                again = nodes.snapshot().state()
                assert {"learner", "store", "counters", "actor/0", "actor/1"} <= set(again)
                assert again["learner"]["steps"] >= saved["steps"]
            yield from wait(lambda: child(nodes, "learner").incarnation > life, 5, "its end is seen")  # noqa: B023
            yield from wait(lambda: child(nodes, "learner").ready, 10, "its next life")
            yield from wait(lambda: nodes.count("learner_steps") > saved["steps"], 10, "a gradient")  # noqa: B023
            took.append(time.monotonic() - killed)
            lost.append(done - saved["steps"])
            assert f"witness {saved['steps']} {chaos.fingerprint(saved)}" in caplog.text
            after = nodes.snapshot()
            counts = after.state()["store"]["counts"]
            assert counts["next"] >= before["next"] and counts["duplicates"] == 0
            checked = chaos.check_blocks(after)
            if keeps_all:
                assert counts["oldest"] == 0 and counts["size"] >= before["size"]
                assert checked >= counts["next"] * 8
        assert {name: child(nodes, name).pid for name in actors} == actors, "no actor has died"
        print(f"\n{kills} kills of the learner: first update after {percentiles(took)}; updates lost: {lost}")

    play(Local(), program, scenario, 60 + 30 * kills)
    assert max(took) <= 10.0


def test_a_queue_whose_checkpoint_lacks_blocks_is_resumed(tmp_path: Path) -> None:
    """While the blocks of a checkpoint are copied the learner takes them out. It is slow here, so the queue is full."""
    path = tmp_path / "r"
    words = ["train", "impala", "--run", str(path), "--quiet", "--algorithm.network-from", "chaos:SlowToLearn"]
    command = [sys.executable, "-m", "veldt", *words, "--eval.every", "0", "--checkpoint.every", "2000", "--steps"]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([*command, "1000000"], cwd=tmp_path, env=paths)
    try:
        chaos.wait_until(lambda: len(list((path / "checkpoints").glob("[0-9]*"))) >= 2, 60, "two checkpoints")
    finally:
        process.kill()
        process.wait(30)
    for file in (path / "checkpoints" / "blocks").iterdir():
        file.unlink()
    loaded = Run(path).checkpoints().load()
    assert loaded is not None and loaded.manifest["nodes"]["store"]["counts"]["size"] > 8, "the queue was full"
    more = str(loaded.manifest["env_steps"] + 4_000)
    resumed = subprocess.run([*command, more], cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    assert Run(path).metrics[-1]["env_steps"] >= int(more)


@pytest.mark.parametrize("recipe", FEW)
def test_a_state_is_loaded_though_processes_die_meanwhile(recipe: str) -> None:
    saved: dict[str, Any] = {}
    changes = {"store.samples_per_insert": 4.0} if recipe == "apex-dqn" else {}
    program = program_of(config_of(recipe=recipe, **changes))

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 30, 20, "it learns")
        saved.update(nodes.state())
        nodes.cut()
        for name in ("learner", "actor/1"):
            chaos.kill(nodes, name)
        nodes.load_state(saved)
        state = nodes.state()
        assert chaos.fingerprint(state["learner"]) == chaos.fingerprint(saved["learner"])
        assert nodes.count("learner_steps") == saved["learner"]["steps"]
        policy = "inference" if recipe == "seed-vtrace" else "policy/1"
        assert state[policy] == saved[policy]
        nodes.resume(1)
        yield from wait(lambda: nodes.count("learner_steps") > saved["learner"]["steps"] + 30, 20, "it goes on")

    play(Local(), program, scenario)


def test_when_the_supervisor_is_killed_everything_goes(tmp_path: Path) -> None:
    with started(tmp_path / "r") as process:
        chaos.wait_until(lambda: env_steps(tmp_path / "r") > 0, 60, "it runs")
        members = family(process.pid)
        table = processes_of(tmp_path / "r")
        assert len(members) == 5 and len(table) == 5, "a keeper is in no table"
        os.kill(table["actor/0"]["pid"], signal.SIGSTOP)  # it can do nothing about it by itself
        os.kill(process.pid, signal.SIGKILL)
        took = chaos.wait_until(lambda: not any(map(chaos.alive, members)), 3, "all are gone")
    print(f"\nall processes gone {took:.3f} s after the supervisor")
    assert not [name for name in os.listdir("/dev/shm") if "veldt" in name]


def test_when_the_zygote_is_killed_all_come_back(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(**{"store.samples_per_insert": 4.0})
    program = program_of(config)
    program.nodes["learner"] = dataclasses.replace(program.nodes["learner"], build=chaos.Witness)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 30, 20, "it learns")
        saved, members = nodes.snapshot().state()["learner"], family()
        os.kill(nodes.supervisor.zygotes[False].pid, signal.SIGKILL)
        yield from wait(lambda: nodes.supervisor.children["learner"].incarnation == 1, 10, "its end is seen")
        yield from wait(lambda: all(x.ready for x in nodes.supervisor.children.values()), 20, "all are back")
        assert not any(map(chaos.alive, members))
        yield from wait(lambda: nodes.count("learner_steps") > saved["steps"] + 30, 20, "it goes on")
        assert f"witness {saved['steps']} {chaos.fingerprint(saved)}" in caplog.text
        assert chaos.check_blocks(nodes.snapshot()) > 100

    before = chaos.belongings()
    play(Local(), program, scenario)
    assert chaos.belongings() == before
    assert "the zygote died with exit status -9; restarting all processes" in caplog.text


# Ctrl-C.


def interrupt(path: Path, when: str, delay: float) -> tuple[float, str]:
    """Starts a run, interrupts it, and looks at what is left; how long its end took, and what it said."""
    env = "chaos:Sluggish" if when in ("twice", "blocked") else "veldt/Counter-v0"
    with started(path, **{"env": env, "checkpoint.every": 300, "log.every": 0.05}) as process:
        if when == "start":
            chaos.wait_until(lambda: family(process.pid), 60, "the zygote is there")
        else:
            goal = 600 if env.startswith("veldt") else 4 * 500 - 20  # when all environments have become slow
            chaos.wait_until(lambda: env_steps(path) > goal, 60, "it runs")
        time.sleep(delay)  # the moment of the fault
        members = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        sent = time.monotonic()
        if when == "twice":
            time.sleep(delay / 10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        took = time.monotonic() - sent
        # Interrupted in the middle of an import, Python may end itself with the signal; a shell tells that as 130 too.
        codes = (130, -signal.SIGINT) if when == "start" else (130,)
        assert process.returncode in codes, (when, delay, process.returncode, output)
    assert "Traceback" not in output and "Error" not in output, output
    chaos.wait_until(lambda: not any(map(chaos.alive, members)), 1, "all are gone")
    if when != "twice":  # which leaves everything as it is
        assert not (path / "processes.json").exists() and not list(path.rglob(".aside*")), list(path.rglob("*"))
    if when != "start" or (path / "checkpoints" / "latest").exists():
        loaded = Run(path).checkpoints().load()
        assert loaded is not None and {"learner", "store", "counters"} <= set(loaded.manifest["nodes"])
        if when != "twice":
            assert loaded.manifest["env_steps"] >= env_steps(path), "nothing that was told is lost"
    return took, output


@pytest.mark.parametrize("times", lives(1, 7))
@pytest.mark.parametrize(
    ("when", "seconds"),
    [("start", 5.0), ("checkpoint", 5.0), ("twice", 1.0), pytest.param("blocked", 5.0, marks=pytest.mark.long)],
)
def test_an_interrupted_run_ends_soon_and_leaves_a_checkpoint(
    tmp_path: Path, when: str, seconds: float, times: int
) -> None:
    rng = np.random.default_rng(times)
    took = []
    for i in range(times):
        delay = float(rng.random()) * (3.0 if when == "start" else 1.0)
        took.append(interrupt(tmp_path / f"{i}", when, delay)[0])
    print(f"\n{times} interrupts ({when}): the end came after {percentiles(took)}")
    assert max(took) <= seconds


# Stopped, hung, slow.


def orders(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def moody(path: Path, pace: float = 0.0, **changes: Any) -> Any:
    """A program of environments that obey files, and the directory where these go."""
    return program_of(config_of(functools.partial(Moody, str(orders(path)), pace), **changes), Checker)


def test_a_stopped_actor_is_replaced_or_goes_on_and_others_never_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(lambda: steps_of(nodes, "actor/0") > 200, 20, "it runs")
        # Stopped for less than the time-out: the same life goes on.
        pid = child(nodes, "actor/0").pid
        os.kill(pid, signal.SIGSTOP)
        at, goal = time.monotonic(), steps_of(nodes, "actor/1") + 20
        yield from wait(lambda: steps_of(nodes, "actor/1") > goal and time.monotonic() > at + 0.5, 5, "the other goes on")
        os.kill(pid, signal.SIGCONT)
        steps = steps_of(nodes, "actor/0")
        yield from wait(lambda: steps_of(nodes, "actor/0") > steps + 50, 5, "it goes on")
        assert child(nodes, "actor/0").pid == pid and verdict.look()["restarts"] == 0
        # For longer: it is killed, so that it can never write again, and replaced.
        stopped = psutil.Process(pid)
        os.kill(pid, signal.SIGSTOP)
        at, others = time.monotonic(), steps_of(nodes, "actor/1")
        yield from wait(lambda: not chaos.alive(stopped), 6, "the stopped one is killed")
        assert time.monotonic() - at <= 1.5 + 1.5 + 0.5  # half a second for the moment of the look
        (age,) = re.findall(r"actor/0 has made no progress for ([0-9.]+) s", caplog.text)
        assert 1.5 <= float(age) <= 1.5 + 1.0
        assert steps_of(nodes, "actor/1") > others + 40
        goal = steps_of(nodes, "actor/0") + 20
        yield from wait(lambda: steps_of(nodes, "actor/0") > goal, 10, "the new one steps")
        yield from wait(verdict.more(2_000), 20, "all is well")

    play(Local(step_timeout=1.5), moody(tmp_path / "orders", 0.002), scenario)
    assert "it does not answer signals; is it stopped?" in caplog.text


def test_an_environment_that_hangs_is_named_with_its_stack_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(verdict.more(500), 20, "it runs")
        (tmp_path / "orders" / "hang").touch()
        at = time.monotonic()
        yield from wait(lambda: list((tmp_path / "orders").glob("hang-*")), 10, "one hangs")
        pid = int(next((tmp_path / "orders").glob("hang-*")).name.partition("-")[2])
        name = next(x.name for x in nodes.supervisor.children.values() if x.pid == pid)
        other = {"actor/0": "actor/1", "actor/1": "actor/0"}[name]
        others, hung = steps_of(nodes, other), psutil.Process(pid)
        yield from wait(lambda: not chaos.alive(hung), 6, "the hung one is killed")
        took = time.monotonic() - at
        print(f"\na hang was found after {took:.2f} s, where a step may take 1.0 s")
        assert took <= 1.0 + 1.5
        assert steps_of(nodes, other) > others + 40, "the other is not held up"  # it makes 400 a second on a free machine
        assert f"{name} has made no progress for" in caplog.text and f"in a step of {name}; killing it" in caplog.text
        stack = caplog.text[caplog.text.index("Its stack:") :]
        assert stack.index("in hang_for_ever") < stack.index("in step") < stack.index("in loop")
        goal = steps_of(nodes, name) + 20
        yield from wait(lambda: steps_of(nodes, name) > goal, 10, "the new one steps")
        yield from wait(verdict.more(1_000), 20, "all is well")

    play(Local(step_timeout=1.0), moody(tmp_path / "orders", 0.002), scenario)


def test_a_slow_environment_does_not_slow_down_the_other_actors(tmp_path: Path) -> None:
    names = [f"actor/{i}" for i in range(4)]

    def scenario(nodes: Any) -> Iterator[None]:
        def measure(which: list[str]) -> Iterator[None]:
            begun, at = {name: steps_of(nodes, name) for name in which}, time.monotonic()
            yield from wait(lambda: time.monotonic() - at > 0.6, 2, "a while")
            seconds = time.monotonic() - at
            rates.append(sum((steps_of(nodes, name) - begun[name]) / seconds for name in which))

        rates: list[float] = []
        yield from wait(lambda: all(steps_of(nodes, name) > 50 for name in names), 20, "all run")
        yield from measure(names)
        fast = 3 / 4 * rates.pop()  # of three
        (tmp_path / "orders" / "slow").touch()
        yield from wait(lambda: list((tmp_path / "orders").glob("slow-*")), 10, "one is slow")
        pid = int(next((tmp_path / "orders").glob("slow-*")).name.partition("-")[2])
        slow = next(x.name for x in nodes.supervisor.children.values() if x.pid == pid)
        yield from measure([slow])
        assert rates.pop() < fast / 6, "it is slow"
        rest = [name for name in names if name != slow]
        begun = {name: steps_of(nodes, name) for name in rest}  # more than a stream holds
        yield from wait(lambda: all(steps_of(nodes, name) > begun[name] + 400 for name in rest), 20, "the others go on")
        while not rates or (rates[-1] < 0.9 * fast and len(rates) < 8):  # the machine may be busy with other things
            yield from measure(rest)
        print(f"\n{max(rates):.0f} env steps/s of three actors beside a slow one, {fast:.0f} before it was slow")
        assert max(rates) >= 0.9 * fast, rates

    play(Local(), moody(tmp_path / "orders", 0.003, actors=4, **{"actor.block": 4}), scenario)


# Bad environments.


@pytest.mark.parametrize("failures", lives(4, 40))
def test_an_environment_that_raises_now_and_then_does_not_stop_the_run(
    failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(lambda: verdict.look().get("restarts", 0) >= failures, 60 + 3 * failures, "some failures")
        yield from wait(verdict.more(1_000), 20, "it goes on")
        steps = nodes.count("env_steps")
        print(f"\n{verdict.seen['restarts']:.0f} failures in {steps:,} env steps; {verdict.seen['checked']:,.0f} checked")

    env = functools.partial(chaos.Raising, step=1e-3)
    play(Local(), program_of(config_of(env), Checker), scenario, 120 + 5 * failures)
    assert re.search(r"actor/\d ended \(EnvError: .*step raised ArithmeticError: a bad step\)", caplog.text)
    assert "in _perhaps" in caplog.text, "the environment's own traceback"


def test_an_environment_that_always_raises_in_reset_ends_the_run_with_its_traceback() -> None:
    program = program_of(config_of(functools.partial(chaos.Raising, reset=1.0)), Checker)
    with pytest.raises(ProcessFailed, match=r"5 times in a row.*reset raised ArithmeticError: a bad reset") as caught:
        play(Local(), program, lambda nodes: wait(lambda: False, 30, "the error"), 30)
    assert "in _perhaps" in caught.value.traceback


def test_an_environment_that_always_raises_gives_a_code_and_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert main(command(tmp_path / "r", env="chaos:always_raises")) == 1
    assert time.monotonic() - began < 30
    told = capfd.readouterr().err
    assert "in _perhaps" in told and "a bad step" in told.splitlines()[-1] and told.splitlines()[-1].startswith("veldt: ")
    assert main(command(tmp_path / "s", env="chaos:cannot_be_made")) == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "could not be made: ArithmeticError: a bad constructor" in told
    assert not family()


def test_an_environment_that_lies_is_counted_and_not_believed() -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(verdict.more(10_000), 30, "windows")
        yield from wait(lambda: verdict.look().get("bad_observations", 0) >= 100, 20, "bad ones are counted")
        assert verdict.seen["restarts"] == 0
        assert chaos.check_blocks(nodes.snapshot()) > 300
        assert nodes.count("bad_observations") / nodes.count("env_steps") > 0.05

    play(Local(), program_of(config_of(chaos.Lying), Checker), scenario)


# Bad numbers.


def test_a_loss_that_is_not_a_number_is_skipped_and_no_actor_ever_sees_it(caplog: pytest.LogCaptureFixture) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        seen: dict[str, float] = {}
        yield from wait(lambda: nodes.count("learner_steps") > 200, 30, "updates")
        yield from wait(lambda: seen.update(nodes.metrics()) or seen.get("skipped_updates", 0) > 20, 20, "it is counted")
        assert seen["restarts"] == 0 and np.isfinite(seen["loss"])
        assert all(np.isfinite(x).all() for x in nodes.state()["learner"].values())

    algorithm = chaos.Poisoned(n=3, double=True, network_from="chaos:Net", every=7)
    config = config_of(algorithm=algorithm, **{"store.samples_per_insert": 8.0, "learner.publish_every": 1})
    play(Local(), program_of(config), scenario)
    assert re.search(r"learner: .*update 7 skipped: its loss or gradient is not finite", caplog.text)
    assert "weights that are not finite" not in caplog.text


def test_a_run_that_diverges_has_code_1_and_says_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "r", env="chaos:Huge")) == 1
    told = capfd.readouterr().err
    assert told.startswith("veldt: The learner diverged") and "Lower learner.lr" in told and told.count("\n") == 1


# Too slow, too large.


def heaps(nodes: Any) -> int:
    """Bytes of memory that is no file and not shared by descriptor, over all processes."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in nodes.resources()[0]]
    return sum(1024 * int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Anonymous:"))


@pytest.mark.parametrize("seconds", lives(1, 120))
def test_memory_is_bounded_and_counts_are_exact_when_the_learner_is_slow(seconds: int) -> None:
    config = config_of(**{"store.samples_per_insert": 4.0, "store.capacity": "400_000"})

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 300, 30, "it is slow but moves")
        first, shared = heaps(nodes), [os.fstat(fd).st_size for fd in nodes.resources()[1]]
        deadline = time.monotonic() + seconds
        yield from wait(lambda: time.monotonic() > deadline, seconds + 5, "a while")
        grown = heaps(nodes) - first
        print(f"\n{seconds} s beside a slow learner: {grown / 1e6:+.1f} MB in all processes")
        assert [os.fstat(fd).st_size for fd in nodes.resources()[1]] == shared and grown < 5e6
        nodes.cut()
        state = nodes.state()
        counts = state["store"]["counts"]
        assert counts["sampled"] == nodes.count("learner_steps") == state["counters"]["counts"]["learner_steps"]
        assert counts["inserted"] - counts["evicted"] == counts["size"] == int(state["store"]["items"].sum())
        error = 4.0 * (counts["inserted"] - 100) - counts["sampled"]
        assert abs(error) <= 2 * 4.0 * 2 * 8 + 64, "the limiter's law"
        # What was stepped and is not in the store is on its way, or was the last of an episode.
        way = config.actors * (64 + 3 * 2) * 8
        assert counts["inserted"] <= nodes.count("env_steps") <= counts["inserted"] * 1.5 + way
        assert nodes.metrics()["restarts"] == 0

    play(Local(), program_of(config, Checker, 64, 0.02), scenario, 60 + 2 * seconds)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"store.capacity": "100000GB"}, "The store needs .* of RAM is free; lower store.capacity"),
        ({"actors": 0}, "actors must be greater than 0, not 0"),
        ({"actors": 5000}, "5000 actors are too many for"),
    ],
    ids=["memory", "no-actors", "too-many-actors"],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    before = chaos.belongings()
    assert main(command(tmp_path / "r", **changes)) == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and re.match(f"veldt: {says}", told), told
    assert chaos.belongings() == before and not (tmp_path / "r").exists()


def test_shared_memory_that_cannot_be_had_is_an_error_and_no_crash() -> None:
    program = program_of(config_of(**{"store.capacity": "400_000"}), Checker)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limit[1]))
    before = chaos.belongings()
    try:
        with pytest.raises(
            UserError, match=r"MB of shared memory are needed and cannot be allocated .*; lower store\.capacity"
        ):
            play(Local(), program, lambda nodes: wait(lambda: False, 30, "the error"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert chaos.belongings() == before


@pytest.mark.parametrize("cycles", lives(2, 100))
def test_starting_and_stopping_leaves_nothing_behind(cycles: int) -> None:
    program = program_of(config_of(), Checker)
    seen = []
    for _ in range(cycles):
        play(Local(), program, lambda nodes: wait(lambda: nodes.count("env_steps") > 50, 20, "it runs"))
        seen.append(chaos.belongings())
    print(f"\n{cycles} cycles: {seen[0]}")
    assert all(x == seen[0] for x in seen)
    assert not seen[0]["processes"] and not seen[0]["mapped"]
