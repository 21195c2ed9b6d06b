"""Stable-Baselines3 DQN on CartPole-v1: seconds from process start until 20 greedy episodes average 475.

    python benchmarks/peers/sb3_time.py --seed 0

The settings are the tuned ones of rl-baselines3-zoo. Exploration ends after 16 % of 50,000 steps whatever --max-steps
says. Every --eval-every environment steps the greedy policy plays one episode in each of 20 CartPoles, all of them in
one batched environment and one forward pass a step; that time counts. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

ZOO_STEPS = 50_000
SOLVED = 475.0
EPISODES = 20


def process_age() -> float:
    """Seconds since the process began, to 10 ms (the kernel gives the start in ticks since boot)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time() - psutil.Process().create_time()


class StopWhenSolved(BaseCallback):
    """Plays greedy episodes at a fixed interval and ends training once their mean return is high enough."""

    def __init__(self, every: int, seed: int) -> None:
        super().__init__()
        self.every = every
        self.env = gym.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="vector_entry_point")
        self.env.reset(seed=seed)
        self.returns: list[float] = []
        self.eval_seconds = 0.0
        self.solved_after: float | None = None

    def _on_step(self) -> bool:
        if self.num_timesteps % self.every:
            return True
        began = time.perf_counter()
        self.returns.append(self.play())
        self.eval_seconds += time.perf_counter() - began
        if self.returns[-1] < SOLVED:
            return True
        self.solved_after = process_age()
        return False

    @torch.no_grad()
    def play(self) -> float:
        """The mean return of the first episode of each environment."""
        obs, _ = self.env.reset()
        running = np.ones(EPISODES, dtype=bool)
        total = np.zeros(EPISODES)
        while running.any():
            actions = self.model.q_net(torch.from_numpy(obs)).argmax(1).numpy()
            obs, reward, terminated, truncated, _ = self.env.step(actions)
            total += reward * running
            running &= ~(terminated | truncated)
        return float(total.mean())


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
        "eval_seconds": round(callback.eval_seconds, 3),
        "evaluations": callback.returns,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
