"""A vector of environments that emits step records (`veldt.records.step`), from anything Gymnasium can run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from veldt import callables
from veldt.compiled import LIGHT, njit
from veldt.envs.atari import Atari, find_protocol
from veldt.envs.minatar import Seeded, without_plots
from veldt.errors import UserError, did_you_mean
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, ArraySpec, Spec, Tree, spec

EnvLike = str | Callable[[], gym.Env[Any, Any]]
BAD_IN_A_ROW = 100  # steps of bad observations from one environment before the run stops

# By prefix of the id: the module that registers it, and our extra.
PACKAGES = {"ALE/": ("ale_py", "atari"), "MinAtar/": ("minatar.gym", "minatar")}

log = logging.getLogger("veldt")


class EnvError(RuntimeError):
    """An environment raised; its own traceback is the cause."""


class Envs:
    """n environments stepped together. `reset` and `step` return step records [n] (see `veldt.records.step`).

    An observation that is not finite or leaves its space, or a reward that is not finite, is never passed on: its row is
    zeros with valid=False, it is counted in `bad`, and after 100 in a row from one environment the run stops.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], name: str) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(f"{name} resets in mode {mode}, but Veldt needs NEXT_STEP autoreset; build it with that.")
        self.env, self.name, self.n = env, name, env.num_envs
        self.spec = _env_spec(env, name)
        self.bad = 0  # rows not passed on
        self._began = False
        self._bad_in_a_row = np.zeros(self.n, np.int64)
        self._bounds = {key: _bounds(space) for key, space in _columns(env.single_observation_space, name).items()}
        self._flat = {key: flat for key, x in self._bounds.items() if (flat := _flat(x, self.spec.observation[key]))}
        self._last = np.zeros(self.n, np.bool_)
        space = env.single_action_space
        starts = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
        self._first_action = np.asarray(starts, np.int64) if np.any(starts) else None
        self._action_bounds = (space.low, space.high) if isinstance(space, spaces.Box) else None

    def reset(self, seed: int) -> Tree:
        try:
            # Environment i is seeded with seed + i, which must stay an int32.
            raw, _ = self.env.reset(seed=min(seed % 2**31, 2**31 - self.n))
        except Exception as error:
            raise EnvError(f"{self.name}: reset raised {type(error).__name__}: {error}") from error
        self._last = np.zeros(self.n, np.bool_)
        self._bad_in_a_row[:] = 0
        step = self._record(raw, np.zeros(self.n), np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_))
        step["first"][:] = True
        if not self._began and not step["valid"].any():
            raise UserError(f"{self.name}: the observation after reset {self._why}; mend the environment or its space.")
        self._began = True
        return step

    def step(self, action: Array) -> Tree:
        """Applies one action an environment; where the previous record was last, it is ignored and an episode begins."""
        if self._first_action is not None:
            action = action + self._first_action
        if self._action_bounds is not None:
            action = np.clip(action, *self._action_bounds)
        try:
            raw, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise EnvError(f"{self.name}: step raised {type(error).__name__}: {error}") from error
        step = self._record(raw, reward, terminated, truncated)
        if isinstance(self.env, Atari) and "life_lost" in info:  # ends the return, not the episode
            step["discount"][info["life_lost"]] = 0.0
        self._last = step["last"]
        return step

    def close(self) -> None:
        self.env.close()

    def _record(self, raw: Any, reward: Array, terminated: Array, truncated: Array) -> Tree:
        step: Tree = {}
        bad: Array | None = None
        for name, column in self.spec.observation.items():
            x = raw if name == "obs" else raw[name.removeprefix("obs/")]
            x = np.asarray(x, column.dtype)
            assert x.shape == (self.n, *column.shape), (self.name, name, x.shape, column.shape)
            step[name] = x
            outside = self._outside(name, x)
            if outside is not None:
                bad = outside if bad is None else bad | outside
        step["reward"] = np.asarray(reward, np.float32)
        step["discount"] = discount = np.empty(self.n, np.float32)
        step["first"], step["last"], step["valid"] = flags = np.empty((3, self.n), np.bool_)
        if not _flags(step["reward"], terminated, truncated, self._last, discount, flags):
            self._why = f"came with the reward {reward}"
            bad = ~np.isfinite(step["reward"]) | (False if bad is None else bad)
        if bad is None:
            if np.count_nonzero(self._bad_in_a_row):
                self._bad_in_a_row[:] = 0
        else:
            self._blank(step, bad)
        return step

    def _outside(self, name: str, x: Array) -> Array | None:
        """Which environments' observations are not finite or out of bounds; None: all are well."""
        if name in self._flat and _inside(x.reshape(self.n, -1), *self._flat[name]):
            return None
        finite, low, high = self._bounds[name]
        well = np.isfinite(x) if finite else None
        if low is not None:
            inside = (x >= low) & (x <= high)
            well = inside if well is None else well & inside
        if well is None or well.all():
            return None
        where = np.argwhere(~well)[0]
        kind = "left its space" if np.isfinite(x[tuple(where)]) else "is not finite"
        self._why = f"{kind} ({name}{where[1:].tolist()} = {x[tuple(where)]})"
        return np.asarray(~well.reshape(self.n, -1).all(1))

    def _blank(self, step: Tree, bad: Array) -> None:
        if self.bad == 0:
            log.warning("%s: an observation %s; it is not stored, and counted as bad_observations", self.name, self._why)
        self.bad += int(bad.sum())
        self._bad_in_a_row = np.where(bad, self._bad_in_a_row + 1, 0)
        if self._bad_in_a_row.max() >= BAD_IN_A_ROW:
            raise UserError(
                f"{self.name}: {BAD_IN_A_ROW} observations in a row were bad, the last one {self._why}; "
                "mend the environment or its space."
            )
        for name in (*self.spec.observation, "reward"):
            step[name] = step[name].copy()
            step[name][bad] = 0
        step["valid"][bad] = False


def make_env(env: EnvLike, n: int = 1, render: bool = False, protocol: str = "") -> Envs:
    """n environments from a Gymnasium id, `module:callable`, or a callable that returns one `gymnasium.Env`.

    The protocol names whose settings Atari is played with (`veldt.envs.atari`).
    """
    name = env if isinstance(env, str) else getattr(env, "__qualname__", repr(env))
    options: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    factory = _find(env) if isinstance(env, str) else env
    if factory is not None:

        def build() -> VectorEnv[Any, Any, Any]:
            return SyncVectorEnv([factory] * n, autoreset_mode=AutoresetMode.NEXT_STEP)

    elif isinstance(env, str) and is_atari(env):
        settings = find_protocol(protocol)

        def build() -> VectorEnv[Any, Any, Any]:
            return Atari(str(env), n, settings, render)

    else:
        assert isinstance(env, str)
        entry = gym.spec(env)

        def build() -> VectorEnv[Any, Any, Any]:
            if entry.vector_entry_point is not None and not render:
                return gym.make_vec(env, n, vectorization_mode="vector_entry_point")
            return SyncVectorEnv([one] * n, autoreset_mode=AutoresetMode.NEXT_STEP)

        def one() -> gym.Env[Any, Any]:
            made = gym.make(env, disable_env_checker=True, **options)
            return Seeded(made) if env.startswith("MinAtar/") else made

    try:
        with warnings.catch_warnings():
            # v0 of MinAtar has all six actions and v1 the minimal set; neither is out of date.
            warnings.filterwarnings("ignore", ".*MinAtar/.* is out of date", DeprecationWarning)
            vector = build()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} could not be made: {type(error).__name__}: {error}") from error
    return Envs(vector, name)


def is_atari(env: str) -> bool:
    return env.startswith("ALE/")


def _find(env: str) -> Callable[[], gym.Env[Any, Any]] | None:
    """The callable that `module:callable` names, or None for a Gymnasium id that exists."""
    if env.rpartition(":")[0]:
        factory = callables.find(env)
        if factory is not None:
            return factory
    prefix = next((prefix for prefix in PACKAGES if env.startswith(prefix)), "")
    if prefix and not any(name.startswith(prefix) for name in gym.registry):
        package, extra = PACKAGES[prefix]
        try:
            with contextlib.ExitStack() as stack:
                if package.startswith("minatar") and os.environ.get(LIGHT):
                    stack.enter_context(without_plots())
                module = importlib.import_module(package)
        except ImportError:
            package = package.partition(".")[0]
            raise UserError(f"{env} needs {package}; install it with: pip install 'veldt[{extra}]'.") from None
        if hasattr(module, "register_envs"):  # others register when imported
            module.register_envs()
    if env not in gym.registry and re.search("-v[0-9]$", env):
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # its old names, such as PongNoFrameskip-v4, are answered below
    try:
        gym.spec(env)
    except gym.error.Error:
        hint = did_you_mean(env.rpartition(":")[2], gym.registry)
        raise UserError(f"There is no environment {env!r}.{hint or ' Give a Gymnasium id, or module:callable.'}") from None
    if str(gym.spec(env).entry_point).startswith("ale_py") and not is_atari(env):
        game = re.split("NoFrameskip|Deterministic|-", env)[0]
        raise UserError(f"{env} gives raw screens; use ALE/{game}-v5, where Veldt skips, merges and shrinks frames.")
    return None


def _env_spec(env: VectorEnv[Any, Any, Any], name: str) -> EnvSpec:
    columns = _columns(env.single_observation_space, name)
    observation: Spec = {}
    for key, box in columns.items():
        # float64 observations are stored as float32: half the memory, and what the network computes with.
        dtype = np.dtype(np.float32) if box.dtype == np.float64 else np.dtype(box.dtype)
        observation[key] = spec(box.shape, dtype)
    space = env.single_action_space
    if isinstance(space, spaces.Discrete):
        action = spec((), np.int64)
    elif isinstance(space, spaces.MultiDiscrete):
        action = spec(space.shape, np.int64)
    elif isinstance(space, spaces.Box):
        action = spec(space.shape, np.float32)
    else:
        raise UserError(f"{name} has the action space {space}; Veldt takes Discrete, MultiDiscrete and Box.")
    return EnvSpec(name, observation, action, space)


def _columns(space: spaces.Space[Any], name: str) -> dict[str, spaces.Box]:
    boxes = {f"obs/{key}": x for key, x in space.spaces.items()} if isinstance(space, spaces.Dict) else {"obs": space}
    for key, box in boxes.items():
        if not isinstance(box, spaces.Box):
            raise UserError(
                f"{name} has the observation space {box} ({key}); Veldt takes Box, and Dict of Box: wrap the environment, "
                "for example with gymnasium.wrappers.FlattenObservation."
            )
    return {key: box for key, box in boxes.items() if isinstance(box, spaces.Box)}


def _flat(bounds: tuple[bool, Array | None, Array | None], column: ArraySpec) -> tuple[Array, Array] | None:
    """Lowest and highest value of each number of an observation, for those of floats."""
    finite, low, high = bounds
    if not finite or column.dtype.itemsize < 4:
        return None
    ends = ((-np.inf if x is None else x) * sign for x, sign in ((low, 1), (None if high is None else -high, -1)))
    flat_low, flat_high = (np.broadcast_to(x, column.shape).astype(column.dtype).ravel() for x in ends)
    return flat_low, flat_high


@njit("b1(f4[:], b1[:], b1[:], b1[:], f4[::1], b1[:,::1])")
def _flags(reward: Array, terminated: Array, truncated: Array, last_before: Array, discount: Array, flags: Array) -> bool:
    """Fills in discount, first, last and valid; whether all rewards are finite."""
    discount[:] = np.logical_not(terminated)
    flags[0] = last_before
    flags[1] = np.logical_or(terminated, truncated)
    flags[2] = True
    return bool(np.isfinite(reward).all())


@njit(["b1(f4[:,:], f4[::1], f4[::1])", "b1(f8[:,:], f8[::1], f8[::1])"])
def _inside(x: Array, low: Array, high: Array) -> bool:
    """Whether all of x [n, size] is finite and within bounds [size]."""
    return bool(((x >= low) & (x <= high) & np.isfinite(x)).all())


def _bounds(box: spaces.Box) -> tuple[bool, Array | None, Array | None]:
    """(can be not finite, low, high); no bounds where every value of the dtype is inside. A little slack for rounding."""
    floating = np.issubdtype(box.dtype, np.floating)
    if floating:
        if not (np.isfinite(box.low).any() or np.isfinite(box.high).any()):
            return True, None, None
        with np.errstate(over="ignore"):  # beyond the largest float lies infinity, which bounds nothing
            return True, box.low - 1e-4 * np.maximum(1, abs(box.low)), box.high + 1e-4 * np.maximum(1, abs(box.high))
    if box.dtype == np.bool_:
        return False, None, None
    limits = np.iinfo(str(box.dtype))
    if (box.low == limits.min).all() and (box.high == limits.max).all():
        return False, None, None
    return False, box.low, box.high
