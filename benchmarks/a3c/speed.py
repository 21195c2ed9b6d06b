"""Env steps per second of A3C beside a bare loop and beside a Hogwild A3C as it is usually written, in one run.

python benchmarks/a3c/speed.py --workers 1 2 --unroll 5 --seconds 5 --rounds 3

    bare     one process, no sharing: act, backward, torch's RMSprop; the same network, environment and unroll
    hogwild  torch.multiprocessing, share_memory_: each process loads the shared model, acts for an unroll, computes the
             gradient on its copy, and steps a shared RMSprop
    veldt    veldt train a3c, its workers in processes of their own

Each is N processes at once. The three take turns, and the table has the median over the rounds.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.bench.peers import measure
from veldt.experiment import recipes
from veldt.topologies import make_program

ENV, HIDDEN, GAMMA = "CartPole-v1", 64, 0.99


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(F.relu(self.two(F.relu(self.one(x)))))
        return F.log_softmax(out[..., :2], -1), out[..., 2]


def loss_of(log_p: Tensor, value: Tensor, action: Tensor, reward: list[float], following: float) -> Tensor:
    returns = []
    for r in reversed(reward):
        following = r + GAMMA * following
        returns.append(following)
    error = torch.tensor(returns[::-1]) - value
    taken = log_p.gather(1, action[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum()
    return 0.5 * error.square().sum() - (error.detach() * taken).sum() - 0.01 * entropy


def bare(rank: int, unroll: int, counts: Any, stop: Any, shared: Any) -> None:
    """Acts without gradients, and computes the unroll again for the gradient, all at once."""
    torch.set_num_threads(1)
    net, env, rng = Net(), gym.make(ENV), np.random.default_rng(rank)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=7e-4, alpha=0.99, eps=0.1)
    obs, _ = env.reset(seed=rank)
    while not stop.value:
        seen, actions, rewards, ends = [], [], [], ""
        while len(seen) < unroll and not ends:
            with torch.no_grad():
                log_p, _ = net(torch.from_numpy(obs))
            action = int(rng.random() >= np.exp(log_p.numpy()[0]))
            seen.append(obs)
            actions.append(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            rewards.append(float(reward))
            ends = "terminated" if terminated else "truncated" if truncated else ""
        log_p, value = net(torch.from_numpy(np.stack([*seen, obs])))
        following = 0.0 if ends == "terminated" else float(value[-1].detach())
        optimizer.zero_grad()
        loss_of(log_p[:-1], value[:-1], torch.tensor(actions), rewards, following).backward()
        optimizer.step()
        counts[rank] += len(seen)
        if ends:
            obs, _ = env.reset()


def hogwild(rank: int, unroll: int, counts: Any, stop: Any, shared: Any) -> None:
    """The graph of acting is kept for the gradient, as most implementations do."""
    torch.set_num_threads(1)
    theirs, squares = shared
    net, env = Net(), gym.make(ENV)
    obs, _ = env.reset(seed=rank)
    while not stop.value:
        net.load_state_dict(theirs.state_dict())
        outputs, actions, rewards, ends = [], [], [], ""
        while len(actions) < unroll and not ends:
            log_p, value = net(torch.from_numpy(obs))
            action = int(log_p.exp().multinomial(1))
            outputs.append((log_p, value))
            actions.append(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            rewards.append(float(reward))
            ends = "terminated" if terminated else "truncated" if truncated else ""
        following = 0.0 if ends == "terminated" else float(net(torch.from_numpy(obs))[1].detach())
        net.zero_grad()
        log_p, value = torch.stack([x[0] for x in outputs]), torch.stack([x[1] for x in outputs])
        loss_of(log_p, value, torch.tensor(actions), rewards, following).backward()
        with torch.no_grad():
            for p, own, g in zip(theirs.parameters(), net.parameters(), squares, strict=True):
                assert own.grad is not None
                g.mul_(0.99).addcmul_(own.grad, own.grad, value=0.01)
                p.addcdiv_(own.grad, (g + 0.1).sqrt(), value=-7e-4)
        counts[rank] += len(actions)
        if ends:
            obs, _ = env.reset()


def rate(target: Any, workers: int, unroll: int, seconds: float, shared: Any = None) -> float:
    """Env steps per second of all processes."""
    context = mp.get_context("spawn")
    counts, stop = context.Array("l", workers, lock=False), context.Value("b", 0, lock=False)
    processes = [context.Process(target=target, args=(i, unroll, counts, stop, shared)) for i in range(workers)]
    for process in processes:
        process.start()
    while min(counts) < 1_000:
        time.sleep(0.01)
        assert all(process.is_alive() for process in processes)
    before, began = sum(counts), time.perf_counter()
    time.sleep(seconds)
    found = (sum(counts) - before) / (time.perf_counter() - began)
    stop.value = 1
    for process in processes:
        process.join(10)
    return found


def veldt(workers: int, unroll: int, seconds: float) -> float:
    changes = {"workers": workers, "algorithm.unroll": unroll, "eval.every": 0, "steps": 10**8}
    config = recipes.make("a3c", ENV, seed=0, **changes)
    return measure(make_program(config, config.env_spec()), seconds, ("env_steps",), begins="env_steps")["env_steps"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for workers in args.workers:
        found: dict[str, list[float]] = {"bare": [], "hogwild": [], "veldt": []}
        for _ in range(args.rounds):
            model = Net().share_memory()
            squares = [torch.zeros_like(p).share_memory_() for p in model.parameters()]
            found["bare"].append(rate(bare, workers, args.unroll, args.seconds))
            found["hogwild"].append(rate(hogwild, workers, args.unroll, args.seconds, (model, squares)))
            found["veldt"].append(veldt(workers, args.unroll, args.seconds))
        medians = {name: statistics.median(x) for name, x in found.items()}
        print(f"{workers} workers, unrolls of {args.unroll}, env steps/s in all (each worker), median of {args.rounds}:")
        for name, x in medians.items():
            ratio = medians["veldt"] / x
            rounds = ", ".join(f"{y:,.0f}" for y in found[name])
            print(f"  {name:8} {x:8,.0f} ({x / workers:7,.0f})   veldt / {name} {ratio:.2f}   rounds {rounds}", flush=True)


if __name__ == "__main__":
    main()
