"""Planner: what a run would do with other numbers of actors, from the metrics of one that was run.

From its metrics come CPU seconds of an env step, by process: c. With N actors, each on a core of its own,

    E = min(N / c_actor, 1 / c_gate, 1 / c_inference, 1 / c_learner, cores / sum of c)

env steps a second: whichever process would need more than a core of its own first is the bottleneck, and `cores` limits
what shares one machine. The learner's share holds its inserts and its updates, at the replay ratio of the run. A host gets
weights once for each look of an actor for newer ones that finds some.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veldt.errors import UserError

SERVICES = ("gate", "inference", "learner")
WARM_UP = 0.2  # of the time, which is left out: imports, an empty store, first updates
SHORTEST_S = 5.0  # of what is left


@dataclass(frozen=True)
class Costs:
    """Of one env step of the run that was measured."""

    cpu: Mapping[str, float]  # CPU seconds, by kind of process; of all actors together
    updates: float
    ratio: float  # samples per item
    sent: float  # bytes, to the store or to central inference
    weights: int  # bytes of all
    published: float  # versions of them
    looks: float  # env steps of one actor between two looks for newer weights; 0: it gets none


@dataclass(frozen=True)
class Forecast:
    actors: int
    env_steps: float  # a second
    updates: float  # a second
    cores: float  # in use
    sent: float  # bytes a second, from actors
    weights: float  # bytes a second, to the hosts of actors
    age: float  # seconds: how old the weights are that an actor acts with, at most, on average
    limit: str


def calibrate(lines: Sequence[Mapping[str, Any]], weights: int, looks: float) -> Costs:
    """`lines` of metrics.jsonl; `weights`: bytes; `looks`: see Costs."""
    both = ("cpu/actor", "cpu/learner")
    timed = [line for line in lines if line.get("env_steps_per_s") and all(line.get(name) for name in both)]
    end = float(timed[-1]["time_s"]) if timed else 0.0
    used = [line for line in timed if line["time_s"] >= WARM_UP * end and (line.get("learner_steps_per_s") or 0.0) > 0]
    if not used or end - used[0]["time_s"] < SHORTEST_S:
        raise UserError("The run is too short to plan from: train for at least ten seconds in processes, with updates.")

    def mean(name: str) -> float:
        return sum(float(line.get(name) or 0.0) for line in used) / len(used)

    steps = mean("env_steps_per_s")
    cpu = {kind: mean(f"cpu/{kind}") / steps for kind in SERVICES if any(f"cpu/{kind}" in line for line in used)}
    own, joined = max(1.0, mean("actors")), mean("gate_actors")
    if joined and "gate" in cpu:  # in a forecast, all steps go through it
        cpu["gate"] *= (own + joined) / joined
    # One actor's share of a core, and of the steps: those that have joined made as many, in CPU time of their hosts.
    cpu["actor"] = mean("cpu/actor") * (own + joined) / steps
    rates = {name: mean(f"{name}_per_s") / steps for name in ("learner_steps", "bytes", "published")}
    return Costs(cpu, rates["learner_steps"], mean("replay_ratio"), rates["bytes"], weights, rates["published"], looks)


def forecast(costs: Costs, actors: int, cores: float = 0.0, per_host: int = 0) -> Forecast:
    """`cores` of the one machine that has everything; 0: every process has a core. `per_host`: actors of a site; 0: each
    actor gets weights for itself."""
    limits = {name: 1 / c for name, c in costs.cpu.items() if name != "actor" and c > 0}
    limits["actors"] = actors / costs.cpu["actor"]
    total = sum(costs.cpu.values())
    if cores:
        limits["cores"] = cores / total
    limit = min(limits, key=lambda name: limits[name])
    steps = limits[limit]
    hosts = -(-actors // per_host) if per_host else actors
    published, age, fetched = costs.published * steps, 0.0, 0.0
    if costs.looks and costs.weights:
        look_s = costs.looks * actors / steps
        fetched = min(published, min(per_host or 1, actors) / look_s)  # of one host, a second
        age = look_s + 1 / published if published else look_s
    sent, down = costs.sent * steps, hosts * costs.weights * fetched
    return Forecast(actors, steps, costs.updates * steps, total * steps, sent, down, age, limit)
