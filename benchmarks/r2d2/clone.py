"""Behaviour cloning with R2D2's own recurrent network: what the demonstrations alone can teach.

python benchmarks/r2d2/clone.py demos/ --env veldt/KeyDoor-v0
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.nn import functional as F

from veldt.algorithms.r2d2 import RecurrentQ
from veldt.demos.set import Demos
from veldt.envs import Envs, make_env
from veldt.experiment import recipes
from veldt.nets.networks import C, H, Rows

UPDATES = (50, 100, 200, 400, 600)
ENVS, EPISODES = 50, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demos")
    parser.add_argument("--env", default="veldt/KeyDoor-v0")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    algorithm, envs = recipes.make("r2d2", args.env).algorithm, make_env(args.env, ENVS)
    rows, actions, mask = sequences(Demos.open(args.demos), envs.spec.n_actions)
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        net = algorithm.network(envs.spec)
        optimizer, found = torch.optim.Adam(net.parameters(), 1e-3), []
        for update in range(1, UPDATES[-1] + 1):
            logits = net(rows, nothing(algorithm.lstm, len(actions)))
            error = F.cross_entropy(logits.flatten(0, 1), actions.flatten(), reduction="none")
            loss = (error * mask.flatten()).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update in UPDATES:
                found.append(f"{update}: {success(net, envs, algorithm.lstm, seed):.2f}")
        print(f"seed {seed}: loss {loss.item():.3f}; success by number of updates: {', '.join(found)}", flush=True)


def sequences(demos: Demos, n_actions: int) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """All episodes side by side [N, longest]: what the network reads, the actions, and where there are any."""
    episodes = list(demos.episodes())
    shape = (len(episodes), max(len(e["first"]) for e in episodes))
    obs = torch.zeros(*shape, *episodes[0]["obs"].shape[1:])
    actions, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for i, e in enumerate(episodes):
        n = len(e["first"])
        obs[i, :n], actions[i, :n] = torch.from_numpy(e["obs"]), torch.from_numpy(e["action"])
        mask[i, : n - 1] = 1
    taken = F.one_hot(actions, n_actions).float().roll(1, 1)
    taken[:, 0] = 0
    return Rows(obs, taken, torch.zeros(shape), None), actions, mask


def nothing(size: int, n: int) -> dict[str, torch.Tensor]:
    return {H: torch.zeros(n, size), C: torch.zeros(n, size)}


@torch.no_grad()
def success(net: RecurrentQ, envs: Envs, size: int, seed: int) -> float:
    """Of the likeliest actions, in layouts that were not demonstrated."""
    record, state, taken = envs.reset(1_000 + seed), nothing(size, ENVS), torch.zeros(ENVS, net.actions)
    done, total = 0, 0.0
    while done < EPISODES:
        first = torch.from_numpy(record["first"])[:, None]
        state, taken = {name: x.masked_fill(first, 0) for name, x in state.items()}, taken.masked_fill(first, 0)
        row = Rows(torch.from_numpy(record["obs"])[:, None], taken[:, None], torch.zeros(ENVS, 1), None)
        logits, state = net.step(row, state)
        action = logits[:, 0].argmax(1)
        taken, record = F.one_hot(action, net.actions).float(), envs.step(action.numpy())
        done += int(record["last"].sum())
        total += float(np.sum(record["reward"] * record["last"]))
    return total / done


if __name__ == "__main__":
    main()
