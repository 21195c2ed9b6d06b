"""Learning to known answers, with fixed seeds; and what must not be learned when a part of the target is taken away."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import veldt
from veldt.envs.small import DeepSea

pytestmark = pytest.mark.learning

GAMMA = 0.9
STATES = 8  # of veldt/Chain-v0
SOON = {"learner.lr": 1e-3, "store.samples_per_insert": 32, "actor.hold": 1, "eval.every": 0}  # for few steps


def chain_optimum(n, gamma):
    """Q* [n - 1, 2] by value iteration in plain words: left, right; the last state ends it and has no values."""
    q = np.zeros((n - 1, 2))
    for _ in range(200):
        v = [*q.max(1), 0.0]
        q = np.array([[gamma * v[max(0, s - 1)], float(s + 1 == n - 1) + gamma * v[s + 1]] for s in range(n - 1)])
    assert np.allclose(q[:, 1], gamma ** (n - 2 - np.arange(n - 1)))
    return q


def train_chain(tmp_path, **overrides):
    """Random behaviour, so that every state and action is seen; returns the run and its Q [n - 1, 2]."""
    settings = {
        "steps": 6_000,
        "actor.epsilon_end": 1.0,
        "algorithm.gamma": GAMMA,
        "store.min_size": 500,
        "learner.target_every": 50,
        "eval.every": 0,
    }
    run = veldt.train("dqn", env="veldt/Chain-v0", run=tmp_path, quiet=True, **(settings | overrides))
    with torch.no_grad():
        return run, run.policy().net(torch.eye(STATES)[: STATES - 1]).numpy()


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm.n": 1, "algorithm.double": False, "algorithm.huber": False},
        {"algorithm.n": 1, "algorithm.double": True, "algorithm.dueling": True, "store.selector": "prioritized"},
    ],
    ids=["plain", "double, dueling, prioritized"],
)
def test_chain_to_its_exact_values(tmp_path, overrides):
    run, q = train_chain(tmp_path, **overrides)
    error = np.abs(q - chain_optimum(STATES, GAMMA))
    assert error.max() < 0.05, error.round(3)
    result = run.evaluate(5)
    assert result.returns == [1.0] * 5 and result.lengths == [STATES - 1] * 5


def test_chain_is_not_solved_without_bootstrapping(tmp_path):
    """With gamma = 0 only the step into the goal has a value; from the start nothing leads there."""
    run, q = train_chain(tmp_path, **{"algorithm.n": 1, "algorithm.gamma": 0.0, "steps": 4_000})
    truth = np.zeros((STATES - 1, 2))
    truth[-1, 1] = 1.0
    assert np.abs(q - truth).max() < 0.05, q.round(3)
    assert np.abs(q - chain_optimum(STATES, GAMMA)).max() > 0.5
    assert run.evaluate(5).mean_length > STATES - 1


def test_catch_from_pixels(tmp_path):
    settings = SOON | {"algorithm.n": 1, "actor.epsilon_steps": 3_000, "store.min_size": 500}
    run = veldt.train("dqn", env="veldt/Catch-v0", run=tmp_path, quiet=True, steps=6_000, **settings)
    assert run.evaluate(100).mean_return >= 0.95


def small_sea():
    return DeepSea(5)


def test_a_small_deep_sea(tmp_path):
    """One episode in 32 of random play finds the treasure; the optimum is 1 - 0.01."""
    settings = SOON | {"actor.epsilon_steps": 4_500, "store.min_size": 500, "algorithm.n": 1}
    run = veldt.train("dqn", env=small_sea, run=tmp_path, quiet=True, steps=6_000, **settings)
    assert run.evaluate(5).returns == pytest.approx([0.99] * 5)


def test_cartpole_in_20_000_steps(tmp_path):
    """Three steps of reward alone, without the bootstrap, come to about 120."""
    settings = SOON | {"store.samples_per_insert": 16}
    run = veldt.train("dqn", env="CartPole-v1", run=tmp_path, quiet=True, steps=20_000, **settings)
    assert run.evaluate(20).mean_return >= 200
