"""Environments with continuous actions, registered as `veldt/Name-v0`, and a scripted policy."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from veldt.envs.small import Reset, Step
from veldt.records.tree import Array

METADATA = {"render_modes": ["rgb_array"], "render_fps": 8}


class TwoGoals(gym.Env[Array, Array]):
    """Put the hand on one of two goals that lie opposite each other, at +g and -g: reward 1 within `radius`, else 0.
    An episode is one action; the optimum is 1, and random actions reach 0.1.

    The observation is the angle of g, doubled, so that it does not tell g from -g. The value has two modes in every state,
    and between them, where their mean lies, it is 0. No continuous policy is always right: as the observation goes round
    once, a goal that is followed ends up as the other one.

    With `decoy` the observation tells them apart, and only +g earns 1; within 0.5 of -0.4 g, where most of the nearer
    actions are, an action earns 0.5. Who follows the slope of the value from the middle ends up there.
    """

    def __init__(self, distance: float = 0.7, radius: float = 0.25, decoy: bool = False) -> None:
        self.distance, self.radius, self.decoy, self.angle = distance, radius, decoy, 0.0
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.angle = float(self.np_random.uniform(0, 2 * np.pi))
        return self._observe(), {}

    def step(self, action: Array) -> Step:
        goal = self.distance * np.array([np.cos(self.angle), np.sin(self.angle)])
        if self.decoy:
            near = np.linalg.norm(action + 0.4 / self.distance * goal) <= 0.5
            found = np.linalg.norm(action - goal) <= self.radius
            return self._observe(), 1.0 if found else 0.5 * float(near), True, False, {}
        missed = min(np.linalg.norm(action - goal), np.linalg.norm(action + goal))
        return self._observe(), float(missed <= self.radius), True, False, {}

    def _observe(self) -> Array:
        angle = self.angle if self.decoy else 2 * self.angle
        return np.array([np.cos(angle), np.sin(angle)], np.float32)


def anywhere(env: gym.Env[Any, Any]) -> Callable[[Array], Array]:
    """Uniformly random actions."""
    space, rng = env.action_space, env.unwrapped.np_random
    assert isinstance(space, spaces.Box)
    return lambda obs: rng.uniform(space.low, space.high).astype(np.float32)


SIZE, TABLE = 48, 45  # pixels of the image, and the row of the table
SPEED = 6.0  # pixels that the gripper moves at most in a step
OPEN, THICK = 6.5, 2.0  # pixels from the middle of the open gripper to its fingers, and their width
LIFT = 15.0  # pixels above the table at which a block counts as grasped
LEFT, RIGHT, TOP = 10.0, 37.0, 34.0  # where the gripper may be


class Grasp(gym.Env[Array, Array]):
    """A camera looks from the side at a gripper above a table with a block. Reward 1 once the block is held `LIFT` pixels
    above the table, which ends the episode; else 0.

    Actions are (right, up, close): the first two are in units of `SPEED` pixels, and the gripper is closed while the last
    is above 0. Open fingers have to go down on both sides of the block; on top of it they stop, and beside it they push.
    What the gripper does is in the image: it has no other observation.
    """

    metadata = METADATA

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
        self.action_space = spaces.Box(-1, 1, (3,), np.float32)
        self.x = self.z = self.block_x = self.block_z = self.width = self.height = 0.0
        self.closed = self.holds = False
        self.t = 0  # steps of the episode
        self.shade = self.light = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        rng = self.np_random
        self.x, self.block_x = rng.uniform(LEFT, RIGHT, 2).tolist()
        self.z = rng.uniform(26, TOP)
        self.width, self.height = rng.uniform(5, 9), rng.uniform(5, 9)
        self.block_z, self.closed, self.holds, self.t = 0.0, False, False, 0
        self.shade, self.light = int(rng.integers(110, 190)), int(rng.integers(0, 40))
        return self._observe(), {}

    def step(self, action: Array) -> Step:
        right, up, close = np.clip(action, -1, 1).tolist()
        self.t += 1
        self._move(SPEED * right, SPEED * up)
        self._close(close > 0)
        done = self.holds and self.block_z >= LIFT
        return self._observe(), float(done), done, False, {}

    def _move(self, right: float, up: float) -> None:
        x = min(max(self.x + right, LEFT), RIGHT)
        right, self.x = x - self.x, x
        if self.holds:
            z = min(max(self.z + up, self.z - self.block_z), TOP)
            self.block_x, self.block_z, self.z = self.block_x + right, self.block_z + z - self.z, z
            return
        if self.z < self.height and self._touches():
            self.block_x = min(max(self.block_x + right, 4.0), SIZE - 4.0)
        floor = self.height if self.z >= self.height and self._touches() else 0.0
        self.z = min(max(self.z + up, floor), TOP)

    def _close(self, closed: bool) -> None:
        between = abs(self.x - self.block_x) <= OPEN - self.width / 2
        if closed and not self.closed:
            self.holds = between and self.z < 0.7 * self.height
            self.block_x = self.x if self.holds else self.block_x
        elif not closed and self.holds:
            self.holds, self.block_z = False, 0.0
        self.closed = closed

    @property
    def reach(self) -> float:
        """Pixels from the middle of the gripper to the inside of its fingers."""
        return self.width / 2 if self.holds else 1.0 if self.closed else OPEN

    def _touches(self) -> bool:
        """Whether a finger is above or in the block."""
        away, half = abs(self.x - self.block_x), self.width / 2
        return self.reach - half < away < self.reach + THICK + half

    def _observe(self) -> Array:
        image = np.full((SIZE, SIZE), self.light, np.uint8)
        image[TABLE:] = 80
        _draw(image, self.block_x, self.width / 2, self.block_z, self.height, self.shade)
        for side in (-1, 1):
            _draw(image, self.x + side * (self.reach + THICK / 2), THICK / 2, self.z, 6.0, 255)
        _draw(image, self.x, self.reach + THICK, self.z + 6, 3.0, 220)
        return image

    def render(self) -> Array | None:
        if self.render_mode is None:
            return None
        return self._observe()[:, :, None].repeat(3, 2).repeat(4, 0).repeat(4, 1)


def _draw(image: Array, x: float, half: float, z: float, height: float, shade: int) -> None:
    """A rectangle around column x, from z pixels above the table up."""
    top, bottom = round(TABLE - z - height), round(TABLE - z)
    image[max(0, top) : max(0, bottom), max(0, round(x - half)) : max(0, round(x + half))] = shade


def grasp_script(env: gym.Env[Any, Any]) -> Callable[[Array], Array]:
    """Goes down at any place, closes at a height that may be too large, and lifts: about one episode in
    five succeeds."""
    game = env.unwrapped
    assert isinstance(game, Grasp)
    target, depth, closing = 0.0, 0.0, False

    def act(obs: Array) -> Array:
        nonlocal target, depth, closing
        rng = game.np_random
        if game.t == 0:
            target, depth, closing = rng.uniform(LEFT, RIGHT), rng.uniform(1, 16), False
        closing = closing or game.z < depth or game.t >= 7
        right = np.clip((target - game.x) / SPEED, -1, 1)
        up = 1.0 if game.closed and closing else -1.0
        noise = rng.normal(0, 0.15, 2)
        return np.array([right + noise[0], up + noise[1], 1.0 if closing else -1.0], np.float32).clip(-1, 1)

    return act


for _name, _limit in (("TwoGoals", None), ("Grasp", 15)):
    gym.register(f"veldt/{_name}-v0", entry_point=f"veldt.envs.reaching:{_name}", max_episode_steps=_limit)
