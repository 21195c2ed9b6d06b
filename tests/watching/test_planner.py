"""The planner: a forecast follows from what each process takes, and names the one that is full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from veldt.__main__ import main
from veldt.cli.plan import table
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.settings import as_plain
from veldt.watching.planner import Costs, calibrate, forecast

# CPU seconds of an env step: what a made-up machine takes.
ACTOR, LEARNER, GATE = 100e-6, 20e-6, 5e-6


def lines_of(actors: int, joined: int = 0, seconds: int = 30) -> list[dict[str, Any]]:
    """What a run on that machine writes, with a core for each process, and a start that is slower."""
    out: list[dict[str, Any]] = []
    for t in range(1, seconds + 1):
        rate = (actors + joined) / ACTOR * (0.1 if t < 4 else 1.0)
        line = {"time_s": float(t), "env_steps_per_s": rate, "learner_steps_per_s": rate / 4, "replay_ratio": 16.0}
        line |= {"cpu/actor": rate * ACTOR / (actors + joined), "cpu/learner": rate * LEARNER, "actors": actors}
        line |= {"bytes_per_s": 60 * rate, "published_per_s": rate / 400}
        if joined:
            line |= {"gate_actors": joined, "cpu/gate": rate * GATE * joined / (actors + joined)}
        out.append(line)
    return out


@pytest.mark.parametrize(("actors", "joined"), [(1, 0), (3, 0), (1, 2), (2, 6)])
def test_costs_do_not_depend_on_how_many_actors_were_measured(actors: int, joined: int) -> None:
    costs = calibrate(lines_of(actors, joined), 4_000, 64.0)
    assert costs.cpu["actor"] == pytest.approx(ACTOR) and costs.cpu["learner"] == pytest.approx(LEARNER)
    assert costs.cpu.get("gate", GATE) == pytest.approx(GATE)
    assert (costs.updates, costs.sent, costs.published) == pytest.approx((0.25, 60.0, 1 / 400))


def test_the_first_process_that_is_full_is_the_limit() -> None:
    costs = calibrate(lines_of(1, 1), 4_000, 64.0)
    found = {n: forecast(costs, n) for n in (1, 4, 5, 6, 100)}
    assert {n: found[n].limit for n in (1, 4, 6, 100)} == {1: "actors", 4: "actors", 6: "learner", 100: "learner"}
    assert [found[n].env_steps for n in (1, 4, 6, 100)] == pytest.approx([10_000, 40_000, 50_000, 50_000])
    assert found[100].updates == pytest.approx(12_500) and found[100].sent == pytest.approx(3e6)
    on_two = forecast(costs, 4, cores=2.0)
    assert (on_two.limit, on_two.cores) == ("cores", pytest.approx(2.0))
    assert on_two.env_steps == pytest.approx(2.0 / (ACTOR + LEARNER + GATE))


def test_a_site_gets_weights_once() -> None:
    """At most as often as they are published; each actor looks once in a while."""
    costs = Costs({"actor": 1e-3, "learner": 1e-6}, 0.1, 1.0, 0.0, 1_000_000, 1.0, 100.0)
    alone, site = forecast(costs, 8), forecast(costs, 8, per_host=8)
    assert alone.weights == pytest.approx(8 * 10 * 1e6), "each looks ten times a second, and finds new ones"
    assert site.weights == pytest.approx(80 * 1e6), "one actor or another looks, and no two at the same moment"
    rare = Costs({"actor": 1e-3, "learner": 1e-6}, 0.1, 1.0, 0.0, 1_000_000, 1 / 800, 100.0)
    assert forecast(rare, 8, per_host=8).weights == pytest.approx(10e6), "ten versions a second, once"
    assert forecast(rare, 8).weights == pytest.approx(80e6)
    assert forecast(rare, 8).age == pytest.approx(0.1 + 0.1)
    assert forecast(costs, 2, per_host=32).weights == pytest.approx(20e6), "a host has no more actors than there are"


def test_a_run_that_says_too_little_is_refused() -> None:
    other = [{name: x for name, x in line.items() if name != "cpu/actor"} for line in lines_of(1)]
    idle = [{name: x for name, x in line.items() if name != "learner_steps_per_s"} for line in lines_of(1)]
    for lines in ([], lines_of(1, seconds=3), [{"time_s": 50.0, "env_steps": 3}], other, idle):
        with pytest.raises(UserError, match="too short to plan from"):
            calibrate(lines, 0, 0.0)


def test_the_command_prints_a_row_for_each_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = as_plain(recipes.make("apex-dqn", "CartPole-v1"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = "".join(json.dumps(line | {"env_steps": 1, "learner_steps": 1}) + "\n" for line in lines_of(1))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["plan", str(tmp_path), "--actors", "1", "4", "1000", "--price", "0.04"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "actor 100 us, learner 20 us" in rows[0] and rows[2].split()[:2] == ["1", "10,000"]
    assert rows[4].split()[:2] == ["1,000", "50,000"] and rows[4].endswith("learner") and "was not measured" in rows[5]
    assert len(table([], 0.0)) == 1
    assert main(["plan", str(tmp_path), "--actors", "0"]) == 2
    for recipe in ("gorila", "a3c", "es", "dqn"):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(recipes.make(recipe, "CartPole-v1"))))
        assert main(["plan", str(tmp_path)]) == 2
        assert f"{recipe} has other processes than the planner knows" in capsys.readouterr().err
