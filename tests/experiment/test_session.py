"""A session presumes no store, learner or evaluator: what a program has is what runs, is logged and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_run import TINY, stopping

import veldt
from veldt.counters import Counters
from veldt.experiment import prepare
from veldt.experiment.run import Run
from veldt.program import ROWS, Program


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
