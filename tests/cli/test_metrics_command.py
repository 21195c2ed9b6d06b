"""`veldt metrics`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from veldt.cli import metrics
from veldt.errors import UserError

LINES = [
    {"time_s": 1.0, "env_steps": 100, "learner_steps": 5, "loss": 0.25},
    {"time_s": 2.0, "env_steps": 200, "learner_steps": 9, "eval_return": 7.5, "bottleneck": "It waits, mostly."},
    {"time_s": 3.0, "env_steps": 100, "learner_steps": 5, "resumed_from": 5},
    {"time_s": 4.0, "env_steps": 200, "learner_steps": 9, "loss": 0.123456789, "eval_return": None},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_csv_has_every_number_and_no_repeated_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics.run([str(path), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0])[:3] == ["time_s", "env_steps", "learner_steps"]
    assert [row["env_steps"] for row in rows] == ["100", "100", "200"] and [row["loss"] for row in rows] == [
        "0.25",
        "",
        "0.123456789",
    ]


def test_columns_are_chosen_by_name(path: Path) -> None:
    out = path / "x y.csv"
    assert metrics.run([str(path), "--columns", "env_steps", "loss", "-o", str(out)]) == 0
    assert out.read_text() == "env_steps,loss\n100,0.25\n200,0.123456789\n"
    with pytest.raises(UserError, match=r"no metric 'los'\. Did you mean loss"):
        metrics.run([str(path), "--columns", "los"])
    with pytest.raises(UserError, match="cannot be written"):
        metrics.run([str(path), "-o", str(path)])


def test_without_csv_the_newest_values_are_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics.run([str(path)]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["loss"] == "0.123457" and told["env_steps"] == "200" and "eval_return" not in told
