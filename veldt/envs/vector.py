"""Envs: a Gymnasium vector environment as a source of step records (`veldt.records.step`)."""

import logging
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from veldt.compiled import njit
from veldt.errors import EnvError, UserError
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, ArraySpec, Tree, spec

RETURN_ENDS = "veldt.return_ends"  # key of `info`: bool [n], where the return ends though the episode continues
BAD_IN_A_ROW = 100  # bad rows of one environment, without a good one but of resets between them, before the run stops

log = logging.getLogger("veldt")


class Envs:
    """n environments stepped together. `reset` and `step` return step records [n] (see `veldt.records.step`).

    The vector environment must reset in mode NEXT_STEP. Where its `info` has RETURN_ENDS, the discount is 0 there: a lost
    life in Atari ends the return, not the episode.

    An observation that is not finite or outside its space, or a reward that is not finite, is dropped: it is zeros, its row
    has valid=False, and `bad` counts it. A finite reward stays: it belongs to the return. After 100 bad rows of one
    environment the run stops, if there was no good one between them; the observation after a reset is not one.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], name: str) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(f"{name} resets in mode {mode}, but Veldt needs NEXT_STEP autoreset; build it with that.")
        self.env, self.name, self.n = env, name, env.num_envs
        boxes = _boxes(env.single_observation_space, name)
        # float64 observations are stored as float32: half the size, and what the network computes with.
        dtypes = {key: np.dtype(np.float32 if x.dtype == np.float64 else x.dtype) for key, x in boxes.items()}
        observation = {key: spec(x.shape, dtypes[key]) for key, x in boxes.items()}
        self._bounds = {key: _bounds(x, dtypes[key]) for key, x in boxes.items()}
        bounds = {key: x for key, x in self._bounds.items() if x is not None}
        self.spec = EnvSpec(name, observation, _action(env.single_action_space, name), env.single_action_space, bounds)
        self.bad = 0  # rows that were dropped
        self._began = False
        self._bad_in_a_row = np.zeros(self.n, np.int64)
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
        self._last = np.ones(self.n, np.bool_)
        step = self._record(raw, np.zeros(self.n), np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_))
        self._last = step["last"]
        if not self._began and not step["valid"].any():
            raise UserError(f"{self.name}: the observation after reset {self._why}; fix the environment or its space.")
        self._began = True
        return step

    def step(self, action: Array) -> Tree:
        """Applies one action per environment. Where the previous record was last, it is ignored: a new episode begins."""
        if self._first_action is not None:
            action = action + self._first_action
        if self._action_bounds is not None:
            action = np.clip(action, *self._action_bounds)
        try:
            raw, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise EnvError(f"{self.name}: step raised {type(error).__name__}: {error}") from error
        step = self._record(raw, reward, terminated, truncated)
        if RETURN_ENDS in info:
            step["discount"][info[RETURN_ENDS]] = 0.0
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
                self._bad_in_a_row[~step["first"]] = 0
        else:
            self._blank(step, bad)
        return step

    def _outside(self, name: str, x: Array) -> Array | None:
        """Which environments' observations are not finite or out of bounds; None: none are."""
        bounds = self._bounds[name]
        if bounds is None:
            return None
        (low, high), flat = bounds, x.reshape(self.n, -1)
        if x.dtype == np.float32 and _inside(flat, low, high):
            return None
        good = ((flat >= low) & (flat <= high) & np.isfinite(flat)).reshape(x.shape)
        if good.all():
            return None
        where = np.argwhere(~good)[0]
        kind = "left its space" if np.isfinite(x[tuple(where)]) else "is not finite"
        self._why = f"{kind} ({name}{where[1:].tolist()} = {x[tuple(where)]})"
        return np.asarray(~good.reshape(self.n, -1).all(1))

    def _blank(self, step: Tree, bad: Array) -> None:
        if self.bad == 0:
            log.warning("%s: an observation %s; it is dropped and counted in bad_observations", self.name, self._why)
        self.bad += int(bad.sum())
        self._bad_in_a_row = np.where(bad, self._bad_in_a_row + 1, self._bad_in_a_row * step["first"])
        if self._bad_in_a_row.max() >= BAD_IN_A_ROW:
            raise UserError(
                f"{self.name}: {BAD_IN_A_ROW} observations in a row were bad, the last one {self._why}; "
                "fix the environment or its space."
            )
        for name in self.spec.observation:
            step[name] = step[name].copy()
            step[name][bad] = 0
        step["reward"] = np.where(np.isfinite(step["reward"]), step["reward"], np.float32(0))
        step["valid"][bad] = False


def _boxes(space: spaces.Space[Any], name: str) -> dict[str, spaces.Box]:
    """The observation space by column."""
    boxes = {f"obs/{key}": x for key, x in space.spaces.items()} if isinstance(space, spaces.Dict) else {"obs": space}
    for key, box in boxes.items():
        if not isinstance(box, spaces.Box):
            raise UserError(
                f"{name} has the observation space {box} ({key}); Veldt supports Box and Dict of Box: wrap it, "
                "for example with gymnasium.wrappers.FlattenObservation."
            )
    return cast(dict[str, spaces.Box], boxes)


def _action(space: spaces.Space[Any], name: str) -> ArraySpec:
    if isinstance(space, spaces.Discrete):
        return spec((), np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return spec(space.shape, np.int64)
    if isinstance(space, spaces.Box):
        return spec(space.shape, np.float32)
    raise UserError(f"{name} has the action space {space}; Veldt supports Discrete, MultiDiscrete and Box.")


@njit("b1(f4[:], b1[:], b1[:], b1[:], f4[::1], b1[:,::1])")
def _flags(reward: Array, terminated: Array, truncated: Array, last_before: Array, discount: Array, flags: Array) -> bool:
    """Fills in discount, first, last and valid. Returns whether all rewards are finite."""
    discount[:] = np.logical_not(terminated)
    flags[0] = last_before
    flags[1] = np.logical_or(terminated, truncated)
    flags[2] = True
    return bool(np.isfinite(reward).all())


@njit(["b1(f4[:,:], f4[::1], f4[::1])", "b1(f8[:,:], f8[::1], f8[::1])"])
def _inside(x: Array, low: Array, high: Array) -> bool:
    """Whether all of x [n, size] is finite and within bounds [size]."""
    return bool(((x >= low) & (x <= high) & np.isfinite(x)).all())


def _bounds(box: spaces.Box, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
    """Lowest and highest values [size], with slack for rounding; None if every value of the dtype is inside."""
    low, high = box.low.ravel(), box.high.ravel()
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # a bound that overflows becomes infinite
            low, high = low - 1e-4 * np.maximum(1, abs(low)), high + 1e-4 * np.maximum(1, abs(high))
            return low.astype(dtype), high.astype(dtype)
    limits = None if dtype == np.bool_ else np.iinfo(dtype)
    if limits is None or ((low == limits.min).all() and (high == limits.max).all()):
        return None
    return low, high
