"""Gradients and bytes a second through parameter servers, by their number: learners that do nothing but push and pull.

    python benchmarks/gorila/throughput.py --env CartPole-v1 --shards 1 2 4 --learners 2 --seconds 5

A gradient counts once all servers have it. Bytes are those of the slices; weights go back in as many.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.optim import Flat
from veldt.learning.shards import ROW, VERSION, sharded
from veldt.program import ROWS, Program
from veldt.runtime.local.local import Local
from veldt.topologies.shards import add_shards


class Pusher:
    """A learner whose gradients cost nothing."""

    def __init__(self, updater: Any, algorithm: Any, env: Any) -> None:
        self.flat = Flat.of(algorithm.network(env))
        self.flat.gradient.copy_(1e-3 * torch.randn(len(self.flat.gradient)))
        self.updater = updater(self.flat)

    def step(self) -> bool:
        if not self.updater.ready():
            return False
        self.updater.update([""], 1.0)
        return True


def measure(env_name: str, shards: int, learners: int, seconds: float, optimizer: str) -> dict[str, Any]:
    config: Any = recipes.make("gorila", env_name, shards=shards, **{"guard.max_age": 0, "learner.optimizer": optimizer})
    env, program = config.env_spec(), Program()
    counters = program.add("counters", Counters, ROWS)
    servers = add_shards(program, config, env, counters)
    statistics = program.array("losses", (learners, ROW), np.float64)
    for i in range(learners):
        updater = program.add(f"updater/{i}", sharded, *servers, config.guard, statistics, i, 0.0)
        program.add(f"pusher/{i}", Pusher, updater, config.algorithm, env, on=updater)
    size = sum(part.gradient.stop - part.gradient.start for part in servers[1])
    with Local().start(program) as nodes:
        applied = [nodes.supervisor.arrays[f"shard/{k}/counts"] for k in range(shards)]

        def count() -> int:
            return int(min(x[VERSION] for x in applied))

        while count() < 50:
            nodes.step()
        began, before = time.monotonic(), count()
        while time.monotonic() < began + seconds:
            nodes.step()
        rate = (count() - before) / (time.monotonic() - began)
        line = nodes.metrics()
    out = {"env": env_name, "parameters": size, "shards": shards, "learners": learners, "optimizer": optimizer}
    out |= {"gradients_per_s": round(rate, 1), "MB_per_s": round(4e-6 * size * rate, 1)}
    return out | {"server_busy": round(line.get("busy/shard", 0.0), 2), "staleness": round(line.get("staleness", 0.0), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["CartPole-v1", "ALE/Pong-v5"])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    for env in args.env:
        for learners in args.learners:
            for shards in args.shards:
                print(json.dumps(measure(env, shards, learners, args.seconds, args.optimizer)), flush=True)


if __name__ == "__main__":
    main()
