"""Random numbers that are held for several steps, and policies that explore with them."""

from __future__ import annotations

import numpy as np
import pytest

from veldt.acting.exploration import HeldRandom
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.algorithms.dqn import DQN
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.learning.params import LatestParams

LONGEST = 8


def draws(n: int, steps: int, longest: int = LONGEST) -> np.ndarray:
    """[steps, n], one number for each environment and step."""
    held, everyone = HeldRandom(np.random.default_rng(0), n, longest), np.arange(n)
    numbers = []
    for _ in range(steps):
        held.begin(everyone)
        numbers.append(held.random((n, 1))[:, 0])
    return np.array(numbers)


def test_k_steps_or_more_have_a_chance_of_one_in_k() -> None:
    numbers = draws(40_000, LONGEST + 1)
    lengths = (numbers[1:] == numbers[:1]).cumprod(0).sum(0) + 1  # of the first number of each environment
    for k in range(1, LONGEST + 1):
        assert (lengths >= k).mean() == pytest.approx(1 / k, abs=0.01)
    assert lengths.max() == LONGEST


def test_a_number_is_uniform_at_every_step() -> None:
    for numbers in draws(40_000, 12)[::4]:
        assert np.histogram(numbers, 10, (0, 1))[0] == pytest.approx(4_000, rel=0.06)


def test_one_step_is_a_new_number_each_time() -> None:
    assert len(np.unique(draws(50, 20, longest=1))) == 50 * 20


def test_environments_that_are_not_asked_keep_their_numbers() -> None:
    held = HeldRandom(np.random.default_rng(0), 6, 1000)
    held.begin(np.arange(6))
    before = held.standard_normal((6, 2))
    held._left[:] = 3
    for _ in range(3):
        held.begin(np.array([4, 1]))
        np.testing.assert_array_equal(held.standard_normal((2, 2)), before[[4, 1]])
    held.begin(np.array([4, 1, 0]))
    after = held.standard_normal((3, 2))
    assert (after[:2] != before[[4, 1]]).all() and (after[2] == before[0]).all()


def test_every_draw_of_a_step_is_held_apart() -> None:
    held, everyone = HeldRandom(np.random.default_rng(0), 500, 1000), np.arange(500)
    seen = []
    for _ in range(2):
        held.begin(everyone)
        seen.append((held.standard_normal((500, 3)), held.random((500, 1))))
    kept = (seen[0][1] == seen[1][1])[:, 0]
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_array_equal(kept, (seen[0][0] == seen[1][0]).all(1))


def test_a_reset_ends_what_is_held() -> None:
    held, everyone = HeldRandom(np.random.default_rng(0), 4, 1000), np.arange(4)
    held.begin(everyone)
    before = held.random((4, 1))
    held._left[:] = 100
    held.reset(slice(1, 3))
    held.begin(everyone)
    np.testing.assert_array_equal((held.random((4, 1)) == before)[:, 0], [True, False, False, True])


N, STEPS = 200, 300


def actions(policy: LocalPolicy | BatchedPolicy) -> np.ndarray:
    """[STEPS, N], all at the same observation, so that a greedy action is always the same one."""
    step = make_env("veldt/Chain-v0", N).reset(0)
    taken = []
    for _ in range(STEPS):
        assert policy.send(0, step)
        out = policy.recv(0)
        assert out is not None
        taken.append(out["action"])
    return np.array(taken)


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("hold", [1, 32])
def test_random_actions_are_repeated_and_no_more_of_them_are_random(central: bool, hold: int) -> None:
    spec, algorithm = make_env("veldt/Chain-v0").spec, DQN(hidden=(8,))
    args = (algorithm, spec, LatestParams(), Counters(), np.full(N, 0.4), 1)
    if central:
        policy: LocalPolicy | BatchedPolicy = BatchedPolicy(*args, hold=hold, groups=1, n=N, batch=N, wait=0.0)
    else:
        policy = LocalPolicy(*args, hold=hold)
    taken = actions(policy)
    greedy = np.bincount(taken.ravel()).argmax()
    others = taken != greedy  # of random actions, one in n_actions is the greedy one
    assert others.mean() == pytest.approx(0.4 * (1 - 1 / spec.n_actions), abs=0.03)
    repeated = (others[1:] & others[:-1]).mean() / others[:-1].mean()
    # Held 32 steps at most, numbers last 4.06 on average, so that 0.75 of all steps are like the one before.
    assert repeated == pytest.approx(others.mean() if hold == 1 else 0.75 + 0.25 * others.mean(), abs=0.05)


def test_a_group_that_begins_anew_holds_nothing() -> None:
    policy = LocalPolicy(DQN(), make_env("veldt/Chain-v0").spec, LatestParams(), Counters(), np.ones(N), 1, hold=10**6)
    step, seen = make_env("veldt/Chain-v0", N).reset(0), []
    for _ in range(2):
        policy.send(0, step)
        seen.append(policy.recv(0)["action"])  # type: ignore[index]
        policy.reset(0)
    assert (seen[0] != seen[1]).mean() > 0.2  # two actions: half of the new ones are like the old ones
