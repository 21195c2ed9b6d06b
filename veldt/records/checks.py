"""Checks of what an actor sends that the run did not start: within these bounds, nothing can harm the run's processes.

A check returns why a message is refused, or an empty string. Measured with blocks of 8 steps of a small
environment: 75 us a block, 20 us a step record.
"""

from typing import Any

import numpy as np
from gymnasium import spaces

from veldt.records.block import Schema, window_items
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, ArraySpec, Tree

LARGEST = 1e8  # of a float: its square, summed over a batch, is still a float32
LARGEST_INT = 1 << 53
LARGEST_SEEN = 1 << 32  # of an integer that the network computes with

Bounds = tuple[Any, Any] | None  # lowest and highest values of one row; None: all of the dtype are allowed


def env_bounds(env: EnvSpec) -> dict[str, Bounds]:
    """Of the columns of a step and of the action. Observations may leave their space, as those of many environments do."""
    found = {name: _bounds_of(column, LARGEST_SEEN) for name, column in env.step.items()}
    found |= {name: (np.zeros(shape, np.int64), top) for name, (shape, top) in _choices(env).items()}
    return found | {"discount": (0.0, 1.0), "action": _action_bounds(env)}


def _choices(env: EnvSpec) -> dict[str, tuple[tuple[int, ...], Array]]:
    """By column of choices: its shape, and the highest of each."""
    shapes = {name: env.observation[name].shape for name in env.categories}
    return {name: (shape, np.reshape(env.categories[name], shape) - 1) for name, shape in shapes.items()}


def _action_bounds(env: EnvSpec) -> Bounds:
    """Continuous actions are clipped by the environment, and may be recorded as they were before."""
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return 0, int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return np.zeros(space.shape, np.int64), np.asarray(space.nvec) - 1
    return _bounds_of(env.action)


def _bounds_of(column: ArraySpec, most: int = LARGEST_INT) -> Bounds:
    kind = column.dtype.kind
    if kind == "f":
        limit = min(LARGEST, float(np.finfo(column.dtype).max))
        return -limit, limit
    return (-most, most) if column.dtype.itemsize == 8 and kind in "iu" else None


def _outside(name: str, x: Array, bounds: Bounds) -> str:
    """NaN compares as False."""
    if x.dtype.kind == "b":
        return f"{name!r} has booleans that are neither 0 nor 1" if x.size and x.view(np.uint8).max() > 1 else ""
    if bounds is None or not x.size:
        return ""
    low, high = bounds
    if isinstance(low, np.ndarray):
        inside = bool(((x >= low) & (x <= high)).all())
    else:
        inside = bool(x.min() >= low and x.max() <= high)
    return "" if inside else f"{name!r} has values that are not finite or out of bounds"


class StepCheck:
    """Of a step record [n]."""

    def __init__(self, env: EnvSpec, n: int) -> None:
        self.steps = n
        bounds = env_bounds(env)
        self._bounds = [(name, bounds[name]) for name in env.step]

    def __call__(self, message: Tree) -> str:
        return next((why for name, bounds in self._bounds if (why := _outside(name, message[name], bounds))), "")


class ActionCheck:
    """Of the actions [n] that a run sends to an actor."""

    steps = 0

    def __init__(self, env: EnvSpec) -> None:
        self._bounds = _action_bounds(env)

    def __call__(self, message: Tree) -> str:
        return _outside("action", message["action"], self._bounds) if "action" in message else "a reply without actions"


class BlockCheck:
    """Of `Store.insert(block, priorities)` as a message (`storing.store.BlockCodec`)."""

    def __init__(self, schema: Schema, env: EnvSpec) -> None:
        self.schema, self.steps = schema, schema.fresh
        known = env_bounds(env)
        self._rows = {name: known[name] if name in known else _bounds_of(c) for name, c in schema.layout.spec.items()}
        self._starts = {name: _bounds_of(column) for name, column in schema.start_layout.spec.items()}

    def __call__(self, message: Tree) -> str:
        schema, items, priorities = self.schema, message["items"], message.get("priorities")
        rows, starts = (
            layout.columns(layout.received(message, prefix))
            for layout, prefix in ((schema.layout, "rows/"), (schema.start_layout, "starts/"))
        )
        for columns, bounds in ((rows, self._rows), (starts, self._starts)):
            for name, x in columns.items():
                if why := _outside(name, x, bounds[name]):
                    return why
        if priorities is not None and not (priorities.min() >= 0 and priorities.max() <= LARGEST):
            return "'priorities' are negative, not finite or too large"
        if not items.any() or (items & ~window_items(rows["valid"], rows["last"], schema.window, schema.fresh)).any():
            return "a block has no items, or items without a step to train on"
        return ""
