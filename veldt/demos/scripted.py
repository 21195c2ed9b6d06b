"""Scripted: a policy from an expert function."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from veldt.demos.set import is_inside
from veldt.envs import Envs, make_env
from veldt.envs.atari import Atari
from veldt.errors import UserError
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree

Expert = Callable[[Any], Any]  # one observation, or a dict of them by key -> one action
MakeExpert = Callable[[Any], Expert]  # the environment that is played -> its expert


class Scripted:
    """A policy for one environment from a function that makes an expert at the start of each episode."""

    due = math.inf

    def __init__(self, make: MakeExpert, game: Any, spec: EnvSpec, name: str = "the expert") -> None:
        self.make, self.game, self.spec, self.name = make, game, spec, name
        self._expert: Expert | None = None
        self._action: Array | None = None

    def send(self, group: int, step: Tree) -> bool:
        if step["first"][0] or self._expert is None:
            made: Any = self.make(self.game)
            if not callable(made):
                kind = type(made).__name__
                raise UserError(f"{self.name} must return a function from an observation to an action, not a {kind}.")
            self._expert = made
        seen: Any = {name.removeprefix("obs/"): step[name][0].copy() for name in self.spec.observation}
        assert self._expert is not None
        self._action = self._checked(self._expert(seen["obs"] if "obs" in self.spec.observation else seen))
        return True

    def recv(self, group: int) -> Tree | None:
        action, self._action = self._action, None
        return None if action is None else {"action": action[None]}

    def record(self) -> None:
        """Records nothing."""

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self._expert = self._action = None

    def _checked(self, action: Any) -> Array:
        """The action as it is recorded: discrete ones count from 0, continuous ones are clipped to their bounds."""
        space, column = self.spec.action_space, self.spec.action
        try:
            x = np.asarray(action)
            valid = x.shape == column.shape and x.dtype.kind in ("biuf" if isinstance(space, spaces.Box) else "biu")
        except (TypeError, ValueError):
            valid = False
        if valid and isinstance(space, spaces.Box):
            x = np.clip(x.astype(np.float64), space.low, space.high)
        elif valid:
            assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete), space
            x = x.astype(np.int64) - space.start
        if not valid or not is_inside(space, x[None]):
            raise UserError(f"{self.name} returned the action {reprlib.repr(action)}, which is not in {space}.")
        return x.astype(column.dtype)


def make_played(env: str, protocol: str = "") -> tuple[Envs, Any]:
    """One environment that emits records, and the Gymnasium environment inside, which an expert may inspect.

    An environment with a vector version of its own is made without it, as that has no single environment inside. Atari
    has none either: there the expert gets the vector environment.
    """
    envs = make_env(env, 1, protocol=protocol)
    if not isinstance(envs.env, SyncVectorEnv | Atari):
        envs.close()
        envs = Envs(make_env(lambda: gym.make(env, disable_env_checker=True), 1).env, env)
    return envs, envs.env.envs[0].unwrapped if isinstance(envs.env, SyncVectorEnv) else envs.env
