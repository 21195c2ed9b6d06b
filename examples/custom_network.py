"""Your own network: an nn.Module that is made from an EnvSpec and maps observations to features; heads are added to it.

python examples/custom_network.py --steps 8_000
"""

from __future__ import annotations

import torch
import tyro
from torch import nn

import veldt


class SmallCNN(nn.Module):
    """For screens too small for the Nature CNN: [B, rows, columns] uint8 -> [B, 32]."""

    def __init__(self, env: veldt.EnvSpec) -> None:
        super().__init__()
        rows, columns = env.observation["obs"].shape
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.linear = nn.Linear(16 * rows * columns, 32)

    def forward(self, screen: torch.Tensor) -> torch.Tensor:
        x = screen[:, None].float() / 255
        return self.linear(self.conv(x).relu().flatten(1)).relu()


def main(steps: int = 8_000) -> None:
    """Trains DQN on Catch for this many env steps. The best possible return is 1."""
    run = veldt.train("dqn", env="veldt/Catch-v0", network=SmallCNN, steps=steps)
    print(f"mean return of 100 greedy episodes: {run.evaluate(100).mean_return:.2f}")


if __name__ == "__main__":
    tyro.cli(main)
