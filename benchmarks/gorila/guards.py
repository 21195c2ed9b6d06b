"""Gorila with one learner of two that is broken, with the guard against it and without.

    python benchmarks/gorila/guards.py --fault late rewards --seeds 0 1 2 3 4 -o guards.jsonl

late: it holds every gradient back until the servers have made `--versions` more updates. rewards: its rewards are
multiplied by `--factor`; below 0 they also have the wrong sign. Prints the mean return of 20 greedy episodes of the last
weights, and which gradients were dropped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import veldt
from veldt.algorithms.dqn import DQN
from veldt.learning.params import Weights
from veldt.learning.shards import sharded
from veldt.program import Program
from veldt.topologies import TOPOLOGIES, gorila

BROKEN = 1  # the learner
GUARDS = {"late": "guard.max_age", "rewards": "guard.deviations"}


class LateShard:
    """A shard as a learner sees it that pushes everything `versions` updates later."""

    def __init__(self, shard: Any, versions: int) -> None:
        self.shard, self.versions, self.newest = shard, versions, 0
        self.held: deque[tuple[Any, Any, int]] = deque()

    def weights(self, have: int = -1) -> Weights | None:
        found: Weights | None = self.shard.weights(have)
        self.newest = self.newest if found is None else found.version
        return found

    def push(self, gradient: Any, buffers: Any, at: int) -> bool:
        self.held.append((gradient.copy(), buffers.copy(), at))
        while self.newest - self.held[0][2] >= self.versions and self.shard.push(*self.held[0]):
            self.held.popleft()
            if not self.held:
                break
        return True


def late(versions: int, shards: Any, *how: Any) -> Callable[..., Any]:
    return sharded([LateShard(shard, versions) for shard in shards], *how)


@dataclass(frozen=True)
class Wrong(DQN):
    factor: float = 1.0

    def returns(self, reward: Any, discount: Any, last: Any) -> Any:
        return super().returns(self.factor * reward, discount, last)


def with_late_learner(versions: int, program: Program, config: Any, env: Any) -> None:
    gorila(program, config, env)
    node = program.nodes[f"updater/{BROKEN}"]
    program.nodes[node.name] = replace(node, build=partial(late, versions))


def with_wrong_rewards(factor: float, program: Program, config: Any, env: Any) -> None:
    gorila(program, config, env)
    node = program.nodes[f"learner/{BROKEN}"]
    algorithm = Wrong(**vars(config.algorithm), factor=factor)
    program.nodes[node.name] = replace(node, args=(algorithm, *node.args[1:]))


def train(fault: str, guarded: bool, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    off = {} if guarded else {GUARDS[fault]: 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        how = {"topology": fault, "seed": seed, "eval.every": 50_000, **off, **settings}
        run = veldt.train("gorila", env="CartPole-v1", run=Path(folder) / "run", quiet=True, **how)
        line, found = run.metrics[-1], run.evaluate(episodes=20)
    counts = ("learner_steps", "gradients_pushed", "gradients_dropped_age", "gradients_dropped_loss")
    out = {"fault": fault, "guard": guarded, "seed": seed, "return": found.mean_return}
    return out | {name: line[name] for name in counts} | {"seconds": round(time.monotonic() - began, 1)} | settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", nargs="+", choices=list(GUARDS), default=list(GUARDS))
    parser.add_argument("--guard", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", nargs="*", default=[], help="other settings, name=value")
    parser.add_argument("--versions", type=int, default=500)
    parser.add_argument("--factor", type=float, default=-10.0)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (text.split("=") for text in args.set)}
    TOPOLOGIES["late"] = partial(with_late_learner, args.versions)
    TOPOLOGIES["rewards"] = partial(with_wrong_rewards, args.factor)
    for seed in args.seeds:
        for fault in args.fault:
            for guard in args.guard:
                how = {"versions": args.versions} if fault == "late" else {"factor": args.factor}
                found = how | train(fault, guard == "on", seed, settings)
                print(json.dumps(found), flush=True)
                if args.out:
                    with open(args.out, "a") as file:
                        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
