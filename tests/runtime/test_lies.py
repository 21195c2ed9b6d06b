"""Somebody with a valid token, who speaks the protocol and lies: that closes his stream, and nothing else happens."""

from __future__ import annotations

import logging
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from chaos import config_of
from invariants import check_valid
from liars import Caller, House, falsify, honest_block, honest_step, house_of, lie

from veldt.counters import NAMES
from veldt.records.tree import Tree

RECIPES = ["apex-dqn", "r2d2", "impala", "seed-vtrace"]


def small(recipe: str) -> Any:
    changes = {"gate.listen": "127.0.0.1:0", "gate.seats": 3, "store.min_size": 0, "central.wait_ms": 0.0}
    return config_of(recipe=recipe, actors=1, **changes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_true_is_taken(recipe: str) -> None:
    with house_of(small(recipe)) as house:
        one, other = Caller(house, Random(0)), Caller(house, Random(1))
        for _ in range(8):
            assert one.tell_truth() and other.tell_truth(), (one.why, other.why)
            house.serve()
        steps = {"env_steps": one.steps, "episodes": 2}
        assert one.say(one.report(steps, train_return=-3.0, episodes=1e9)), one.why
        assert house.gate.take_reports() == {"seat/0": {"train_return": -3.0}}, "the run counts episodes itself"
        assert house.store.duplicates == 0 and (house.central or house.store.next == 16)


def columns_of(house: House, tree: Tree) -> Tree:
    return house.schema.layout.columns({"packed": tree["rows/packed"].view(house.schema.layout.record)})


BLOCKS: dict[str, Any] = {
    "an action out of range": lambda house, tree: columns_of(house, tree)["action"].fill(7),
    "a negative action": lambda house, tree: columns_of(house, tree)["action"].fill(-1),
    "NaN in a packed column": lambda house, tree: columns_of(house, tree)["q"].fill(math.nan),
    "a huge reward": lambda house, tree: columns_of(house, tree)["reward"].fill(3e38),
    "a discount above 1": lambda house, tree: columns_of(house, tree)["discount"].fill(2.0),
    "a boolean that is 2": lambda house, tree: columns_of(house, tree)["last"].view(np.uint8).fill(2),
    "an observation beyond any space": lambda house, tree: columns_of(house, tree)["obs"].fill(-(1 << 40)),
    "items without a step": lambda house, tree: columns_of(house, tree)["valid"].fill(False),
    "no items": lambda house, tree: tree["items"].fill(False),
    "a negative priority": lambda house, tree: tree["priorities"].fill(-1.0),
    "a priority that is not finite": lambda house, tree: tree["priorities"].fill(math.inf),
    "a priority that hides all others": lambda house, tree: tree["priorities"].fill(1e300),
    "a method that is the learner's": lambda house, tree: tree["@port"].fill(house.ports.index("update")),
    "a method that there is not": lambda house, tree: tree["@port"].fill(77),
}


@pytest.fixture(scope="module")
def apex() -> Any:
    with house_of(small("apex-dqn")) as house:
        yield house


@pytest.mark.parametrize("what", BLOCKS)
def test_a_block_that_cannot_be_is_refused(what: str, apex: House) -> None:
    who = Caller(apex, Random(0))
    before = apex.store.next
    tree = {"@port": who.header(), **honest_block(apex)}
    BLOCKS[what](apex, tree)
    assert not who.say(who.frame_of(tree))
    apex.serve()
    assert apex.store.next == before
    who.connect()
    assert who.tell_truth(), who.why
    apex.serve()
    assert apex.store.next == before + 1
    who.seat.release()


@pytest.fixture(scope="module")
def seed() -> Any:
    with house_of(small("seed-vtrace")) as house:
        yield house


STEPS: dict[str, Any] = {
    "a group of another actor": lambda house, tree: tree["@port"].__setitem__(2, 0),
    "a group that there is not": lambda house, tree: tree["@port"].__setitem__(2, 1 << 40),
    "the number of another call": lambda house, tree: tree["@port"].__setitem__(1, 1 << 40),
    "a method that there is not": lambda house, tree: tree["@port"].__setitem__(0, 9),
    "an observation beyond any space": lambda house, tree: tree["obs"].fill(-(1 << 40)),
    "a huge reward": lambda house, tree: tree["reward"].fill(3e38),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_cannot_be_is_refused(what: str, seed: House) -> None:
    who = Caller(seed, Random(0))
    tree = {"@port": who.header(), **honest_step(seed)}
    STEPS[what](seed, tree)
    assert not who.say(who.frame_of(tree))
    seed.serve()
    who.connect()
    assert who.tell_truth(), who.why
    seed.serve()
    who.seat.release()


@pytest.mark.parametrize("number", [1 << 62, -1, -(1 << 63)])
def test_who_a_message_is_from_follows_from_the_seat(number: int) -> None:
    """A number from the far future would make the store drop all later blocks of this seat as duplicates."""
    with house_of(small("apex-dqn")) as house:
        who = Caller(house, Random(0))
        for _ in range(40):
            assert who.tell_truth()
            house.serve()
        assert not who.say(who.frame_of({"@port": who.header(), **honest_block(house)}, number=number))
        who.connect()
        assert who.say(who.frame_of({"@port": who.header(), **honest_block(house)}, number=who.number_next() - 1))
        assert house.gate.metrics()["gate_duplicates"] == 1 and who.tell_truth()
        house.serve()
        assert house.store.metrics()["store_duplicates"] == 0 and house.store.next == 41


COUNTS = [{name: n} for name in NAMES for n in (-1, 1 << 53, 10_000)] + [{"learner_steps": 1}, {"evaluations": 1}]


@pytest.mark.parametrize("counts", COUNTS)
def test_counts_follow_what_was_sent(counts: dict[str, int], apex: House) -> None:
    who = Caller(apex, Random(0))
    before = apex.board.memory, apex.seats[0].counts.copy()
    assert who.tell_truth() and not who.say(who.report(counts))
    np.testing.assert_array_equal(apex.seats[0].counts, before[1])
    who.seat.release()
    apex.serve()


def test_counts_never_fall_and_outlive_the_stream(apex: House) -> None:
    who = Caller(apex, Random(0))
    assert who.tell_truth() and who.say(who.report({"env_steps": 8}))
    assert not who.say(who.report({"env_steps": 7}))
    who.connect()
    assert who.say(who.report({"env_steps": 9})) and who.seat.row[0] - who.seat.record[4] == 9
    who.seat.release()
    apex.serve()


@pytest.mark.parametrize(
    "metrics",
    [{"eval_return": 1e6}, {"env_steps_per_s": 1.0}, {"\x1b[2Jx": 1.0}, {"lag_updates": -1.0}, {"train_return": 1e200}],
)
def test_metrics_are_those_of_an_actor(metrics: dict[str, float], apex: House, caplog: pytest.LogCaptureFixture) -> None:
    who = Caller(apex, Random(0))
    apex.gate._logged_at.clear()
    apex.gate.take_reports()
    assert not who.say(who.report({}, **metrics)) and not apex.gate.take_reports()
    assert f"refused {who.seat.name}: the metric" in caplog.text and "\x1b" not in caplog.text
    who.seat.release()


def test_a_run_with_more_metrics_than_a_message_holds_goes_on(apex: House) -> None:
    who = Caller(apex, Random(0))
    assert not who.say(who.report({}, **{f"{i:03}{'x' * 120}": 0.0 for i in range(180)}))
    who.seat.release()


def fuzz(recipe: str, messages: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "veldt")
    rng = Random(f"{recipe} {messages}")
    with house_of(small(recipe)) as house:
        honest, liar = Caller(house, rng), Caller(house, rng)
        rows = {seat.name: seat.row for seat in house.seats}
        taken = 0
        for i in range(messages):
            taken += liar.say(lie(rng, liar))
            if liar.stream.end.done():
                house.gate.take_reports()
                liar.connect()
            if i % 8 == 0:
                assert honest.tell_truth(), honest.why
                assert honest.say(honest.report({"env_steps": honest.steps}, train_return=1.0)), honest.why
            house.serve(updates=i % (4 if recipe in ("impala", "seed-vtrace") else 100) == 0)
        assert honest.refused == 0 and rows[honest.seat.name][0] == honest.steps
        assert honest.seat.lanes[0].writer.written == len(range(0, messages, 8))
        assert liar.refused > messages / 3 and taken > messages / 20, "some of it is strange, and not wrong"
        assert rows[liar.seat.name][0] <= 2 * liar.seat.record[3] + 10_000
        assert [*rows["seat/2"]] == [0] * len(rows["seat/2"])
        assert f"refused {liar.seat.name}" in caplog.text and f"refused {honest.seat.name}" not in caplog.text
        assert house.gate.metrics()["gate_refused"] == liar.refused
        assert house.host.metrics()["skipped_updates"] == 0 and house.host.objects["learner"].steps > 0
        check_valid(house.store)
        print(f"\n{recipe}: {messages} lies, {liar.refused} refused for {len(liar.why)} reasons, {taken} without effect")


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_lie_has_an_effect(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(recipe, 10_000, caplog)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_lie_of_many_has_an_effect(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(recipe, 100_000, caplog)


def test_a_lie_is_one_value(apex: House) -> None:
    """The fuzzer reaches every column, the packed ones too."""
    rng, tree = Random(0), honest_block(apex)
    found = {falsify(rng, tree, apex.schema)[1] for _ in range(500)}
    wanted = {f"rows/packed/{name}" for name in apex.schema.layout.record.names} | {"items", "priorities"}
    assert wanted <= found
