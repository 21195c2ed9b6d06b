"""The sentence that names the bottleneck: for lines made by hand, and for runs with a built-in bottleneck."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest

import veldt
from veldt.acting.worker import Worker
from veldt.envs.small import Chain
from veldt.experiment import progress, recipes
from veldt.learning.master import Master
from veldt.metrics import ACTOR, LEARNER, MEAN, PACKAGE, WAITS, Declarations, Metric, declared, wait
from veldt.program import Program
from veldt.sentences import Sentences
from veldt.storing.slots import Size
from veldt.watching.bottleneck import Rates, bottleneck

LINE: dict[str, Any] = {
    "env_steps": 10_000,
    "learner_steps": 500,
    "learner_steps_per_s": 100.0,
    "store_items": 9_000,
    "store_min_size": 1_000,
    "samples_per_insert": 4.0,
    "replay_ratio": 2.0,  # of the whole run, which began with filling the store
    "inserted_per_s": 1_000.0,
    "sampled_per_s": 3_950.0,
    "actors": 2,
    "cores": 4,
    "queue": 16,
    "cpu/all": 2.0,
    "busy/learner": 0.9,
    "busy/actor": 0.9,
    "busy/env": 0.6,
    "busy/policy": 0.3,
    "wait/actor": 0.05,
    "wait/learner": 0.05,
    "queue_fill": 0.1,
    "refusing": 0.0,
}


BUNDLES: dict[str, Any] = LINE | {"busy/shard": 0.3, "wait/shards": 0.0, "busy/learner": 0.6, "busy/actor": 0.35}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["bundles are the bottleneck", "60 % of the time in gradients", "60 % in environments", "add --bundles"]),
        ({"wait/shards": 0.4, "busy/shard": 0.97}, ["servers are the bottleneck", "busy 97 %", "wait 40 %", "--shards"]),
        ({"cpu/all": 3.9}, ["All 4 cores are busy", "servers are busy 30 %"]),
        ({"wait/learner": 0.5}, ["bundles wait 50 %"]),
        ({"store_items": 300, "learner_steps_per_s": 0.0}, ["filling", "300 of the 1,000"]),
    ],
)
def test_the_bottleneck_of_bundles_with_parameter_servers(changes: dict[str, Any], words: list[str]) -> None:
    line = {name: x for name, x in (BUNDLES | changes).items() if name != "wait/actor"}
    sentence = bottleneck(line)
    assert all(word in sentence for word in words), sentence
    del line["wait/learner"]
    assert not bottleneck(line) or "store is filling" in sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store_items": 300, "learner_steps_per_s": 0.0}, ["filling", "300 of the 1,000"]),
        (
            {"wait/learner": 0.62},
            ["learner waits 62 %", "60 % of theirs in environments", "add --actors (now 2)", "(now 4)"],
        ),
        (
            {"wait/learner": 0.62, "busy/env": 0.1, "busy/policy": 0.8},
            ["learner waits 62 %", "80 % of theirs in their network"],
        ),
        ({"wait/learner": 0.62, "cpu/all": 3.9}, ["learner waits 62 %", "all 4 cores are busy"]),
        ({"wait/actor": 0.7, "refusing": 0.9, "busy/learner": 0.97}, ["learner is the bottleneck", "97 %", "wait 70 %"]),
        ({"wait/actor": 0.7, "queue_fill": 0.95}, ["queue to the store is the bottleneck", "70 %", "--queue (now 16)"]),
        ({"inserted_per_s": 100.0, "sampled_per_s": 130.0}, ["learner is the bottleneck", "1.3 times instead of 4"]),
        (
            {"wait/actor": 0.4, "wait/learner": 0.45, "refusing": 0.5},
            ["take turns waiting for each other (40 % and 45 %", "actor.block"],
        ),
        ({"cpu/all": 3.9}, ["No process waits", "all 4 cores"]),
        ({}, ["balance"]),
    ],
)
def test_the_sentence_for_a_line(changes: dict[str, Any], words: list[str]) -> None:
    sentence = bottleneck(LINE | changes)
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith(".") and "\n" not in sentence


CENTRAL = LINE | {"wait/learner": 0.6, "wait/inference": 0.02, "wait/actor": 0.7, "inference_batch": 7.6, "envs": 16}
SHARED = "waits 60 % of its time for data; "


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["inference is the bottleneck, busy 98 %", "(8 of 16 environments at once)", "--central.device cuda"]),
        (
            {"inference_device": "cpu"},
            ["inference is the bottleneck", "a smaller network, or a GPU with --central.device cuda."],
        ),
        ({"inference_device": "cuda"}, ["inference is the bottleneck", "larger batches, or a smaller network."]),
        ({"wait/inference": 0.7, "wait/actor": 0.02}, ["60 % of their time in environments: add --actors (now 2)"]),
        ({"wait/inference": 0.5, "wait/actor": 0.4}, ["wait for each other (40 % and 50 %", "--central.groups"]),
        ({"wait/inference": 0.5, "cpu/all": 3.9}, ["all 4 cores are busy: faster environments or more cores"]),
    ],
)
def test_the_sentence_with_central_inference(changes: dict[str, Any], words: list[str]) -> None:
    sentence = bottleneck(CENTRAL | changes)
    assert all(word in sentence for word in (SHARED, *words)), sentence


@pytest.mark.parametrize(
    ("changes", "begins", "never"),
    [
        # Inference is busy 95 %, and the actors wait for it: the queue has nothing to do with it.
        ({"wait/inference": 0.05, "wait/actor": 0.9}, "Inference is the bottleneck, busy 95 %", "queue"),
        ({"wait/inference": 0.05, "wait/actor": 0.9, "queue_fill": 0.9}, "Inference is the bottleneck, busy 95 %", "queue"),
        ({"wait/inference": 0.5, "wait/actor": 0.4}, "Actors and inference wait for each other (40 % and 50 %", "queue"),
        ({"wait/inference": 0.6, "wait/actor": 0.7, "queue_fill": 0.95}, "The queue to the store is the bottl", "actors"),
        ({"wait/inference": 0.05, "wait/actor": 0.05}, "No process waits for long", "queue"),
    ],
)
def test_with_central_inference_actors_never_wait_for_the_queue(changes: dict[str, Any], begins: str, never: str) -> None:
    """The learner has the data that it needs. Actors send no blocks: inference does."""
    sentence = bottleneck(CENTRAL | {"wait/learner": 0.05} | changes)
    assert sentence.startswith(begins) and never not in sentence and sentence.endswith("."), sentence
    if "queue" in sentence:
        assert "inference waits 60 % of its time for room in it" in sentence


def test_with_central_inference_the_learner_may_still_be_the_bottleneck() -> None:
    sentence = bottleneck(CENTRAL | {"wait/learner": 0.0, "wait/actor": 0.7, "wait/inference": 0.6, "refusing": 0.9})
    assert "learner is the bottleneck" in sentence


def test_without_samples_per_insert_it_is_not_advised() -> None:
    assert "samples_per_insert" not in bottleneck(LINE | {"samples_per_insert": 0.0, "wait/learner": 0.5})


def test_workers_that_do_all_the_work_are_told_to_be_more() -> None:
    line = {"workers": 2, "cores": 16, "busy/env": 0.3, "busy/policy": 0.5, "busy/learner": 0.2, "wait/actor": 0.0}
    assert bottleneck(line) == (
        "The workers spend 50 % of their time in their network: add --workers (now 2), one for each of the 16 cores."
    )
    assert "60 % of their time in updates" in bottleneck(line | {"busy/learner": 0.6})
    said = bottleneck(line | {"busy/env": 0.7, "workers": 16})
    assert "70 % of their time in environments, and all 16 cores have one" in said
    assert bottleneck({"workers": 2, "cores": 2}) == "", "no report yet"


def test_one_thread() -> None:
    alone = {name: x for name, x in LINE.items() if not name.startswith(("wait/", "cpu/"))}
    assert "the learner takes 90 %" in bottleneck(alone, one_thread=True)
    assert "environments take 95 %" in bottleneck(alone | {"busy/learner": 0.02, "busy/env": 0.95}, one_thread=True)
    assert bottleneck({"env_steps": 0}, one_thread=True) == ""
    assert bottleneck(alone) == "", "processes have not reported"


class Sleepy(gym.Wrapper[Any, Any, Any, Any]):
    """Takes 4 ms a step without using a core."""

    def step(self, action: Any) -> Any:
        time.sleep(0.004)
        return self.env.step(action)


def sleepy() -> gym.Env[Any, Any]:
    return Sleepy(gym.wrappers.TimeLimit(Chain(), 50))


def quick() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(Chain(), 50)


COMMON: dict[str, Any] = {
    "actors": 2,
    "envs_per_actor": 4,
    "actor.block": 16,
    "algorithm.hidden": (32,),
    "algorithm.n": 3,
    "store.capacity": "20_000",
    "store.min_size": 100,
    "learner.batch": 32,
    "learner.prefetch": 1,
    "eval.every": 0,
    "checkpoint.every": 0,
    "log.every": 0.4,
}
LARGE = {"algorithm.hidden": (1024, 1024)}
# The environment, the settings, and what the sentence must contain.
BUILT_IN: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "slow environments": (sleepy, {"steps": 2_000}, ["learner waits", "in environments", "add --actors"]),
    "slow learner": (
        quick,
        LARGE | {"steps": 4_000, "learner.batch": 256, "store.samples_per_insert": 32.0},
        ["learner is the bottleneck", "the actors wait"],
    ),
    "tiny queue": (
        quick,
        {"steps": 80_000, "queue": 2, "envs_per_actor": 16, "learner.batch": 4096, "store.samples_per_insert": 0.0},
        ["queue to the store is the bottleneck", "raise --queue (now 2)"],
    ),
    "slow network of the actors": (
        quick,
        LARGE | {"steps": 40_000, "stop_after": "20s", "envs_per_actor": 1, "store.samples_per_insert": 0.5},
        ["learner waits", "in their network"],
    ),
}


def check_lines(lines: list[dict[str, Any]]) -> None:
    """In every line, rates are not negative, fractions are at most 1, and no more cores are used than the machine has."""
    for line in lines:
        assert all(x >= 0 for name, x in line.items() if name.endswith("_per_s")), line
        assert all(-1e-6 <= x <= 1.05 for name, x in line.items() if name.startswith(("busy/", "wait/"))), line
        assert line.get("cpu/all", 0) <= line.get("cores", 0) + 1, line


@pytest.mark.parametrize("case", BUILT_IN)
def test_a_built_in_bottleneck_is_named(case: str, tmp_path: Path) -> None:
    env, settings, words = BUILT_IN[case]
    run = veldt.train("apex-dqn", env=env, run=tmp_path / "r", quiet=True, **COMMON | settings)
    # Lines after the first updates, without the last one: everything is stopped then.
    check_lines(run.metrics)
    lines = [line for line in run.metrics if line.get("bottleneck") and line.get("learner_steps", 0) > 0][1:-1]
    told = Counter(all(word in line["bottleneck"] for word in words) for line in lines)
    assert len(lines) >= 3 and told[True] >= 0.7 * len(lines), [line["bottleneck"] for line in lines]


def test_a_line_has_every_link_of_the_chain(tmp_path: Path) -> None:
    run = veldt.train(
        "apex-dqn", env="CartPole-v1", run=tmp_path / "r", quiet=True, **COMMON | {"steps": 20_000, "log.every": 0.1}
    )
    check_lines(run.metrics)
    # Lines are more frequent than reports: a rate must cover all lines since the last report.
    both = [line for line in run.metrics[2:-1] if "inserted_per_s" in line]
    ratios = [line["inserted_per_s"] / line["env_steps_per_s"] for line in both if line["env_steps_per_s"]]
    assert len(ratios) >= 3 and 0.7 < sorted(ratios)[len(ratios) // 2] < 1.3, ratios
    line: dict[str, Any] = {}
    for more in run.metrics[:-1]:
        line |= more
    for name in ("env_steps", "learner_steps", "blocks", "bytes", "inserted", "sampled", "published"):
        assert line[f"{name}_per_s"] > 0, name
    for name in ("busy/env", "busy/policy", "busy/actor", "busy/learner", "busy/sample", "wait/actor", "wait/learner"):
        assert 0 <= line[name] <= 1, (name, line[name])
    assert line["busy/env"] + line["busy/policy"] == pytest.approx(line["busy/actor"])
    assert 0 < line["cpu/learner"] < 2 and 0 < line["cpu/actor"] < 2 and line["cpu/all"] > line["cpu/learner"]
    assert line["lag_updates"] >= 0 and line["lag_s"] >= 0 and 0 <= line["queue_fill"] <= 1 and 0 <= line["refusing"] <= 1
    assert line["restarts"] == 0 and line["actors"] == 2 and line["envs"] == 8 and line["queue"] == 16
    # A block of CartPole has 16 fresh steps of items, so blocks and items come at the same rate but for a factor.
    assert line["inserted_per_s"] / line["blocks_per_s"] == pytest.approx(16, rel=0.2)


def test_a_balanced_run_and_a_resumed_run_have_no_bottleneck(tmp_path: Path) -> None:
    """The store is filled before the first update, and everything pauses while a checkpoint is loaded."""
    settings = COMMON | {"store.samples_per_insert": 0.5, "store.min_size": 2_000, "log.every": 0.3}
    veldt.train("apex-dqn", env=quick, run=tmp_path / "r", quiet=True, **settings | {"steps": 10_000})
    run = veldt.train("apex-dqn", env=quick, run=tmp_path / "r", quiet=True, **settings | {"steps": 35_000})
    check_lines(run.metrics)
    told = [line["bottleneck"] for line in run.metrics if "bottleneck" in line]
    assert told and not any("learner is the bottleneck" in sentence for sentence in told), told


def test_in_one_process_the_largest_share_is_named(tmp_path: Path) -> None:
    settings = {"steps": 4_000, "envs_per_actor": 4, "store.min_size": 100, "eval.every": 0, "log.every": 0.2}
    run = veldt.train("dqn", env=quick, run=tmp_path / "r", quiet=True, **{"runtime": "local", **settings})
    check_lines(run.metrics)
    assert "the learner takes" in [line["bottleneck"] for line in run.metrics if "bottleneck" in line][-1]


def test_a_rate_covers_the_time_since_its_count_was_last_reported() -> None:
    rates = Rates(1.0)
    rates.begin({"env_steps": 0}, 100.0, [])
    assert rates.of({"env_steps": 50, "published": 7}, 101.0, [])["env_steps_per_s"] == 50
    assert "published_per_s" not in rates.of({"env_steps": 150}, 102.0, [])
    found = rates.of({"env_steps": 150, "published": 27}, 103.0, [])
    assert found["env_steps_per_s"] == 0 and found["published_per_s"] == 10
    assert "published_per_s" not in rates.of({"published": 2}, 104.0, []), "its process was restarted"
    assert rates.of({"published": 3}, 104.5, [])["published_per_s"] == 2
    assert rates.of({"published": 4}, 105.0, [])["published_per_s"] == 2, "a line that follows shortly restarts nothing"


def test_a_line_soon_after_another_one_has_no_rate_of_the_short_time_between() -> None:
    """10 items/s, reported in lumps of 20 that are up to 2 s late."""
    rates = Rates(2.0)
    rates.begin({"store_inserted": 0}, 0.0, [])
    assert rates.of({"store_inserted": 0}, 0.05, []).get("inserted_per_s") is None, "too short a time"
    assert rates.of({"store_inserted": 20}, 2.0, [])["inserted_per_s"] == 10
    assert rates.of({"store_inserted": 20}, 3.95, [])["inserted_per_s"] == pytest.approx(20 / 3.95)
    for soon in (0.001, 0.01, 0.1):
        assert rates.of({"store_inserted": 40}, 4.0 + soon, [])["inserted_per_s"] == pytest.approx(10, rel=0.1)
    assert rates.of({"store_inserted": 60}, 6.05, [])["inserted_per_s"] == pytest.approx(10, rel=0.1)


class SteadyNodes:
    """1,000 env steps a second, and a look at the memory of all processes that takes as long as it likes."""

    live = True

    def __init__(self) -> None:
        self.now = 50.0

    def count(self, name: str) -> int:
        return int(1_000 * self.now) if name == "env_steps" else 0

    def metrics(self) -> dict[str, float]:
        return {}

    def resources(self) -> tuple[list[int], list[int]]:
        return [], []


def test_the_time_that_a_line_takes_is_not_missing_in_the_next_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, lines = SteadyNodes(), []

    def slow(*_: Any) -> int:
        nodes.now += 1.5
        return 0

    monkeypatch.setattr("time.monotonic", lambda: nodes.now)
    monkeypatch.setattr(progress, "used_memory", slow)
    config = recipes.make("apex-dqn", "CartPole-v1")
    prepared = SimpleNamespace(config=config, declarations=PACKAGE, store=Size(1, 1, 1), ram=0, gpu=0, program=Program())
    written = progress.Progress(prepared, SimpleNamespace(write=lines.append))  # type: ignore[arg-type]
    written.begin(nodes)  # type: ignore[arg-type]
    for pause in (1.0, 0.01, 0.11, 1.0, 0.01, 0.01, 3.0, 0.1):
        nodes.now += pause
        written.log(nodes)  # type: ignore[arg-type]
    found = [line["env_steps_per_s"] for line in lines if "env_steps_per_s" in line]
    assert len(found) == len(lines) and found == pytest.approx([1_000] * len(found), rel=0.01)


class LostEvaluation(SteadyNodes):
    """An evaluator that was killed after it had counted an evaluation, and before it had reported it."""

    def count(self, name: str) -> int:
        return int(self.now > 60) if name == "evaluations" else super().count(name)


def test_an_evaluation_that_is_never_reported_is_not_waited_for_with_ten_lines_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, lines = LostEvaluation(), []
    monkeypatch.setattr("time.monotonic", lambda: nodes.now)
    config = recipes.make("apex-dqn", "CartPole-v1", **{"log.every": 10.0})
    prepared = SimpleNamespace(config=config, declarations=PACKAGE, store=Size(1, 1, 1), ram=0, gpu=0, program=Program())
    written = progress.Progress(prepared, SimpleNamespace(write=lines.append))  # type: ignore[arg-type]
    written.begin(nodes)  # type: ignore[arg-type]
    for _ in range(10_000):
        nodes.now += 0.01
        written.log_if_due(nodes)  # type: ignore[arg-type]
    assert 10 <= len(lines) < 10 + 2 * progress.LOST_S / progress.EVALUATION_S


def test_rates_follow_from_the_declared_counts() -> None:
    declarations = declared([])
    declarations.add("scout", (Metric("maps", "maps", rate="maps_per_s"),))
    rates = Rates(1.0, declarations)
    rates.begin({"maps": 5, "env_steps": 0, "notes": 0}, 100.0, [])
    found = rates.of({"maps": 25, "env_steps": 8, "notes": 9}, 102.0, [])
    assert found["maps_per_s"] == 10 and found["env_steps_per_s"] == 4 and "notes_per_s" not in found


# Nodes that the package does not know.


def others(*metrics: Metric) -> Declarations:
    declarations = declared([])
    declarations.add("scout", metrics)
    return declarations


def test_a_node_of_another_name_is_the_link_that_it_declares() -> None:
    """Actors and learner under names of their own: the sentence is the same."""
    line = {name.replace("actor", "player").replace("learner", "pupil"): x for name, x in LINE.items() if "/" in name}
    line = {name: x for name, x in LINE.items() if "/" not in name} | line | {"wait/pupil": 0.62}
    declarations = declared([])
    declarations.add("player", ACTOR)
    declarations.add("pupil", LEARNER)
    assert bottleneck(line, declarations=declarations) == bottleneck(LINE | {"wait/learner": 0.62})
    assert bottleneck(line) == ""


def test_a_busy_link_outside_the_chain_is_what_the_learner_waits_for() -> None:
    line = LINE | {"wait/learner": 0.62, "busy/scout": 0.97}
    assert "the scout is the bottleneck, busy 97 % of its time" in bottleneck(line, declarations=others())
    assert "environments" in bottleneck(line | {"busy/scout": 0.5}, declarations=others())
    assert "environments" in bottleneck(line), "it is not declared"
    waiting = LINE | {"wait/actor": 0.7, "refusing": 0.9, "busy/learner": 0.3, "busy/scout": 0.97}
    assert "The actors wait 70 %" in (sentence := bottleneck(waiting, declarations=others())) and "the scout is" in sentence


def test_a_link_outside_the_chain_says_what_it_waits_for() -> None:
    waits = Metric("wait/{kind}", "fraction", MEAN, MEAN, column=WAITS, waits_for="maps")
    assert bottleneck(LINE | {"wait/scout": 0.4}, declarations=others(waits)).startswith(
        "The scout waits 40 % of its time for maps; "
    )
    assert bottleneck(LINE | {"wait/scout": 0.1}, declarations=others(waits)) == bottleneck(LINE)


def test_one_thread_names_a_node_outside_the_chain() -> None:
    assert "the scout takes 95 %" in bottleneck({"busy/scout": 0.95, "busy/env": 0.02}, True, others())


class Labels:
    """Makes what `Fits` learns from."""

    METRICS = (wait(waits_for="windows"),)

    def step(self) -> bool:
        return False


class Fits(Labels):
    METRICS = (wait(waits_for="labels"),)


def test_a_program_that_nobody_knows_has_a_sentence_once_all_of_its_processes_have_reported() -> None:
    program = Program()
    program.add("labels/0", Labels)
    program.add("fits", Fits)
    program.add("scout", Labels, on=program.add("labels/1", Labels))  # in the process of the one before
    found = declared(program.nodes.values())
    line = {"busy/labels": 0.97, "wait/labels": 0.02, "busy/fits": 0.4, "wait/fits": 0.55, "cores": 4}
    sentence = "The labels is the bottleneck, busy 97 % of its time. The fits waits 55 % of its time for labels."
    assert bottleneck(line, declarations=found) == sentence
    assert "; the labels is the busiest, 70 %" in bottleneck(line | {"busy/labels": 0.7}, declarations=found)
    assert "No process waits for long" in bottleneck(line | {"wait/fits": 0.1}, declarations=found)
    assert "all 4 cores are busy" in bottleneck(line | {"wait/fits": 0.1, "cpu/all": 4.0}, declarations=found)
    del line["wait/labels"]
    assert bottleneck(line, declarations=found) == ""


def test_a_program_may_declare_its_sentences() -> None:
    class Speaking(Fits):
        SENTENCES = Sentences(
            ("wait/fits",), {}, busy="Fits are fine.", cores="", waits="wait/fits", idle="Fits wait {wait/fits}."
        )

    program = Program()
    program.add("fits", Speaking)
    found = declared(program.nodes.values())
    assert bottleneck({"wait/fits": 0.5}, declarations=found) == "Fits wait 50 %."
    assert bottleneck({"wait/fits": 0.1}, declarations=found) == "Fits are fine."


def test_evolution_strategies_wait_for_the_last_episodes_or_for_the_update() -> None:
    program = Program()
    program.add("master", Master)
    program.add("worker/0", Worker)
    found = declared(program.nodes.values())
    line = {"busy/master": 0.02, "busy/worker": 0.95, "busy/env": 0.6, "wait/worker": 0.04, "cores": 2, "actors": 1}
    assert bottleneck(line, declarations=found) == (
        "The workers are the bottleneck, most of the time with the environments: add --actors (now 1)."
    )
    assert "2 cores: a smaller network or more cores" in bottleneck(line | {"cpu/all": 2.0, "busy/env": 0.2}, False, found)
    assert "the last episodes of a generation" in bottleneck(line | {"wait/worker": 0.3}, False, found)
    assert "The master's update" in bottleneck(line | {"wait/worker": 0.3, "busy/master": 0.3}, False, found)
    assert "environments take 60 %" in bottleneck(line, True, found)
