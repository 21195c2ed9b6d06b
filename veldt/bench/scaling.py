"""Env steps per second over the number of actors, without a learner, in an environment that keeps its core busy."""

import dataclasses
from functools import partial
from typing import Any

from veldt.bench.peers import measure
from veldt.bench.timing import machine, take_turns
from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.params import LatestParams
from veldt.machine import core_count
from veldt.program import CELL, ROWS, Program
from veldt.topologies import add_actor
from veldt.topologies.stores import add_store


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
        counts = [n for n in (1, 2, 4, 8, 12, 16, 32, 64) if n <= core_count()]
        found = take_turns(self.rounds, {n: partial(self._rates, n) for n in counts})
        rates = {n: figures["env_steps"] for n, figures in found.items()}
        results = {
            f"{n} actors": {"env_steps_per_s": rate, "of linear": rate / (n * rates[1])} for n, rate in rates.items()
        }
        return {"machine": machine(), "results": results}

    def _rates(self, actors: int, _: int) -> dict[str, float]:
        settings = {"actors": actors, "envs_per_actor": self.envs, "store.samples_per_insert": 0.0, "eval.every": 0}
        config = recipes.make("apex-dqn", "veldt/Spin-v0", steps=1 << 40, **settings)
        env = config.envs().spec
        program = Program()
        counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
        store = add_store(program, config, config.schema(env))
        for i in range(actors):
            add_actor(program, config, env, i, store, params, counters)
        return measure(program, self.seconds, ("env_steps",), begins="env_steps")
