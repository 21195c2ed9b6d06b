"""A run that pauses at a number of env steps (--until), and goes on as if it had not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_run import flags, tiny, whole_state

import veldt
from veldt.__main__ import main
from veldt.errors import UserError
from veldt.experiment.run import Run


def rates(run: Run) -> list[tuple[int, float]]:
    lines = [json.loads(text) for text in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [(line["env_steps"], line["learning_rate"]) for line in lines if "learning_rate" in line]


def test_paused_where_there_is_a_checkpoint_anyway_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Annealed: the learning rate depends on the length of the run, which a pause does not change."""
    whole = tiny(tmp_path / "whole", **{"learner.anneal": True})
    paused = tiny(tmp_path / "paused", until=600, **{"learner.anneal": True})
    assert 600 <= paused.metrics[-1]["env_steps"] < 604 and paused.config == whole.config
    veldt.resume(paused.path, quiet=True, until=1_200)
    assert 1_200 <= paused.metrics[-1]["env_steps"] < 1_204
    veldt.resume(paused.path, quiet=True)
    assert whole_state(paused) == whole_state(whole)


def test_the_annealed_rate_at_a_pause_is_that_of_the_whole_length(tmp_path: Path) -> None:
    paused = tiny(tmp_path / "r", until=750, **{"learner.anneal": True, "learner.lr": 1e-3})
    steps, rate = rates(paused)[-1]
    assert 700 <= steps <= 760
    assert rate == pytest.approx(1e-3 * (1 - steps / 1_500), rel=0.02), "not 0, as at the end of a run of 750 steps"


def test_the_commands_pause_go_on_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "r")
    train = ["train", "dqn", "--env", "CartPole-v1", "--run", path, *flags(steps=800)]
    assert main([*train, "--until", "300"]) == 0
    assert re.search(rf"Paused at 30\d of 800 env steps. Continue with: veldt resume {path}", capsys.readouterr().out)
    assert main([*train, "--until", "300"]) == 0
    assert re.search(r"at 30\d env steps already. Continue with: veldt resume", capsys.readouterr().out)
    assert main(["resume", path, "--until", "400"]) == 0
    assert re.search(r"Paused at 40\d of 800", capsys.readouterr().out)
    assert main(["resume", path, "--until", "10_000"]) == 0  # more than there are
    out = capsys.readouterr().out
    assert "Paused" not in out and "Done." in out and Run(path).metrics[-1]["env_steps"] >= 800


def test_a_pause_before_the_first_update_is_no_failure_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "dqn", "--env", "CartPole-v1", "--run", str(tmp_path / "r"), *flags()]
    assert main([*argv, "--until", "50"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Paused at 5\d of 1,500 env steps", out) and "without an update" not in out


def test_it_pauses_after_a_step_at_least(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="until must be greater than 0, not 0"):
        tiny(tmp_path / "r", until=0)
    assert not (tmp_path / "r").exists()
