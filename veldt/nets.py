"""Networks: torsos for vectors and pixels, and heads. Integers become floats here; uint8 is scaled to [0, 1]."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.step import EnvSpec
from veldt.tree import ArraySpec


class MLP(nn.Module):
    """Linear layers with ReLU between and after them: [B, ...] -> [B, hidden[-1]]."""

    def __init__(self, inputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        sizes = (inputs, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        x = as_float(x).reshape(len(x), -1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class NatureCNN(nn.Module):
    """Mnih et al. 2015: conv 32 8x8/4, 64 4x4/2, 64 3x3/1, linear 512. [B, channels, H, W] -> [B, 512].

    With `channels_last` it takes [B, ..., H, W, C] as cameras and renderers give it.
    """

    def __init__(self, channels: int, height: int, width: int, channels_last: bool = False) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.conv1 = nn.Conv2d(channels, 32, 8, 4)
        self.conv2 = nn.Conv2d(32, 64, 4, 2)
        self.conv3 = nn.Conv2d(64, 64, 3, 1)
        self.channels, self.height, self.width = channels, height, width
        with torch.no_grad():
            flat = self._convolve(torch.zeros(1, channels, height, width)).shape[1]
        self.linear = nn.Linear(flat, 512)
        self.features = 512

    def _convolve(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return F.relu(self.conv3(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = as_float(x.movedim(-1, -3) if self.channels_last else x)
        x = x.reshape(len(x), self.channels, self.height, self.width)
        return F.relu(self.linear(self._convolve(x)))


class Concat(nn.Module):
    """A torso for each key of a Dict observation; their features side by side."""

    def __init__(self, torsos: dict[str, nn.Module]) -> None:
        super().__init__()
        self.keys = list(torsos)
        self.torsos = nn.ModuleList(torsos.values())
        self.features = sum(features_of(torso) for torso in torsos.values())

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.cat([torso(x[key]) for key, torso in zip(self.keys, self.torsos, strict=True)], 1)


class QHead(nn.Module):
    """[B, features] -> [B, actions]. Dueling: q = v + a - mean over actions of a (Wang et al. 2016)."""

    def __init__(self, features: int, actions: int, dueling: bool) -> None:
        super().__init__()
        self.advantage = nn.Linear(features, actions)
        self.value = nn.Linear(features, 1) if dueling else None

    def forward(self, x: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(x)
        if self.value is None:
            return advantage
        value: Tensor = self.value(x)
        return value + advantage - advantage.mean(1, keepdim=True)


class QNetwork(nn.Module):
    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.torso, self.head = torso, head

    def forward(self, obs: Any) -> Tensor:
        q: Tensor = self.head(self.torso(obs))
        return q


def torso_for(env: EnvSpec, history: int, stacked: tuple[str, ...], hidden: tuple[int, ...]) -> nn.Module:
    """The Nature CNN for images of at least 36 x 36, an MLP for all else; both side by side for a Dict."""
    torsos: dict[str, nn.Module] = {}
    for name, column in env.observation.items():
        key = name.removeprefix("obs/")
        stack = history if not stacked or key in stacked else 1
        image = _image(column)
        if image is not None:
            channels, height, width, channels_last = image
            torsos[key] = NatureCNN(stack * channels, height, width, channels_last)
        else:
            torsos[key] = MLP(stack * int(np.prod(column.shape)), hidden)
    return torsos["obs"] if "obs" in env.observation else Concat(torsos)


def features_of(torso: nn.Module) -> int:
    """The width of a torso's output."""
    assert isinstance(torso.features, int), torso
    return torso.features


def _image(column: ArraySpec) -> tuple[int, int, int, bool] | None:
    """(channels, height, width, channels last) of a uint8 column [H, W], [C, H, W] or [H, W, C], C at most 4 if last."""
    shape = column.shape
    if column.dtype != np.uint8 or len(shape) not in (2, 3):
        return None
    channels_last = len(shape) == 3 and shape[-1] <= 4
    height, width = shape[:2] if channels_last else shape[-2:]
    channels = 1 if len(shape) == 2 else shape[-1] if channels_last else shape[0]
    return (channels, height, width, channels_last) if min(height, width) >= 36 else None


def as_float(x: Tensor) -> Tensor:
    if x.dtype == torch.uint8:
        return x.float() * (1 / 255)
    return x if x.dtype == torch.float32 else x.float()
