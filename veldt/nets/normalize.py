"""Normalisation of vectors, so that one setting fits environments whose observations have other units."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from veldt.records.tree import Array

MIN_RATE = 1e-5  # weight of a new batch in the running statistics; the first 100,000 weigh the same
LIMIT = 5.0  # standard deviations
LARGEST = 1e15  # in the statistics: the square of a larger number, summed, would be infinite
LARGE = 4.0  # means and deviations up to this stay as they are
NARROW = 0.25  # half of the declared range of an element that is scaled up
NARROWEST = 1e-15  # half of the declared range: what is narrower than this stays as it is


class ObservationNorm(nn.Module):
    """Each element minus a mean, over a standard deviation of at least LEAST, clipped to 5: [B, size] -> [B, size].

    Whoever counts the observations sets mean and variance. They are buffers, so they are published, saved and copied to the
    target network with the weights.
    """

    mean: Tensor  # [size]
    variance: Tensor  # [size]
    LEAST: ClassVar[float] = 0.1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.variance.sqrt().clamp_min(self.LEAST)).clamp(-LIMIT, LIMIT)


class RunningNorm(ObservationNorm):
    """Mean and deviation are those of the batches that are learned from: forward passes in training mode, with a gradient.

    An element that never changed is not enlarged beyond LEAST.
    """

    batches: Tensor  # []
    LEAST = 1e-4

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.add(x.detach())
        return super().forward(x)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Adds a batch to the statistics."""
        self.batches += 1
        rate = (1 / self.batches).clamp_min(MIN_RATE)
        variance, mean = torch.var_mean(x.clamp(-LARGEST, LARGEST), 0, correction=0)
        step = mean - self.mean
        self.mean += rate * step
        self.variance += rate * (variance - self.variance + (1 - rate) * step.square())


class Moderate(RunningNorm):
    """Brings elements that are very large or very small to an ordinary size, and leaves all others as they are.

    An element whose declared range [low, high] is narrow is scaled to [-1, 1]. A running mean beyond LARGE is moved to it,
    a running deviation beyond LARGE is reduced to it. Scaling every element to deviation 1 makes learning less stable
    where the units were good ones (docs/results/defaults.md).

    Statistics change only when a batch is learned from, so what follows from them is kept: a forward pass is three
    operations.
    """

    center: Tensor  # [size]
    factor: Tensor  # [size]
    origin: Tensor  # [size], what is subtracted
    scale: Tensor  # [size], what that is multiplied by

    def __init__(self, low: Array, high: Array) -> None:
        super().__init__(len(low))
        low, high = (np.asarray(x, np.float64) for x in (low, high))
        half = high / 2 - low / 2
        narrow = (half > NARROWEST) & (half < NARROW)
        center = torch.from_numpy(np.where(narrow, high, 0) / 2 + np.where(narrow, low, 0) / 2).float()
        factor = torch.from_numpy(1 / np.where(narrow, half, 1)).float()
        for name, x in {"center": center, "factor": factor}.items():
            self.register_buffer(name, x)
        for name, x in {"origin": center, "scale": factor}.items():  # published, but not saved: they follow from the others
            self.register_buffer(name, x.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.add(x.detach())
        return ((x - self.origin) * self.scale).clamp(-LIMIT * LARGE, LIMIT * LARGE)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        super().add((x - self.center) * self.factor)
        self.derive()

    @torch.no_grad()
    def derive(self) -> None:
        """Sets what follows from the statistics; `params.restore` calls it."""
        self.origin.copy_(self.center + (self.mean - self.mean.clamp(-LARGE, LARGE)) / self.factor)
        self.scale.copy_(self.factor * (LARGE / self.variance.sqrt().clamp_min(LARGE)))
