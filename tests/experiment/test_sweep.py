"""Sweeps: what a file may ask for, many runs with real processes, stopping and going on, and the table."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image
from test_cli import SLOW, end, start, wait_for
from test_run import TINY

from veldt.cli import sweep as command
from veldt.errors import UserError
from veldt.experiment import trials as running
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import exclusive
from veldt.experiment.run import Run
from veldt.experiment.sweep import Spec, read_spec, slug
from veldt.experiment.trials import Child, Failed, Score, Sweep, bootstrap, estimate, mean_over, score, table
from veldt.watching.links import figure

Captured = pytest.CaptureFixture[str]

SET = {name: list(x) if isinstance(x, tuple) else x for name, x in TINY.items()} | {"steps": 400, "eval.every": 100}
CHAIN: dict[str, Any] = {
    "recipe": "dqn",
    "env": "veldt/Chain-v0",
    "seeds": [0, 1],
    "at_once": 2,
    "episodes": 3,
    "set": SET,
    "settings": {"one step": {"algorithm.n": 1}, "three steps": {"algorithm": {"n": 3}}},
}


def written(path: Path, **changes: Any) -> Path:
    """The file of a small sweep; a change to None leaves that key out."""
    values = {key: x for key, x in (CHAIN | changes).items() if x is not None}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


# What a file may ask for.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seedz": 3}, "There is no key 'seedz'. Did you mean seeds"),
        ({"zzzzzz": 3}, "There is no key 'zzzzzz'. There are: name, recipe"),
        ({"seeds": None}, "seeds must be a list"),
        ({"seeds": []}, "seeds must be a list"),
        ({"seeds": 0}, "seeds must be a list"),
        ({"seeds": [0, 1, 0]}, "seeds: 0 appears twice"),
        ({"seeds": [-1]}, "seeds must be integers"),
        ({"seeds": [0.5]}, "seeds must be integers"),
        ({"recipe": "dqm"}, "one step: There is no recipe 'dqm'. Did you mean dqn?"),
        ({"recipe": None}, "one step: there is no recipe"),
        ({"env": None, "settings": None}, "dqn: there is no env"),
        ({"env": "veldt/Chian-v0"}, "one step: There is no environment 'veldt/Chian-v0'. Did you mean veldt/Chain-v0"),
        ({"env": "Pendulum-v1"}, "needs a Discrete action space"),
        ({"set": {"lerner.lr": 1}}, "There is no setting 'lerner'. Did you mean learner?"),
        ({"set": {"env": "CartPole-v1"}}, "set: env is a key of its own"),
        ({"set": {"seed": 3}}, "set: seed cannot be set here"),
        ({"set": {"learner.lr": 1, "learner": {"lr": 2}}}, "set: learner.lr appears twice"),
        ({"set": [1]}, "set must hold names and values"),
        ({"set": {"steps": -5}}, "steps must be greater than 0"),
        ({"set": {"store.capacity": "10"}}, "store"),
        ({"settings": {"a": {"learner.lrr": 1}}}, "a: There is no setting learner.'lrr'. Did you mean lr"),
        ({"settings": {"a": 3}}, "settings: a must hold names and values"),
        ({"settings": {True: {}}}, "settings: the name True must be text"),
        ({"settings": {"a b": {}, "a-b": {"algorithm.n": 2}}}, "'a-b' and 'a b' would share a directory"),
        ({"settings": {"A": {}, "a": {"algorithm.n": 2}}}, "would share a directory"),
        ({"settings": {"table.md": {}}}, "would share a directory"),
        ({"settings": {"***": {}}}, "must have a letter or a digit"),
        ({"grid": {"learner.lr": 1e-3}}, "grid: learner.lr must be a list"),
        ({"grid": {"learner.lr": []}}, "grid: learner.lr must be a list"),
        ({"grid": {"learner.lr": ["1e-3", 0.001]}}, "grid: lr 0.001 appears twice"),
        ({"grid": {"learner.lr": {"loguniform": [1e-4, 1e-2]}}}, "grid: learner.lr must be as in {loguniform:"),
        ({"grid": {"learner.lr": {"loguniform": [0, 1e-2], "n": 3}}}, "loguniform must be greater than 0, not 0"),
        ({"grid": {"learner.lr": {"loguniform": [1e-2, 1e-4], "n": 3}}}, "0.01 is not less than 0.0001"),
        ({"grid": {"learner.lr": {"loguniform": [1e-4, 1e-2], "n": 0}}}, "grid: learner.lr: n must be greater than 0"),
        ({"grid": {"algorithm.n": [1, 2]}}, "settings: one step: algorithm.n is in the grid as well"),
        ({"at_once": 0}, "at_once must be greater than 0"),
        ({"at_once": 1.5}, "at_once must be an integer"),
        ({"episodes": "many"}, "episodes must be a number"),
        ({"timeout_s": -1}, "timeout_s must be greater than 0"),
        ({"reach": True}, "reach must be a number"),
        ({"name": "//"}, "name '//' must have a letter or a digit"),
    ],
    ids=lambda x: json.dumps({str(k): str(v) for k, v in x.items()}) if isinstance(x, dict) else "",
)
def test_a_mistake_is_one_sentence_that_names_the_file_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "x.yaml", **changes)
    with pytest.raises(UserError) as caught:
        command.run(["x.yaml"])
    text = str(caught.value)
    assert text.startswith("x.yaml: ") and says in text and "\n" not in text, text
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"], "nothing is left behind"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read as YAML"),
        ("recipe: dqn\nsettings: {a: {}, a: {steps: 5}}", "'a' appears twice"),
        ("seeds: 1\nseeds: 2", "'seeds' appears twice"),
        ("just words", "must hold keys"),
        ("", "must hold keys"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_spec(tmp_path / "x.yaml")
    assert "x.yaml" in str(caught.value)
    with pytest.raises(UserError, match=r"There is no .*none\.yaml"):
        read_spec(tmp_path / "none.yaml")


def test_flags_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(written(tmp_path / "x.yaml"))
    for argv, says in (
        (["--only", "one stop"], "There is no setting 'one stop'. Did you mean one step"),
        (["--only", "zzz"], "There are: one step, three steps"),
        (["--at-once", "0"], "--at-once must be greater than 0"),
        (["--table"], "There is no sweeps/x yet"),
        (["--dir", "x.yaml"], "cannot be written"),
    ):
        with pytest.raises(UserError) as caught:
            command.run([file, *argv])
        assert says in str(caught.value)
    with pytest.raises(SystemExit, match="2"):
        command.run([file, "--zzzzz"])
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]
    (tmp_path / "held").mkdir()
    with exclusive(tmp_path / "held"), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        command.run([file, "--dir", "held"])


def test_stores_that_fit_alone_but_not_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veldt.experiment.sweep.available_memory", lambda: 10**9)
    spec = read_spec(written(tmp_path / "x.yaml", set=SET | {"store.capacity": "0.5GB"}))
    trials = spec.trials(tmp_path)
    Sweep(spec, trials, at_once=1).check_memory()
    with pytest.raises(UserError, match=r"stores of 2 runs at once need 1\.0 GB, but 1\.0 GB of memory is free"):
        Sweep(spec, trials, at_once=2).check_memory()


def test_settings_override_what_is_set_for_all_and_may_have_their_own_recipe_and_env(tmp_path: Path) -> None:
    settings = {
        "plain": None,
        "slow": {"learner": {"lr": "1e-5"}, "eval.every": 7},
        "apex": {"recipe": "apex-dqn", "env": "CartPole-v1"},
    }
    spec = read_spec(written(tmp_path / "my sweep.yaml", settings=settings, seeds=2, reach=0.5, at_once=None))
    assert (spec.name, spec.seeds, spec.at_once, spec.episodes, spec.reach) == ("my sweep", (0, 1), 1, 3, 0.5)
    assert 3_600 <= spec.timeout_s < float("inf"), "every run has an end"
    configs = {setting.name: setting.config for setting in spec.settings}
    assert (configs["plain"].recipe, configs["plain"].env, configs["plain"].steps) == ("dqn", "veldt/Chain-v0", 400)
    assert (configs["slow"].learner.lr, configs["slow"].eval.every) == (1e-5, 7)
    assert configs["slow"].learner.batch == configs["plain"].learner.batch == TINY["learner.batch"]
    assert (configs["apex"].recipe, configs["apex"].env, configs["apex"].steps) == ("apex-dqn", "CartPole-v1", 400)
    trials = spec.trials(Path("d"))
    assert [(t.setting, t.config.seed, str(t.path)) for t in trials] == [
        (name, seed, f"d/{name}/seed-{seed}") for seed in (0, 1) for name in settings
    ]


def test_what_has_no_store_needs_no_memory_for_one(tmp_path: Path) -> None:
    own = {"recipe": "es", "env": "CartPole-v1", "set": {"steps": 1_000}, "settings": {"few": {"learner.pairs": 4}}}
    assert [setting.nbytes for setting in read_spec(written(tmp_path / "x.yaml", **own)).settings] == [0]


def test_a_grid_is_every_combination_and_its_names_say_which(tmp_path: Path) -> None:
    grid = {"learner.lr": ["1e-3", 1e-4], "algorithm": {"n": [1, 3], "double": [True]}}
    spec = read_spec(written(tmp_path / "x.yaml", settings=None, grid=grid))
    found = {s.name: (s.config.learner.lr, s.config.algorithm.n, s.config.algorithm.double) for s in spec.settings}
    assert found == {
        "lr 0.001, n 1, double on": (1e-3, 1, True),
        "lr 0.001, n 3, double on": (1e-3, 3, True),
        "lr 0.0001, n 1, double on": (1e-4, 1, True),
        "lr 0.0001, n 3, double on": (1e-4, 3, True),
    }
    assert spec.settings[0].slug == "lr-0.001-n-1-double-on"


@pytest.mark.parametrize("nested", [False, True])
def test_an_axis_may_be_drawn_from_a_log_uniform_distribution(nested: bool, tmp_path: Path) -> None:
    """Half of the draws are below the geometric mean of the bounds. A seed draws the same values again."""

    def rates(seed: int) -> list[float]:
        drawn = {"loguniform": ["1e-4", 1e-2], "n": 200, "seed": seed}
        grid = {"learner": {"lr": drawn}} if nested else {"learner.lr": drawn}
        spec = read_spec(written(tmp_path / "x.yaml", settings=None, grid=grid))
        return [setting.config.learner.lr for setting in spec.settings]

    found = rates(7)
    assert len(set(found)) == 200 and all(1e-4 <= rate <= 1e-2 for rate in found)
    assert 75 <= sum(rate < 1e-3 for rate in found) <= 125
    assert rates(7) == found and not set(rates(8)) & set(found[:20])


def test_a_grid_multiplies_the_settings_and_may_hold_recipes(tmp_path: Path) -> None:
    grid = {"recipe": ["dqn", "apex-dqn"], "eval.every": [50], "checkpoint.every": [60]}
    spec = read_spec(written(tmp_path / "x.yaml", recipe=None, grid=grid))
    names = [s.name for s in spec.settings]
    same = "eval.every 50, checkpoint.every 60"  # two that end alike are named in full
    assert names == [f"{a}, {b}, {same}" for a in ("one step", "three steps") for b in ("dqn", "apex-dqn")]
    assert [s.config.recipe for s in spec.settings] == ["dqn", "apex-dqn"] * 2
    assert [s.config.algorithm.n for s in spec.settings] == [1, 1, 3, 3]
    assert all((s.config.eval.every, s.config.checkpoint.every) == (50, 60) for s in spec.settings)


def test_long_names_have_short_directories_of_their_own() -> None:
    one, two = (slug("lr 0.001, " * 50 + end) for end in ("a", "b"))
    assert one != two and len(one) <= 100 and len(two) <= 100


def test_the_example_can_be_read() -> None:
    spec = read_spec(Path(__file__).parents[2] / "examples" / "sweeps" / "catch.yaml")
    assert len(spec.trials(Path("d"))) == 6


# A whole one.


@dataclass(frozen=True)
class Made:
    """A sweep that was run."""

    file: Path
    directory: Path
    code: int
    out: str

    def again(self, *flags: str, **changes: Any) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            code = command.run([str(written(self.file, **changes)), "--dir", str(self.directory), *flags])
        return code, text.getvalue()

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob("*/seed-*.json"))]

    def times(self) -> dict[str, int]:
        """When each file of the runs was last changed."""
        return {str(path): path.stat().st_mtime_ns for path in self.directory.glob("*/**/*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    home = tmp_path_factory.mktemp("sweep")
    made = Made(home / "tiny.yaml", home / "d", 0, "")
    code, out = made.again()
    return Made(made.file, made.directory, code, out)


def test_every_run_is_trained_and_evaluated_and_told(made: Made) -> None:
    assert made.code == 0, made.out
    assert len(made.results()) == 4
    for result in made.results():
        run = Run(made.directory / result["setting"].replace(" ", "-") / f"seed-{result['seed']}")
        assert run.metrics[-1]["env_steps"] >= 400 and run.config.seed == result["seed"]
        assert run.config.algorithm.n == {"one step": 1, "three steps": 3}[result["setting"]]
        assert run.evaluate(3).returns == result["returns"] and result["mean_return"] == statistics.fmean(result["returns"])
        assert "$ veldt train dqn --config" in run.path.with_name(f"{run.path.name}.log").read_text()
        assert f"{result['setting']} seed {result['seed']}: started" in made.out
        assert re.search(rf"\d/4 {result['setting']} seed {result['seed']}: greedy [\d.]+ after \d+ s", made.out)
    assert re.search(r"1/4 .* about \d+:\d\d left\n", made.out) and re.search(r"4/4 .* s\n", made.out)


def test_no_more_runs_at_once_than_asked_for_and_no_fewer(made: Made) -> None:
    spans = [(result["began"], result["ended"]) for result in made.results()]
    at_once = [sum(began <= when < ended for began, ended in spans) for when, _ in spans]
    assert max(at_once) == 2, spans


def test_the_table_has_a_row_a_setting_and_the_plot_a_curve(made: Made) -> None:
    text = (made.directory / "table.md").read_text()
    assert text in made.out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    rows.pop(1)  # the line below the head
    assert [row[0] for row in rows] == ["setting", "one step", "three steps"]
    assert rows[0][1:] == ["seeds", "greedy return of 3 episodes", "return over the run", "seconds per run"]
    for row in rows[1:]:
        means = [result["mean_return"] for result in made.results() if result["setting"] == row[0]]
        assert row[1] == "2" and row[2] == estimate(means)
    assert text.rstrip().endswith(f"veldt sweep {made.file} --dir {made.directory}")
    with Image.open(made.directory / "curves.png") as image:
        assert image.format == "PNG" and image.width > 500


def test_the_copy_of_the_file_asks_for_the_same(made: Made) -> None:
    copy, original = read_spec(made.directory / "sweep.yaml"), read_spec(written(made.file))
    assert copy.name == "tiny"
    assert copy.trials(Path("d")) == original.trials(Path("d"))


def test_a_second_time_nothing_is_run_and_the_table_is_the_same(made: Made) -> None:
    before, text = made.times(), (made.directory / "table.md").read_text()
    code, out = made.again()
    assert code == 0 and "started" not in out and text in out
    assert made.times() == before
    assert (made.directory / "table.md").read_text() == text


def test_the_table_alone_can_be_made_anew(made: Made) -> None:
    before = made.times()
    (made.directory / "curves.png").unlink()
    code, out = made.again("--table", reach=-1, seeds=3)
    assert code == 0 and made.times() == before and (made.directory / "curves.png").exists()
    assert "env steps to -1" in out and "(2 of 2)" in out and "| 2 of 3 |" in out and "started" not in out
    assert out.rstrip().count("--table") == 0, "the command makes the runs as well"
    made.again("--table", reach=None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"settings": {"one step": {"algorithm.n": 2}}},
            "one-step/seed-0 was started with a different config: algorithm.n is 1 there",
        ),
        ({"set": SET | {"steps": 500}}, "steps is 400 there and 500 here"),
        ({"set": SET | {"steps": 300}}, "steps is 400 there and 300 here"),
    ],
    ids=str,
)
def test_runs_of_another_config_are_not_mixed_in(made: Made, change: dict[str, Any], says: str) -> None:
    before = made.times()
    for flags in ([], ["--table"]):
        with pytest.raises(UserError) as caught:
            made.again(*flags, **change)
        assert says in str(caught.value) and "--dir" in str(caught.value)
    assert made.times() == before


def test_what_changes_no_result_may_change(made: Made) -> None:
    before = made.times()
    assert made.again(set=SET | {"log.every": 0.5, "checkpoint.keep": 3})[0] == 0
    assert made.times() == before


def test_more_episodes_evaluate_again_without_training_and_only_what_is_asked_for(made: Made) -> None:
    run = Run(made.directory / "one-step" / "seed-0")
    weights, others = run.weights_hash(), {name: at for name, at in made.times().items() if "one-step" not in name}
    code, out = made.again("--only", "one step", seeds=[0], episodes=4)
    assert code == 0 and "1/1 one step seed 0" in out and "| 0 of 1 |" in out, "the other setting has no such result"
    assert len(json.loads((made.directory / "one-step" / "seed-0.json").read_text())["returns"]) == 4
    assert run.weights_hash() == weights
    assert {name: at for name, at in made.times().items() if "one-step" not in name} == others


# Stopping and going on.


def gone(processes: list[psutil.Process], seconds: float = 20) -> None:
    """Waits until none of them is there."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], alive


@contextlib.contextmanager
def sweeping(home: Path, **changes: Any) -> Iterator[tuple[Any, Path]]:
    """A sweep as a process of its own, once each of its first runs has a checkpoint. In the end nothing of it is left."""
    spec = read_spec(written(home / "x.yaml", **changes))
    runs = [trial.path for trial in spec.trials(home / "sweeps" / "x")][: spec.at_once]
    process = start(home, "sweep", home / "x.yaml")
    children: list[psutil.Process] = []
    try:
        wait_for(process, lambda: all((run / "checkpoints" / "latest").exists() for run in runs))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= len(runs)
        assert os.getpgid(process.pid) not in {os.getpgid(child.pid) for child in children}, "Ctrl-C would reach them twice"
        yield process, home / "sweeps" / "x"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)
        gone(children)


LONG = SET | {"steps": 6_000, "eval.every": 1_000, "checkpoint.every": 500, "store.capacity": "1_000"}
APEX = {"recipe": "apex-dqn", "actors": 1, "actor.block": 16, "store.slack": 0.2}


def test_after_a_kill_nothing_runs_on_and_the_same_command_finishes(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run, which is killed, has many processes; the second has not begun by then."""
    settings = {"many": LONG | APEX, "one": {}}
    with sweeping(tmp_path, settings=settings, seeds=1, at_once=1) as (process, directory):
        process.kill()
    checkpoint = Checkpoints(directory / "many" / "seed-0" / "checkpoints").load()
    assert checkpoint is not None and checkpoint.manifest["env_steps"] < 6_000, "it did not run to its end by itself"
    assert not list(directory.glob("*/seed-0.json")) and not (directory / "one").exists()
    monkeypatch.chdir(tmp_path)
    assert command.run(["x.yaml", "--at-once", "2"]) == 0
    out = capsys.readouterr().out
    assert "many seed 0: resumed" in out and "one seed 0: started" in out
    assert re.search(r"/2 many seed 0: greedy", out) and re.search(r"/2 one seed 0: greedy", out)
    lines = [json.loads(line) for line in (directory / "many" / "seed-0" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line.get("resumed_from", 0) > 0], "it went on from its checkpoint"
    assert lines[-1]["env_steps"] >= 6_000


def test_ctrl_c_lets_every_run_write_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    with sweeping(tmp_path, set=LONG | {"steps": 10**6}, settings=None, seeds=2) as (process, directory):
        process.send_signal(signal.SIGINT)
        out, err = end(process, 40)
    assert process.returncode == 130, err
    assert "Stopped with 0 of 2 runs finished. Resume with: veldt sweep" in out and "failed" not in out
    assert "Traceback" not in err
    for seed in (0, 1):
        checkpoint = Checkpoints(directory / "dqn" / f"seed-{seed}" / "checkpoints").load()
        assert checkpoint is not None and checkpoint.manifest["scheduled"] is False


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "still_envs.py").write_text(SLOW)
    written(tmp_path / "x.yaml", env="still_envs:Stuck", settings={"a": {"eval.every": 0}}, seeds=1)
    process = start(tmp_path, "sweep", "x.yaml", "--trust")
    try:
        wait_for(process, (tmp_path / "stuck").exists)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        for line in process.stderr:
            if "repeat to stop immediately" in line:
                break
        assert process.poll() is None, "the first one waits for a checkpoint"
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
    finally:
        end(process, 30)
    assert process.returncode == 143 and children
    gone(children)
    assert time.monotonic() - began < 5


def test_one_run_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "failing_envs.py").write_text(SLOW.replace("time.sleep(60)", "raise RuntimeError('gone')"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"broken": {"env": "failing_envs:Stuck", "eval.every": 0}, "good": {}}
    written(tmp_path / "x.yaml", settings=settings, seeds=1)
    assert command.run(["x.yaml", "--trust"]) == 1
    out = capsys.readouterr().out
    assert "broken seed 0: failed, it ended with exit code 1" in out and "1/2 good seed 0: greedy" in out
    told = out.partition("broken seed 0 failed: it ended")[2]
    assert "sweeps/x/broken/seed-0.log" in told and "step raised RuntimeError: gone" in told
    assert "1 of 2 runs failed. Retry with: veldt sweep x.yaml --trust" in told
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in out.splitlines() if line.startswith("| ")}
    assert (rows["broken"], rows["good"]) == ("0 of 1", "1")


def test_a_run_that_takes_too_long_is_stopped_and_killed_if_it_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck_envs.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(running, "STOP_S", 0.3)
    spec = read_spec(written(tmp_path / "x.yaml", env="stuck_envs:Stuck", settings={"a": {"eval.every": 0}}, seeds=1), True)
    trial = spec.trials(tmp_path / "d")[0]
    trial.path.mkdir(parents=True)
    trial.beside("json").write_text('{"returns": [1.0], "asked": 1}')  # of a run in the same place, before
    child = Child(trial, 1, timeout_s=1_000)
    try:
        until(lambda: (tmp_path / "stuck").exists())
        assert child.outcome() is None and not child.stopped
        child.timeout_s = 0.5  # it is older than that
        began = time.monotonic()
        until(lambda: child.process.poll() is not None or child.outcome() is not None)
        assert time.monotonic() - began >= 0.3, "first it is asked to stop"
        outcome = child.outcome()
    finally:
        child.kill()
    assert isinstance(outcome, Failed) and "took longer than 0.5 s (timeout_s)" in outcome.why
    assert child.process.returncode == -signal.SIGKILL
    assert (trial.path / "config.yaml").exists() and trial.result(1) is None, "it is not taken for finished"


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing within {seconds} s"
        time.sleep(0.01)


# What is reported.


def test_the_interval_of_values_that_can_be_enumerated() -> None:
    """A resample's mean of n zeros and ones, k of them ones, is Binomial(n, k/n)/n."""
    assert bootstrap([3.0, 3.0, 3.0]) == (3.0, 3.0)
    assert bootstrap([3.0]) is None and bootstrap([]) is None
    assert bootstrap([0, 0, 0, 0, 1]) == (0.0, 0.6)  # P(X >= 3) = 0.058, P(X >= 4) = 0.007
    assert bootstrap([0, 1, 1, 1, 1]) == pytest.approx((0.4, 1.0))
    assert bootstrap([0, 0, 0, 0, 1], level=0.5) == pytest.approx((0.0, 0.4))  # P(X >= 2) = 0.263, P(X >= 1) = 0.672
    assert bootstrap([0, 0, 0, 0, 1]) == bootstrap([0, 0, 0, 0, 1]), "the same each time"


def test_the_interval_is_that_of_all_resamples() -> None:
    values = [0.3, 1.7, 2.9, 8.1]
    means = np.sort([np.mean(x) for x in np.stack(np.meshgrid(*[values] * 4), -1).reshape(-1, 4)])
    low, high = bootstrap(values) or (0, 0)
    assert np.mean(means < low) <= 0.025 + 0.005 and np.mean(means <= low) >= 0.025 - 0.005
    assert np.mean(means > high) <= 0.025 + 0.005 and np.mean(means >= high) >= 0.025 - 0.005


@pytest.mark.parametrize(("n", "expected"), [(3, 0.74), (10, 0.90), (40, 0.94)])
def test_the_interval_of_normal_values_holds_the_mean_as_often_as_we_say(n: int, expected: float) -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(600):
        low, high = bootstrap(rng.normal(5.0, 2.0, n).tolist(), resamples=1_000) or (0, 0)
        held.append(low <= 5.0 <= high)
    assert np.mean(held) == pytest.approx(expected, abs=0.04)


def test_the_mean_over_env_steps_weighs_evaluations_by_what_they_stand_for() -> None:
    assert mean_over([], []) is None
    assert mean_over([10], [3.0]) == 3.0
    assert mean_over([10, 10], [3.0, 5.0]) == 4.0
    assert mean_over([0, 100], [0.0, 1.0]) == 0.5
    assert mean_over([0, 10, 100], [0.0, 1.0, 1.0]) == pytest.approx(0.95)


def test_a_run_is_scored_by_its_evaluations() -> None:
    lines = [
        {"env_steps": 5, "time_s": 0.5, "train_return": 9.0},
        {"env_steps": 10, "time_s": 1.0, "eval_return": 0.2},
        {"env_steps": 20, "time_s": 2.0, "eval_return": 0.9},
        {"env_steps": 30, "time_s": 3.0, "eval_return": 0.4},
        {"env_steps": 35, "time_s": 3.5},
    ]
    result = {"mean_return": 0.7, "returns": [0.7]}
    assert score(result, lines, 0.9) == Score(0.7, pytest.approx((0.55 + 0.65) / 2), (20, 2.0), 3.5)
    assert score(result, lines, 0.95).reached is None and score(result, lines, None).reached is None
    assert score(result, lines[:1], None).area is None
    own = {"eval_env_steps": 19, "eval_time_s": 1.5}  # of the weights that played
    assert score(result, [lines[1], lines[2] | own], 0.9).reached == (19, 1.5)


def test_the_table_says_how_many_reached_the_goal_and_when_half_of_all_had() -> None:
    def scores(*reached: float | None) -> list[Score]:
        return [Score(1.0, None, None if at is None else (1_000 * at, at), 30.0) for at in reached]

    found = {"a": scores(12, None, 4), "b": scores(12, None, None), "c": scores(4, 8), "d": [], "e|f": scores(2)}
    text = table(Spec("x", (), (0, 1, 2), reach=0.9), found, "veldt sweep x.yaml")
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line[:2] == "| "]
    rows.pop(1)  # the line below the head
    assert rows[0][4:] == ["env steps to 0.9", "seconds to 0.9", "seconds per run"]
    assert rows[1] == ["a", "3", "1 [1, 1]", "-", "12,000 (2 of 3)", "12", "30"]
    assert rows[2][4:6] == ["- (1 of 3)", "-"]
    assert rows[3][1] == "2 of 3" and rows[3][4:6] == ["6,000 (2 of 2)", "6"]
    assert rows[4] == ["d", "0 of 3", "-", "-", "- (0 of 0)", "-", "-"]
    assert rows[5][:3] == ["e\\|f", "1 of 3", "1 [-]"]
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1, "it can be read as it is"


def test_numbers_have_three_digits() -> None:
    values = [0.98765, -0.0123, 12.34, 487.35, 12_345.6, float("inf")]
    assert [figure(x) for x in values] == ["0.988", "-0.0123", "12.3", "487", "12,346", "-"]


def test_help_shows_a_file(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        command.run(["--help"])
    out = capsys.readouterr().out
    for part in ("Example: veldt sweep", "--at-once", "--only", "--table", "--dir", "settings:"):
        assert part in out
