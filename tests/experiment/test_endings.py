"""What ends a run early, what its caller hears, its best and its last weights, and what may change on resume."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_run import TINY, tiny, whole_state

import veldt
from veldt.acting.actor import evaluate
from veldt.errors import UserError
from veldt.experiment import ending, recipes
from veldt.experiment.changes import ON_RESUME
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.listening import CheckpointSaved, EvaluationDone, LogLine, seconds
from veldt.experiment.run import Run
from veldt.experiment.saving import Best
from veldt.experiment.settings import flat
from veldt.seeds import derive

Heard = list[Any]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Heard]:
    """A run of 1,500 env steps, and all that its callbacks were given."""
    events: Heard = []
    hear = {name: events.append for name in ("on_log", "on_evaluation", "on_checkpoint")}
    return tiny(tmp_path_factory.mktemp("endings") / "r", **hear), events


def of(events: Heard, kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_callbacks_hear_of_every_line_evaluation_and_checkpoint(heard: tuple[Run, Heard]) -> None:
    run, events = heard
    saved, evaluated = of(events, CheckpointSaved), of(events, EvaluationDone)
    assert [x.number for x in saved] == [1, 2, 3, 4, 5] and (saved[-1].path / "manifest.json").exists()
    points = [(point.env_steps, point.mean_return) for point in run.evaluations]
    assert [(x.env_steps, x.mean_return) for x in evaluated] == points and len(points) == 4
    lines = of(events, LogLine)
    assert [x.env_steps for x in lines] == [line["env_steps"] for line in run.metrics]
    assert lines[-1].metrics["eval_return"] == evaluated[-1].mean_return


def test_the_last_weights_are_evaluated(heard: tuple[Run, Heard]) -> None:
    run, events = heard
    last, checkpoint = of(events, EvaluationDone)[-1], run.checkpoints().load()
    assert checkpoint is not None
    assert (last.env_steps, last.learner_steps) == (checkpoint.manifest["env_steps"], checkpoint.manifest["learner_steps"])
    assert again(run, "latest", derive(0, "last evaluation")) == last.mean_return


def again(run: Run, which: Any, seed: int) -> float:
    """The evaluation of the weights in the run directory."""
    with closing(run.config.envs(2)) as envs:
        found = evaluate(envs, run.policy(which=which), 2, seed, run.config.eval.max_length)
    assert found is not None
    return found.mean_return


def test_the_best_weights_are_those_that_were_evaluated_and_outlive_checkpoints(heard: tuple[Run, Heard]) -> None:
    run, events = heard
    evaluated = of(events, EvaluationDone)
    top = max(x.mean_return for x in evaluated)
    index = max(i for i, x in enumerate(evaluated) if x.mean_return == top)
    best = run.checkpoints().best()
    assert best is not None and best.manifest["mean_return"] == top
    assert best.manifest["learner_steps"] == evaluated[index].learner_steps and evaluated[index].best
    seed = derive(0, "evaluation", index + 1) if index < 3 else derive(0, "last evaluation")
    assert again(run, "best", seed) == top
    assert len(list((run.path / "checkpoints").glob("best-*"))) == 1


def test_a_damaged_best_checkpoint_is_not_used(heard: tuple[Run, Heard], tmp_path: Path) -> None:
    run, _ = heard
    copy = tmp_path / "r"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "config.yaml").write_text((run.path / "config.yaml").read_text())
    with pytest.raises(UserError, match="no best checkpoint"):
        Run(copy).policy(which="best")
    own = next((run.path / "checkpoints").glob("best-*"))
    there = copy / "checkpoints" / own.name
    there.mkdir()
    for file in own.iterdir():
        (there / file.name).write_bytes(file.read_bytes())
    assert Run(copy).policy(which="best").net is not None
    (there / "weights.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="no best checkpoint"):
        Run(copy).policy(which="best")
    with pytest.raises(UserError, match="which is latest or best, not 'newest'"):
        veldt.load(run.path, which="newest")  # type: ignore[arg-type]


def test_the_last_evaluation_changes_nothing_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = tiny(tmp_path / "with", steps=400)
    with monkeypatch.context() as patch:
        patch.setattr("veldt.experiment.session.evaluate_weights", lambda *args: None)
        without = tiny(tmp_path / "without", steps=400)
        assert whole_state(with_it) == whole_state(without)
        assert len(with_it.evaluations) == 1 and not without.evaluations
        veldt.resume(without.path, quiet=True, steps=700)
    veldt.resume(with_it.path, quiet=True, steps=700)
    assert whole_state(with_it) == whole_state(without)


def test_an_environment_that_hangs_or_breaks_does_not_hold_up_the_end(
    heard: tuple[Run, Heard], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = heard
    spec, weights = run.config.env_spec(), run.checkpoints().weights()
    assert weights is not None
    config = veldt.recipe("dqn", **TINY | {"env": "CartPole-v1", "step_timeout": 0.3})
    monkeypatch.setattr(ending, "evaluate", lambda *args: __import__("time").sleep(2))
    assert ending.evaluate_weights(config, spec, weights) is None
    assert "a step of CartPole-v1 took more than step_timeout" in caplog.text
    monkeypatch.setattr(ending, "evaluate", lambda *args: 1 / 0)
    assert ending.evaluate_weights(config, spec, weights) is None and "division by zero" in caplog.text


@pytest.mark.parametrize("how", ["false", "stop", "return"])
def test_a_run_ends_early_with_a_checkpoint_and_says_why(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(event: EvaluationDone) -> bool:
        if how == "stop":
            raise veldt.Stop("pruned")
        return how != "false"

    more: dict[str, Any] = {"on_evaluation": stop} if how != "return" else {"stop_return": 1.0}
    changes = TINY | {"eval.every": 200, "steps": 50_000} | more
    run = veldt.train("dqn", env="CartPole-v1", run=tmp_path / "r", **changes)
    checkpoint, text = run.checkpoints().load(), capsys.readouterr().out
    assert checkpoint is not None and 200 <= checkpoint.manifest["env_steps"] < 1_000
    why = {"false": "on_evaluation returned False.", "stop": "on_evaluation raised Stop: pruned."}
    assert f"Stopped early: {why.get(how, 'an evaluation')}" in text and (how != "return" or "(--stop-return 1)" in text)
    assert "Return of the last weights: " in text and "95 % interval" in text
    assert f"continue with: veldt resume {run.path}" in text
    assert run.evaluations[-1].env_steps == checkpoint.manifest["env_steps"]


def test_a_callback_that_raises_ends_the_run_with_its_error_and_a_checkpoint(tmp_path: Path) -> None:
    def broken(event: LogLine) -> None:
        if event.env_steps > 100:
            raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        tiny(tmp_path / "r", on_log=broken)
    assert Run(tmp_path / "r").checkpoints().load() is not None


def test_a_run_ends_when_its_time_is_up(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", steps=10_000_000, stop_after="1s", **{"eval.every": 0})
    assert 0.9 < run.metrics[-1]["time_s"] < 20 and not run.evaluations
    assert "the time is up (--stop-after 1s)" in (run.path / "log.txt").read_text()


def test_a_run_whose_time_is_up_before_an_update_is_not_called_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = veldt.train("dqn", env="CartPole-v1", run=tmp_path / "r", **TINY | {"stop_after": "0s"})
    said = capsys.readouterr().out
    assert "ended without an update: the time is up" in said and f"veldt resume {run.path}\n" in said


def test_the_best_weights_are_the_best_where_links_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "best" / "full").mkdir(parents=True)  # no link can replace it
    best = Best(Checkpoints(tmp_path), torch.nn.Linear(1, 1))
    weights = {"w": np.zeros(3, np.float32)}
    assert best.offer(weights, 5.0, 10, 1) and not best.offer(weights, 4.0, 20, 2) and best.offer(weights, 6.0, 30, 3)
    found = Checkpoints(tmp_path).best()
    assert found is not None and found.manifest["mean_return"] == 6.0
    assert [path.name for path in tmp_path.glob("best-*")] == ["best-000000000030"]


def test_a_resume_that_cannot_begin_changes_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(tmp_path / "r", steps=300)
    before = run.config
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    with pytest.raises(UserError, match="pip install"):
        veldt.resume(run.path, quiet=True, steps=400, **{"log.wandb": True})
    assert run.config == before and not (run.path / "config_history.jsonl").exists()
    veldt.resume(run.path, quiet=True, steps=400)


def test_durations() -> None:
    assert [seconds(text) for text in ("90s", "30m", "2h", "1h30m", "0.5h", "1d")] == [90, 1800, 7200, 5400, 1800, 86400]
    for text in ("90", "h", "2 h", "1h30", "-3s", "inf"):
        with pytest.raises(UserError, match="stop_after must be a duration"):
            seconds(text)
    with pytest.raises(UserError, match="stop_return needs evaluations"):
        veldt.train("dqn", stop_return=3.0, **{"eval.every": 0})


def test_a_resume_may_change_what_is_sound_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny(tmp_path / "r", steps=300)
    capsys.readouterr()
    veldt.resume(run.path, steps=600, **{"learner.lr": 1e-4, "learner.clip_norm": 1.0})
    text = capsys.readouterr().out
    assert "changed: learner.lr was 0.001, and is 0.0001 from here on" in text
    at = json.loads((run.path / "config_history.jsonl").read_text())["env_steps"]
    rate = f"it goes on at {1e-4 * (1 - at / 600):.3g}, and falls to 0 at 600 env steps"
    assert f"learning rate: it was 0 here; {rate}" in text
    (line,) = [json.loads(text) for text in (run.path / "config_history.jsonl").read_text().splitlines()]
    assert line["changed"] == {"steps": [300, 600], "learner.lr": [0.001, 0.0001], "learner.clip_norm": [10.0, 1.0]}
    assert run.config.learner.lr == 1e-4 and run.metrics[-1]["env_steps"] >= 600
    with pytest.raises(UserError, match=r"learner.lr is 0.0001 there and 0.001 here; choose another --run"):
        tiny(run.path, steps=900)  # not a resume, but the command that started it
    for name, value in (("seed", 5), ("algorithm.n", 2), ("store.capacity", "300")):
        with pytest.raises(UserError, match=f"{name} is .* there and .* here; it cannot change on resume"):
            veldt.resume(run.path, quiet=True, **{name: value})


def test_the_settings_that_may_change_exist() -> None:
    known = {name for recipe in recipes.RECIPES for name in flat(recipes.make(recipe))}
    assert not ON_RESUME.keys() - known and all(ON_RESUME.values())


def test_a_run_starts_with_the_weights_of_another_as_far_as_they_fit(
    heard: tuple[Run, Heard], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = heard
    weights = source.checkpoints().weights()
    assert weights is not None
    starts: list[Any] = []

    def first(event: LogLine) -> bool:
        starts.append(event)
        return False

    changes = TINY | {"algorithm.dueling": True, "eval.every": 0, "log.every": 1e-6}
    run = veldt.train("dqn", env="CartPole-v1", run=tmp_path / "r", init_from=source.path, on_log=first, **changes)
    text, own = capsys.readouterr().out, run.checkpoints().weights()
    assert own is not None and starts[0].learner_steps == 0
    shared = own.keys() & weights.keys()
    assert {"torso.norm.mean", "torso.norm.variance"} <= shared, "normalisation statistics too"
    for name in shared:
        np.testing.assert_array_equal(own[name], weights[name], err_msg=name)
    assert f"init from {source.path}: {len(shared)} of {len(own)} arrays" in text
    for name in own.keys() - shared:
        assert f"init: {name} {list(own[name].shape)} starts at random: it is missing there" in text
    with pytest.raises(UserError, match="has no checkpoint to start from"):
        tiny(tmp_path / "s", init_from=str(tmp_path))


MODULE = """
from dataclasses import replace
import veldt
from veldt.experiment import recipes

def quick(env: str) -> veldt.Config:
    "Learns at once."
    return replace(recipes.make("dqn", env), steps=400)

def nothing(env: str):
    return env
"""


def test_a_recipe_of_ones_own_is_found_by_its_name_and_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_recipe.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {name: x for name, x in TINY.items() if name != "steps"}
    run = veldt.train("own_recipe:quick", env="CartPole-v1", run=tmp_path / "r", quiet=True, **settings)
    assert run.config.recipe == "own_recipe:quick" and run.config.steps == 400
    for use in (lambda: Run(run.path).config, lambda: veldt.load(run.path), lambda: veldt.resume(run.path)):
        with pytest.raises(
            veldt.UserError, match=r"would import and call own_recipe:quick \(recipe\); allow it with --trust"
        ):
            use()
    assert veldt.load(run.path, trust=True)(np.zeros(4))[0] in (0, 1)
    veldt.resume(run.path, quiet=True, trust=True, steps=500)
    with pytest.raises(UserError, match="'own_recipe:nothing' must return a Config, not a str"):
        veldt.train("own_recipe:nothing")
    with pytest.raises(UserError, match="is not a recipe"):
        veldt.train("own_recipe:missing")


def test_an_installed_package_offers_recipes_as_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from veldt.__main__ import main

    info = tmp_path / "own_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[veldt.recipes]\nquick-one = own_entry:quick\n")
    (tmp_path / "own_entry.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert recipes.make("quick-one", "CartPole-v1").recipe == "quick-one"
    assert main(["recipes"]) == 0 and "own_entry:quick, installed by own-package" in capsys.readouterr().out
