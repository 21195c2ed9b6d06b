"""Populations: the file, copies between runs, and that a population killed at any moment ends as if it had not been."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image
from test_cli import start, wait_for
from test_run import TINY, tiny, whole_state

import veldt
from veldt.__main__ import main
from veldt.cli import pbt as command
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.populations import scheduler as scheduling
from veldt.experiment.populations.crew import Job, Processes
from veldt.experiment.populations.population import Outcome, Population
from veldt.experiment.populations.quantum import run_quantum
from veldt.experiment.populations.scheduler import Scheduler, check_same
from veldt.experiment.populations.spec import Spec, read_spec
from veldt.experiment.populations.transplant import is_learned, transplant
from veldt.experiment.recipes import RECIPES
from veldt.experiment.run import Run
from veldt.runtime import Inline
from veldt.topologies import make_program
from veldt.watching.lineage import Line, ancestors, read_lineage

SET = {name: list(x) if isinstance(x, tuple) else x for name, x in TINY.items()}
SET = {name: x for name, x in SET.items() if name not in ("steps", "eval.episodes", "eval.every", "checkpoint.every")}
CHAIN: dict[str, Any] = {
    "recipe": "dqn",
    "env": "veldt/Chain-v0",
    "population": 4,
    "steps": 900,
    "ready": 300,
    "episodes": 2,
    "set": SET | {"learner.anneal": True},
    "tune": {"learner.lr": {"loguniform": [1e-5, 1e-2]}, "learner.batch": {"uniform": [8, 32]}},
    "exploit": {"rule": "truncation", "fraction": 0.25},
}


def written(path: Path, **changes: Any) -> Path:
    """The file of a small population; a change to None leaves that key out."""
    path.write_text(yaml.safe_dump({key: x for key, x in (CHAIN | changes).items() if x is not None}, sort_keys=False))
    return path


def spec_of(tmp_path: Path, **changes: Any) -> Spec:
    return read_spec(written(tmp_path / "x.yaml", **changes))


# The file.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"populaton": 3}, "There is no key 'populaton'. Did you mean population"),
        ({"population": None}, "There is no population; add population: NUMBER"),
        ({"population": 0}, "population must be greater than 0"),
        ({"population": 10**6}, "population must be at most 1,000"),
        ({"ready": 1.5}, "ready must be an integer"),
        ({"steps": None}, "There is no steps"),
        ({"seed": -1}, "seed must not be negative"),
        ({"recipe": "dqm"}, "There is no recipe 'dqm'. Did you mean dqn?"),
        ({"env": "veldt/Chian-v0"}, "There is no environment 'veldt/Chian-v0'"),
        ({"set": {"steps": 3}}, "set: steps cannot be set here: it is a key of its own"),
        ({"set": {"seed": 3}}, "set: seed cannot be set here"),
        ({"set": {"stop_after": "3s"}}, "a member takes all its steps"),
        ({"tune": None}, "tune must name a setting and its range"),
        ({"tune": {"learner.lrr": {"uniform": [0, 1]}}}, "There is no setting learner.'lrr'. Did you mean lr"),
        ({"tune": {"algorithm.n": {"choices": [1, 3]}}}, "algorithm.n cannot change during a run; these can: learner.lr"),
        ({"tune": {"learner.lr": [1e-4, 1e-2]}}, "tune: learner.lr must be as in {loguniform:"),
        ({"tune": {"learner.lr": {"loguniform": [1e-2, 1e-4]}}}, "0.01 is not less than 0.0001"),
        ({"tune": {"learner.lr": {"loguniform": [0, 1e-4]}}}, "loguniform must be greater than 0"),
        ({"tune": {"learner.lr": {"choices": []}}}, "choices must be a list of different values"),
        ({"tune": {"learner.lr": {"uniform": [0, 1], "first": [2]}}}, "first: 2 is not from 0 to 1"),
        ({"exploit": "best"}, "exploit: rule must be one of truncation, tournament, t-test, none, not 'best'"),
        ({"exploit": {"rule": "tournament", "fraction": 0.2}}, "exploit: tournament has no 'fraction'"),
        ({"exploit": {"fraction": 0.7}}, "fraction must be at most 0.5"),
        ({"explore": {"factors": []}}, "factors must be a list"),
        ({"explore": {"resample": 2}}, "resample must be a probability"),
        ({"order": "any"}, "order must be one of rounds, arrival"),
        ({"copy_store": 1}, "copy_store must be true or false"),
    ],
    ids=lambda x: json.dumps({str(k): str(v) for k, v in x.items()}) if isinstance(x, dict) else "",
)
def test_a_mistake_is_one_sentence_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "x.yaml", **changes)
    with pytest.raises(UserError) as caught:
        command.run(["x.yaml"])
    text = str(caught.value)
    assert text.startswith("x.yaml: ") and says in text and "\n" not in text, text
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"], "nothing is left behind"


def test_the_examples_can_be_read() -> None:
    for path in (Path(__file__).parents[2] / "examples" / "populations").glob("*.yaml"):
        assert read_spec(path).quanta > 1


def test_members_begin_with_values_of_their_own_and_those_that_are_given(tmp_path: Path) -> None:
    tune = {"learner.lr": {"loguniform": [1e-5, 1e-2], "first": ["1e-5", 1e-2]}}
    spec = spec_of(tmp_path, tune=tune, population=5)
    rates = [spec.born(i)["learner.lr"] for i in range(5)]
    assert rates[:2] == [1e-5, 1e-2] and len(set(rates)) == 5
    configs = [spec.config(i, spec.born(i)) for i in range(5)]
    assert [config.learner.lr for config in configs] == rates and len({config.seed for config in configs}) == 5
    assert {config.steps for config in configs} == {900}, "schedules take the whole length"


# Copies between runs.


@pytest.mark.parametrize("recipe", ["dqn", "a3c", "gorila", "es"])
def test_a_transplant_moves_what_was_learned_and_nothing_else(tmp_path: Path, recipe: str) -> None:
    small: dict[str, Any] = {"log.every": 0.02, "eval.every": 0, "seed": 3, "algorithm.hidden": (8,), "runtime": "inline"}
    if recipe in ("dqn", "gorila"):
        small |= {"store.min_size": 50, "learner.batch": 8, "store.capacity": "400"}
    ours, theirs = (
        veldt.train(recipe, env="veldt/Chain-v0", run=tmp_path / name, quiet=True, **small | {"seed": seed, "steps": steps})
        for name, seed, steps in (("ours", 1, 150), ("theirs", 2, 250))
    )
    before, given = (run.checkpoints().load() for run in (ours, theirs))
    assert before is not None and given is not None
    number = transplant(ours.path, before.number, theirs.path, given.number, {"quantum": 1})
    after = ours.checkpoints().load()
    assert after is not None and after.number == number == before.number + 1
    assert ours.weights_hash() == theirs.weights_hash()
    for node, part in after.state().items():
        for name, x in part.items():
            from_donor = name.startswith(("weights/", "target/", "optimizer/")) or (
                node.startswith("/arrays") and np.asarray(x).dtype.kind == "f"
            )
            expected = (given if from_donor or name == "observed" else before).state()[node][name]
            if name not in ("returns", "lengths"):
                assert np.array_equal(x, expected) if isinstance(x, np.ndarray) else x == expected, (node, name)
    clocks = ("env_steps", "learner_steps", "time_s", "blocks")
    assert {name: after.manifest[name] for name in clocks} == {name: before.manifest[name] for name in clocks}
    veldt.resume(ours.path, quiet=True, steps=300)
    assert ours.metrics[-1]["env_steps"] >= 300


STAYS = ("mass", "demo_mass")  # priorities: they belong to the store


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "r2d3"])
def test_every_array_that_a_run_saves_is_known_to_move_or_to_stay(recipe: str) -> None:
    """Averages under a name that no copy knows would stay behind, and go on with the weights of another run."""
    config = recipes.make(recipe, "Pendulum-v1" if recipe in ("apex-dpg", "qt-opt") else "CartPole-v1", runtime="inline")
    with Inline().start(make_program(config, config.env_spec())) as nodes:
        state = nodes.state()
    found = [(node, name, x) for node, part in state.items() for name, x in part.items() if isinstance(x, np.ndarray)]
    floats = [(node, name, is_learned(node, name, x)) for node, name, x in found if x.dtype.kind == "f" and x.size > 1]
    assert any(learned for _, _, learned in floats)
    assert [(node, name) for node, name, learned in floats if not learned and name not in STAYS] == []


def test_a_run_that_made_no_update_takes_the_optimizer_too(tmp_path: Path) -> None:
    ours, theirs = tiny(tmp_path / "ours", until=40), tiny(tmp_path / "theirs", until=400)
    theirs_number = len(list((theirs.path / "checkpoints").glob("[0-9]*")))
    assert ours.metrics[-1]["learner_steps"] == 0
    transplant(ours.path, 1, theirs.path, theirs_number, {})
    found = ours.checkpoints().load()
    assert found is not None and any(name.startswith("optimizer/") for name in found.state()["learner"])
    veldt.resume(ours.path, quiet=True, until=300)
    assert ours.metrics[-1]["learner_steps"] > 0


def test_with_the_store_the_donors_replay_comes_along(tmp_path: Path) -> None:
    ours, theirs = tiny(tmp_path / "ours", until=300), tiny(tmp_path / "theirs", seed=7, until=450)
    numbers = [run.checkpoints().load().number for run in (ours, theirs)]  # type: ignore[union-attr]
    transplant(ours.path, numbers[0], theirs.path, numbers[1], {}, store=True)
    after, given = ours.checkpoints().load(), theirs.checkpoints().load()
    assert after is not None and given is not None and after.manifest["env_steps"] < 310
    hashes = [[file["sha256"] for file in x.manifest["blocks"]["store"]] for x in (after, given)]
    assert hashes[0] == hashes[1] and np.array_equal(after.state()["store"]["items"], given.state()["store"]["items"])
    assert after.state()["store"]["rng"] != given.state()["store"]["rng"], "it draws with a stream of its own"
    veldt.resume(ours.path, quiet=True, until=600)
    assert ours.metrics[-1]["store_items"] > 300


def test_a_run_of_another_kind_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    ours = tiny(tmp_path / "ours", until=200)
    theirs = tiny(tmp_path / "theirs", until=200, **{"algorithm.hidden": (32,)})
    names = sorted(path.name for path in (ours.path / "checkpoints").iterdir())
    with pytest.raises(UserError, match="is a run of another kind"):
        transplant(ours.path, 1, theirs.path, 1, {})
    with pytest.raises(UserError, match="000009 cannot be copied: its manifest cannot be read"):
        transplant(ours.path, 1, theirs.path, 9, {})
    assert sorted(path.name for path in (ours.path / "checkpoints").iterdir()) == names


# A whole one, in this process.


class Here:
    """Trains in this process, one after the other. The returns are made up, so that it is known who copies."""

    def __init__(self, crash_at: int = -1, fail: tuple[tuple[int, int], ...] = ()) -> None:
        self.jobs: deque[Job] = deque()
        self.crash_at, self.fail, self.trained = crash_at, fail, 0

    def start(self, job: Job) -> None:
        self.jobs.append(job)

    def wait(self, seconds: float) -> tuple[Job, Outcome] | None:
        job = self.jobs.popleft()
        quantum = -(-job.until // 300)
        if (job.member, quantum) in self.fail:
            return job, Outcome(failed="it was made to fail")
        outcome = run_quantum(job.config_file, job.run, job.until)
        assert not outcome.failed, outcome.failed
        self.trained += 1
        if self.trained == self.crash_at:
            raise Crash
        score = float((7 * job.member + 3 * quantum) % 5)
        return job, replace(outcome, returns=(score, score + 0.5))

    def close(self) -> None: ...


class Crash(BaseException):
    """As if the process had been killed."""


def trained(spec: Spec, directory: Path, **options: Any) -> list[Line]:
    directory.mkdir(exist_ok=True)
    Scheduler(spec, directory, Here(**options), quiet=True).run()
    return read_lineage(directory)


def timeless(lines: list[Line]) -> list[Line]:
    return [{key: x for key, x in line.items() if key not in ("seconds", "train_seconds")} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Spec, Path]:
    home = tmp_path_factory.mktemp("whole")
    spec = spec_of(home)
    trained(spec, home / "d")
    return spec, home / "d"


def test_every_round_the_worst_copies_the_best_and_only_what_is_tuned_changes(whole: tuple[Spec, Path]) -> None:
    spec, directory = whole
    lines = read_lineage(directory)
    assert [line["member"] for line in lines[:4]] == [0, 1, 2, 3] and {line["event"] for line in lines[:4]} == {"born"}
    for quantum in (1, 2, 3):
        ready = {line["member"]: line for line in lines[4:] if line["quantum"] == quantum}
        fitness = {i: line["fitness"] for i, line in ready.items()}
        copies = {i: line["copied"]["member"] for i, line in ready.items() if "copied" in line}
        worst, best = min(fitness, key=lambda i: (fitness[i], i)), max(fitness, key=lambda i: (fitness[i], i))
        assert copies == ({worst: best} if quantum < 3 else {}), "after the last quantum nobody copies"
        for line in ready.values():
            if "copied" in line:
                donor = ready[line["copied"]["member"]]["tuned"]["learner.lr"]
                assert round(line["next"]["learner.lr"] / donor, 4) in (0.8, 1.2)
            else:
                assert line["next"] == line["tuned"]
    for member in range(4):
        run, last = Run(directory / f"member-{member}"), [line for line in lines if line["member"] == member][-1]
        born = spec.config(member, last["tuned"])
        assert run.config == born, "no other setting has changed"
        assert run.config.learner.lr == last["tuned"]["learner.lr"] and run.metrics[-1]["env_steps"] >= 900


def test_the_weights_after_a_copy_are_those_of_the_other_member(whole: tuple[Spec, Path]) -> None:
    _, directory = whole
    line = next(line for line in read_lineage(directory) if line.get("copied"))
    path = ancestors(read_lineage(directory), line["member"])
    assert (line["copied"]["member"], line["copied"]["quantum"]) in path and (line["member"], line["quantum"]) not in path
    assert [quantum for _, quantum in path] == [1, 2, 3], "each quantum was trained once"


@pytest.mark.parametrize("crash", ["before a line", "before a copy", "after a copy"])
def test_killed_and_started_again_it_ends_with_the_same_bits(
    whole: tuple[Spec, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    spec, directory = whole
    crashed = []

    def copy(*args: Any) -> int:
        if crash == "before a copy" and not crashed:
            crashed.append(crash)
            raise Crash
        number = transplant(*args)
        if crash == "after a copy" and not crashed:
            crashed.append(crash)
            raise Crash
        return number

    monkeypatch.setattr(scheduling, "transplant", copy)
    with pytest.raises(Crash):
        trained(spec, tmp_path / "d", crash_at=6 if crash == "before a line" else -1)
    with open(tmp_path / "d" / "lineage.jsonl", "a") as file:
        file.write('{"event": "ready", "mem')  # half a line
    lines = trained(spec, tmp_path / "d")
    assert timeless(lines) == timeless(read_lineage(directory))
    for member in range(spec.size):
        ours, theirs = (Run(path / f"member-{member}") for path in (tmp_path / "d", directory))
        assert whole_state(ours) == whole_state(theirs)


def test_a_member_that_fails_is_missing_and_takes_over_from_another_or_is_given_up(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    lines = trained(spec, tmp_path / "d", fail=((1, 2),))
    line = next(line for line in lines if line.get("failed"))
    assert (line["member"], line["quantum"], line["returns"], line["fitness"]) == (1, 2, [], None)
    others = {x["member"]: x["fitness"] for x in lines if x.get("quantum") == 2 and x["member"] != 1}
    assert others[line["copied"]["member"]] == max(others.values())
    spec = spec_of(tmp_path, steps=1_200, population=2, exploit="none")
    lines = trained(spec, tmp_path / "e", fail=((1, 1), (1, 2), (1, 3)))
    assert [(line["member"], line["quantum"]) for line in lines if line["event"] == "ready"] == [
        *((0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)),
        (0, 4),
    ]


# The state, without runs.


def simulated(spec: Spec, seed: int, at_once: int, made_up: bool = False) -> list[Line]:
    """A random order in which quanta end; random returns, or such as follow from the member and the quantum."""
    rng, population, lines = np.random.default_rng(seed), Population(spec), []
    checkpoints = dict.fromkeys(range(spec.size), 0)
    while len(population.members) < spec.size:
        population.apply(population.birth())
    running: list[int] = []
    outcomes: dict[int, Outcome] = {}
    while not population.done:
        while len(running) < at_once and (member := population.to_train([*running, *outcomes])):
            running.append(member.index)
        member_ = population.members[running.pop(int(rng.integers(len(running))))]
        checkpoints[member_.index] += 1
        returns = tuple(rng.integers(0, 4, 3).astype(float)) if rng.random() > 0.05 else ()
        if made_up:
            returns = (float((7 * member_.index + 3 * member_.quantum) % 5),)
        failed = "" if returns else "by chance"
        steps, checkpoint = spec.until(member_.quantum + 1), checkpoints[member_.index]
        outcomes[member_.index] = Outcome(returns, steps, steps, checkpoint, failed=failed)
        while ready := [i for i in sorted(outcomes) if population.may_decide(i, outcomes)]:
            line = population.decide(ready[0], outcomes)
            del outcomes[ready[0]]
            lines.append(line)
            population.apply(line)
            checkpoints[line["member"]] += "copied" in line
            if copied := line.get("copied"):  # the checkpoint is one of the last two of the donor
                assert checkpoints[copied["member"]] - copied["checkpoint"] <= 1
    return lines


@pytest.mark.parametrize("order", ["rounds", "arrival"])
@pytest.mark.parametrize("rule", ["truncation", "tournament", "t-test"])
def test_in_any_order_of_events_copies_are_of_checkpoints_that_are_kept(tmp_path: Path, order: str, rule: str) -> None:
    for seed in range(12):
        size = 2 + seed % 6
        spec = spec_of(tmp_path, population=size, order=order, exploit=rule, steps=3_000, seed=seed)
        lines = simulated(spec, seed, at_once=1 + seed % 4)
        assert all(line["copied"]["member"] != line["member"] for line in lines if "copied" in line)
        who = [(line["member"], line["quantum"]) for line in lines]
        assert len(set(who)) == len(who), "nobody decides twice"
        again = Population(spec)
        for line in ({"event": "born", "member": i, "tuned": spec.born(i)} for i in range(size)):
            again.apply(line)
        for line in lines:
            again.apply(line)
        assert again.done


def test_in_rounds_it_does_not_matter_how_many_are_trained_at_once_nor_who_is_faster(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, population=7, steps=3_000)
    runs = [simulated(spec, seed, at_once, made_up=True) for seed, at_once in ((0, 1), (1, 2), (2, 5), (3, 7))]
    assert all(timeless(lines) == timeless(runs[0]) for lines in runs) and any("copied" in line for line in runs[0])


def test_killed_between_two_lines_of_a_round_nobody_goes_on_before_the_round_is_decided(tmp_path: Path) -> None:
    """Otherwise a member that has decided could lose the checkpoint that another one is about to copy."""
    spec = spec_of(tmp_path, population=4)
    lines = simulated(spec, 0, 1, made_up=True)
    half = Population(spec)
    for _ in range(4):
        half.apply(half.birth())
    for line in lines[:6]:  # the first round, and two members of the second
        half.apply(line)
    assert [m.quantum for m in half.members] == [2, 2, 1, 1]
    first = half.to_train([])
    assert first is not None and first.index == 2
    assert half.to_train([2, 3]) is None, "0 and 1 wait"


# The command.


def test_a_directory_of_another_population_and_a_lineage_that_was_changed_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, steps=300)
    trained(spec, tmp_path / "d")
    check_same(spec.plain | {"at_once": 2}, tmp_path / "d" / "population.yaml")
    with pytest.raises(UserError, match="was started with another file: ready is 300 there and 100 here"):
        check_same(spec_of(tmp_path, steps=300, ready=100).plain, tmp_path / "d" / "population.yaml")
    lines = (tmp_path / "d" / "lineage.jsonl").read_text().splitlines()
    for text, says in (
        ("\n".join(lines[:2] + lines[3:]), "member 3 was born"),
        ("\n".join([*lines, lines[-1]]), "has lost a line before member 3, quantum 1"),
        ("\n".join([*lines, '{"event": "ready", "member": -1}']), "its line 9 is not one that veldt pbt writes"),
    ):
        (tmp_path / "d" / "lineage.jsonl").write_text(text + "\n")
        with pytest.raises(UserError, match=says):
            Scheduler(spec, tmp_path / "d", Here(), quiet=True)


def test_the_processes_of_a_population_are_killed_and_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First a process that trains, then the population itself; no process is left behind."""
    file, path = written(tmp_path / "x.yaml", population=2, at_once=2, ready=450), tmp_path / "d"
    process = start(tmp_path, "pbt", file, "--dir", path)
    try:
        wait_for(process, lambda: (path / "member-1" / "log.txt").exists())
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        os.kill(workers[0].pid, signal.SIGKILL)
        wait_for(process, lambda: len(read_lineage(path)) >= 4)
        workers += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=30)
        deadline = time.monotonic() + 20
        while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
            assert time.monotonic() < deadline, "workers are left behind"
            time.sleep(0.05)
    finally:
        process.kill()
    assert main(["pbt", str(file), "--dir", str(path)]) == 0
    lines, out = read_lineage(path), capsys.readouterr().out
    assert [line["quantum"] for line in lines if line["event"] == "ready"] == [1, 1, 2, 2]
    assert not any(line.get("failed") for line in lines)
    assert (
        re.search(r"4/4 member [01] at 90\d env steps", out)
        and "Best: member" in out
        and f"veldt eval {path}/member-" in out
    )
    assert main(["plot", str(path), "-o", str(tmp_path / "tree.png")]) == 0
    assert main(["pbt", str(file), "--dir", str(path), "--plot"]) == 0
    for image in (path / "population.png", tmp_path / "tree.png"):
        with Image.open(image) as found:
            assert found.format == "PNG" and found.width > 500


def test_a_process_that_dies_again_and_again_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veldt.experiment.populations.crew.CODE", "sys.exit(3)")
    crew = Processes(tmp_path)
    crew.start(Job(0, tmp_path / "x.yaml", tmp_path / "r", 10, 60.0))
    deadline, found = time.monotonic() + 60, None
    while found is None:
        found = crew.wait(0.5)
        assert time.monotonic() < deadline
    assert found[1].failed.startswith("its process died 3 times (exit code 3") and not found[1].returns
    crew.close()


@pytest.mark.long
def test_killed_ten_times_at_random_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Real processes; fitness as it is."""
    rng = np.random.default_rng(5)
    file = written(tmp_path / "x.yaml", steps=3_000, at_once=2, env="CartPole-v1")
    assert main(["pbt", str(file), "--dir", str(tmp_path / "whole"), "--quiet"]) == 0
    path, kills = tmp_path / "d", 0
    while kills < 10:
        process = start(tmp_path, "pbt", file, "--dir", path, "--quiet")
        try:
            wait_for(process, lambda: (path / "worker-0.log").exists())
            process.communicate(timeout=float(rng.uniform(2.0, 9.0)))
        except subprocess.TimeoutExpired:
            kills += 1
        finally:
            process.kill()
            process.communicate(timeout=30)
        lines = [line for line in read_lineage(path) if line["event"] == "ready"]
        assert len({(line["member"], line["quantum"]) for line in lines}) == len(lines), "nobody decided twice"
        assert len(lines) < 40, f"it was done after {kills} kills"
    assert main(["pbt", str(file), "--dir", str(path), "--quiet"]) == 0
    assert timeless(read_lineage(path)) == timeless(read_lineage(tmp_path / "whole"))
    assert sum("copied" in line for line in read_lineage(path)) > 5
    for member in range(4):
        ours, theirs = (Run(place / f"member-{member}") for place in (path, tmp_path / "whole"))
        assert whole_state(ours) == whole_state(theirs)
