"""QT-Opt as a whole: in one thread, bit for bit; and in processes that are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import child, family, kill, play, wait
from test_demos import recorded
from test_run import Stop, crash, stopping, whole_state

import veldt
from veldt.errors import UserError
from veldt.experiment import recipes, settings
from veldt.experiment.prepare import count_stores, plan_ram, prepare
from veldt.learning.bellman import BellmanUpdater
from veldt.program import Program
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import make_plan
from veldt.storing.labelled import Labelled
from veldt.topologies import make_program
from veldt.watching.links import links

GOALS = "veldt/TwoGoals-v0"
SMALL: dict[str, Any] = {
    "runtime": "inline",
    "steps": 800,
    "actors": 1,
    "envs_per_actor": 4,
    "actor.block": 8,
    "algorithm.hidden": (16, 16),
    "algorithm.samples": 16,
    "labels.batch": 16,
    "labels.capacity": "2_000",
    "labels.min_size": 100,
    "store.capacity": "2_000",
    "store.min_size": 100,
    "store.samples_per_insert": 2.0,
    "labels.samples_per_label": 4.0,
    "learner.batch": 16,
    "targets.average": 0.9,
    "targets.lag": 20,
    "targets.publish_every": 3,
    "eval.every": 400,
    "eval.episodes": 2,
    "checkpoint.every": 200,
}


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


def program_of(env: str = GOALS, **changes: Any) -> Program:
    config = recipes.make("qt-opt", env, seed=3, **SMALL | changes)
    return make_program(config, config.env_spec())


def scripted(env: Any) -> Any:
    """Tries places at random; one in ten is a goal."""
    return lambda obs: env.np_random.uniform(-1, 1, 2).astype(np.float32)


@pytest.mark.parametrize("demos", [True, pytest.param(False, marks=pytest.mark.long)])
def test_resume_is_exact_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demos: bool) -> None:
    how = SMALL | {"updaters": 2, "learner.prefetch": 3}
    if demos:
        found = recorded(tmp_path / "demos", scripted, GOALS, 40)
        how |= {"demos": str(found.path), "offline_updates": 100, "on_policy_steps": 500}
    whole = veldt.train("qt-opt", env=GOALS, run=tmp_path / "whole", quiet=True, **how)
    with stopping(monkeypatch, 250, crash), pytest.raises(Stop):
        veldt.train("qt-opt", env=GOALS, run=tmp_path / "cut", quiet=True, **how)
    assert veldt.Run(tmp_path / "cut").checkpoints().load() is not None
    again = veldt.resume(tmp_path / "cut", quiet=True)
    assert whole_state(whole) == whole_state(again)
    assert again.evaluate(3).returns == whole.evaluate(3).returns


def test_a_run_labels_learns_and_reports(tmp_path: Path) -> None:
    run = veldt.train(
        "qt-opt", env=GOALS, run=tmp_path / "r", quiet=True, **SMALL | {"labels.max_age": 30, "log.every": 0.1}
    )
    line = [x for x in run.metrics if "label_age_max" in x][-1]
    assert max(x.get("label_age_max", 0) for x in run.metrics) <= 30
    assert line["labels"] % 16 == 0 and 0 <= line["store_sampled"] - line["labels"] <= 4 * 16, "a cut drops a block"
    assert line["demo_items"] >= 0 if "demo_items" in line else True
    wanted = run.config.store.samples_per_insert * line["store_inserted"]
    assert 0.5 * wanted < line["labels"] < 1.2 * wanted, "as many labels for a step as the ratio says"
    rows = {row.name: row for row in links(line)}
    assert {"labelling", "labels"} <= rows.keys() and "labels" in rows["labels"].more[0]
    assert run.evaluate(5).returns and veldt.load(run.path).value(np.zeros(2, np.float32)) >= 0


def test_the_demonstrations_are_learned_from_before_there_are_steps_of_its_own(tmp_path: Path) -> None:
    found = recorded(tmp_path / "demos", scripted, GOALS, 60)
    how: dict[str, Any] = {
        "demos": str(found.path),
        "offline_updates": 400,
        "steps": 300,
        "log.every": 0.05,
        "eval.every": 0,
    }
    run = veldt.train("qt-opt", env=GOALS, run=tmp_path / "r", quiet=True, **SMALL | how)
    early = [x for x in run.metrics if 0 < x["learner_steps"] < 200]
    assert early and all(x["env_steps"] <= 64 for x in early), "actors wait"
    assert all(x["demo_part"] == 1 for x in early)
    last = [x for x in run.metrics if "demo_part" in x][-1]
    assert last["env_steps"] >= 200 and last["learner_steps"] >= 300 and last["demo_items"] == 60


def test_each_count_is_a_number_of_processes() -> None:
    plan = make_plan(program_of(runtime="local", updaters=3, actors=2))
    assert list(plan.processes) == [
        *("store", "learner", "bellman/0", "bellman/1", "bellman/2", "actor/0", "actor/1", "evaluator")
    ]
    updaters = [f"bellman/{i}" for i in range(3)]
    assert plan.callers("labelled") == updaters and plan.callers("targets") == updaters
    assert plan.callers("store") == [*updaters, "actor/0", "actor/1"]


def test_the_plan_of_memory_counts_the_labels() -> None:
    def planned(**changes: Any) -> int:
        config = recipes.make("qt-opt", GOALS, **SMALL | changes)
        env = config.env_spec()
        return plan_ram(config, env, make_program(config, env), 1_000, 0)[1]

    assert planned(**{"labels.capacity": "60MB"}) - planned(**{"labels.capacity": "10MB"}) == pytest.approx(50e6, rel=0.01)
    prepared = prepare(recipes.make("qt-opt", GOALS, **SMALL))
    assert count_stores(prepared.program) == 1 and prepared.store.capacity == 2_000 and prepared.activations > 0


@pytest.mark.parametrize("kills", [5, pytest.param(80, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_killed_processes_come_back_and_no_label_is_doubled(kills: int) -> None:
    names, back = ["bellman/0", "learner", "actor/0", "store", "bellman/1"], []
    rng = np.random.default_rng(kills)

    def labels(nodes: Any) -> dict[str, int]:
        return {name: int(x) for name, x in nodes.state()["labelled"]["counts"].items()}

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 50, 60, "the first updates")
        for number in range(kills):
            name = names[number % 5]
            moment = time.monotonic() + 0.3 * rng.random()
            yield from wait(lambda until=moment: time.monotonic() > until, 5, "the moment of the kill")
            before, began = labels(nodes)["inserted"], time.monotonic()
            restarts = child(nodes, name).restarts
            kill(nodes, name)
            yield from wait(lambda n=name, r=restarts: child(nodes, n).restarts > r and child(nodes, n).ready, 30, name)
            back.append(time.monotonic() - began)
            yield from wait(lambda b=before: labels(nodes)["inserted"] > b + 100, 60, f"labels after {name}")
            updates = nodes.count("learner_steps")
            yield from wait(lambda u=updates: nodes.count("learner_steps") > u + 10, 60, f"updates after {name}")
        seen = labels(nodes)
        assert seen["inserted"] >= 100 * kills
        snapshot = nodes.snapshot()
        store = snapshot.stores()["labelled"]
        _, _, blocks = store.blocks(store.oldest)
        rows = blocks["rows/packed"]
        flat = {row.tobytes() for row in rows}
        assert len(flat) == len(rows), "two blocks are the same"

    many = {"updaters": 2, "actors": 2, "runtime": "local", "steps": 10**9, "eval.every": 0, "store.actors_wait": False}
    play(Local(), program_of("Pendulum-v1", **many), scenario, seconds=60 + 12 * kills)
    assert np.median(back) < 2.0
    assert not family()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inference": "central"}, "computes actions in each actor"),
        ({"store.selector": "prioritized"}, "uniformly"),
        ({"labels.max_age": 2}, "at least targets.publish_every"),
        ({"offline_updates": 10}, "needs logged data"),
        ({"updaters": 0}, "updaters must be greater than 0"),
        ({"targets.average": 1.5}, "targets.average must be from 0 to 1"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        settings.check(recipes.make("qt-opt", GOALS, **SMALL | changes))


def test_settings_without_effect_are_known() -> None:
    idle = settings.without_effect(recipes.make("qt-opt", GOALS, **SMALL))
    assert {"demo_ratio", "on_policy", "offline_updates", "learner.target_every", "learner.graph"} <= idle.keys()
    config = recipes.make("qt-opt", GOALS, demos="x", **SMALL)
    assert not {"on_policy", "offline_updates"} & settings.without_effect(config).keys()


def test_node_classes_are_what_the_builders_say() -> None:
    nodes = program_of().nodes
    assert nodes["labelled"].node_class is Labelled and nodes["bellman/0"].node_class is BellmanUpdater
    assert nodes["bellman/0"].is_worker and not nodes["targets"].is_worker
