"""A store that returns made-up batches, a params service that keeps all weights, and a network with buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from veldt.envs import make_env
from veldt.learning.params import LatestParams, Weights
from veldt.records.tree import Array
from veldt.storing.store import Sample

ENV = make_env("veldt/Chain-v0").spec


class Store:
    """Returns batches that follow from their number, poisoned if asked, and records all calls."""

    def __init__(self, poison: Callable[[int], Any] = lambda number: None) -> None:
        self.poison, self.number, self.trims, self.asked = poison, 0, 0, []
        self.updates: list[tuple[Array, Array]] = []
        self.calls: list[str] = []  # sample and update, in order
        self.empty = False

    def insert(self, block: Any, priorities: Any) -> bool:
        return True

    def sample(self, n: int) -> Sample | None:
        self.calls.append("sample")
        if self.empty:
            return None
        self.number += 1
        self.asked.append(n)
        rng = np.random.default_rng(self.number)
        rows: dict[str, Array] = {
            "obs": rng.random((n, 2, 8), np.float32),
            "action": rng.integers(0, 2, (n, 2)),
            "reward": rng.random((n, 2), np.float32),
            "discount": np.ones((n, 2), np.float32),
            "last": np.zeros((n, 2), np.bool_),
            "first": np.zeros((n, 2), np.bool_),
            "valid": np.ones((n, 2), np.bool_),
        }
        bad = self.poison(self.number)
        if bad is not None:
            column, value = bad
            rows[column][0] = value
        keys = np.arange(n, dtype=np.int64) + 100 * self.number
        return Sample(keys, rows, {}, np.ones(n, np.float32), np.full(n, 1 / n))

    def update(self, keys: Array, priorities: Array) -> None:
        assert np.isfinite(priorities).all(), "priorities that are not finite never reach a store"
        self.calls.append("update")
        self.updates.append((keys, priorities))

    def trim(self) -> None:
        self.trims += 1


class Published(LatestParams):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[Weights] = []

    def publish(self, weights: Weights) -> None:
        super().publish(weights)
        newest = self.pull(-1)
        assert newest is not None
        self.all.append(newest)


class Normed(nn.Module):
    """A network with buffers that change in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.q(self.norm(x))
        return out
