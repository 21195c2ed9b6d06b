"""Environments that need a recurrent network: their rules, their chance levels, and experts that reach their optima."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from veldt import callables
from veldt.envs import make_env
from veldt.envs.recall import KeyDoor, TMaze, key_door_expert, t_maze_expert

IDS = ("veldt/TMaze-v0", "veldt/TMazeFixed-v0", "veldt/KeyDoor-v0", "veldt/MaskedCartPole-v0")
LEFT, RIGHT, CORRIDOR, JUNCTION = np.eye(4, dtype=np.float32)
WALL, KEY, DOOR, GOAL = range(4)
MOVES = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}
USE = 4


def play(env: Any, policy: Any, seed: int | None = None) -> tuple[list[Any], float, bool]:
    """An episode: observations, return, and whether it terminated."""
    obs, _ = env.reset(seed=seed)
    seen, total, terminated, truncated = [obs], 0.0, False, False
    while not (terminated or truncated):
        obs, reward, terminated, truncated, _ = env.step(policy(obs))
        seen.append(obs)
        total += reward
    return seen, total, terminated


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_finds_nothing_wrong(name: str) -> None:
    env = gym.make(name).unwrapped
    check_env(env, skip_render_check="CartPole" in name)


@pytest.mark.parametrize("name", IDS)
def test_the_registered_ones_keep_to_their_spaces_and_their_seeds(name: str) -> None:
    def records(seed: int) -> dict[str, Any]:
        envs, rng = make_env(name, 4), np.random.default_rng(0)
        steps = [envs.reset(seed), *(envs.step(rng.integers(0, envs.spec.n_actions, 4)) for _ in range(200))]
        assert envs.bad == 0
        return {key: np.stack([step[key] for step in steps]) for key in steps[0]}

    one, same, other = records(3), records(3), records(4)
    assert one["last"].any() and one["valid"].all()
    for key in one:
        np.testing.assert_array_equal(one[key], same[key])
    assert not np.array_equal(one["obs"], other["obs"])


def test_the_cue_is_shown_first_and_never_again() -> None:
    env = TMaze(12)
    env.reset(seed=0)
    kinds = Counter[tuple[bool, int]]()
    for _ in range(2_000):
        seen, _, terminated = play(env, lambda obs: 0)
        first, *corridor, junction, end = seen
        assert terminated and (np.array_equal(first, LEFT) or np.array_equal(first, RIGHT))
        np.testing.assert_array_equal(np.array(corridor), np.tile(CORRIDOR, (len(corridor), 1)))
        np.testing.assert_array_equal(junction, JUNCTION)
        np.testing.assert_array_equal(end, np.zeros(4))
        kinds[bool(first[0]), len(corridor) + 1] += 1
    assert set(kinds) == {(left, length) for left in (False, True) for length in range(2, 13)}
    counts = np.array([*kinds.values()])
    expected = 2_000 / 22
    assert ((counts - expected) ** 2 / expected).sum() < 46.8  # 21 degrees of freedom; once in 1,000 is it more


@pytest.mark.parametrize(("name", "lengths"), [("veldt/TMaze-v0", set(range(2, 31))), ("veldt/TMazeFixed-v0", {30})])
def test_the_registered_mazes_are_as_long_as_they_say(name: str, lengths: set[int]) -> None:
    env = gym.make(name)
    env.reset(seed=1)
    found = Counter(len(play(env, lambda obs: 0)[0]) - 2 for _ in range(600))  # moves, then the choice
    assert set(found) == lengths


def test_in_the_corridor_only_one_action_leads_on() -> None:
    """So the action before the junction tells nothing; and the cue is not shown again to one who waits."""
    env, rng = TMaze(8), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(200):
        (obs, _), done, actions = env.reset(), False, []
        while not obs[3]:
            actions.append(rng.integers(2))
            obs, reward, done, _, _ = env.step(actions[-1])
            assert not done and reward == 0 and not obs[:2].any()
        assert actions[-1] == 0 and actions.count(0) == env.distance


@pytest.mark.parametrize("turn", [0, 1])
def test_a_turn_is_right_if_it_is_the_one_shown_whatever_was_done_before(turn: int) -> None:
    env, rng = TMaze(5), np.random.default_rng(2)
    env.reset(seed=turn)
    totals = []
    for _ in range(400):
        seen, total, _ = play(env, lambda obs: turn if obs[3] else rng.integers(2))
        assert total == seen[0][turn]
        totals.append(total)
    assert 0.4 < np.mean(totals) < 0.6, "chance"


@pytest.mark.parametrize("name", ["veldt/TMaze-v0", "veldt/TMazeFixed-v0"])
def test_who_remembers_the_cue_always_turns_right(name: str) -> None:
    env = gym.make(name)
    expert = callables.find("veldt.envs.recall:t_maze_expert")
    assert expert is t_maze_expert
    policy = expert(env.unwrapped)
    assert all(play(env, policy, seed)[1] == 1 for seed in range(200))


def layout(env: KeyDoor) -> dict[int, list[tuple[int, int]]]:
    """The cells of each kind, within the frame."""
    cells = env.grid[2:-2, 2:-2]
    assert cells.shape == (env.size, env.size, 4) and (cells.sum(-1) <= 1).all()
    return {kind: [(int(r), int(c)) for r, c in np.argwhere(cells[..., kind])] for kind in range(4)}


def test_layouts_are_two_rooms_and_differ() -> None:
    env = KeyDoor()
    env.reset(seed=0)
    walls, doors, keys, goals, agents = (Counter[Any]() for _ in range(5))
    for _ in range(2_000):
        obs, _ = env.reset()
        cells, agent = layout(env), (env.row - 2, env.column - 2)
        [door], [key], [goal] = cells[DOOR], cells[KEY], cells[GOAL]
        assert sorted([*cells[WALL], door]) == [(row, door[1]) for row in range(9)], "one wall, from end to end"
        assert key[1] < door[1] < goal[1] and agent[1] < door[1] and key != agent
        assert obs[-1] == 0
        for count, x in zip((walls, doors, keys, goals, agents), (door[1], door[0], key, goal, agent), strict=True):
            count[x] += 1
    assert set(walls) == {3, 4, 5} and min(walls.values()) > 550
    assert set(doors) == set(range(9)) and min(doors.values()) > 150
    assert len(keys) == len(agents) == len(goals) == 9 * 5, "any cell of a room"


def test_the_expert_solves_every_layout_in_as_few_steps_as_can_be() -> None:
    env = gym.make("veldt/KeyDoor-v0")
    game = env.unwrapped
    assert isinstance(game, KeyDoor)
    expert = callables.find("veldt.envs.recall:key_door_expert")
    assert expert is key_door_expert
    policy, lengths = expert(game), []
    for seed in range(1_000):
        env.reset(seed=seed)
        cells = layout(game)
        stops = [(game.row - 2, game.column - 2), *cells[KEY], *cells[DOOR], *cells[GOAL]]
        shortest = sum(abs(a - c) + abs(b - d) for (a, b), (c, d) in itertools.pairwise(stops))
        seen, total, terminated = play(env, policy, seed)
        assert terminated and total == 1
        assert len(seen) - 1 == shortest + 2, "all moves, and two uses"
        lengths.append(len(seen) - 1)
    assert 16 < np.mean(lengths) < 18.5 and max(lengths) < 40


def test_every_step_follows_the_rules_and_shows_the_cells_around_the_agent() -> None:
    """A game of its own, of what may be walked on and what is where, is played beside."""
    env, rng = KeyDoor(6), np.random.default_rng(0)
    policy = key_door_expert(env)
    happened = Counter[str]()
    for seed in range(300):
        obs, _ = env.reset(seed=seed)
        cells, here, has_key, done = layout(env), (env.row - 2, env.column - 2), False, False
        for _ in range(100):
            view = obs[:-1].reshape(5, 5, 4)
            for row, column in np.ndindex(5, 5):
                there = here[0] + row - 2, here[1] + column - 2
                kinds = [kind for kind in range(4) if there in cells[kind]] if {*there} <= {*range(6)} else [WALL]
                assert [*np.flatnonzero(view[row, column])] == kinds
            assert obs[-1] == has_key and {*np.unique(obs)} <= {0, 1} and not done
            action = policy(obs) if rng.random() < 0.3 else int(rng.integers(5))
            obs, reward, done, truncated, _ = env.step(np.int64(action))
            if action == USE:
                if here in cells[KEY]:
                    cells[KEY], has_key = [], True
                    happened["key"] += 1
                assert done == (here in cells[GOAL])
            else:
                assert not done
                there = here[0] + MOVES[action][0], here[1] + MOVES[action][1]
                if there in cells[DOOR]:
                    happened["through" if has_key else "locked"] += 1
                if {*there} <= {*range(6)} and there not in cells[WALL] and (has_key or there not in cells[DOOR]):
                    here = there
                else:
                    happened["stayed"] += 1
            assert not truncated and reward == done
            if done:
                happened["goal"] += 1
                break
    assert all(happened[x] > 20 for x in ("key", "through", "locked", "stayed", "goal")), happened


def test_without_the_key_the_other_room_is_never_reached() -> None:
    env, rng = KeyDoor(), np.random.default_rng(0)
    for seed in range(20):
        env.reset(seed=seed)
        door = layout(env)[DOOR][0][1]
        for action in rng.integers(0, 4, 500):  # never uses the key
            env.step(action)
            assert env.column - 2 < door and not env.has_key


def test_the_limit_truncates_and_does_not_terminate() -> None:
    env = gym.make("veldt/KeyDoor-v0")
    env.reset(seed=0)
    for t in range(1, 81):
        _, reward, terminated, truncated, _ = env.step(USE)  # where it begins there is nothing to use
        assert reward == 0 and not terminated and truncated == (t == 80)


def test_random_play_almost_never_finds_the_goal() -> None:
    env, rng = KeyDoor(), np.random.default_rng(0)
    env.reset(seed=0)
    found = 0
    for _ in range(5_000):
        env.reset()
        found += any(env.step(action)[2] for action in rng.integers(0, 5, 80).tolist())
    assert 0 < found < 0.005 * 5_000


def test_pictures_show_where_the_agent_is() -> None:
    def places(env: gym.Env[Any, Any], color: tuple[int, int, int]) -> list[tuple[int, int]]:
        frame: Any = env.render()
        assert frame.dtype == np.uint8 and (frame == frame[::16, ::16].repeat(16, 0).repeat(16, 1)).all()
        return [(int(row), int(column)) for row, column in np.argwhere((frame[::16, ::16] == color).all(-1))]

    env = gym.make("veldt/KeyDoor-v0", render_mode="rgb_array")
    game = env.unwrapped
    assert isinstance(game, KeyDoor)
    policy, done = key_door_expert(game), False
    obs, _ = env.reset(seed=0)
    while not done:
        assert places(env, (150, 60, 200) if game.has_key else (230, 60, 60)) == [(game.row - 1, game.column - 1)]
        obs, _, done, _, _ = env.step(policy(obs))
    maze = gym.make("veldt/TMazeFixed-v0", render_mode="rgb_array")
    obs, _ = maze.reset(seed=0)
    for column in range(31):
        assert places(maze, (230, 60, 60)) == [(5, column)]
        assert places(maze, (60, 180, 75)) == [(4 if obs[0] else 6, 30)]
        maze.step(0)


def test_masked_cartpole_is_cartpole_without_its_velocities() -> None:
    ours, theirs, rng = gym.make("veldt/MaskedCartPole-v0"), gym.make("CartPole-v1"), np.random.default_rng(0)
    ends = Counter[str]()
    for seed in range(20):
        skilled = seed % 2
        seen, full = ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0]
        terminated = truncated = False
        while not (terminated or truncated):
            np.testing.assert_array_equal(seen, full[[0, 2]])
            action = int(full @ [0.1, 0.5, 5, 1] > 0) if skilled else int(rng.integers(2))
            full, *result, _ = theirs.step(action)
            seen, *same, _ = ours.step(action)
            assert same == result
            terminated, truncated = bool(result[1]), bool(result[2])
        np.testing.assert_array_equal(seen, full[[0, 2]])
        ends["terminated" if terminated else "truncated"] += 1
    assert ends["terminated"] > 5 and ends["truncated"] > 5


def test_so_are_many_of_them_at_once() -> None:
    ours, theirs, rng = make_env("veldt/MaskedCartPole-v0", 3), make_env("CartPole-v1", 3), np.random.default_rng(0)
    assert type(ours.env).__name__ == "MaskedCartPoleVector"
    a, b = ours.reset(5), theirs.reset(5)
    episodes = 0
    for _ in range(700):
        np.testing.assert_array_equal(a["obs"], b["obs"][:, [0, 2]])
        for key in ("reward", "discount", "first", "last", "valid"):
            np.testing.assert_array_equal(a[key], b[key])
        episodes += int(a["last"].sum())
        action = np.where(np.arange(3) == 0, rng.integers(0, 2, 3), (b["obs"] @ [0.1, 0.5, 5, 1] > 0).astype(np.int64))
        a, b = ours.step(action), theirs.step(action)
    assert episodes > 10
