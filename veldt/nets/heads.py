"""Heads and the networks that are made of them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class QHead(nn.Module):
    """[..., features] -> [..., actions]. Dueling: q = v + a - mean over actions of a (Wang et al. 2016).

    With `hidden`, value and advantages each have a hidden layer of that size.
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
