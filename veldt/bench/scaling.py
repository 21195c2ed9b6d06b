"""Env steps per second over the number of actors, without a learner, in an environment that keeps its core busy."""

import dataclasses
import os
import statistics
import time
from typing import Any

from veldt.bench.timing import machine
from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.params import LatestParams
from veldt.program import CELL, ROWS, Program
from veldt.runtime import Nodes
from veldt.runtime.local.local import Local
from veldt.topologies import add_actor
from veldt.topologies.stores import add_store

WARM_S = 1.0


@dataclasses.dataclass(frozen=True)
class ScalingBench:
    """Env steps a second for 1, 2, 4 ... actors whose environment spins 1 ms a step, against linear."""

    seconds: float = 4.0
    """Seconds of one turn."""
    rounds: int = 3
    """Turns that each number of actors gets."""
    envs: int = 1
    """Environments of each actor."""

    def run(self) -> dict[str, Any]:
        cores = len(os.sched_getaffinity(0))
        counts = [n for n in (1, 2, 4, 8, 12, 16, 32, 64) if n <= cores]
        rates: dict[int, list[float]] = {n: [] for n in counts}
        for _ in range(self.rounds):
            for n in counts:
                rates[n].append(self._rate(n))
        medians = {n: statistics.median(x) for n, x in rates.items()}
        results = {
            f"{n} actors": {"env_steps_per_s": rate, "of linear": rate / (n * medians[1])} for n, rate in medians.items()
        }
        return {"machine": machine(), "results": results}

    def _rate(self, actors: int) -> float:
        settings = {"actors": actors, "envs_per_actor": self.envs, "store.samples_per_insert": 0.0, "eval.every": 0}
        config = recipes.make("apex-dqn", "veldt/Spin-v0", steps=1 << 40, **settings)
        env = config.envs().spec
        program = Program()
        counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
        store = add_store(program, config, config.schema(env))
        for i in range(actors):
            add_actor(program, config, env, i, store, params, counters)
        marks: list[tuple[float, int]] = []
        began = time.perf_counter()

        def done(nodes: Nodes) -> bool:
            nonlocal began
            now, steps = time.perf_counter(), nodes.count("env_steps")
            if not steps:
                began = now
            if (len(marks) == 0 and steps and now - began > WARM_S) or (marks and now - marks[0][0] > self.seconds):
                marks.append((now, steps))
            return len(marks) == 2

        with Local().start(program) as nodes:
            while not done(nodes):
                nodes.step()
        (t0, steps0), (t1, steps1) = marks
        return (steps1 - steps0) / (t1 - t0)
