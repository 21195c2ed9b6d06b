"""Env steps a second of one worker of `veldt train es`, and of a bare loop of one environment and one forward pass with the
same network, in alternating turns of CPU time, on one core.

python benchmarks/es/speed.py CartPole-v1 --lanes 16 --seconds 2 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from veldt.acting.worker import Worker
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.experiment import recipes
from veldt.learning.evolution import Generation, fill_noise
from veldt.learning.params import flatten

MASTER_SEED = 1


class Collector:
    """Stands for the master: a generation that does not end."""

    def __init__(self, vector: Any) -> None:
        self.vector, self.steps = vector, 0

    def generation(self, have: int = -1) -> Generation | None:
        return None if have == 1 else Generation(1, 0, 0, self.vector)

    def result(self, generation: int, pair: int, plus: float, minus: float, plus_steps: int, minus_steps: int) -> None:
        self.steps += plus_steps + minus_steps

    def observations(self, generation: int, pair: int, sums: Any) -> None: ...


def worker(config: Any, lanes: int) -> tuple[Worker, Collector]:
    spec = config.env_spec()
    table = np.zeros(config.learner.table, np.float32)
    fill_noise(table, MASTER_SEED)
    master: Any = Collector(flatten(config.algorithm.network(spec)).detach().numpy().copy())
    envs = partial(make_env, config.env, **config.env_options, separate=True)
    how = (config.learner, config.actor.noise, MASTER_SEED, 0, 1, table)
    return Worker(config.algorithm, spec, envs, lanes, master, Counters(), *how), master


def worker_rate(made: tuple[Worker, Collector], seconds: float) -> float:
    node, master = made
    before = master.steps
    began = time.process_time()
    while time.process_time() - began < seconds:
        for _ in range(50):
            node.step()
    # Steps of episodes that have not ended are as many at the start as at the end, on average.
    return (master.steps - before) / (time.process_time() - began)


def bare_rate(config: Any, seconds: float, numpy: bool) -> float:
    env, net = gym.make(config.env, disable_env_checker=True), config.algorithm.network(config.env_spec()).eval()
    layers = [*net.torso.layers, net.head]
    parts = [part for layer in layers for part in (layer, nn.Tanh())][:-1]
    whole = nn.Sequential(*parts).requires_grad_(False)
    arrays = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers]
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    obs, _ = env.reset(seed=0)
    steps, began = 0, time.process_time()
    with torch.inference_mode():
        while time.process_time() - began < seconds:
            x = np.asarray(obs, np.float32)
            if numpy:
                for weight, bias in arrays[:-1]:
                    x = np.tanh(weight @ x + bias)
                out = arrays[-1][0] @ x + arrays[-1][1]
            else:
                out = whole(torch.from_numpy(x)).numpy()
            space: Any = env.action_space
            action = int(out.argmax()) if discrete else np.clip(out * space.high, space.low, space.high)
            obs, _, terminated, truncated, _ = env.step(action)
            steps += 1
            if terminated or truncated:
                obs, _ = env.reset()
    return steps / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("envs", nargs="+")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for env in args.envs:
        config = recipes.make("es", env, **{"learner.mode": "first", "learner.noiseless": 0.0, "learner.seeds": "own"})
        made = worker(config, args.lanes)
        worker_rate(made, 0.5)
        rates: dict[str, list[float]] = {"worker": [], "bare, torch": [], "bare, numpy": []}
        for _ in range(args.rounds):
            rates["worker"].append(worker_rate(made, args.seconds))
            rates["bare, torch"].append(bare_rate(config, args.seconds, numpy=False))
            rates["bare, numpy"].append(bare_rate(config, args.seconds, numpy=True))
        middle = {name: statistics.median(found) for name, found in rates.items()}
        text = ", ".join(f"{name} {rate:,.0f}" for name, rate in middle.items())
        shares = [f"{middle['worker'] / middle[name]:.2f} of {name}" for name in ("bare, torch", "bare, numpy")]
        print(f"{env}, {args.lanes} lanes, env steps/s: {text}; {', '.join(shares)}")


if __name__ == "__main__":
    main()
