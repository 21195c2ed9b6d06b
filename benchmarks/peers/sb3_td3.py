"""Stable-Baselines3 TD3 on a continuous task: greedy returns against env steps and seconds, as JSON lines.

    python benchmarks/peers/sb3_td3.py --env HalfCheetah-v5 --seed 0 --steps 50000 --out td3-0.jsonl

The settings are the tuned ones of rl-baselines3-zoo for MuJoCo.
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise


class Curve(BaseCallback):
    def __init__(self, env: str, every: int, episodes: int, out: str, seed: int) -> None:
        super().__init__()
        self.env, self.every, self.episodes, self.out = Monitor(gym.make(env)), every, episodes, out
        self.env.reset(seed=seed + 1000)
        self.began, self.evaluating = time.monotonic(), 0.0

    def _on_step(self) -> bool:
        if self.num_timesteps % self.every == 0:
            began = time.monotonic()
            mean, _ = evaluate_policy(self.model, self.env, self.episodes, deterministic=True)
            self.evaluating += time.monotonic() - began
            seconds = time.monotonic() - self.began - self.evaluating
            with open(self.out, "a") as file:
                line = {"env_steps": self.num_timesteps, "time_s": round(seconds, 1), "eval_return": float(mean)}
                file.write(json.dumps(line) + "\n")
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=5_000)
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    env = gym.make(args.env)
    actions = env.action_space.shape[0]
    noise = NormalActionNoise(np.zeros(actions), 0.1 * np.ones(actions))
    model = TD3("MlpPolicy", env, learning_starts=10_000, action_noise=noise, seed=args.seed, device="cpu")
    model.learn(args.steps, callback=Curve(args.env, args.every, args.episodes, args.out, args.seed))


if __name__ == "__main__":
    main()
