"""veldt tune: the file, a study that is killed and resumed, pruning, and the command that it prints."""

from __future__ import annotations

import json
import shlex
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import start, wait_for
from test_run import TINY

from veldt.__main__ import main
from veldt.cli import train
from veldt.cli import tune as command
from veldt.errors import UserError
from veldt.experiment.populations import tuning
from veldt.experiment.populations.study import read_study
from veldt.experiment.run import Run
from veldt.experiment.settings import flat

optuna = pytest.importorskip("optuna")

SET = {name: list(x) if isinstance(x, tuple) else x for name, x in TINY.items() if name not in ("steps", "eval.every")}
CHAIN: dict[str, Any] = {
    "recipe": "dqn",
    "env": "veldt/Chain-v0",
    "steps": 600,
    "trials": 3,
    "episodes": 2,
    "set": SET | {"eval.every": 100},
    "prune": "none",
    "tune": {
        "learner.lr": {"loguniform": [1e-5, 1e-2]},
        "learner.batch": {"uniform": [8, 32]},
        "algorithm.double": {"choices": [True, False]},
        "algorithm.hidden": {"choices": [[16], [8, 8]]},
    },
}
CHAIN["set"].pop("algorithm.hidden"), CHAIN["set"].pop("learner.batch")


def written(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({key: x for key, x in (CHAIN | changes).items() if x is not None}, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trails": 3}, "There is no key 'trails'. Did you mean trials"),
        ({"env": None}, "There is no env"),
        ({"trials": 0}, "trials must be greater than 0"),
        ({"tune": None}, "tune must name a setting"),
        ({"tune": {"learner.lrr": {"uniform": [0, 1]}}}, "There is no setting learner.'lrr'"),
        ({"tune": {"seed": {"uniform": [0, 9]}}}, "tune: seed cannot be tuned"),
        (
            {"tune": {"learner.prefetch": {"uniform": [1, 9]}}},
            "learner.prefetch cannot be tuned: it is set for every trial",
        ),
        ({"tune": {"algorithm.gamma": {"choices": [0.9, 1.5]}}}, "algorithm.gamma must be from 0 to 1, not 1.5"),
        ({"prune": {"after": 100, "factor": 1}}, "factor must be at least 2"),
        ({"set": SET | {"eval.every": 0}, "prune": {"after": 100}}, "prune needs evaluations"),
    ],
    ids=lambda x: json.dumps(x, default=str)[:60] if isinstance(x, dict) else "",
)
def test_a_mistake_is_one_sentence_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "x.yaml", **changes)
    with pytest.raises(UserError) as caught:
        command.run(["x.yaml"])
    assert str(caught.value).startswith("x.yaml: ") and says in str(caught.value), caught.value
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'veldt\[tune\]'"):
        tuning.optuna()


def test_the_examples_can_be_read() -> None:
    for path in (Path(__file__).parents[2] / "examples" / "studies").glob("*.yaml"):
        spec = read_study(path)
        assert spec.usual.keys() == spec.ranges.keys(), "the first trial is the recipe's own"


def test_killed_and_started_again_a_study_has_all_its_trials_and_prints_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, path = written(tmp_path / "x.yaml"), tmp_path / "d"
    process = start(tmp_path, "tune", file, "--dir", path)
    try:
        wait_for(process, lambda: (path / "trial-1" / "metrics.jsonl").exists())
    finally:
        process.kill()
        process.communicate(timeout=30)
    storage = f"sqlite:///{path / 'study.db'}"
    before = optuna.load_study(study_name="x", storage=storage).trials
    assert [trial.state.name for trial in before] == ["COMPLETE", "RUNNING"]
    assert main(["tune", str(file), "--dir", str(path)]) == 0
    out = capsys.readouterr().out
    study = optuna.load_study(study_name="x", storage=storage)  # Optuna's own API
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert study.trials[1].params == before[1].params, "the trial that was under way went on"
    assert len({trial.params["learner.lr"] for trial in study.trials}) == 3, "nothing is drawn twice"
    usual = flat(read_study(file).base.config)
    assert study.trials[0].params["learner.lr"] == usual["learner.lr"]
    for trial in study.trials:
        run = Run(path / f"trial-{trial.number}")
        assert run.config.learner.lr == trial.params["learner.lr"] and run.metrics[-1]["env_steps"] >= 600
        assert json.loads(trial.params["algorithm.hidden"]) == list(run.config.algorithm.hidden)
        assert trial.value == json.loads((path / f"trial-{trial.number}.json").read_text())["mean_return"]
        assert trial.intermediate_values, "its evaluations"
    assert "3/3 trial 2: return" in out and f"Best: trial {study.best_trial.number}" in out
    best = Run(path / f"trial-{study.best_trial.number}").config
    asked: list[Any] = []
    monkeypatch.setattr(train, "train", lambda config, **_: asked.append(config))
    typed = shlex.split(out.splitlines()[-1])
    assert typed[:2] == ["veldt", "train"] and main(typed[1:]) == 0
    ours, theirs = flat(asked[0]), flat(best)
    assert {name for name in ours if ours[name] != theirs[name]} <= {"seed"}, "the command has all that was set"
    assert sqlite3.connect(path / "study.db").execute("select count(*) from trials").fetchone() == (3,)


def test_a_trial_that_is_worse_than_others_is_stopped_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up evaluations: trial 0 is good, all later ones are bad."""
    file = written(tmp_path / "x.yaml", trials=2, prune={"after": 100, "factor": 2})
    spec = read_study(file)
    (tmp_path / "d").mkdir()
    tuner = tuning.Tuner(spec, tmp_path / "d")
    stopped = []

    class Fake:
        def __init__(self, trial: Any, *_: Any) -> None:
            self.trial, self.ended = trial, False
            trial.path.mkdir()
            score = 1.0 if trial.path.name == "trial-0" else -1.0
            lines = [{"time_s": n, "env_steps": n, "learner_steps": n, "eval_return": score} for n in (100, 200, 400)]
            (trial.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

        def stop(self, why: str) -> None:
            stopped.append((self.trial.path.name, why))
            self.ended = True

        def outcome(self) -> Any:
            return tuning.Failed(self.trial, "stopped", "") if self.ended else {"mean_return": 1.0}

        def kill(self) -> None: ...

    monkeypatch.setattr(tuning, "Child", Fake)
    tuner.run()
    assert [trial.state.name for trial in tuner.study.trials] == ["COMPLETE", "PRUNED"]
    assert stopped == [("trial-1", tuning.PRUNED)] and tuner.best() is not None
