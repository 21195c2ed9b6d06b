"""Block: an immutable run of consecutive steps of one environment. Window: what a loss reads of it.

    block rows   [ before | K fresh steps | after ]        before = history - 1 + burn_in
    window rows  [ before | length | lookahead ]           after  = length - stride + lookahead

A window that starts at fresh step o trains the rows of steps o ... o + length - 1. Starts are multiples of the stride,
so a block has K / stride of them. Context missing at the ends of a stream is padding with valid=False.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from veldt.records.tree import Array, Layout, Spec, Tree


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
        """Only one step of a window trains: a store then blanks the rows before its episode, and a stack is a slice."""
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


@dataclass(frozen=True)
class Block:
    """Storages of steps and of window starts; `items[s]` says whether the s-th start can be trained on."""

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
