"""IMPALA on CartPole: against the limits of the machine, and against RLlib.

The limits are two plain loops that run side by side: one acts with the same network in the same environments, the other
takes bare torch steps on a batch that is there. As each step that was acted is trained once, cores that did nothing else
would come to cores / (1 / acted + 1 / trained) steps a second: the rates of one core each.
"""

import dataclasses
import json
import statistics
from typing import Any

from veldt.bench.peers import NEVER, PEERS, SOLVED, WholeRuns, bare, measure, run_json, train
from veldt.bench.timing import calls_per_second, machine, take_turns
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.machine import core_count
from veldt.topologies import make_program

EVAL_EVERY = 20_000


@dataclasses.dataclass(frozen=True)
class ImpalaBench(WholeRuns):
    """IMPALA on CartPole against bare loops and RLlib: steps acted and trained a second, and the time to solve it."""

    rllib_limit: float = 120.0
    """Time limit in seconds for RLlib to solve CartPole; a run that does not is counted with this time."""

    def run(self) -> dict[str, Any]:
        contenders = {"ours": self._ours, "bare": self._bare} | ({"rllib": self._rllib} if self.rllib_python else {})
        rates = take_turns(self.rounds, contenders)
        titles = {"ours": "ours", "bare": "bare loops, one core each", "rllib": "rllib"}
        results = {titles[name]: line for name, line in rates.items()}
        ours, cores = rates["ours"], min(core_count(), self.actors + 1)
        acted, trained = rates["bare"]["env_steps_per_s"], rates["bare"]["steps_trained_per_s"]
        limit = min(trained, self.actors * acted, cores / (1 / acted + 1 / trained))
        results["ours / bare"] = {f"env_steps_per_s, {cores} cores": ours["env_steps_per_s"] / limit}
        if "rllib" in rates:
            peer = rates["rllib"]
            names = ("env_steps_per_s", "steps_trained_per_s")
            results["ours / rllib"] = {name: ours[name] / peer[name] for name in names}
        results |= self._solving()
        return {"machine": machine(), "results": results}

    def _ours(self, seed: int) -> dict[str, float]:
        config = bench_config(self.actors, self.envs, seed)
        counters = ("env_steps", "episodes", "learner_steps")
        rates = measure(make_program(config, config.env_spec()), self.seconds, counters, ("policy_lag",))
        # An unroll has a row for each step, and one for the end of each episode, which does not train.
        rows, acted = rates["env_steps"] + rates["episodes"], rates["env_steps"]
        learned = rates["learner_steps"] * config.learner.batch * config.algorithm.unroll
        return {
            "env_steps_per_s": acted,
            "steps_trained_per_s": learned * acted / rows,
            "steps_trained / env_steps": learned / rows,
            "updates_per_s": rates["learner_steps"],
            "policy_lag_updates": rates["policy_lag"],
        }

    def _rllib(self, seed: int) -> dict[str, float]:
        flags = ("--seconds", str(self.seconds), "--seed", str(seed))
        found = run_json(self.rllib_python, PEERS / "rllib_impala.py", *self._size(), *flags)
        acted, learned = found["env_steps_per_second"], found["env_steps_trained_per_second"]
        return {
            "env_steps_per_s": acted,
            "steps_trained_per_s": learned,
            "steps_trained / env_steps": learned / acted,
            "updates_per_s": found["updates_per_second"],
            "s_to_first_update": found["first_update_seconds"],
        }

    def _size(self) -> tuple[str, ...]:
        return ("--runners", str(self.actors), "--envs", str(self.envs))

    def _bare(self, _: int) -> dict[str, float]:
        learner, actor = bare(__name__, self.envs, self.seconds)
        return {"env_steps_per_s": actor, "steps_trained_per_s": learner}

    def _solving(self) -> dict[str, dict[str, float]]:
        """Seconds from the command to the first update, and to the first evaluation of 20 greedy episodes >= 475."""
        ours, theirs = [], []
        for seed in range(self.seeds):
            ours.append(train("impala", seed, EVAL_EVERY))
            if self.rllib_python:
                limit = ("--until", str(SOLVED), "--seconds", str(self.rllib_limit))
                flags = (*self._size(), "--fragment", "20", *limit, "--seed", str(seed))
                found = run_json(self.rllib_python, PEERS / "rllib_impala.py", *flags)
                theirs.append((found["first_update_seconds"], found["until_seconds"] or NEVER))
        results = {"ours, from the start of the command": _times(ours, NEVER)}
        if theirs:
            results["rllib, from the start of the command"] = _times(theirs, self.rllib_limit)
            names = ("s_to_first_update", "s_to_475")
            one, other = results.values()
            results["ours / rllib, from the start of the command"] = {name: one[name] / other[name] for name in names}
        return results


def _times(runs: list[tuple[float, float]], limit: float) -> dict[str, float]:
    first, solved = ([run[i] for run in runs] for i in (0, 1))
    return {
        "s_to_first_update": statistics.median(first),
        "s_to_475": statistics.median(min(limit, time_s) for time_s in solved),
        "s_to_475_worst": min(limit, max(solved)),
        "fraction of the seeds solved": sum(time_s < NEVER for time_s in solved) / len(solved),
    }


def bench_config(actors: int, envs: int, seed: int) -> Config:
    """The recipe, with no step limit and no evaluations."""
    settings: dict[str, Any] = {"actors": actors, "envs_per_actor": envs, "learner.anneal": False, "eval.every": 0}
    return recipes.make("impala", "CartPole-v1", seed=seed, steps=1 << 40, **settings)


def bare_learner(envs: int, seconds: float) -> None:
    """Prints steps trained per second by plain torch steps on a ready batch, with V-trace compiled."""
    import numpy as np
    import torch

    from veldt.bench.learner import descend
    from veldt.learning.returns import vtrace

    torch.set_num_threads(1)
    config = bench_config(1, envs, 0)
    algorithm, batch, unroll = config.algorithm, config.learner.batch, config.algorithm.unroll
    net = algorithm.network(config.envs().spec)
    optimizer = torch.optim.Adam(net.parameters(), config.learner.lr, fused=True)
    obs = torch.randn(batch * (unroll + 1), 4)
    action = torch.randint(2, (batch, unroll, 1))
    mu = torch.full((batch, unroll), float(np.log(0.5)))
    reward, discount = np.ones((2, batch, unroll + 1), np.float32)
    trains = np.ones((batch, unroll), bool)

    def step() -> None:
        logits, value = (x.unflatten(0, (batch, unroll + 1)) for x in net.out(net.torso(obs)))
        logits = logits[:, :-1]
        log_pi = logits.gather(2, action)[:, :, 0]
        ratio = (log_pi.detach() - mu).exp().numpy()
        found = vtrace(value.detach().numpy(), reward, discount, trains, ratio, algorithm.gamma)
        target, advantage = map(torch.from_numpy, found)
        entropy = -(logits.exp() * logits).sum(2)
        each = algorithm.baseline_cost * 0.5 * (target - value[:, :-1]).square() - advantage * log_pi
        descend((each - algorithm.entropy_cost * entropy).mean(), net, optimizer, config.learner.clip_norm)

    print(json.dumps(batch * unroll * calls_per_second(step, seconds)))


def bare_actor(envs: int, seconds: float) -> None:
    """Prints env steps per second of a loop that only acts, sampling from the policy, in plain environments."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    config = bench_config(1, envs, 0)
    vector = config.envs(envs)
    net: Any = config.algorithm.network(vector.spec).requires_grad_(False)
    env, rng, explore = vector.env, np.random.default_rng(0), np.ones(envs)
    obs, _ = env.reset(seed=0)

    def step() -> None:
        nonlocal obs
        logits = net.policy(torch.from_numpy(obs))
        obs, *_ = env.step(net.distribution.draw(logits.numpy(), explore, rng)["action"])

    print(json.dumps(envs * calls_per_second(step, seconds)))
