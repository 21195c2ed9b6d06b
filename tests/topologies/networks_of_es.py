"""A network of the user, for a test of evolution strategies. Tests do not collect this file."""

from __future__ import annotations

from typing import Any

from torch import nn


def small(env: Any) -> nn.Module:
    inputs = 1
    for size in env.observation["obs"].shape:
        inputs *= size
    return nn.Sequential(Floats(), nn.Linear(inputs, 8), nn.Tanh())


class Floats(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.float().flatten(1)
