"""One actor, one store, one learner: the chain uncut.

[ Actor - Recorder - LocalPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)
"""

from __future__ import annotations

from typing import Any

from veldt.acting.actor import Actor
from veldt.acting.evaluator import Evaluator
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.counters import Counters
from veldt.experiment.config import Config
from veldt.learning.learner import Learner
from veldt.learning.params import LatestParams
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.topologies.stores import add_store


def single(program: Program, config: Config, env: EnvSpec) -> None:
    algorithm, schema, seed = config.algorithm, config.schema(env), config.seed
    counters = program.add("counters", Counters, ROWS)
    params = program.add("params", LatestParams, CELL)
    store = add_store(program, config, schema)
    learner = add_learner(program, config, env, store, params, counters)
    explore = config.actor.explore(0, config.envs_per_actor, config.envs_per_actor)
    policy_seed = derive(seed, "policy", 0)
    policy = program.add("policy/0", LocalPolicy, algorithm, env, params, counters, explore, policy_seed, on=learner)
    recorder = program.add(
        "recorder/0",
        Recorder,
        policy,
        store,
        algorithm,
        schema,
        first_priorities=config.store.first_priorities,
        on=learner,
    )
    program.add(
        "actor/0", Actor, config.envs, config.envs_per_actor, recorder, counters, seed, incarnation=INCARNATION, on=learner
    )
    if config.eval.every:
        add_evaluator(program, config, env, params, counters)


def add_learner(program: Program, config: Config, env: EnvSpec, store: Any, params: Any, counters: Any) -> Any:
    """In the store's process, and before the policies: the first weights are its own."""
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
    )


def add_evaluator(program: Program, config: Config, env: EnvSpec, params: Any, counters: Any) -> None:
    """Greedy episodes of the newest weights, beside all the rest."""
    algorithm, epsilon, policy_seed = config.algorithm, config.eval.epsilon, derive(config.seed, "greedy")
    greedy = program.add("policy/greedy", LocalPolicy, algorithm, env, params, counters, epsilon, policy_seed)
    every, episodes, max_length = config.eval.every, config.eval.episodes, config.eval.max_length
    program.add("evaluator", Evaluator, config.envs, greedy, counters, every, episodes, max_length, config.seed, on=greedy)
