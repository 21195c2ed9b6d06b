"""What is built on a torso: heads, the LSTM, whose state is reset where an episode begins, and networks that have one."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from veldt.nets.torsos import OneHot, as_float, each, is_picture, on_device, rows_of
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, spec

H, C, TAKEN = "state/h", "state/c", "state/taken"  # recorded columns: the LSTM's state, and the last action as its input


class NormedMLP(nn.Module):
    """Linear, layer norm, tanh; then linear layers with ReLU, and a linear output: [B, inputs] -> [B, outputs].

    The output layer is initialized near 0 (Lillicrap et al. 2016), and so is a tanh or a value computed from it.
    """

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        sizes = (inputs, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norm = nn.LayerNorm(sizes[1]) if hidden else nn.Identity()
        self.output = nn.Linear(sizes[-1], outputs)
        for parameter in self.output.parameters():
            nn.init.uniform_(parameter, -3e-3, 3e-3)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(self.norm(layer(x))) if i == 0 else F.relu(layer(x))
        y: Tensor = self.output(x)
        return y


class Vector(nn.Module):
    """Observations that are no images, as one vector [B, D] in the order of their names; choices are one-hot."""

    def __init__(self, env: EnvSpec, history: int, stacked: tuple[str, ...]) -> None:
        super().__init__()
        names = sorted(name for name in env.observation if not is_picture(env, name))
        self.keys = [name.removeprefix("obs/") for name in names]
        self.choices = [name.removeprefix("obs/") for name in names if name in env.categories]
        rows = {key: history if not stacked or key in stacked else 1 for key in self.keys}
        sizes = {name.removeprefix("obs/"): x for name, x in env.categories.items()}
        self.encoders = nn.ModuleList(OneHot(sizes[key], rows[key]) for key in self.choices)

    def forward(self, obs: Any) -> Tensor:
        obs, encode = obs if isinstance(obs, dict) else {"obs": obs}, dict(zip(self.choices, self.encoders, strict=True))
        parts = [encode[key](obs[key]) if key in encode else rows_of(as_float(obs[key])) for key in self.keys]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class QHead(nn.Module):
    """[..., features] -> [..., actions]. Dueling: q = v + a - mean over actions of a (Wang et al. 2016).

    With `hidden`, value and advantages each have a hidden layer of that size: Wang et al.'s have 512 on the convolutions.
    """

    def __init__(self, features: int, actions: int, dueling: bool, hidden: int = 0) -> None:
        super().__init__()
        self.advantage = self._stream(features, hidden, actions)
        self.value = self._stream(features, hidden, 1) if dueling else None

    def _stream(self, features: int, hidden: int, outputs: int) -> nn.Module:
        if not hidden:
            return nn.Linear(features, outputs)
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(x)
        if self.value is None:
            return advantage
        value: Tensor = self.value(x)
        return value + advantage - advantage.mean(-1, keepdim=True)


class QNetwork(nn.Sequential):
    """A torso and a head: observations [B, ...] -> action values [B, actions]."""

    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__(OrderedDict(torso=torso, head=head))


class LSTM(nn.Module):
    """A recurrent core whose state is reset to zero where an episode begins: [B, T, inputs] -> [B, T, size].

    The gates are in torch's order: input, forget, cell, output. The forget gate's bias is initialized to 1 (open).
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(inputs, size, batch_first=True)
        with torch.no_grad():
            bias = self.cell.bias_ih_l0
            assert isinstance(bias, nn.Parameter)
            bias[size : 2 * size] += 1

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and the state after the rows, from the state h, c [B, size] before them; no episode begins here."""
        y, (h, c) = self.cell(x, (h[None], c[None]))
        return y, h[0], c[0]

    def outputs(self, x: Tensor, h: Tensor, c: Tensor, first: Array | Tensor | None) -> Tensor:
        """Only the outputs. Where `first` [B, T] is set, the state before that row is zero; None: nowhere.

        torch's LSTM cannot reset its state in a sequence, so each episode becomes its own sequence. How many there are, the
        host has to know; where `first` is a tensor it need not, and the LSTM runs row by row.
        """
        if isinstance(first, Tensor):
            return torch.stack(list(self._by_row(x, h, c, first)[0]), 1)
        if first is None or not first.any():
            return self.forward(x, h, c)[0]
        rows, place, lane, fresh = (on_device(a, x.device) for a in episodes(first))
        h, c = (s[lane].masked_fill(fresh[:, None], 0) for s in (h, c))
        y: Tensor = self.cell(x.flatten(0, 1)[rows], (h[None], c[None]))[0]
        return y.flatten(0, 1)[place]

    def after(self, x: Tensor, h: Tensor, c: Tensor, first: Array | Tensor | None) -> tuple[Tensor, Tensor]:
        """Only the state after the last row. It depends on the last episode alone."""
        if isinstance(first, Tensor):
            return self._by_row(x, h, c, first)[1:]
        if first is None or not first.any():
            return self.forward(x, h, c)[1:]
        steps, began = first.shape[1], np.asarray(first.any(1))
        begin = np.where(began, steps - 1 - first[:, ::-1].argmax(1), 0)  # [B], its first row here
        rows = np.minimum(begin[:, None] + np.arange(steps - begin.min()), steps - 1)
        fresh = on_device(began, x.device)[:, None]
        last = x.gather(1, on_device(rows, x.device)[:, :, None].expand(-1, -1, x.shape[2]))
        packed = pack_padded_sequence(last, torch.from_numpy(steps - begin), batch_first=True, enforce_sorted=False)
        _, (h, c) = self.cell(packed, (h.masked_fill(fresh, 0)[None], c.masked_fill(fresh, 0)[None]))
        return h[0], c[0]

    def _by_row(self, x: Tensor, h: Tensor, c: Tensor, first: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Row by row with static shapes, which a CUDA graph can hold: the outputs [B, size] of T rows, and the state."""
        cell: Any = self.cell
        gates = F.linear(x.transpose(0, 1), cell.weight_ih_l0, cell.bias_ih_l0 + cell.bias_hh_l0)  # [T, B, 4 size]
        stays, outputs = (~first).to(x).transpose(0, 1)[:, :, None], []  # [T, B, 1]
        for inputs, stay in zip(gates.unbind(), stays.unbind(), strict=True):
            h, c = lstm_cell(inputs, F.linear(h * stay, cell.weight_hh_l0), c * stay)
            outputs.append(h)
        return outputs, h, c


def lstm_cell(inputs: Tensor, recurrent: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The next h and c from the two parts of the gates [B, 4 size] and c."""
    if inputs.is_cuda:  # one kernel instead of eight; it exists only there
        h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(inputs, recurrent, c)
        return h, c
    i, f, g, o = (inputs + recurrent).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


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
    """The LSTM's input: features [B, T, F], the last action [B, T, E] and the last reward [B, T]."""
    return torch.cat((features, taken, reward[:, :, None]), 2)


@dataclass
class Rows:
    """The input of a network that may be recurrent: rows [B, T, ...]."""

    obs: Any
    taken: Tensor  # [B, T, E], the last action, encoded; zeros where an episode begins
    reward: Tensor  # [B, T], received on arriving at the row, as the LSTM gets it
    first: Array | Tensor | None  # [B, T], where an episode begins; None: nowhere

    def __getitem__(self, index: Any) -> "Rows":
        first = None if self.first is None else self.first[index]
        return Rows(each(self.obs, lambda x: x[index]), self.taken[index], self.reward[index], first)


class Recurrent(nn.Module):
    """A torso, an LSTM over its features, the last action and the last reward, and a head."""

    torso: nn.Module
    core: LSTM | None  # None: the head is on the torso
    head: nn.Module
    taken: str  # the column that holds the last action
    encode: Callable[[Tensor], Tensor]  # that column as the LSTM's input: [...] -> [..., E]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def out(self, x: Tensor) -> Any:
        """What the network gives for the features [B, T, F]."""
        return self.head(x)

    def forward(self, rows: Rows, state: dict[str, Tensor]) -> Any:
        """From the state before the first row."""
        x = self._input(rows)
        return self.out(x if self.core is None else self.core.outputs(x, state[H], state[C], rows.first))

    def step(self, rows: Rows, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The same for rows in which no episode begins, and the LSTM's state after them."""
        assert self.core is not None
        y, h, c = self.core(self._input(rows), state[H], state[C])
        return self.out(y), {H: h, C: c}

    @torch.no_grad()
    def burn_in(self, rows: Rows, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after the rows, without a gradient."""
        if self.core is None or not rows.reward.shape[1]:
            return state
        h, c = self.core.after(self._input(rows), state[H], state[C], rows.first)
        return {H: h, C: c}

    def _input(self, rows: Rows) -> Tensor:
        features: Tensor = self.torso(each(rows.obs, lambda x: x.flatten(0, 1))).unflatten(0, rows.reward.shape)
        return features if self.core is None else recurrent_input(features, rows.taken, rows.reward)


def state_spec(lstm: int, encoded: int) -> Spec:
    """The recorded columns of an LSTM of this size, and of its last action; none where the size is 0."""
    widths = {H: lstm, C: lstm, TAKEN: encoded} if lstm else {}
    return {name: spec((width,), np.float32) for name, width in widths.items()}
