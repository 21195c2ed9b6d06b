"""Environments that need a recurrent network, registered as `veldt/Name-v0`, and experts that solve them."""

from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from veldt.envs.small import Reset, Step, one_hot
from veldt.records.tree import Array

Expert = Callable[[Array], int]

METADATA = {"render_modes": ["rgb_array"], "render_fps": 8}
PIXELS = 16  # side of a rendered cell


class TMaze(gym.Env[Array, np.int64]):
    """A corridor that ends in a junction. Only the first observation shows which way to turn there.

    The observation is one of four flags: turn left, turn right (first step only), corridor, junction. In the corridor
    action 0 moves one cell and 1 stays, so the last action before the junction is always 0: a network that sees the last
    action cannot use it as a note. At the junction 0 turns left and 1 right, which terminates with reward 1 if the turn is
    right, else 0, and an observation of zeros. The corridor is `length` cells long if `fixed`, else uniform on 2 ...
    `length`; the turn and the length are drawn independently for each episode. A policy without recurrent state returns
    0.5, as a random one does; the optimum is 1.
    """

    metadata = METADATA

    def __init__(self, length: int = 30, fixed: bool = False, render_mode: str | None = None) -> None:
        self.length, self.fixed, self.render_mode = length, fixed, render_mode
        self.turn = self.distance = self.moves = 0
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.turn, self.moves = int(self.np_random.integers(2)), 0
        self.distance = self.length if self.fixed else int(self.np_random.integers(2, self.length + 1))
        return one_hot(self.turn, 4), {}

    def step(self, action: np.int64) -> Step:
        if self.moves == self.distance:
            return np.zeros(4, np.float32), float(action == self.turn), True, False, {}
        self.moves += int(action == 0)
        return one_hot(3 if self.moves == self.distance else 2, 4), 0.0, False, False, {}

    def render(self) -> Array | None:
        """From above, moving right: the agent is red, the correct turn green."""
        if self.render_mode is None:
            return None
        cells = np.zeros((11, self.length + 1, 3), np.uint8)
        cells[5, : self.distance + 1] = cells[4:7, self.distance] = 200
        cells[4 if self.turn == 0 else 6, self.distance] = 60, 180, 75
        cells[5, self.moves] = 230, 60, 60
        return cells.repeat(PIXELS, 0).repeat(PIXELS, 1)


def t_maze_expert(env: gym.Env[Any, Any]) -> Expert:
    """Remembers the turn that the first observation shows."""
    turn = 0

    def act(obs: Array) -> int:
        nonlocal turn
        if obs[:2].any():
            turn = int(obs[1])
        return turn if obs[3] else 0

    return act


WALL, KEY, DOOR, GOAL = range(4)
RADIUS = 2  # of the view, in cells
FLAGS = (2 * RADIUS + 1) ** 2 * 4 + 1  # size of an observation
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right: row and column
USE = len(MOVES)
COLORS = ((90, 90, 90), (240, 200, 40), (150, 90, 40), (60, 180, 75))


class KeyDoor(gym.Env[Array, np.int64]):
    """Two rooms with a wall and a locked door between them, `size` x `size` cells in all. "Use" on the cell of the key
    picks it up, which opens the door; "use" on the goal behind the door gives the only reward, 1, and terminates.

    Actions: up, down, left, right, use; walls and the locked door block moves. The observation is the 5 x 5 cells around
    the agent as flags [row, column, (wall, key, door, goal)], flattened, and a last flag for holding the key; cells outside
    the rooms are walls. The places of wall, door, key, goal and agent are drawn for each episode; agent and key are left of
    the wall, the goal is right of it. Within the registered limit of 80 steps a random policy succeeds in 0.15 % of the
    episodes; the optimum is 1, after 17 steps on average.
    """

    metadata = METADATA

    def __init__(self, size: int = 9, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode
        self.row = self.column = 0
        self.has_key = False
        self.observation_space = spaces.Box(0, 1, (FLAGS,), np.float32)
        self.action_space = spaces.Discrete(5)
        # The grid [row, column, kind] has a border of walls as wide as the view.
        self._empty = np.zeros((size + 2 * RADIUS, size + 2 * RADIUS, 4), np.float32)
        self._empty[..., WALL] = 1
        self._empty[RADIUS:-RADIUS, RADIUS:-RADIUS, WALL] = 0
        self.grid = self._empty.copy()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        n = self.size
        wall = int(self.np_random.integers(n // 3, n - n // 3))  # its column; at least a third of the cells on each side
        door, agent, key, goal = self.np_random.integers((n, n * wall, n * wall - 1, n * (n - 1 - wall))).tolist()
        key += key >= agent  # not where the agent is
        self.grid = self._empty.copy()
        cells = self.grid[RADIUS:-RADIUS, RADIUS:-RADIUS]
        cells[:, wall, WALL] = 1
        cells[door, wall] = np.eye(4)[DOOR]
        cells[key // wall, key % wall, KEY] = 1
        cells[goal % n, wall + 1 + goal // n, GOAL] = 1
        self.row, self.column, self.has_key = RADIUS + agent // wall, RADIUS + agent % wall, False
        return self._observe(), {}

    def step(self, action: np.int64) -> Step:
        if action == USE:
            here = self.grid[self.row, self.column]
            if here[KEY]:
                self.has_key = True
                here[KEY] = 0
            done = bool(here[GOAL])
            return self._observe(), float(done), done, False, {}
        down, right = MOVES[action]
        row, column = self.row + down, self.column + right
        if self.is_free(row, column):
            self.row, self.column = row, column
        return self._observe(), 0.0, False, False, {}

    def is_free(self, row: int, column: int) -> bool:
        wall, _, door, _ = self.grid[row, column].tolist()
        return not wall and (self.has_key or not door)

    def _observe(self) -> Array:
        obs = np.empty(FLAGS, np.float32)
        view = self.grid[self.row - RADIUS : self.row + RADIUS + 1, self.column - RADIUS : self.column + RADIUS + 1]
        obs[:-1] = view.reshape(-1)
        obs[-1] = self.has_key
        return obs

    def render(self) -> Array | None:
        """From above: the agent is red, or purple with the key; cells outside its view are darker."""
        if self.render_mode is None:
            return None
        cells = np.where(self.grid.any(-1, keepdims=True), np.array(COLORS)[self.grid.argmax(-1)], 230)
        cells[self.row, self.column] = (150, 60, 200) if self.has_key else (230, 60, 60)
        unseen = np.ones(cells.shape[:2], np.bool_)
        unseen[self.row - RADIUS : self.row + RADIUS + 1, self.column - RADIUS : self.column + RADIUS + 1] = False
        cells[unseen] //= 2
        return cells[1:-1, 1:-1].astype(np.uint8).repeat(PIXELS, 0).repeat(PIXELS, 1)


def key_door_expert(env: gym.Env[Any, Any]) -> Expert:
    """Reads the whole grid and takes a shortest path."""
    game = env.unwrapped
    assert isinstance(game, KeyDoor)

    def act(obs: Array) -> int:
        start, target = (game.row, game.column), GOAL if game.has_key else KEY
        first: dict[tuple[int, int], int] = {start: USE}  # by cell: the first move of a shortest path to it
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
    gym.register(f"veldt/{_name}-v0", entry_point=f"veldt.envs.recall:{_class}", max_episode_steps=_limit, kwargs=_options)
