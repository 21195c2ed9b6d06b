"""Actors and evaluators: what they count, how they cut episodes, and that evaluation is fair."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from veldt.acting.actor import Actor, Evaluator, evaluate
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.envs.small import Chain, Counter
from veldt.records.tree import Array, Tree
from veldt.shared import PrivateRows


class Always:
    """A policy with one answer, that keeps what it was sent. `wait` says how often it is not ready."""

    def __init__(self, action: int = 1, wait: int = 0, refuse: int = 0) -> None:
        self.action, self.wait, self.refuse = action, wait, refuse
        self.version, self.when = 6, (60, 1.5)  # of its weights
        self.sent: list[tuple[int, Tree]] = []
        self.resets: list[int] = []
        self.flushed = 0
        self._asked: dict[int, int] = {}
        self._waiting: dict[int, int] = {}

    def send(self, group: int, step: Tree) -> bool:
        self._asked[group] = self._asked.get(group, 0) + 1
        if self._asked[group] % (self.refuse + 1):
            return False
        assert group not in self._waiting, "a second step before the first was answered"
        self.sent.append((group, {name: x.copy() for name, x in step.items()}))
        self._waiting[group] = self.wait
        return True

    def recv(self, group: int) -> Tree | None:
        if group not in self._waiting:
            return None
        if self._waiting[group]:
            self._waiting[group] -= 1
            return None
        del self._waiting[group]
        return {"action": np.full(len(self.sent[-1][1]["first"]), self.action)}

    def flush(self, group: int) -> bool:
        self.flushed += 1
        return self.flushed % 2 == 0  # not yet, then yes

    def reset(self, group: int) -> None:
        self.resets.append(group)
        self._waiting.pop(group, None)

    def pull(self) -> None:
        pass

    def column(self, name: str, group: int = 0) -> Array:
        return np.array([step[name] for number, step in self.sent if number == group])


CHAINS = partial(make_env, "veldt/Chain-v0")


def actor(policy: Any, env: Any = Chain, n: int = 2, groups: int = 1, seed: int = 0) -> Actor:
    return Actor(partial(make_env, env), n, policy, Counters(), seed, groups=tuple(range(groups)))


def test_env_steps_are_applied_actions_and_never_resets() -> None:
    who = actor(Always(1))  # Chain(8): 7 actions an episode, then one step that resets
    for _ in range(8 * 5):
        assert who.step()
    assert who.counters.get("env_steps") == 2 * 7 * 5
    assert who.counters.get("episodes") == 10
    assert set(who.lengths) == {7} and set(who.returns) == {1.0}
    counts = {"episodes": 10.0, "bad_episodes": 0.0, "bad_observations": 0.0}
    assert who.metrics() == {**counts, "train_return": 1.0, "train_length": 7.0}


def test_returns_are_sums_of_raw_rewards() -> None:
    who = actor(Always(1), Counter, n=1)
    assert who.groups[0].record is not None
    env = int(who.groups[0].record["obs"][0, 0])
    while who.counters.get("episodes") < 30:
        who.step()
    lengths = [Counter.length(env, episode, 12) for episode in range(30)]
    sums = [sum(Counter.reward(env, e, t, 1) for t in range(1, lengths[e] + 1)) for e in range(30)]
    assert list(who.lengths) == lengths and list(who.returns) == sums


def test_the_policy_sees_every_record_once_and_in_order() -> None:
    policy = Always(1)
    who = actor(policy, n=1)
    for _ in range(17):
        who.step()
    states = policy.column("obs").argmax(-1)[:, 0]
    assert states.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert policy.column("first")[:, 0].nonzero()[0].tolist() == [0, 8, 16]
    assert policy.column("last")[:, 0].nonzero()[0].tolist() == [7, 15]


@pytest.mark.parametrize(("wait", "refuse"), [(2, 0), (0, 2), (3, 1)])
def test_a_slow_policy_loses_nothing(wait: int, refuse: int) -> None:
    slow, quick = Always(1, wait, refuse), Always(1)
    ours, theirs = actor(slow, Counter), actor(quick, Counter)
    while ours.counters.get("env_steps") < 60:
        ours.step()
    while theirs.counters.get("env_steps") < 60:
        theirs.step()
    count = min(len(slow.sent), len(quick.sent))
    np.testing.assert_array_equal(slow.column("obs")[:count], quick.column("obs")[:count])


def test_a_waiting_policy_is_no_work() -> None:
    who = actor(Always(wait=3))
    assert [who.step() for _ in range(8)] == [False, False, False, True] * 2


def test_groups_have_environments_and_seeds_of_their_own() -> None:
    policy = Always(1)
    who = actor(policy, Counter, groups=3)
    for _ in range(20):
        who.step()
    ids = [policy.column("obs", group)[:, :, 0] for group in range(3)]
    assert len({int(x) for seen in ids for x in seen.ravel()}) == 6
    assert policy.resets == [0, 1, 2]


def test_seeds_follow_from_the_run_and_the_number() -> None:
    def begins(seed: int, number: int) -> list[float]:
        policy = Always(0)
        who = actor(policy, "CartPole-v1", seed=seed)
        who.resume(number)
        who.step()
        return list(policy.sent[-1][1]["obs"].ravel())

    assert begins(1, 2) == begins(1, 2)
    assert begins(1, 2) != begins(1, 3)
    assert begins(1, 2) != begins(2, 2)


@pytest.mark.parametrize("wait", [0, 2])
def test_a_cut_ends_running_episodes_as_truncated_and_leaves_them_out_of_the_returns(wait: int) -> None:
    policy = Always(1, wait)
    who = actor(policy)
    while who.counters.get("env_steps") < 2 * 10:
        who.step()
    assert who.counters.get("episodes") == 2
    for _ in range(100):
        if who.cut():
            break
    else:
        raise AssertionError("the cut never ended")
    last = policy.sent[-1][1]
    assert last["last"].all() and (last["discount"] == 1).all()
    assert who.counters.get("episodes") == 2 and set(who.lengths) == {7}
    assert policy.flushed == 2
    who.resume(1)
    assert policy.resets[-1] == 0
    before = len(policy.sent)
    while len(policy.sent) == before:
        who.step()
    begun = policy.sent[-1][1]
    assert begun["first"].all() and not begun["last"].any()
    while who.counters.get("episodes") == 2:
        who.step()
    assert set(who.lengths) == {7}, "the length of the cut episode is forgotten"


def test_a_cut_just_after_an_end_keeps_a_terminal_state_terminal() -> None:
    policy = Always(1)
    who = actor(policy)
    for _ in range(7):
        who.step()
    while not who.cut():
        pass
    last = policy.sent[-1][1]
    assert last["last"].all() and (last["discount"] == 0).all()
    assert who.counters.get("episodes") == 2


def test_a_restored_actor_reports_the_same() -> None:
    who = actor(Always(1))
    for _ in range(40):
        who.step()
    other = actor(Always(1))
    other.load_state(who.state())
    other.counters.load_state(who.counters.state())
    assert other.metrics() == who.metrics()


# Evaluation.


@pytest.mark.parametrize(("episodes", "n"), [(1, 1), (5, 2), (7, 3), (4, 4), (20, 16)])
def test_every_environment_plays_its_share(episodes: int, n: int) -> None:
    """Episodes of very different lengths: those that end early are not counted more often."""
    result = evaluate(make_env(Counter, n), Always(1), episodes, seed=3)
    assert len(result.returns) == len(result.lengths) == episodes
    expected = []
    for lane in range(n):
        share = (episodes + lane) // n
        expected += [Counter.length(3 + lane, episode, 12) for episode in range(share)]
    assert result.lengths == expected
    returns = []
    for lane in range(n):
        for episode in range((episodes + lane) // n):
            length = Counter.length(3 + lane, episode, 12)
            returns.append(sum(Counter.reward(3 + lane, episode, t, 1) for t in range(1, length + 1)))
    assert result.returns == returns


def test_episodes_that_never_end_are_not_waited_for() -> None:
    result = evaluate(make_env(Chain, 2), Always(0), 2, seed=0, max_length=50)
    assert result.lengths == [50, 50]


def test_an_evaluator_works_every_so_many_env_steps_and_tells_each_result_once() -> None:
    counters = Counters()
    who = Evaluator(CHAINS, Always(1), counters, every=100, episodes=3, max_length=99, seed=0)  # type: ignore[arg-type]
    assert not who.step() and who.metrics() == {}
    counters.add("env_steps", 100)
    assert who.step() and not who.step()
    version = {"eval_learner_steps": 6, "eval_env_steps": 60, "eval_published_at": 1.5}
    assert who.metrics() == {"eval_return": 1.0, "eval_length": 7.0, "eval_bad_episodes": 0, **version}
    assert who.metrics() == {}
    counters.add("env_steps", 99)
    assert not who.step()
    counters.add("env_steps", 1)
    assert who.step()
    assert counters.get("evaluations") == 2
    other = Evaluator(CHAINS, Always(1), counters, every=100, episodes=3, max_length=99, seed=0)  # type: ignore[arg-type]
    other.load_state(who.state())
    assert not other.step(), "a restored one does not evaluate again"
    reborn = Evaluator(CHAINS, Always(1), counters, every=100, episodes=3, max_length=99, seed=0)  # type: ignore[arg-type]
    assert not reborn.step(), "nor does one that was killed and has no state"
    counters.add("env_steps", 100)
    assert reborn.step() and counters.get("evaluations") == 3
    who.close(), other.close(), reborn.close()


def test_an_episode_that_was_not_waited_for_is_not_counted_again() -> None:
    """Episodes of 15 steps, cut off at 10: what is left of each is no episode of its own."""
    result = evaluate(make_env(lambda: TimeLimit(Chain(), 15), 2), Always(0), 6, seed=0, max_length=10)
    assert result is not None and result.lengths == [10] * 6


def test_an_evaluation_ends_when_the_run_does() -> None:
    rows = PrivateRows()
    counters = Counters(rows)
    chains = partial(make_env, Chain)  # without a time limit
    who = Evaluator(chains, Always(0), counters, every=100, episodes=1, max_length=10**9, seed=0)  # type: ignore[arg-type]
    assert not who.step()
    counters.add("env_steps", 100)
    rows.stopping = True
    assert who.step() and who.metrics() == {} and counters.get("evaluations") == 0
    who.close()
