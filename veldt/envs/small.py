"""Small environments with known optima, registered as `veldt/Name-v0`."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector.utils import batch_space

from veldt.records.tree import Array

Reset = tuple[Array, dict[str, Any]]
Step = tuple[Array, float, bool, bool, dict[str, Any]]


def one_hot(place: int, size: int) -> Array:
    """All zeros if the place is not below the size."""
    out = np.zeros(size, np.float32)
    out[place : place + 1] = 1
    return out


class Chain(gym.Env[Array, np.int64]):
    """States 0 ... n-1 in a row; action 1 moves right, action 0 left. Reaching the end gives reward 1 and terminates.

    The optimal value of state s is gamma^(n-2-s).
    """

    def __init__(self, n: int = 8) -> None:
        self.n, self.state = n, 0
        self.observation_space = spaces.Box(0, 1, (n,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.state = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> Step:
        self.state = self.state + 1 if action == 1 else max(0, self.state - 1)
        done = self.state == self.n - 1
        return self._observe(), float(done), done, False, {}

    def _observe(self) -> Array:
        return one_hot(self.state, self.n)


class DeepSea(gym.Env[Array, np.int64]):
    """An n x n grid in which the agent falls one row per step (Osband et al. 2020). Moving right costs 0.01/n; a treasure
    of 1 lies in the last column of the last row. Which action moves right differs from cell to cell, so undirected
    exploration finds the treasure with probability 2^-n."""

    def __init__(self, n: int = 10, mapping_seed: int = 0) -> None:
        self.n, self.row, self.column = n, 0, 0
        self.right = np.random.default_rng(mapping_seed).integers(0, 2, (n, n))  # the action that moves right
        self.observation_space = spaces.Box(0, 1, (n * n,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.row, self.column = 0, 0
        return one_hot(0, self.n * self.n), {}

    def step(self, action: np.int64) -> Step:
        right = action == self.right[self.row, self.column]
        reward = -0.01 / self.n if right else 0.0
        if right and self.column == self.n - 1:
            reward += 1.0
        self.column = min(self.n - 1, self.column + 1) if right else max(0, self.column - 1)
        self.row += 1
        return one_hot(self.row * self.n + self.column, self.n * self.n), reward, self.row == self.n, False, {}


class Catch(gym.Env[Array, np.int64]):
    """A ball falls through a rows x columns grid of pixels onto a paddle: +1 caught, -1 missed. The optimum is 1."""

    def __init__(self, rows: int = 10, columns: int = 5) -> None:
        self.rows, self.columns = rows, columns
        self.ball = self.paddle = self.row = 0
        self.observation_space = spaces.Box(0, 255, (rows, columns), np.uint8)
        self.action_space = spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.ball, self.paddle, self.row = int(self.np_random.integers(self.columns)), self.columns // 2, 0
        return self._observe(), {}

    def step(self, action: np.int64) -> Step:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        self.row += 1
        done = self.row == self.rows - 1
        return self._observe(), (1.0 if self.paddle == self.ball else -1.0) if done else 0.0, done, False, {}

    def _observe(self) -> Array:
        screen = np.zeros((self.rows, self.columns), np.uint8)
        screen[self.row, self.ball] = screen[-1, self.paddle] = 255
        return screen


class BlindCliffwalk(Chain):
    """n states; in each, one of two actions leads to the next state and the other off the cliff (Schaul et al.
    2016, section 3.1).

    Reward 1 after n right steps in a row, else 0; every end is terminal. Random play succeeds once in 2^n episodes. The
    value of the right action in state s is gamma^(n-1-s), of the wrong one 0.
    """

    def __init__(self, n: int = 12) -> None:
        super().__init__(n)

    def right(self, state: int) -> int:
        """The action that leads to the next state; it alternates, so that a constant policy fails."""
        return state % 2

    def step(self, action: np.int64) -> Step:
        if action != self.right(self.state):
            return np.zeros(self.n, np.float32), 0.0, True, False, {}
        self.state += 1
        done = self.state == self.n
        return self._observe(), float(done), done, False, {}


class Counter(gym.Env[Array, np.int64]):
    """A test environment: every one of its records can be checked by itself.

    The observation is (env, episode, t, action that led here), where env is the seed it was last reset with. Rewards,
    lengths and terminations are known functions of these. Episodes have 1 to `longest` steps; some terminate, some are
    truncated.
    """

    def __init__(self, longest: int = 12) -> None:
        self.longest = longest
        self.env_id, self.episode, self.t = 0, -1, 0
        self.observation_space = spaces.Box(0, 2**62, (4,), np.int64)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        if seed is not None:
            self.env_id, self.episode = seed, -1
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.env_id, self.episode, 0, 0], np.int64), {}

    def step(self, action: np.int64) -> Step:
        self.t += 1
        done = self.t == Counter.length(self.env_id, self.episode, self.longest)
        terminal = done and Counter.terminates(self.env_id, self.episode)
        obs = np.array([self.env_id, self.episode, self.t, action], np.int64)
        return obs, Counter.reward(*obs.tolist()), terminal, done and not terminal, {}

    @staticmethod
    def mix(*numbers: int) -> int:
        """A hash of small integers, the same on every machine."""
        h = 0x9E3779B97F4A7C15
        for x in numbers:
            h = ((h ^ (x + 1)) * 0xBF58476D1CE4E5B9) % 2**64
            h ^= h >> 29
        return h

    @staticmethod
    def length(env: int, episode: int, longest: int) -> int:
        """Actions in an episode; one episode in four has a single one."""
        h = Counter.mix(env, episode, 1)
        return 1 if h % 4 == 0 else 1 + (h >> 8) % longest

    @staticmethod
    def terminates(env: int, episode: int) -> bool:
        return Counter.mix(env, episode, 2) % 2 == 0

    @staticmethod
    def reward(env: int, episode: int, t: int, action: int) -> float:
        """Received on arriving at t by this action: an integer in -8 ... 8, 0 at t = 0."""
        return float(Counter.mix(env, episode, t, action) % 17 - 8) if t else 0.0


class Spin(gym.Env[Array, np.int64]):
    """Keeps a core busy for `ms` milliseconds per step: for benchmarks of everything else."""

    def __init__(self, ms: float = 1.0) -> None:
        self.seconds = ms / 1000
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> Step:
        end = time.thread_time() + self.seconds  # CPU time of this thread
        while time.thread_time() < end:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}


class Cards(gym.Env[Any, np.int64]):
    """A hand of n cards with random values; each is played once. The lowest of those left earns 1, so the optimum is n.
    A card that was played is an illegal action, which raises a ValueError.

    `info["action_mask"]` says which cards are left; or, if `dict`, the observation's key `action_mask` does.
    """

    def __init__(self, n: int = 5, dict: bool = False) -> None:
        self.n, self.dict = n, dict
        self.values, self.left = np.zeros(n, np.float32), np.ones(n, np.bool_)
        cards = spaces.Box(0, 1, (n,), np.float32)
        self.observation_space = spaces.Dict(cards=cards, action_mask=spaces.MultiBinary(n)) if dict else cards
        self.action_space = spaces.Discrete(n)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.values, self.left = self.np_random.random(self.n, np.float32), np.ones(self.n, np.bool_)
        return self._observe()

    def step(self, action: np.int64) -> Any:
        if not self.left[action]:
            raise ValueError(f"card {action} was played")
        lowest = self.values[action] == self.values[self.left].min()
        self.left[action] = False
        obs, info = self._observe()
        return obs, float(lowest), not self.left.any(), False, info

    def _observe(self) -> tuple[Any, Any]:
        cards, mask = self.values.copy(), self.left.astype(np.int8)
        return ({"cards": cards, "action_mask": mask}, {}) if self.dict else (cards, {"action_mask": mask})


SEEN = [0, 2]  # columns of CartPole's observation: the position of the cart and the angle of the pole


class Masked:
    """CartPole without velocities: a policy has to infer them from earlier observations."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        obs, info = super().reset(seed=seed, options=options)  # type: ignore[misc]
        return obs[..., SEEN], info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)  # type: ignore[misc]
        return obs[..., SEEN], *rest


def _seen(space: Any) -> spaces.Box:
    return spaces.Box(space.low[SEEN], space.high[SEEN], dtype=np.float32)


class MaskedCartPole(Masked, CartPoleEnv):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.observation_space = _seen(self.observation_space)


class MaskedCartPoleVector(Masked, CartPoleVectorEnv):
    def __init__(self, num_envs: int = 1, max_episode_steps: int = 500) -> None:
        super().__init__(num_envs, max_episode_steps)
        self.single_observation_space = _seen(self.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)


_limits = {
    "Cards": None,
    "Chain": 100,
    "DeepSea": None,
    "Catch": None,
    "BlindCliffwalk": None,
    "Counter": None,
    "Spin": 1000,
}
for _name, _limit in _limits.items():
    gym.register(f"veldt/{_name}-v0", entry_point=f"veldt.envs.small:{_name}", max_episode_steps=_limit)
gym.register(
    "veldt/MaskedCartPole-v0",
    entry_point="veldt.envs.small:MaskedCartPole",
    vector_entry_point="veldt.envs.small:MaskedCartPoleVector",
    max_episode_steps=500,
)
