"""A session presumes no store, learner or evaluator: what a program has is what runs, is logged and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_run import TINY, stopping

import veldt
from veldt.counters import Counters
from veldt.experiment import prepare, recipes, standstill
from veldt.experiment.run import Run
from veldt.experiment.standstill import Standstill
from veldt.program import ROWS, Program
from veldt.storing.replay import Replay


class Ticker:
    """Counts, and nothing else."""

    def __init__(self, counters: Any) -> None:
        self.counters, self.ticks = counters, 0

    def step(self) -> bool:
        self.ticks += 1
        self.counters.add("env_steps", 1)
        return True

    def metrics(self) -> dict[str, float]:
        return {"ticks": float(self.ticks)}

    def state(self) -> dict[str, Any]:
        return {"ticks": self.ticks}

    def load_state(self, state: dict[str, Any]) -> None:
        self.ticks = int(state["ticks"])


def only_a_ticker(config: Any, env: Any) -> Program:
    program = Program()
    program.add("ticker", Ticker, program.add("counters", Counters, ROWS))
    return program


class Crash(BaseException):
    pass


def crash(running: Any) -> None:
    raise Crash


@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_a_program_without_store_and_learner_runs_logs_and_goes_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setattr(prepare, "make_program", only_a_ticker)
    settings = TINY | {"steps": 1_000, "runtime": runtime, "checkpoint.every": 300}
    if runtime == "inline":
        with stopping(monkeypatch, 700, crash), pytest.raises(Crash):
            veldt.train("dqn", run=tmp_path / "r", quiet=True, **settings)
    run = veldt.train("dqn", run=tmp_path / "r", quiet=True, **settings)
    last = run.metrics[-1]
    assert last["env_steps"] >= 1_000 and last["learner_steps"] == 0
    checkpoint = Run(tmp_path / "r").checkpoints().load()
    assert checkpoint is not None
    assert checkpoint.manifest["blocks"] == {} and checkpoint.weights() == {}
    assert checkpoint.manifest["nodes"]["ticker"]["ticks"] == checkpoint.manifest["env_steps"]
    if runtime == "inline":
        assert last["ticks"] == last["env_steps"] == 1_000
        lines = [json.loads(text) for text in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
        assert [line["env_steps"] for line in lines if "resumed_from" in line] == [600]


def test_a_learner_that_stands_still_is_told_once_and_as_long_as_it_does(caplog: pytest.LogCaptureFixture) -> None:
    stands = Standstill(step_timeout=30.0)
    assert stands.look(0.0, 0, 0) == stands.look(500.0, 10_000, 0) == 0.0, "the store may be filling"
    assert stands.look(501.0, 10_100, 1) == stands.look(560.0, 10_200, 1) == 0.0
    assert stands.look(580.0, 10_100, 1) == 0.0, "nothing comes that it could learn from"
    assert stands.look(590.0, 30_100, 1) == 89.0 and stands.look(600.0, 31_100, 1) == 99.0
    assert caplog.text.count("The learner has made no update for 89 s, in which there were 20,000 env steps") == 1
    assert stands.look(601.0, 31_200, 2) == stands.look(602.0, 31_300, 2) == 0.0
    assert stands.look(700.0, 32_000, 2) == 99.0 and caplog.text.count("has made no update") == 2


def test_a_run_whose_learner_stood_still_says_so_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its store has nothing for it any more."""
    monkeypatch.setattr(standstill, "LONG_S", 0.0)
    sample, calls = Replay.sample, iter(range(10**9))
    monkeypatch.setattr(Replay, "sample", lambda self, n: sample(self, n) if next(calls) < 50 else None)
    settings = TINY | {"step_timeout": 1e-9, "store.samples_per_insert": 0.0, "log.every": 0.001}
    config = recipes.make("dqn", "veldt/Chain-v0", **settings)  # inline, the time of a step has no effect otherwise
    veldt.train(config, run=tmp_path / "r")
    assert "The learner has made no update for" in capsys.readouterr().out
    assert Run(tmp_path / "r").metrics[-1]["learner_stands_s"] > 0
