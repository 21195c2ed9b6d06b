"""Wiring: the nodes of each link of the chain, added to a program. Topologies differ in how many there are, and where.

Arguments named store, params, counters and recorder are Refs (`veldt.program`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from veldt.acting.actor import Actor, Evaluator, send_examples
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.learning.learner import Learner
from veldt.learning.params import LatestParams
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.topologies.stores import add_store

if TYPE_CHECKING:
    from veldt.experiment.config import Config


class Shared(NamedTuple):
    """What actors and learner meet in."""

    store: Any
    params: Any
    counters: Any


def add_shared(program: Program, config: Config, env: EnvSpec) -> Shared:
    counters = program.add("counters", Counters, ROWS)
    params = program.add("params", LatestParams, CELL)
    return Shared(add_store(program, config, config.schema(env)), params, counters)


def add_learner(program: Program, config: Config, env: EnvSpec, store: Any, params: Any, counters: Any) -> Any:
    """In the store's process, and before the policies: the first weights are the learner's."""
    return program.add(
        "learner",
        Learner,
        config.algorithm,
        env,
        store,
        params,
        counters,
        config.learner,
        config.steps,
        derive(config.seed, "learner"),
        config.device,
        on=store,
        threads=config.threads,
        keep=True,
    )


def add_actor(
    program: Program, config: Config, env: EnvSpec, i: int, store: Any, params: Any, counters: Any, on: Any = None
) -> None:
    """The i-th actor with its policy and recorder, in one process: that of `on`, or a new one."""
    algorithm, seed, n, name = config.algorithm, config.seed, config.envs_per_actor, f"actor/{i}"
    explore = config.actor.explore(i * n, n, n * config.total_actors)
    policy = program.add(
        f"policy/{i}",
        LocalPolicy,
        algorithm,
        env,
        params,
        counters,
        explore,
        derive(seed, "policy", i),
        config.refresh,
        on=on,
    )
    on = on or policy
    recorder = program.add(
        f"recorder/{i}",
        Recorder,
        policy,
        store,
        algorithm,
        config.schema(env),
        first_priorities=config.store.first_priorities,
        on=on,
    )
    program.add(name, Actor, config.envs, n, recorder, counters, seed, name, (0,), INCARNATION, on=on, elsewhere=True)


def add_inference(program: Program, config: Config, env: EnvSpec, store: Any, params: Any, counters: Any) -> Any:
    """One policy for all actors, and the recorder around it, in a process of their own. Returns the recorder."""
    central, total = config.central, config.total_actors * config.envs_per_actor
    policy = program.add(
        "inference",
        BatchedPolicy,
        config.algorithm,
        env,
        params,
        counters,
        config.actor.explore(0, total, total),
        derive(config.seed, "policy", 0),
        groups=config.total_actors * central.groups,
        n=config.envs_per_actor // central.groups,
        batch=central.batch or total,
        wait=1e-3 * central.wait_ms if config.runtime == "local" else 0.0,  # inline nothing could arrive meanwhile
        together=central.groups,
        device=central.device or config.device,
        threads=config.threads,
    )
    return program.add(
        "recorder",
        Recorder,
        policy,
        store,
        config.algorithm,
        config.schema(env),
        first_priorities=config.store.first_priorities,
        later=config.runtime == "local",
        on=policy,
        examples=send_examples(env, config.envs_per_actor // central.groups),
    )


def add_light_actor(program: Program, config: Config, i: int, recorder: Any, counters: Any) -> None:
    """The i-th actor under central inference, in a process without torch."""
    envs = partial(make_env, config.env, protocol=config.protocol)
    groups = tuple(range(i * config.central.groups, (i + 1) * config.central.groups))
    n, name = config.envs_per_actor // config.central.groups, f"actor/{i}"
    args = (envs, n, recorder, counters, config.seed, name, groups, INCARNATION)
    program.add(name, Actor, *args, light=True, elsewhere=True)


def add_evaluator(program: Program, config: Config, env: EnvSpec, params: Any, counters: Any) -> None:
    """Greedy episodes with the newest weights, in a process of their own; none where eval.every is 0."""
    if not config.eval.every:
        return
    algorithm, epsilon, policy_seed = config.algorithm, config.eval.epsilon, derive(config.seed, "greedy")
    greedy = program.add("policy/greedy", LocalPolicy, algorithm, env, params, counters, epsilon, policy_seed)
    every, episodes, max_length = config.eval.every, config.eval.episodes, config.eval.max_length
    program.add("evaluator", Evaluator, config.envs, greedy, counters, every, episodes, max_length, config.seed, on=greedy)
