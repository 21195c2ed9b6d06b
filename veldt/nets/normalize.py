"""Running normalisation of vectors, so that one setting fits environments whose observations have other units."""

import torch
from torch import Tensor, nn

MIN_RATE = 1e-5  # weight of a new batch in the running statistics; the first 100,000 weigh the same
MIN_DEVIATION = 1e-4  # an element that never changed is not enlarged beyond this
LIMIT = 5.0  # standard deviations


class RunningNorm(nn.Module):
    """Each element minus its running mean, over its running standard deviation, clipped: [B, size] -> [B, size].

    The statistics are those of the batches that are learned from: forward passes in training mode with a gradient. They are
    buffers, so they are published, saved and copied to the target network with the weights.
    """

    mean: Tensor  # [size]
    variance: Tensor  # [size]
    batches: Tensor  # []

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.add(x.detach())
        return ((x - self.mean) / self.variance.sqrt().clamp_min(MIN_DEVIATION)).clamp(-LIMIT, LIMIT)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Adds a batch to the statistics."""
        self.batches += 1
        rate = (1 / self.batches).clamp_min(MIN_RATE)
        variance, mean = torch.var_mean(x, 0, correction=0)
        step = mean - self.mean
        self.mean += rate * step
        self.variance += rate * (variance - self.variance + (1 - rate) * step.square())
