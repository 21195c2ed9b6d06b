"""Environments that only one who remembers can master, registered as `veldt/Name-v0`, and experts that play them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from veldt.envs.small import Reset, Step
from veldt.records.tree import Array

Expert = Callable[[Array], int]

PICTURES = {"render_modes": ["rgb_array"], "render_fps": 8}
PIXELS = 16  # the side of a cell in them


class TMaze(gym.Env[Array, np.int64]):
    """A corridor that ends in a junction. The first observation says which way to turn there, and no later one does.

    The observation is one of four flags: turn left, turn right (at first), corridor, junction. In the corridor 0 leads on
    by one and 1 stays, so the last action before the junction is always 0: what was shown cannot be kept in actions, where
    those are seen. At the junction 0 turns left and 1 right, which terminates with reward 1 if that was the way, else 0,
    and an observation of zeros. The junction is seen after as many moves as the corridor is long: for each episode uniform
    on 2 ... `length`, or `length` itself if `fixed`. Which way, and how far, is drawn independently. Without memory, as at
    random, the return is 0.5; the optimum is 1.
    """

    metadata = PICTURES

    def __init__(self, length: int = 30, fixed: bool = False, render_mode: str | None = None) -> None:
        self.length, self.fixed, self.render_mode = length, fixed, render_mode
        self.way = self.far = self.moves = 0
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.way, self.moves = int(self.np_random.integers(2)), 0
        self.far = self.length if self.fixed else int(self.np_random.integers(2, self.length + 1))
        return self._see(self.way), {}

    def step(self, action: np.int64) -> Step:
        if self.moves == self.far:
            return np.zeros(4, np.float32), float(action == self.way), True, False, {}
        self.moves += int(action == 0)
        return self._see(3 if self.moves == self.far else 2), 0.0, False, False, {}

    def _see(self, flag: int) -> Array:
        obs = np.zeros(4, np.float32)
        obs[flag] = 1
        return obs

    def render(self) -> Array | None:
        """From above, walking right: the agent is red, the right way green."""
        if self.render_mode is None:
            return None
        cells = np.zeros((11, self.length + 1, 3), np.uint8)
        cells[5, : self.far + 1] = cells[4:7, self.far] = 200
        cells[4 if self.way == 0 else 6, self.far] = 60, 180, 75
        cells[5, self.moves] = 230, 60, 60
        return cells.repeat(PIXELS, 0).repeat(PIXELS, 1)


def t_maze_expert(env: gym.Env[Any, Any]) -> Expert:
    """Remembers the way it was shown."""
    way = 0

    def act(obs: Array) -> int:
        nonlocal way
        if obs[:2].any():
            way = int(obs[1])
        return way if obs[3] else 0

    return act


WALL, KEY, DOOR, GOAL = range(4)
RADIUS = 2  # of the view: that many cells to each side
FLAGS = (2 * RADIUS + 1) ** 2 * 4 + 1  # flags of an observation
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right: row and column
USE = len(MOVES)
COLORS = ((90, 90, 90), (240, 200, 40), (150, 90, 40), (60, 180, 75))


class KeyDoor(gym.Env[Array, np.int64]):
    """Two rooms, `size` x `size` cells together with the wall between them, in which there is a locked door. To use the
    key one stands on is to take it; with it one may walk through the door; to use the goal behind gives the only reward,
    1, and terminates.

    Actions: up, down, left, right, use; who walks into a wall or a locked door stays. The observation is what lies in
    the 5 x 5 cells around the agent, as flags [row, column, (wall, key, door, goal)], flattened, and a last flag for
    having the key; beyond the rooms all is wall. Where the wall, the door, the key, the goal and the agent are is drawn
    for each episode; agent and key are left of the wall, the goal is right of it. Within the 80 steps it is registered
    with, random play succeeds in 0.15 % of the episodes; the optimum is 1, after 17 steps on average.
    """

    metadata = PICTURES

    def __init__(self, size: int = 9, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode
        self.row = self.column = 0
        self.has_key = False
        self.observation_space = spaces.Box(0, 1, (FLAGS,), np.float32)
        self.action_space = spaces.Discrete(5)
        # The grid [row, column, kind] has a frame of walls as wide as one can see.
        self._empty = np.zeros((size + 2 * RADIUS, size + 2 * RADIUS, 4), np.float32)
        self._empty[..., WALL] = 1
        self._empty[RADIUS:-RADIUS, RADIUS:-RADIUS, WALL] = 0
        self.grid = self._empty.copy()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        n = self.size
        wall = int(self.np_random.integers(n // 3, n - n // 3))  # its column; a third at least on each side
        door, agent, key, goal = self.np_random.integers((n, n * wall, n * wall - 1, n * (n - 1 - wall))).tolist()
        key += key >= agent  # not where the agent is
        self.grid = self._empty.copy()
        cells = self.grid[RADIUS:-RADIUS, RADIUS:-RADIUS]
        cells[:, wall, WALL] = 1
        cells[door, wall] = np.eye(4)[DOOR]
        cells[key // wall, key % wall, KEY] = 1
        cells[goal % n, wall + 1 + goal // n, GOAL] = 1
        self.row, self.column, self.has_key = RADIUS + agent // wall, RADIUS + agent % wall, False
        return self._see(), {}

    def step(self, action: np.int64) -> Step:
        if action == USE:
            here = self.grid[self.row, self.column]
            if here[KEY]:
                self.has_key = True
                here[KEY] = 0
            done = bool(here[GOAL])
            return self._see(), float(done), done, False, {}
        down, right = MOVES[action]
        row, column = self.row + down, self.column + right
        if self.is_free(row, column):
            self.row, self.column = row, column
        return self._see(), 0.0, False, False, {}

    def is_free(self, row: int, column: int) -> bool:
        """Whether one may walk there."""
        wall, _, door, _ = self.grid[row, column].tolist()
        return not wall and (self.has_key or not door)

    def _see(self) -> Array:
        obs = np.empty(FLAGS, np.float32)
        view = self.grid[self.row - RADIUS : self.row + RADIUS + 1, self.column - RADIUS : self.column + RADIUS + 1]
        obs[:-1] = view.reshape(-1)
        obs[-1] = self.has_key
        return obs

    def render(self) -> Array | None:
        """From above: the agent is red, and purple when it has the key; what it does not see is darker."""
        if self.render_mode is None:
            return None
        cells = np.where(self.grid.any(-1, keepdims=True), np.array(COLORS)[self.grid.argmax(-1)], 230)
        cells[self.row, self.column] = (150, 60, 200) if self.has_key else (230, 60, 60)
        unseen = np.ones(cells.shape[:2], np.bool_)
        unseen[self.row - RADIUS : self.row + RADIUS + 1, self.column - RADIUS : self.column + RADIUS + 1] = False
        cells[unseen] //= 2
        return cells[1:-1, 1:-1].astype(np.uint8).repeat(PIXELS, 0).repeat(PIXELS, 1)


def key_door_expert(env: gym.Env[Any, Any]) -> Expert:
    """Knows where everything is, and plays as short as can be."""
    game = env.unwrapped
    assert isinstance(game, KeyDoor)

    def act(obs: Array) -> int:
        start, target = (game.row, game.column), GOAL if game.has_key else KEY
        first: dict[tuple[int, int], int] = {start: USE}  # by cell reached: the first move on a shortest way there
        queue = deque([start])
        while queue:
            row, column = queue.popleft()
            if game.grid[row, column, target]:
                return first[row, column]
            for action, (down, right) in enumerate(MOVES):
                cell = row + down, column + right
                if cell not in first and game.is_free(*cell):
                    first[cell] = action if (row, column) == start else first[row, column]
                    queue.append(cell)
        raise AssertionError("every layout can be solved")

    return act


for _name, _class, _limit, _options in (
    ("TMaze", "TMaze", 120, {}),
    ("TMazeFixed", "TMaze", 120, {"fixed": True}),
    ("KeyDoor", "KeyDoor", 80, {}),
):
    gym.register(f"veldt/{_name}-v0", entry_point=f"veldt.envs.memory:{_class}", max_episode_steps=_limit, kwargs=_options)
