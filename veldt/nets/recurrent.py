"""The LSTM, whose state is reset where an episode begins, and its input."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from veldt.nets.tensors import on_device
from veldt.records.tree import Array

H, C, TAKEN = "state/h", "state/c", "state/taken"  # recorded columns: the LSTM's state, and the last action as its input


class LSTM(nn.Module):
    """A recurrent core whose state is reset to zero where an episode begins: [B, T, inputs] -> [B, T, size].

    The gates are in torch's order: input, forget, cell, output. The forget gate's bias is initialized to 1 (open).
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.cell = nn.LSTM(inputs, size, batch_first=True)
        with torch.no_grad():
            bias = self.cell.bias_ih_l0
            assert isinstance(bias, nn.Parameter)
            bias[size : 2 * size] += 1

    def forward(self, x: Tensor, h: Tensor, c: Tensor, first: Array | None) -> tuple[Tensor, Tensor, Tensor]:
        """Starts from the state h, c [B, size] before the first row; returns outputs and the state after the last row.

        Where `first` [B, T] is set, the state before that row is zero. None: no episode begins in these rows.
        """
        if first is not None and first.any():
            return self.outputs(x, h, c, first), *self.after(x, h, c, first)
        y, (h, c) = self.cell(x, (h[None], c[None]))
        return y, h[0], c[0]

    def outputs(self, x: Tensor, h: Tensor, c: Tensor, first: Array | None) -> Tensor:
        """Only the outputs. torch's LSTM cannot reset its state in a sequence, so each episode becomes its own sequence."""
        if first is None or not first.any():
            y: Tensor = self.cell(x, (h[None], c[None]))[0]
            return y
        rows, place, lane, fresh = (on_device(a, x.device) for a in episodes(first))
        h, c = (s[lane].masked_fill(fresh[:, None], 0) for s in (h, c))
        y, _ = self.cell(x.flatten(0, 1)[rows], (h[None], c[None]))
        y = y.flatten(0, 1)[place]
        return y

    def after(self, x: Tensor, h: Tensor, c: Tensor, first: Array | None) -> tuple[Tensor, Tensor]:
        """Only the state after the last row. It depends on the last episode alone."""
        if first is None or not first.any():
            _, (h, c) = self.cell(x, (h[None], c[None]))
            return h[0], c[0]
        steps = first.shape[1]
        begin = np.where(first.any(1), steps - 1 - first[:, ::-1].argmax(1), 0)  # [B], its first row here
        rows = np.minimum(begin[:, None] + np.arange(steps - begin.min()), steps - 1)
        began = np.asarray(first.any(1))
        fresh = on_device(began, x.device)[:, None]
        last = x.gather(1, on_device(rows, x.device)[:, :, None].expand(-1, -1, x.shape[2]))
        packed = pack_padded_sequence(last, torch.from_numpy(steps - begin), batch_first=True, enforce_sorted=False)
        _, (h, c) = self.cell(packed, (h.masked_fill(fresh, 0)[None], c.masked_fill(fresh, 0)[None]))
        return h[0], c[0]


def episodes(first: Array) -> tuple[Array, Array, Array, Array]:
    """Splits rows [B, T] at episode starts into E sequences (whole or partial episodes) of at most L rows.

    Returns rows [E, L], the index of each into the flattened rows (arbitrary beyond a sequence's end); place [B, T], the
    index of each row into the flattened sequences; lane [E], the b of each; fresh [E], whether its episode begins here.
    """
    begins = first.copy()
    begins[:, 0] = True
    at = np.flatnonzero(begins)  # in flattened rows
    length = int(np.diff(at, append=first.size).max())
    rows = np.minimum(at[:, None] + np.arange(length), first.size - 1)
    number = begins.reshape(-1).cumsum() - 1  # of the episode that a row belongs to
    place = number * length + np.arange(first.size) - at[number]
    return rows, place.reshape(first.shape), at // first.shape[1], first.reshape(-1)[at]


def recurrent_input(features: Tensor, taken: Tensor, reward: Tensor) -> Tensor:
    """The LSTM's input: features [B, T, F], the last action [B, T, E] and the last reward [B, T], clipped to [-1, 1]."""
    return torch.cat((features, taken, reward.clamp(-1, 1)[:, :, None]), 2)
