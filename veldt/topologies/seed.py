"""SEED RL (Espeholt et al. 2020): inference at the server. The cut through the chain moves, the links stay as they are.

    [ Actor ] x N
       | step  ^ action                                   (calls, answered many at once)
    [ Recorder - BatchedPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)

Actors step environments and nothing else: they hold no network, load no torch, and get no weights. One process computes
the actions of all of them in one forward, keeps their histories and recurrent states, and records. It is not the
learner's: a forward would wait for every update. With what store and which algorithm is the config's, as in the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from veldt.acting.actor import Actor
from veldt.acting.batched import BatchedPolicy
from veldt.acting.recorder import Recorder
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.experiment.config import Config
from veldt.learning.params import LatestParams
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.topologies.single import add_evaluator, add_learner
from veldt.topologies.stores import add_store


def seed(program: Program, config: Config, env: EnvSpec) -> None:
    counters = program.add("counters", Counters, ROWS)
    params = program.add("params", LatestParams, CELL)
    store = add_store(program, config, config.schema(env))
    add_learner(program, config, env, store, params, counters)
    recorder = add_inference(program, config, env, store, params, counters)
    for i in range(config.actors):
        add_actor(program, config, i, recorder, counters)
    if config.eval.every:
        add_evaluator(program, config, env, params, counters)


def add_inference(program: Program, config: Config, env: EnvSpec, store: Any, params: Any, counters: Any) -> Any:
    """The policy of all actors, and the recorder around it, in a process of their own."""
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
        wait=1e-3 * central.wait_ms if config.runtime == "local" else 0.0,  # inline nobody could ask meanwhile
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
    )


def add_actor(program: Program, config: Config, i: int, recorder: Any, counters: Any) -> None:
    envs = partial(make_env, config.env, protocol=config.protocol)
    groups = tuple(range(i * config.central.groups, (i + 1) * config.central.groups))
    n, name = config.envs_per_actor // config.central.groups, f"actor/{i}"
    program.add(name, Actor, envs, n, recorder, counters, config.seed, name, groups, INCARNATION, light=True)
