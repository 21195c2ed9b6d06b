"""Stable-Baselines3 DQN on CartPole-v1: seconds from process start until 20 greedy episodes average 475.

    python benchmarks/peers/sb3_time.py --seed 0

The settings are the tuned ones of rl-baselines3-zoo. Exploration ends after 16 % of 50,000 steps whatever --max-steps
says. Every --eval-every environment steps the greedy policy plays one episode in each of 20 CartPoles, all of them in
one batched environment and one forward pass a step; that time counts. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import json

import gymnasium as gym
import numpy as np
import torch
from cartpoles import CartPoles, process_age
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

ZOO_STEPS = 50_000
SOLVED = 475.0


class StopWhenSolved(BaseCallback):
    """Plays greedy episodes at a fixed interval and ends training once their mean return is high enough."""

    def __init__(self, every: int, seed: int) -> None:
        super().__init__()
        self.every, self.games = every, CartPoles(seed)
        self.returns: list[float] = []
        self.solved_after: float | None = None

    @torch.no_grad()
    def _on_step(self) -> bool:
        if self.num_timesteps % self.every:
            return True
        self.returns.append(self.games.play(self._act))
        if self.returns[-1] < SOLVED:
            return True
        self.solved_after = process_age()
        return False

    def _act(self, obs: np.ndarray) -> np.ndarray:
        return self.model.q_net(torch.from_numpy(obs)).argmax(1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=200_000)
    parser.add_argument("--eval-every", type=int, default=2_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1_000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16 * ZOO_STEPS / args.max_steps,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=args.seed,
        device="cpu",
    )
    callback = StopWhenSolved(args.eval_every, args.seed + 10_000)
    model.learn(args.max_steps, callback=callback, log_interval=1_000_000)
    result = {
        "seconds": None if callback.solved_after is None else round(callback.solved_after, 3),
        "env_steps": model.num_timesteps,
        "seed": args.seed,
        "total_seconds": round(process_age(), 3),
        "eval_seconds": round(callback.games.seconds, 3),
        "evaluations": callback.returns,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
