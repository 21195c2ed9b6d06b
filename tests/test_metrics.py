"""Declared metrics: how they add up over nodes and over time, and how other processes learn of them."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from chaos import play, wait
from hypothesis import given
from hypothesis import strategies as st

from veldt.acting.actor import Actor, Evaluator
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.counters import Counters
from veldt.learning.learner import Learner
from veldt.metrics import (
    BUSY,
    HIDDEN,
    LARGEST,
    LATEST,
    MEAN,
    NODES,
    PACKAGE,
    RATE,
    TOTAL,
    WAITS,
    Metric,
    Reports,
    busy_shares,
    declared,
    load,
    merge,
    save,
)
from veldt.program import ROWS, Program
from veldt.runtime import Inline
from veldt.runtime.grpc.gate import Gate
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.services import StreamService
from veldt.storing.replay import Mixture, Replay
from veldt.watching.links import LinkRow, links


class Scout:
    """A worker that the package does not know."""

    METRICS: ClassVar = (
        Metric("maps", "maps", TOTAL, rate="maps_per_s", column=RATE),
        Metric("depth", "m", LARGEST),
        Metric("wait/{kind}", "fraction", MEAN, MEAN, column=WAITS, waits_for="maps"),
    )

    def __init__(self, maps: float, counters: Any) -> None:
        self.maps, self.counters = maps, counters

    def step(self) -> bool:
        time.sleep(0.001)
        self.counters.add("env_steps", 1)
        return True

    def metrics(self) -> dict[str, float]:
        return {"maps": self.maps, "depth": self.maps, "store_items": 10 * self.maps, "loss": self.maps}


def make_scout(maps: float, counters: Any) -> Scout:
    return Scout(maps, counters)


def scouts() -> Program:
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    program.add("scout/0", Scout, 1.0, counters)
    program.scope("a").scope("b").add("scout/1", make_scout, 3.0, counters)
    return program


# Over nodes.


def test_reports_of_two_stores_add_up_and_losses_are_averaged() -> None:
    one = {"store_items": 100.0, "store_inserted": 500.0, "loss": 1.0, "queue_fill": 0.2, "unheard_of": 4.0}
    two = {"store_items": 300.0, "store_inserted": 700.0, "loss": 3.0, "queue_fill": 0.4, "unheard_of": 6.0}
    found = merge([one, two])
    assert found["store_items"] == 400 and found["store_inserted"] == 1_200
    assert found["loss"] == 2 and found["queue_fill"] == pytest.approx(0.3) and found["unheard_of"] == 5


def test_counters_of_the_run_are_not_added_up() -> None:
    assert merge([{"episodes": 7.0, "env_steps": 90.0}, {"episodes": 9.0, "env_steps": 80.0}, {}]) == {
        "episodes": 9,
        "env_steps": 90,
    }


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(-1000, 1000).map(float)), max_size=8))
def test_each_metric_adds_up_as_declared(parts: list[dict[str, float]]) -> None:
    declarations = declared([])
    declarations.add("x", (Metric("a", over_nodes=TOTAL), Metric("b", over_nodes=LARGEST), Metric("c", over_nodes=MEAN)))
    found = merge(parts, declarations)
    for name, how in (("a", sum), ("b", max), ("c", _mean), ("d", _mean)):
        values = [part[name] for part in parts if name in part]
        assert found.get(name) == (how(values) if values else None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Over time.


def test_a_line_has_means_over_its_time_and_latest_values() -> None:
    reports = Reports()
    reports.add("learner", {"queue_fill": 0.0, "busy/learner": 1.0, "store_items": 1.0, "loss": 8.0}, 3.0)
    reports.add("learner", {"queue_fill": 1.0, "busy/learner": 0.0, "store_items": 2.0}, 1.0)
    found = reports.take()
    assert found == {"queue_fill": 0.25, "busy/learner": 0.75, "store_items": 2.0, "loss": 8.0}
    assert reports.take() == {}, "each report is in one line"


def test_a_total_includes_processes_that_have_not_reported_since_the_last_line() -> None:
    """Otherwise the count of two stores would go up and down with who reported last."""
    reports = Reports()
    reports.add("store/0", {"store_items": 100.0, "loss": 1.0}, 0.25)
    reports.add("store/1", {"store_items": 50.0, "loss": 3.0}, 0.25)
    assert reports.take() == {"store_items": 150.0, "loss": 2.0}
    reports.add("store/1", {"store_items": 60.0, "loss": 5.0}, 0.25)
    assert reports.take() == {"store_items": 160.0, "loss": 5.0}
    reports.add("store/0", {"episodes": 7.0}, 0.25)
    reports.add("store/1", {"episodes": 9.0}, 0.25)
    assert reports.take() == {"episodes": 9.0}
    reports.add("store/0", {"episodes": 8.0}, 0.25)
    assert reports.take() == {"episodes": 9.0}, "and so does the largest"
    reports.add("actor/0", {"train_return": 1.0}, 0.25)
    assert reports.take() == {"train_return": 1.0}, "no store has reported"


def test_the_fraction_of_the_time_of_a_kind_is_that_of_all_its_workers() -> None:
    assert busy_shares([("actor", 1.0), ("learner", 2.0), ("actor", 0.5)], 4.0) == {
        "busy/actor": 0.375,
        "busy/learner": 0.5,
    }
    assert math.isfinite(busy_shares([("actor", 0.0)], 0.0)["busy/actor"])


# Declarations.


def test_the_kind_of_a_node_is_its_name_without_scope_and_index() -> None:
    program = Program()
    inner = program.scope("a").scope("b")
    for where, name in ((program, "learner"), (program, "actor/3"), (inner, "learner"), (inner, "policy/greedy")):
        where.add(name, Scout, 0.0, None)
    kinds = {name: node.role for name, node in program.nodes.items()}
    assert kinds == {"learner": "learner", "actor/3": "actor", "a/b/learner": "learner", "a/b/policy/greedy": "policy"}


def test_the_class_of_a_node_is_found_through_what_builds_it() -> None:
    def untyped(*_: Any):  # type: ignore[no-untyped-def]
        return Scout(0.0, None)

    program = Program()
    builds = {"a": Scout, "b": make_scout, "c": functools.partial(functools.partial(Scout), 1.0), "d": untyped}
    for name, build in builds.items():
        program.add(name, build)
    assert [node.node_class for node in program.nodes.values()] == [Scout, Scout, Scout, object]


def test_a_program_declares_the_metrics_of_its_nodes() -> None:
    found = declared(scouts().nodes.values())
    assert found["maps"].over_nodes == TOTAL and found["maps"].link == "scout"
    assert found["maps_per_s"].unit == "maps/s" and found["depth"].over_nodes == LARGEST
    assert found["wait/scout"].waits_for == "maps" and found["busy/scout"].column == BUSY
    assert found["busy/scout"].over_time == MEAN and found["store_items"] == PACKAGE["store_items"]
    assert "nothing" not in found and found["nothing"].over_nodes == MEAN and found["nothing"].over_time == LATEST
    assert found["busy/nothing"].over_time == MEAN and found["nothing"].column == HIDDEN


def test_a_node_of_another_name_counts_as_the_link_that_its_class_declares() -> None:
    program = Program()
    program.add("player/0", Actor)
    found = declared(program.nodes.values())
    assert found["wait/player"].link == "recorder" and found["wait/player"].waits_for == "the store"
    assert found["busy/player"].text == "{busy/player} of the time with the policy"


def test_every_node_class_of_the_package_declares_what_old_runs_are_shown_with() -> None:
    kinds = {"actor": Actor, "policy": LocalPolicy, "inference": BatchedPolicy, "store": Mixture, "learner": Learner}
    for kind, node in (kinds | {"evaluator": Evaluator, "gate": Gate}).items():
        assert NODES[kind] == node.METRICS, kind
    for node in (Replay, StreamService):
        assert all(PACKAGE[metric.name].over_nodes == metric.over_nodes for metric in node.METRICS)


@pytest.mark.parametrize("wrong", [{"over_nodes": "sum"}, {"over_time": "total"}, {"column": "left"}])
def test_a_declaration_that_means_nothing_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"metric depth: '.*' is not one of"):
        Metric("depth", **wrong)


def test_declarations_of_users_are_written_beside_the_metrics(tmp_path: Path) -> None:
    save(PACKAGE, tmp_path)
    assert not list(tmp_path.iterdir()), "the package's own are known to every reader"
    assert load(tmp_path) == PACKAGE
    found = declared(scouts().nodes.values())
    save(found, tmp_path)
    assert load(tmp_path) == found and [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    save(found, tmp_path / "none")  # a disk that cannot be written


@pytest.mark.parametrize(
    "text",
    ["", "{", "7", "null", "[1, null, []]", '[{"name": 3}]', '[{"name": "a", "unless": 7}]', '[{"name": "a", "newer": ""}]']
    + ['[{"name": "a", "over_nodes": "sum"}]', '[{"unit": "m"}]', '[{"name": "a", "unless": [7]}]', "\xff\xfe"],
)
def test_declarations_that_cannot_be_read_are_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_bytes(text.encode("latin-1"))
    assert load(tmp_path) == PACKAGE


def test_a_declaration_beside_broken_ones_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps([7, {"name": "depth", "unit": "m", "over_nodes": LARGEST}]))
    assert load(tmp_path)["depth"] == Metric("depth", "m", LARGEST)


def test_the_example_of_the_docs_has_the_row_that_they_say() -> None:
    text = (Path(__file__).parents[1] / "docs" / "view.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"ClassVar": ClassVar, "Metric": Metric, "TOTAL": TOTAL, "RATE": RATE}
    exec(code, names)
    program = Program()
    for i in range(2):
        program.add(f"scout/{i}", names["Scout"])
    declarations = declared(program.nodes.values())
    line = merge([{"maps": 30.0, "map_age": 1.0}, {"maps": 10.0, "map_age": 3.0}], declarations) | {"busy/scout": 0.5}
    assert line["maps"] == 40
    policy, scout = links(line | {"maps_per_s": 4.0}, declarations)
    assert policy == LinkRow("policy", more=("maps are 2.0 s old",)) and scout == LinkRow("scout", "4.0 maps/s", busy=0.5)


# In both runtimes.


@pytest.mark.parametrize("runtime", [Inline, Local])
def test_reports_of_two_nodes_add_up_wherever_they_run(runtime: Any) -> None:
    seen: dict[str, float] = {}

    def scenario(nodes: Any) -> Iterator[None]:
        def both() -> bool:
            time.sleep(0.01)
            seen.update(nodes.metrics())
            return seen.get("maps") == 4.0 and seen.get("busy/scout", 0.0) > 0

        yield from wait(both, 30, "both have reported")

    try:
        play(runtime(), scouts(), scenario)
    finally:
        zygote.discard()
    assert seen["store_items"] == 40 and seen["depth"] == 3
    assert not {"busy/a", "wait/a", "cpu/a"} & set(seen), "a scope is not a kind"
    assert ("wait/scout" in seen) == (runtime is Local)
