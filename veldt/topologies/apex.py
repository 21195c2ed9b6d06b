"""Ape-X (Horgan et al., Distributed prioritized experience replay, 2018): many actors, one store, one learner.

    [ Actor - Recorder - LocalPolicy ] x N
            | blocks           ^ weights
        [ Store ] -> [ Learner ] -> [ Params ]

Every environment of the run explores with an epsilon of its own. Actors compute the first priorities from the values that
they acted on, send blocks, and take newer weights from time to time; they wait for nobody but an explicit limiter.
"""

from __future__ import annotations

from typing import Any

from veldt.acting.actor import Actor
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.counters import Counters
from veldt.experiment.config import Config
from veldt.learning.params import LatestParams
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.topologies.single import add_evaluator, add_learner
from veldt.topologies.stores import add_store


def apex(program: Program, config: Config, env: EnvSpec) -> None:
    counters = program.add("counters", Counters, ROWS)
    params = program.add("params", LatestParams, CELL)
    store = add_store(program, config, config.schema(env))
    add_learner(program, config, env, store, params, counters)
    add_actors(program, config, env, store, params, counters)
    if config.eval.every:
        add_evaluator(program, config, env, params, counters)


def add_actors(program: Program, config: Config, env: EnvSpec, store: Any, params: Any, counters: Any) -> None:
    for i in range(config.actors):
        add_actor(program, config, env, i, store, params, counters)


def add_actor(program: Program, config: Config, env: EnvSpec, i: int, store: Any, params: Any, counters: Any) -> None:
    """The i-th actor, with its policy and recorder in a process of its own."""
    algorithm, seed, n = config.algorithm, config.seed, config.envs_per_actor
    policy = program.add(
        f"policy/{i}",
        LocalPolicy,
        algorithm,
        env,
        params,
        counters,
        config.actor.explore(i * n, n, n * config.total_actors),
        derive(seed, "policy", i),
        config.refresh,
    )
    recorder = program.add(
        f"recorder/{i}",
        Recorder,
        policy,
        store,
        algorithm,
        config.schema(env),
        first_priorities=config.store.first_priorities,
        on=policy,
    )
    name = f"actor/{i}"
    program.add(name, Actor, config.envs, n, recorder, counters, seed, name, (0,), INCARNATION, on=policy)
