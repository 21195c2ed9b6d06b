"""Environments whose episodes begin one by one, and frame-skip."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from veldt.envs import make_env


def play(envs: Any, lane: int, seed: int, others: dict[int, int], steps: int = 12) -> list[Any]:
    """The records of one lane's episode, while others do something else."""
    envs.begin(lane, seed)
    rng, found = np.random.default_rng(seed), []
    for t in range(steps):
        for other, at in others.items():
            if at == t:
                envs.begin(other, 1_000 * other + t)
        actions = np.array([rng.integers(2) if i == lane else t % 2 for i in range(envs.n)])
        record = envs.step(actions)
        found.append({name: x[lane].tolist() for name, x in record.items()})
    return found


def test_an_episode_follows_from_its_seed_alone() -> None:
    one, four = make_env("CartPole-v1", 1, separate=True), make_env("CartPole-v1", 4, separate=True)
    for lane, others in ((2, {0: 3, 3: 5}), (0, {1: 0, 2: 1, 3: 7}), (2, {2: 99})):
        assert play(four, lane, 77, others) == play(one, 0, 77, {})
    one.close(), four.close()


def test_it_rests_until_it_is_begun_and_after_its_end() -> None:
    envs = make_env("CartPole-v1", 2, separate=True)
    envs.reset(0)
    envs.rest(0), envs.rest(1)
    envs.begin(0, 5)
    record = envs.step(np.array([0, 0]))
    assert record["first"].tolist() == [True, False] and record["last"].tolist() == [False, True]
    lengths = 0
    while not record["last"][0]:
        record = envs.step(np.array([1, 1]))
        lengths += 1
    assert 5 < lengths < 20 and record["discount"][0] == 0
    ended = record["obs"][0].copy()
    for _ in range(5):
        record = envs.step(np.array([1, 1]))
        assert record["last"].all() and (record["obs"][0] == ended).all() and record["reward"].sum() == 0
    envs.begin(0, 5)
    record = envs.step(np.array([1, 1]))
    assert record["first"].tolist() == [True, True] and not record["last"][0] and (record["obs"][0] != ended).any()
    envs.close()


class Listening(gym.Env[Any, Any]):
    """Keeps the actions that it gets. Its choices begin at 3."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(4, start=3)
        self.heard: list[Any] = []

    def reset(self, **options: Any) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.heard.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_choices_reach_the_environment_as_python_ints() -> None:
    envs = make_env(Listening, 2, separate=True)
    envs.reset(0)
    envs.step(np.array([0, 3]))
    heard = [env.unwrapped.heard for env in envs.env.envs]  # type: ignore[attr-defined]
    assert heard == [[3], [6]] and {type(x) for [x] in heard} == {np.int64}, "as from every vector of Gymnasium"
    envs.close()


@pytest.mark.parametrize("separate", [False, True])
def test_frame_skip_repeats_actions_and_sums_rewards(separate: bool) -> None:
    bare, skipping = make_env("Pendulum-v1"), make_env("Pendulum-v1", frame_skip=4, separate=separate)
    one, four = bare.reset(3), skipping.reset(3)
    for t in range(50):
        assert np.allclose(one["obs"], four["obs"])
        action = np.array([[np.sin(t)]], np.float32)
        total = 0.0
        for _ in range(4):
            one = bare.step(action)
            total += float(one["reward"][0])
        four = skipping.step(action)
        assert four["reward"][0] == pytest.approx(total, rel=1e-5)
    assert four["last"][0] and one["last"][0], "200 frames are 50 env steps"
    bare.close(), skipping.close()


def test_one_game_of_atari_begins_by_its_seed() -> None:
    pytest.importorskip("ale_py")
    envs = make_env("ALE/Pong-v5", 2, separate=True)
    found = [play(envs, lane, 9, others, 6) for lane, others in ((0, {1: 2}), (1, {0: 1}))]
    assert found[0] == found[1]
    assert [x["first"] for x in found[0]] == [True, *[False] * 5]
    envs.close()
