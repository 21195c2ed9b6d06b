"""Your own environment: any gymnasium.Env will do.

python examples/custom_env.py --steps 20_000
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces

import veldt


class Hover(gym.Env):
    """A puck on ice; push it left (0), not at all (1) or right (2). Reward: 1 in the middle, less away from it."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed, self.t = self.np_random.uniform(-2, 2), self.np_random.uniform(-0.3, 0.3), 0
        return np.array([self.place, self.speed], np.float32), {}

    def step(self, action):
        self.speed += 0.05 * (int(action) - 1)
        self.place += self.speed
        self.t += 1
        return np.array([self.place, self.speed], np.float32), 1 - abs(self.place), False, self.t == 50, {}


def main(steps: int = 20_000) -> None:
    """Trains DQN on Hover for this many env steps. Random play returns about -190, a good rule 43."""
    run = veldt.train("dqn", env=Hover, steps=steps)
    print(f"mean return of 20 greedy episodes: {run.evaluate(20).mean_return:.1f}")


if __name__ == "__main__":
    tyro.cli(main)
