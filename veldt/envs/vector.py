"""Envs: a Gymnasium vector environment as a source of step records (`veldt.records.step`)."""

import logging
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from veldt.compiled import njit
from veldt.errors import EnvError, UserError
from veldt.records.adapter import Adapter, Column
from veldt.records.masks import MASK
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree

RETURN_ENDS = "veldt.return_ends"  # key of `info`: bool [n], where the return ends though the episode continues
BAD_IN_A_ROW = 100  # bad rows of one environment, without a good one but of resets between them, before the run stops

log = logging.getLogger("veldt")


class Envs:
    """n environments stepped together. `reset` and `step` return step records [n] (see `veldt.records.step`).

    The vector environment must reset in mode NEXT_STEP. Where its `info` has RETURN_ENDS, the discount is 0 there: a lost
    life in Atari ends the return, not the episode.

    An observation or a reward that is not finite is dropped: it is zeros, its row has valid=False, and `bad` counts it. A
    finite reward stays: it belongs to the return. After 100 bad rows of one environment the run stops, if there was no good
    one between them; the observation after a reset is not one.

    A finite observation outside its space is kept, or clipped if `clip` says so; the first one is logged. One that is none
    of the choices of its Discrete or MultiDiscrete space is dropped.

    Where actions are masked, a row without a legal action is dropped too, but for the last of an episode.

    `seen` are the other arguments of an `Adapter`, which makes columns of observations.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], name: str, clip: bool = False, **seen: Any) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UserError(f"{name} resets in mode {mode}, but Veldt needs NEXT_STEP autoreset; build it with that.")
        self.env, self.name, self.n, self.clip = env, name, env.num_envs, clip
        self.adapter = adapter = Adapter(env.single_observation_space, env.single_action_space, name, **seen)
        self.spec = EnvSpec.of(name, adapter)
        self.bad = 0  # rows that were dropped
        self._began = False
        self._bad_in_a_row = np.zeros(self.n, np.int64)
        self._bounds = {key: _bounds(column) for key, column in adapter.columns.items()}
        self._outside = set[str]()  # columns that were outside their space
        self._last = np.zeros(self.n, np.bool_)

    def reset(self, seed: int) -> Tree:
        try:
            # Environment i is seeded with seed + i, which must stay an int32.
            raw, info = self.env.reset(seed=min(seed % 2**31, 2**31 - self.n))
        except UserError:
            raise
        except Exception as error:
            raise EnvError(f"{self.name}: reset raised {type(error).__name__}: {error}") from error
        self._last = np.ones(self.n, np.bool_)
        none = np.zeros(self.n, np.bool_)
        step = self._record(raw, info, np.zeros(self.n), none, none)
        self._last = step["last"]
        if not self._began and not step["valid"].any():
            raise UserError(f"{self.name}: the observation after reset {self._why}; fix the environment or its space.")
        self._began = True
        return step

    def step(self, action: Array) -> Tree:
        """Applies one action per environment. Where the previous record was last, it is ignored: a new episode begins."""
        try:
            raw, reward, terminated, truncated, info = self.env.step(self.adapter.action(action))
        except UserError:
            raise
        except Exception as error:
            raise EnvError(f"{self.name}: step raised {type(error).__name__}: {error}") from error
        step = self._record(raw, info, reward, terminated, truncated)
        if RETURN_ENDS in info:
            step["discount"][info[RETURN_ENDS]] = 0.0
        self._last = step["last"]
        return step

    def begin(self, lane: int, seed: int) -> None:
        """The next step of this environment begins an episode with this seed, whatever runs there. For environments that
        were made `separate`, which rest otherwise: the record of one that rests is its last one, again."""
        self.env.begin(lane, seed % 2**31)  # type: ignore[attr-defined]
        self._last = self._last.copy()
        self._last[lane] = True

    def rest(self, lane: int) -> None:
        """The episode that runs there ends here."""
        self.env.rest(lane)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.env.close()

    def _record(self, raw: Any, info: Any, reward: Array, terminated: Array, truncated: Array) -> Tree:
        step: Tree = {}
        bad: Array | None = None
        for name, column in self.adapter.columns.items():
            x = column.read(raw)
            assert x.shape == (self.n, *column.shape), (self.name, name, x.shape, column.shape)
            x, infinite = self._checked(name, x)
            step[name] = column.encode(x)
            if infinite is not None:
                bad = infinite if bad is None else bad | infinite
        step["reward"] = np.asarray(reward, np.float32)
        step["discount"] = discount = np.empty(self.n, np.float32)
        step["first"], step["last"], step["valid"] = flags = np.empty((3, self.n), np.bool_)
        if not _flags(step["reward"], terminated, truncated, self._last, discount, flags):
            self._why = f"came with the reward {reward}"
            bad = ~np.isfinite(step["reward"]) | (False if bad is None else bad)
        if self.spec.mask:
            bad = self._mask(step, raw, info, bad)
        if bad is None:
            if np.count_nonzero(self._bad_in_a_row):
                self._bad_in_a_row[~step["first"]] = 0
        else:
            self._blank(step, bad)
        return step

    def _mask(self, step: Tree, raw: Any, info: Any, bad: Array | None) -> Array | None:
        """Adds the column of legal actions. A row without any is bad, unless it is the last of its episode."""
        masks = self.adapter.masks
        assert masks is not None
        legal = self.adapter.legal(raw, info, self.n)
        none = ~masks.has_choice(legal)
        if none.any():
            legal = legal | none[:, None]
            none &= ~step["last"]
            if none.any():
                self._why = "came with an action_mask that leaves no legal action"
                bad = none if bad is None else bad | none
        step[MASK] = legal
        return bad

    def _checked(self, name: str, x: Array) -> tuple[Array, Array | None]:
        """A column as it is recorded, and which environments' observations in it are not finite; None: none."""
        bounds = self._bounds[name]
        if bounds is None:
            return x, None
        (low, high), flat = bounds, x.reshape(self.n, -1)
        if x.dtype == np.float32 and _inside(flat, low, high):
            return x, None
        finite = np.isfinite(flat)
        outside = finite & ((flat < low) | (flat > high))
        if self.adapter.columns[name].sizes:
            if not outside.any():
                return x, None
            self._why = f"is none of the choices of {self.adapter.columns[name].space} ({name})"
            return x.clip(0), np.asarray(outside.any(1))
        if outside.any():
            box: Any = self.adapter.columns[name].space
            self._warn_outside(name, box, x, outside.reshape(x.shape))
            if self.clip:
                x = self.adapter.columns[name].clipped(x)
            else:  # from now on only numbers that are not finite matter
                self._bounds[name] = _unbounded(x.dtype, flat.shape[1])
        if finite.all():
            return x, None
        where = np.argwhere(~finite.reshape(x.shape))[0]
        self._why = f"is not finite ({name}{where[1:].tolist()} = {x[tuple(where)]})"
        return x, np.asarray(~finite.all(1))

    def _warn_outside(self, name: str, box: spaces.Box, x: Array, outside: Array) -> None:
        if name in self._outside:
            return
        self._outside.add(name)
        where = tuple(np.argwhere(outside)[0].tolist())
        values = (x[where], box.low[where[1:]], box.high[where[1:]])
        what = "clipped" if self.clip else "kept; --clip-observations clips them"
        place = f"{name}{list(where[1:])}"
        log.warning("%s: %s = %g is outside its space, %g to %g; such observations are %s", self.name, place, *values, what)

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


def _unbounded(dtype: np.dtype[Any], size: int) -> tuple[Array, Array] | None:
    return (np.full(size, -np.inf, dtype), np.full(size, np.inf, dtype)) if dtype.kind == "f" else None


def _bounds(column: Column) -> tuple[Array, Array] | None:
    """Lowest and highest values [size], with slack for rounding; None if every value of the dtype is inside."""
    box, dtype = column.space, column.raw
    if column.sizes:
        return np.zeros(len(column.sizes), np.int64), np.array(column.sizes) - 1
    if not isinstance(box, spaces.Box):
        return None
    low, high = box.low.ravel(), box.high.ravel()
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # a bound that overflows becomes infinite
            low, high = low - 1e-4 * np.maximum(1, abs(low)), high + 1e-4 * np.maximum(1, abs(high))
            return low.astype(dtype), high.astype(dtype)
    limits = None if dtype == np.bool_ else np.iinfo(dtype)
    if limits is None or ((low == limits.min).all() and (high == limits.max).all()):
        return None
    return low, high
