"""Ape-X DQN on CartPole: against the limits of the machine, and against RLlib and Stable-Baselines3.

The limits are two plain loops that run side by side, as a learner and an actor do: one takes bare torch steps of the same
network and batch, the other acts with the same network in the same environments and does nothing else.
"""

import dataclasses
import json
import statistics
from typing import Any

from veldt.bench.peers import NEVER, PEERS, WholeRuns, bare, measure, run_json, train
from veldt.bench.timing import calls_per_second, machine, take_turns
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.topologies import make_program


@dataclasses.dataclass(frozen=True)
class ApexBench(WholeRuns):
    """Ape-X DQN on CartPole against bare loops, RLlib and Stable-Baselines3; both rates at once."""

    sb3_python: str = ""
    """A Python that has Stable-Baselines3; without it that is left out."""

    def run(self) -> dict[str, Any]:
        contenders = {"ours": self._ours, "bare": self._bare} | ({"rllib": self._rllib} if self.rllib_python else {})
        rates = take_turns(self.rounds, contenders)
        results = {f"{name}, both at once": line for name, line in rates.items()}
        ours, limits = rates["ours"], rates["bare"]
        results["ours / bare"] = {
            "learner": ours["samples_per_s"] / limits["samples_per_s"],
            "actors": ours["env_steps_per_s"] / limits["env_steps_per_s"],
        }
        if "rllib" in rates:
            peer = rates["rllib"]
            results["ours / rllib"] = {name: ours[name] / peer[name] for name in ("env_steps_per_s", "samples_per_s")}
        results |= self._solving()
        return {"machine": machine(), "results": results}

    def _ours(self, seed: int) -> dict[str, float]:
        """Without a limiter: neither actors nor learner wait for each other."""
        config = bench_config(self.actors, self.envs, seed)
        rates = measure(make_program(config, config.env_spec()), self.seconds, ("env_steps", "learner_steps"))
        return {
            "env_steps_per_s": rates["env_steps"],
            "samples_per_s": config.learner.batch * rates["learner_steps"],
        }

    def _rllib(self, _: int) -> dict[str, float]:
        found = run_json(self.rllib_python, PEERS / "rllib_dqn.py", "--fragment", "auto", "--seconds", str(self.seconds))
        return {
            "env_steps_per_s": found["env_steps_per_second"],
            "samples_per_s": found["samples_trained_per_second"],
            "s_to_first_update": found["first_update_seconds"],
        }

    def _bare(self, _: int) -> dict[str, float]:
        learner, actor = bare(__name__, self.envs, self.seconds)
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
        "inference": "local",
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
    batch = config.learner.batch
    print(json.dumps(batch * calls_per_second(bare_step(learner, batch), seconds)))


def bare_actor(envs: int, seconds: float) -> None:
    """Prints env steps per second of a loop that only acts, greedily, in plain environments."""
    import torch

    torch.set_num_threads(1)
    config = bench_config(1, envs, 0)
    vector = config.envs(envs)
    net = config.algorithm.network(vector.spec).requires_grad_(False).eval()
    env = vector.env
    obs, _ = env.reset(seed=0)

    def step() -> None:
        nonlocal obs
        obs, *_ = env.step(net(torch.from_numpy(obs)).numpy().argmax(1))

    print(json.dumps(envs * calls_per_second(step, seconds)))
