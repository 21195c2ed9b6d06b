"""Ape-X DQN on CartPole: against the limits of the machine, and against RLlib and Stable-Baselines3.

The limits are two plain loops that run side by side, as a learner and an actor do: one takes bare torch steps of the same
network and batch, the other acts with the same network in the same environments and does nothing else.
"""

import dataclasses
import json
import statistics
import time
from typing import Any

from veldt.bench.peers import NEVER, PEERS, measure, medians, run_json, side_by_side, train
from veldt.bench.timing import machine
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.program import Program
from veldt.topologies import apex


@dataclasses.dataclass(frozen=True)
class ApexBench:
    """Ape-X DQN on CartPole against bare loops, RLlib and Stable-Baselines3; both rates at once."""

    seconds: float = 8.0
    """Seconds of one turn."""
    rounds: int = 3
    """Turns that each contender gets."""
    actors: int = 2
    """Actor processes."""
    envs: int = 8
    """Environments of each actor."""
    seeds: int = 3
    """Runs for the time until CartPole is solved."""
    rllib_python: str = ""
    """A Python that has RLlib; without it RLlib is left out."""
    sb3_python: str = ""
    """A Python that has Stable-Baselines3; without it that is left out."""

    def run(self) -> dict[str, Any]:
        turns: dict[str, list[dict[str, float]]] = {"ours": [], "bare": [], "rllib": []}
        for turn in range(self.rounds):
            turns["ours"].append(self._ours(turn))
            turns["bare"].append(self._bare())
            if self.rllib_python:
                turns["rllib"].append(self._rllib())
        rates = {name: medians(lines) for name, lines in turns.items() if lines}
        results: dict[str, dict[str, float]] = {}
        for name, line in rates.items():
            results[f"{name}, both at once"] = line
        ours, bare = rates["ours"], rates["bare"]
        results["ours / bare"] = {
            "learner": ours["samples_per_s"] / bare["samples_per_s"],
            "actors": ours["env_steps_per_s"] / bare["env_steps_per_s"],
        }
        if "rllib" in rates:
            peer = rates["rllib"]
            results["ours / rllib"] = {name: ours[name] / peer[name] for name in ("env_steps_per_s", "samples_per_s")}
        results |= self._solving()
        return {"machine": machine(), "results": results}

    def _ours(self, seed: int) -> dict[str, float]:
        """Without a limiter: neither actors nor learner wait for each other."""
        config = bench_config(self.actors, self.envs, seed)
        program = Program()
        apex(program, config, config.envs().spec)
        rates = measure(program, self.seconds, ("env_steps", "learner_steps"))
        return {
            "env_steps_per_s": rates["env_steps"],
            "samples_per_s": config.learner.batch * rates["learner_steps"],
        }

    def _rllib(self) -> dict[str, float]:
        found = run_json(self.rllib_python, PEERS / "rllib_dqn.py", "--fragment", "auto", "--seconds", str(self.seconds))
        return {
            "env_steps_per_s": found["env_steps_per_second"],
            "samples_per_s": found["samples_trained_per_second"],
            "s_to_first_update": found["first_update_seconds"],
        }

    def _bare(self) -> dict[str, float]:
        words = f"{self.envs}, {self.seconds}"
        codes = [f"from veldt.bench.apex import bare_{name}; bare_{name}({words})" for name in ("learner", "actor")]
        learner, actor = side_by_side(codes, self.seconds)
        return {"env_steps_per_s": actor, "samples_per_s": learner}

    def _solving(self) -> dict[str, dict[str, float]]:
        """Seconds from the command to the first update, and to the first evaluation of 20 greedy episodes >= 475."""
        first, solved, theirs = [], [], []
        for seed in range(self.seeds):
            updated, reached = train("apex-dqn", seed, 5_000)
            first.append(updated)
            solved.append(reached)
            if self.sb3_python:
                found = run_json(self.sb3_python, PEERS / "sb3_time.py", "--seed", str(seed))["seconds"]
                theirs.append(NEVER if found is None else found)
        results = {
            "ours, from the start of the command": {
                "s_to_first_update": statistics.median(first),
                "s_to_475": statistics.median(solved),
                "s_to_475_worst": max(solved),
            }
        }
        if theirs:
            results["stable-baselines3"] = {"s_to_475": statistics.median(theirs), "s_to_475_worst": max(theirs)}
            results["ours / stable-baselines3"] = {"s_to_475": statistics.median(solved) / statistics.median(theirs)}
        return results


def bench_config(actors: int, envs: int, seed: int) -> Config:
    """What RLlib is compared with: prioritized, n = 3, batch 64, no limiter."""
    settings: dict[str, Any] = {
        "actors": actors,
        "envs_per_actor": envs,
        "algorithm.n": 3,
        "learner.anneal": False,
        "store.samples_per_insert": 0.0,
        "eval.every": 0,
    }
    return recipes.make("apex-dqn", "CartPole-v1", seed=seed, steps=1 << 40, **settings)


def bare_learner(envs: int, seconds: float) -> None:
    """Prints samples trained per second by plain torch steps on a ready batch."""
    import torch

    from veldt.bench.learner import VECTOR, bare_step, make_learner

    torch.set_num_threads(1)
    config = bench_config(1, envs, 0)
    learner = make_learner(VECTOR, config.algorithm, config.learner.batch, 500, "cpu")
    step, count = bare_step(learner, config.learner.batch), 0
    for _ in range(200):
        step()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    print(json.dumps(config.learner.batch * count / (time.perf_counter() - began)))


def bare_actor(envs: int, seconds: float) -> None:
    """Prints env steps per second of a loop that only acts, greedily, in plain environments."""
    import torch

    torch.set_num_threads(1)
    config = bench_config(1, envs, 0)
    vector = config.envs(envs)
    net = config.algorithm.network(vector.spec).requires_grad_(False).eval()
    env = vector.env
    obs, _ = env.reset(seed=0)
    began, count = 0.0, 0
    while count < 200 or time.perf_counter() - began < seconds:
        obs, *_ = env.step(net(torch.from_numpy(obs)).numpy().argmax(1))
        count += 1
        if count == 200:
            began = time.perf_counter()
    print(json.dumps(envs * (count - 200) / (time.perf_counter() - began)))
