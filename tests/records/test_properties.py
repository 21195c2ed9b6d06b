"""Properties of the whole chain: environments, actor, policy, recorder, store, windows, returns."""

from __future__ import annotations

from collections import Counter as Multiset

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_valid
from oracles import Faulty, Rig, examples, tensors
from oracles import trainable as trainable_by_definition
from test_block import windows

from veldt.envs import make_env
from veldt.envs.small import Counter
from veldt.learning.returns import n_step
from veldt.records.block import Window, trainable
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized, Uniform

MOVES = st.lists(
    st.tuples(st.sampled_from(["step"] * 4 + ["sample"] * 3 + ["trim", "cut", "reset", "flush"]), st.integers(1, 25)),
    min_size=2,
    max_size=12,
)


@settings(max_examples=examples(400), deadline=None)
@given(
    window=windows(),
    strides=st.integers(1, 5),
    n=st.integers(1, 4),
    groups=st.integers(1, 2),
    env=st.sampled_from(["veldt/Counter-v0", "veldt/Counter-v0", Faulty]),
    selector=st.sampled_from([Uniform, Prioritized]),
    slots=st.integers(1, 8),
    capacity=st.integers(1, 40),
    slack=st.sampled_from([0.0, 0.5]),
    short=st.booleans(),
    moves=MOVES,
)
def test_every_sampled_window_is_a_run_of_the_stream(
    window, strides, n, groups, env, selector, slots, capacity, slack, short, moves
):
    """Each row alone is right, rows follow one another, and the bootstrap row is m steps on in the same episode."""

    def make_store(schema):
        return Replay(schema, selector(slots * schema.starts), MinSize(), capacity, slots, slack)

    rig = Rig(make_store, window, strides * window.stride, env, n, groups, max_age=-1.0 if short else float("inf"))
    gapless = "flush" not in dict(moves)  # a flush without a reset forgets the history that the policy remembers
    for move, times in [*moves, ("sample", 8)]:
        if move == "step":
            for _ in range(times):
                rig.actor.step()
        elif move == "sample":
            sample = rig.store.sample(times)
            for i in range(len(sample.keys) if sample else 0):
                rows = {name: x[i] for name, x in sample.rows.items()}
                rig.check(rows, {name: x[i] for name, x in sample.starts.items()}, gapless)
                check_bootstrap(rows, window)
        elif move == "trim":
            rig.store.trim()
        elif move == "flush":
            assert all([rig.recorder.flush(group) for group in range(groups)])
        else:
            assert move == "reset" or rig.actor.cut()
            rig.reset()
        check_valid(rig.store)
    rig.actor.close()


def check_bootstrap(rows, window):
    """From each step [T] that can be learned from, row t + m is m steps later in its episode."""
    valid, last, obs = rows["valid"], rows["last"], rows["obs"]
    steps = range(window.before, window.before + window.length)
    learned = [t for t in steps if trainable_by_definition(valid, last, t, window.lookahead)]
    assert learned, "an item has something to learn"
    mask = trainable(valid[None], last[None], window.lookahead)[0, window.before :]
    assert [t for t in steps if mask[t - window.before]] == learned
    if window.lookahead:
        m = n_step(rows["reward"], rows["discount"], last, window.lookahead, 0.9).m
        for t in learned:
            assert valid[t + m[t]] and (obs[t + m[t]][:2] == obs[t][:2]).all() and obs[t + m[t]][2] == obs[t][2] + m[t]
            assert m[t] == window.lookahead or last[t + m[t]]


class Ring(gym.Env):
    """Three states in a ring, and a reward of 1 for every step, for ever."""

    observation_space = spaces.Box(0, 2, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(3))
        return np.array([self.at]), {}

    def step(self, action):
        self.at = (self.at + 1) % 3
        return np.array([self.at]), 1.0, False, False, {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("limit", [1, 2, 5, 50])
def test_a_time_limit_changes_no_value(limit, n):
    """Value iteration over sampled windows: r / (1 - gamma) in every state, unless truncation were taken for an end."""

    def limited():
        return gym.wrappers.TimeLimit(Ring(), limit)

    rig = Rig(lambda schema: Replay(schema, Uniform(64 * 8), MinSize(), 512, 64), Window(lookahead=n), 8, limited, n=3)
    for _ in range(200):
        rig.actor.step()
    rig.actor.close()
    rows = rig.store.sample(400).rows
    state = rows["obs"][:, :, 0]  # [400, 1 + n]
    assert set(state[:, 0].tolist()) == {0, 1, 2}

    def values(discount):
        reward, weight, m = (x[:, 0] for x in n_step(*tensors(rows["reward"], discount, rows["last"]), n, 0.9))
        reached = state[np.arange(len(m)), m.numpy()]
        value = np.zeros(3)
        for _ in range(400):
            target = reward.numpy() + weight.numpy() * value[reached]
            value = np.array([target[state[:, 0] == s].mean() for s in range(3)])
        return value

    np.testing.assert_allclose(values(rows["discount"]), 1 / (1 - 0.9), rtol=1e-5)
    assert (values(rows["discount"] * ~rows["last"]) < 9.99).all()


def short_counter():
    return gym.wrappers.TimeLimit(Counter(), 4)


@settings(max_examples=examples(40), deadline=None)
@given(n=st.integers(1, 4), seed=st.integers(0, 10**6), steps=st.integers(1, 60), limited=st.booleans())
def test_a_vector_gives_the_transitions_of_its_environments_alone(n, seed, steps, limited):
    """(obs, action, reward, discount, next obs), as a multiset; where an episode ended, the action is ignored."""
    envs = make_env(short_counter if limited else "veldt/Counter-v0", n)
    together, applied = Multiset(), [0] * n
    record = envs.reset(seed)
    for _ in range(steps):
        action = np.array([Counter.mix(lane, applied[lane]) % 3 for lane in range(n)])
        after = envs.step(action)
        for lane in range(n):
            assert after["first"][lane] == record["last"][lane] and after["valid"][lane]
            if not record["last"][lane]:
                row = (record["obs"], action, after["reward"], after["discount"], after["obs"])
                together[tuple(str(x[lane]) for x in row)] += 1
                applied[lane] += 1
            else:
                assert after["reward"][lane] == 0 and after["discount"][lane] == 1 and not after["last"][lane]
        record = after
    envs.close()

    alone = Multiset()
    for lane in range(n):
        env = short_counter() if limited else gym.make("veldt/Counter-v0")
        obs, _ = env.reset(seed=seed + lane)
        for k in range(applied[lane]):
            action = np.int64(Counter.mix(lane, k) % 3)
            after, reward, terminated, truncated, _ = env.step(action)
            row = (obs, action, np.float32(reward), np.float32(not terminated), after)
            alone[tuple(str(x) for x in row)] += 1
            obs = env.reset()[0] if terminated or truncated else after
        env.close()
    assert together == alone
