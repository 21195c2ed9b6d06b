"""Recorder: which steps go into which block, that none is lost or doubled, and that blocks never change afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Faulty, Rig, examples
from test_block import windows

from veldt.acting.recorder import Tape
from veldt.records.block import Window
from veldt.storing.limiters import MinSize, SamplesPerInsert
from veldt.storing.replay import Replay
from veldt.storing.selectors import Uniform

SLOTS = 4


def roomy(schema):
    return Replay(schema, Uniform(SLOTS * schema.starts), MinSize(), 10**6, SLOTS)


def drive(rig, moves):
    for move, n in moves:
        if move == "step":
            for _ in range(n):
                rig.actor.step()
        elif move == "flush":
            for group in range(len(rig.actor.groups)):
                assert rig.recorder.flush(group)
        elif move == "cut":
            assert rig.actor.cut()
            rig.reset()
        elif move == "reset":
            rig.reset()


MOVES = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "cut", "reset", "flush"]), st.integers(1, 30)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(300), deadline=None)
@given(
    window=windows(),
    strides=st.integers(1, 4),
    n=st.integers(1, 3),
    groups=st.integers(1, 2),
    env=st.sampled_from(["veldt/Counter-v0", Faulty]),
    short=st.booleans(),
    moves=MOVES,
)
def test_every_window_start_is_an_item_once(window, strides, n, groups, env, short, moves):
    """Over any flushes, cuts and resets; a reset loses what was not in a block yet, and nothing else."""
    rig = Rig(roomy, window, strides * window.stride, env, n, groups, max_age=-1.0 if short else float("inf"))
    drive(rig, [*moves, ("cut", 0)])
    assert sorted(rig.items()) == sorted(rig.expected_items(short))
    rig.actor.close()


@settings(max_examples=examples(60), deadline=None)
@given(history=st.integers(1, 4), n=st.integers(1, 5), fresh=st.integers(1, 6), steps=st.integers(0, 40))
def test_cutting_an_episode_loses_no_step(history, n, fresh, steps):
    """Every action that was applied can be learned from, once."""
    rig = Rig(roomy, Window(history, lookahead=n), fresh)
    drive(rig, [("step", steps), ("cut", 0)])
    assert len(set(rig.items())) == len(list(rig.items())) == rig.actor.counters.get("env_steps")
    rig.actor.close()


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.lists(st.integers(0, 9), min_size=5, max_size=60))
def test_back_pressure_loses_nothing(n, fresh, rhythm):
    """While the store says "not now" the actor waits; all that it did arrives, in order."""

    def tight(schema):
        limiter = SamplesPerInsert.for_run(1.0, 1, burst=schema.starts, batch=4)
        return Replay(schema, Uniform(SLOTS * schema.starts), limiter, 10**6, SLOTS)

    rig = Rig(tight, Window(lookahead=2), fresh, n=n)
    for samples in rhythm:
        rig.actor.step()
        for _ in range(samples // 4):
            rig.store.sample(4)
    for _ in range(1000):
        if rig.actor.cut():
            break
        rig.store.sample(4)
    else:
        pytest.fail("the cut never ended")
    assert sorted(rig.items()) == sorted(rig.expected_items(False))
    for lane in range(n):
        places = [place for place in rig.items() if place[2] == lane]
        assert places == sorted(places)
    rig.actor.close()


def test_an_actor_waits_while_the_store_is_full():
    rig = Rig(lambda schema: Replay(schema, Uniform(64), SamplesPerInsert(1.0, 1, 8.0), 64, 16), Window(lookahead=1), 4)
    for _ in range(200):
        rig.actor.step()
    steps = rig.actor.counters.get("env_steps")
    assert not rig.actor.step() and rig.actor.counters.get("env_steps") == steps < 60
    while rig.store.sample(4) is not None:
        pass
    assert rig.actor.step()
    rig.actor.close()


def test_blocks_are_read_only_and_apart_from_the_tape():
    rig = Rig(roomy, Window(history=3, lookahead=2), 4, n=2)
    drive(rig, [("step", 8)])
    blocks = list(rig.tap.blocks)
    before = [[x.tobytes() for x in (*b.rows.values(), *b.starts.values(), b.items)] for b in blocks]
    tape = rig.recorder._tapes[0]
    for array in (*tape.rows.values(), *tape.states.values()):
        array[...] = np.ones((), array.dtype)
    drive(rig, [("step", 30)])
    assert before == [[x.tobytes() for x in (*b.rows.values(), *b.starts.values(), b.items)] for b in blocks]
    for block in rig.tap.blocks:
        for array in (*block.rows.values(), *block.starts.values(), *block.columns().values(), block.items):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = np.ones((), array.dtype)
    rig.actor.close()


def test_a_young_block_waits_and_an_old_one_is_sent_short():
    window = Window(lookahead=1)
    young, old = (Rig(roomy, window, 50, max_age=age) for age in (1e9, -1.0))
    for rig in (young, old):
        drive(rig, [("step", 20)])
        rig.actor.close()
    assert not young.tap.blocks
    assert old.tap.blocks and all(block.items.sum() == 1 for block in old.tap.blocks)


def test_a_block_without_items_is_not_sent():
    rig = Rig(roomy, Window(lookahead=1), 1, n=3)
    drive(rig, [("step", 60)])
    assert all(block.items.any() for block in rig.tap.blocks)
    rig.actor.close()


@settings(max_examples=examples(60), deadline=None)
@given(windows(), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=12))
def test_what_a_tape_drops_is_gone_and_what_it_keeps_is_in_place(window, strides, moves):
    """The tape against a list of ticks: after a drop its rows are context and then what is not in a block yet."""
    rig = Rig(roomy, window, strides * window.stride)
    tape, model = Tape(rig.schema, 1), [0] * window.before
    step = {name: np.zeros((1, *c.shape), c.dtype) for name, c in rig.schema.layout.spec.items()}
    step |= {"valid": np.ones(1, np.bool_), "steps": np.zeros((1, 1), np.float32)}
    for tick, drop in enumerate(moves, 1):
        if tape.end == rig.schema.rows:
            break
        step["reward"] = np.full(1, tick, np.float32)
        tape.append(step, step)
        model.append(tick)
        if 0 < drop * window.stride <= len(model) - window.before:
            tape.drop(drop * window.stride)
            model = model[drop * window.stride :]
        columns = rig.schema.layout.columns(tape.rows)
        assert columns["reward"][0, : tape.end].tolist() == model
        assert columns["valid"][0].tolist() == [x > 0 for x in model] + [False] * (rig.schema.rows - len(model))
    rig.actor.close()
