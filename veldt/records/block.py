"""Block: an immutable run of consecutive steps of one environment. Window: what a loss reads of it.

    block rows   [ before | K fresh steps | after ]        before = history - 1 + burn_in
    window rows  [ before | length | lookahead ]           after  = length - stride + lookahead

A window that starts at fresh step o trains the rows of steps o ... o + length - 1. Starts are multiples of the stride,
so a block has K / stride of them. Context missing at the ends of a stream is padding with valid=False.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from veldt.errors import UserError
from veldt.records.step import EnvSpec, is_observation
from veldt.records.tree import Array, Layout, Spec, Tree, namespace


@dataclass(frozen=True)
class Window:
    history: int = 1  # the current row and history - 1 before it
    burn_in: int = 0
    length: int = 1
    lookahead: int = 0
    stride: int = 1

    def __post_init__(self) -> None:
        assert self.history >= 1 and self.burn_in >= 0 and self.lookahead >= 0, self
        assert 1 <= self.stride <= self.length, self

    @property
    def before(self) -> int:
        return self.history - 1 + self.burn_in

    @property
    def after(self) -> int:
        return self.length - self.stride + self.lookahead

    @property
    def rows(self) -> int:
        """T, the rows that one sample of this window has."""
        return self.before + self.length + self.lookahead

    @property
    def slices(self) -> bool:
        """Only one step of a window trains, so a store blanks what lies before its episode: stacks are plain slices."""
        return self.length == 1 and self.burn_in == 0

    def block_rows(self, fresh: int) -> int:
        assert fresh > 0 and fresh % self.stride == 0, (fresh, self)
        return self.before + fresh + self.after

    def starts(self, fresh: int) -> int:
        return fresh // self.stride


class Schema:
    """The shape of every block of a run: columns for each row, columns for each window start, the window, and K."""

    def __init__(self, rows: Spec, window: Window, fresh: int, starts: Spec | None = None) -> None:
        self.layout = Layout(rows)
        self.start_layout = Layout(starts or {})
        self.window = window
        self.fresh = fresh
        self.rows = window.block_rows(fresh)  # R
        self.starts = window.starts(fresh)  # S

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.rows * self.layout.nbytes + self.starts * self.start_layout.nbytes


class BlockId(NamedTuple):
    """Names a block once and for all: a block sent twice is recognised by it."""

    actor: int
    incarnation: int
    sequence: int


@dataclass(frozen=True)
class Block:
    """Storages of steps and of window starts; `items[s]` says whether the s-th start can be trained on."""

    id: BlockId
    schema: Schema
    rows: Tree  # [before + K + after]
    starts: Tree  # [K / stride], recurrent state before the first row after the history
    items: Array  # bool [K / stride]

    def columns(self) -> Tree:
        return self.schema.layout.columns(self.rows)


def trainable(valid: Any, last: Any, lookahead: int) -> Any:
    """Which steps can be learned from: [..., T] -> [..., T - lookahead], numpy or torch.

    A step trains if it took an action (not last, not padding) and the rows its return needs are there: `lookahead`
    valid rows, or fewer if the episode ends within them.
    """
    size = valid.shape[-1] - lookahead
    reaches = valid[..., lookahead : lookahead + size]
    for k in range(lookahead - 1, 0, -1):
        row = slice(k, k + size)
        reaches = valid[..., row] & (last[..., row] | reaches)
    return valid[..., :size] & ~last[..., :size] & reaches


def window_items(valid: Array, last: Array, window: Window, fresh: int) -> Array:
    """Which window starts of block rows [..., R] hold at least one trainable step: bool [..., fresh / stride]."""
    steps = trainable(valid, last, window.lookahead)[..., window.before :]
    items = np.zeros((*valid.shape[:-1], window.starts(fresh)), np.bool_)
    for j in range(window.length):
        items |= steps[..., j : j + fresh : window.stride]
    return items


def check_stacked(env: EnvSpec, stacked: tuple[str, ...]) -> None:
    """Raises a UserError for keys that are to be stacked and are not there."""
    for key in stacked:
        if f"obs/{key}" not in env.observation:
            known = ", ".join(name.removeprefix("obs/") for name in env.observation)
            raise UserError(f"{env.name} has no observation {key!r} to stack, only {known}.")


def stack_history(x: Any, first: Any, valid: Any, at: int, history: int) -> Any:
    """The rows at-history+1 ... at of x [B, T, ...] as [B, history, ...], numpy or torch.

    What lies before the episode's first row, or beyond a row that is not valid, reads as zero.
    """
    x = x[:, at - history + 1 : at + 1]
    if history == 1:
        return x
    xp = namespace(x)
    same = xp.ones_like(first[:, :history])  # [B, history], same[j]: row j belongs to the episode of the row `at`
    for j in range(history - 2, -1, -1):
        row = at - history + 1 + j
        same[:, j] = same[:, j + 1] & ~first[:, row + 1] & valid[:, row]
    if xp is np and same.all():
        return x
    return x * same.reshape(*same.shape, *[1] * (x.ndim - 2))


def stack_windows(x: Any, first: Any, valid: Any, history: int) -> Any:
    """The stacks of every row that has history - 1 rows before it: torch [B, T, ...] -> [B, T - history + 1, history, ...].

    What lies before the episode's first row, or beyond a row that is not valid, reads as zero, as in `stack_history`.
    """
    rows = x.shape[1] - history + 1
    stacks = x.unfold(1, history, 1).movedim(-1, 2)  # a view
    same = first.new_ones(len(first), rows, history)  # [B, T - history + 1, history], of the episode of its row
    for j in range(history - 2, -1, -1):
        same[:, :, j] = same[:, :, j + 1] & ~first[:, j + 1 : j + 1 + rows] & valid[:, j : j + rows]
    return stacks * same.reshape(*same.shape, *[1] * (x.ndim - 2))


def observation(rows: Any, at: int, history: int, stacked: tuple[str, ...] = (), blanked: bool = False) -> Any:
    """What a network sees at row `at` of rows [B, T, ...]: a tensor, or a dict of them for a Dict observation.

    Shapes are [B, *space.shape], and [B, history, *space.shape] for stacked keys when history > 1. `stacked` names the
    keys of a Dict observation that history stacks; none given means all. `blanked`: what lies before the episode is zero
    already (`Window.slices`), so that a stack is a view.
    """

    def see(name: str) -> Any:
        if history > 1 and (not stacked or name.removeprefix("obs/") in stacked):
            if blanked:
                return rows[name][:, at - history + 1 : at + 1]
            return stack_history(rows[name], rows["first"], rows["valid"], at, history)
        return rows[name][:, at]

    return _by_key(rows, see)


def observations(rows: Any, history: int, stacked: tuple[str, ...] = ()) -> Any:
    """What a network sees at every row from history - 1 on, as in `observation`: [B, T - history + 1, ...]."""

    def see(name: str) -> Any:
        if history > 1 and (not stacked or name.removeprefix("obs/") in stacked):
            return stack_windows(rows[name], rows["first"], rows["valid"], history)
        return rows[name][:, history - 1 :]

    return _by_key(rows, see)


def _by_key(rows: Any, see: Callable[[str], Any]) -> Any:
    if "obs" in rows:
        return see("obs")
    return {name.removeprefix("obs/"): see(name) for name in rows if is_observation(name)}
