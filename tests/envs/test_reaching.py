"""The environments with continuous actions: their rules, their optima, and how often chance and the script succeed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import veldt.envs  # noqa: F401  (registers them)
from veldt.envs.reaching import LIFT, SPEED, TABLE, Grasp, TwoGoals, anywhere, grasp_script


def total(env: Any, act: Any, seed: int) -> float:
    obs, _ = env.reset(seed=seed)
    reward, done = 0.0, False
    while not done:
        obs, r, terminated, truncated, _ = env.step(np.asarray(act(obs), np.float32))
        reward, done = reward + r, terminated or truncated
        assert env.observation_space.contains(obs)
    return float(reward)


def test_both_goals_are_right_and_what_lies_between_them_is_not() -> None:
    env = gym.make("veldt/TwoGoals-v0")
    for sign in (1, -1):

        def goal(obs: Any, sign: int = sign) -> Any:
            angle = np.arctan2(obs[1], obs[0]) / 2
            return sign * 0.7 * np.array([np.cos(angle), np.sin(angle)])

        assert all(total(env, goal, seed) == 1 for seed in range(100)), "the observation is enough"
        assert not any(total(env, lambda obs, g=goal: 0.5 * g(obs), seed) for seed in range(100))
    assert not any(total(env, lambda obs: np.zeros(2), seed) for seed in range(100))
    rng = np.random.default_rng(0)
    found = np.mean([total(env, lambda obs: rng.uniform(-1, 1, 2), seed) for seed in range(3_000)])
    assert found == pytest.approx(2 * np.pi * 0.25**2 / 4, abs=0.02)


def test_a_decoy_earns_half_and_is_where_most_of_the_nearer_actions_lead() -> None:
    env = gym.make("veldt/TwoGoals-v0", decoy=True)
    assert all(total(env, lambda obs: 0.7 * obs, seed) == 1 for seed in range(50))
    assert all(total(env, lambda obs: -0.4 * obs, seed) == 0.5 for seed in range(50))
    assert all(total(env, lambda obs: 0.0 * obs, seed) == 0.5 for seed in range(50)), "the middle is in the decoy"
    assert not any(total(env, lambda obs: 0.3 * obs, seed) for seed in range(50)), "and there is nothing between"
    found = [total(env, anywhere(env), seed) for seed in range(2_000)]
    assert np.mean(np.array(found) == 1) == pytest.approx(np.pi * 0.25**2 / 4, abs=0.015)


def test_opposite_goals_look_the_same() -> None:
    env = TwoGoals()
    env.reset(seed=0)
    one = env._observe()
    env.angle += np.pi
    np.testing.assert_allclose(env._observe(), one, atol=1e-6)


def careful(game: Grasp) -> Any:
    """Goes above the block, down, closes and lifts."""

    def act(obs: Any) -> Any:
        right = np.clip((game.block_x - game.x) / SPEED, -1, 1)
        over = abs(game.block_x - game.x) < 1
        closing = game.holds or (over and game.z < 2)
        up = 1.0 if game.holds else -1.0 if over or game.z > 12 else 0.0
        return [right, up, 1.0 if closing else -1.0]

    return act


def test_a_careful_policy_always_grasps_chance_never_and_the_script_one_time_in_five() -> None:
    env = gym.make("veldt/Grasp-v0")
    game: Any = env.unwrapped
    assert all(total(env, careful(game), seed) == 1 for seed in range(150))
    rng = np.random.default_rng(0)
    assert sum(total(env, lambda obs: rng.uniform(-1, 1, 3), seed) for seed in range(150)) <= 3
    found = np.mean([total(env, grasp_script(env), seed) for seed in range(400)])
    assert 0.15 < found < 0.27


def grasping(x: float = 20.0, block: float = 20.0, z: float = 20.0) -> Grasp:
    env = Grasp()
    env.reset(seed=1)
    env.x, env.block_x, env.z, env.width, env.height = x, block, z, 6.0, 8.0
    return env


def test_open_fingers_stop_on_the_block_go_down_beside_it_and_push_it() -> None:
    env = grasping(x=20, block=26.5)
    for _ in range(6):
        env.step(np.array([0, -1, -1], np.float32))
    assert env.z == env.height, "a finger is on the block"
    env = grasping(x=20, block=20)
    for _ in range(6):
        env.step(np.array([0, -1, -1], np.float32))
    assert env.z == 0, "one finger on each side"
    env.step(np.array([1, 0, -1], np.float32))
    env.step(np.array([1, 0, -1], np.float32))
    assert env.block_x > 20, "it is pushed"


@pytest.mark.parametrize(("z", "away", "held"), [(0, 0, True), (0, 3, True), (0, 5, False), (5, 0, True), (7, 0, False)])
def test_a_block_is_held_if_it_is_between_the_fingers_and_they_are_low_enough(z: float, away: float, held: bool) -> None:
    env = grasping(x=20 + away, z=z)
    _, reward, *_ = env.step(np.array([0, 0, 1], np.float32))
    assert env.holds == held and reward == 0
    rewards = [env.step(np.array([0, 1, 1], np.float32))[1] for _ in range(3)]
    assert (sum(rewards) >= 1) == held and (env.block_z >= LIFT) == held
    if held:
        env.step(np.array([0, 0, -1], np.float32))
        assert env.block_z == 0 and not env.holds, "it falls"


def test_the_image_shows_all_that_is_there() -> None:
    env = grasping(x=20, block=32, z=20)
    image = env._observe()
    shown = image == env.shade
    assert shown[TABLE - 8 : TABLE, 29:35].all() and shown.sum() == 6 * 8
    assert (image[:TABLE] == 255).sum() == 2 * 2 * 6 and (image[TABLE:] == 80).all()
    opened = image.copy()
    env.step(np.array([0, 0, 1], np.float32))
    assert (env._observe() != opened).any(), "the gripper closed"
