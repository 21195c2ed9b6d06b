"""Topologies: where the chain env -> policy -> recorder -> store -> learner -> params is cut into processes.

    __init__.py   the topologies, and the links that they add to a program: they differ in how many, and where
    evolution.py  evolution strategies: a master and workers
    labelling.py  Bellman updaters, their target networks and the store of labelled transitions (QT-Opt)
    shards.py     the parameter servers of gorila
    stores.py     the stores that a config asks for; demonstrations cut into blocks for one
    workers.py    workers that each act and learn, with shared weights (A3C)

A topology is a function that fills a program. What a program has (a store, a learner, an evaluator) is read from the
program: nothing outside presumes a node. Arguments named store, params, counters and recorder are Refs (`veldt.program`).
May import acting, storing, learning, demos, envs and `program`; the config of `experiment` for type checking only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from veldt.acting.actor import Actor, Evaluator, send_examples
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.learning.learner import Learner
from veldt.learning.params import LatestParams
from veldt.learning.shards import ROW, ShardedParams, sharded
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.topologies.evolution import add_evolution
from veldt.topologies.labelling import add_labelled, add_updater
from veldt.topologies.shards import add_shards
from veldt.topologies.stores import add_store
from veldt.topologies.workers import add_workers

if TYPE_CHECKING:
    from veldt.experiment.config import Config
    from veldt.experiment.recipes.bellman import QTOptConfig
    from veldt.experiment.recipes.parameter_servers import GorilaConfig


def single(program: Program, config: Config, env: EnvSpec) -> None:
    """One actor, one store, one learner: the chain uncut, in one process (DQN).

    [ Actor - Recorder - LocalPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)
    """
    store, params, counters = add_shared(program, config, env)
    learner = add_learner(program, config, env, store, params, counters)
    add_actor(program, config, env, 0, store, params, counters, on=learner)
    add_evaluator(program, config, env, params, counters)


def apex(program: Program, config: Config, env: EnvSpec) -> None:
    """Ape-X (Horgan et al., Distributed prioritized experience replay, 2018): many actors, one store, one learner.

        [ Actor - Recorder - LocalPolicy ] x N
                | blocks           ^ weights
            [ Store ] -> [ Learner ] -> [ Params ]

    Actors compute the first priorities from the values that they acted on, send blocks, and take newer weights every
    `actor.refresh` steps. They wait only for an explicit limiter.

    IMPALA (Espeholt et al. 2018) is the same drawing with a queue for a store: each unroll is learned from once, in the
    order of arrival, and actors wait while the queue is full. An actor takes newer weights at the start of each unroll,
    and records the parameters of the policy that it sampled its actions from; V-trace corrects for what the learner has
    become since then. In processes, unrolls also wait in the streams to the store (`--queue` of them for each actor),
    which adds to the lag.
    """
    store, params, counters = add_shared(program, config, env)
    add_learner(program, config, env, store, params, counters)
    for i in range(config.actors):
        add_actor(program, config, env, i, store, params, counters)
    add_evaluator(program, config, env, params, counters)


def seed(program: Program, config: Config, env: EnvSpec) -> None:
    """SEED RL (Espeholt et al. 2020): inference at the server. The cut through the chain moves; the links are the same.

        [ Actor ] x N
           | step  ^ action                                   (calls, answered in batches)
        [ Recorder - BatchedPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)

    Actors step environments and nothing else: they hold no network, load no torch, and get no weights. One process
    computes the actions of all of them in one forward pass, keeps their histories and recurrent states, and records. It is
    not the learner's process: there, a forward pass would wait for every update.
    """
    store, params, counters = add_shared(program, config, env)
    add_learner(program, config, env, store, params, counters)
    recorder = add_inference(program, config, env, store, params, counters)
    for i in range(config.actors):
        add_light_actor(program, config, i, recorder, counters)
    add_evaluator(program, config, env, params, counters)


def gorila(program: Program, config: GorilaConfig, env: EnvSpec) -> None:
    """Gorila (Nair et al. 2015): bundles that act and learn by themselves, and servers that own the weights.

        [ Actor - Recorder - LocalPolicy - Store - Learner ] x N
                        ^ weights                   | gradients
                             [ ParamShard ] x K

    A bundle is one process, and so is a shard, which owns a slice of the weights and its optimizer. Learners push slices
    of their gradients and take the newest weights before each. With a global replay the store is a process of its own,
    which all bundles insert into and sample from.
    """
    counters = program.add("counters", Counters, ROWS)
    servers = add_shards(program, config, env, counters)
    statistics = program.array("losses", (config.bundles, ROW), "f8")
    schema = config.schema(env)
    store = add_store(program, config, schema, counters, env) if config.replay == "global" else None
    for i in range(config.bundles):
        # The first is seeded like the only learner of other topologies.
        own = replace(config, seed=derive(config.seed, "bundle", i)) if i else config
        local = store or add_store(program, own, schema, counters, env, f"store/{i}")
        place = None if store else local
        guarded = (config.guard, statistics, i, config.learner.clip_norm)
        updater = program.add(f"updater/{i}", sharded, *servers, *guarded, on=place)
        learner = add_learner(program, own, env, local, None, counters, f"learner/{i}", on=updater, updater=updater)
        params = program.add(f"params/{i}", ShardedParams, *servers, on=updater)
        add_actor(program, config, env, i, local, params, counters, on=learner)
    params = program.add("params/greedy", ShardedParams, *servers) if config.eval.every else None
    add_evaluator(program, config, env, params, counters, on=params)


def qt_opt(program: Program, config: QTOptConfig, env: EnvSpec) -> None:
    """QT-Opt (Kalashnikov et al. 2018): collecting, labelling and training are apart, and each has a number of its own.

        [ Actor - Recorder - LocalPolicy ] x N --> [ Store, with logged data ]
                         ^ weights                          | samples
                                               [ BellmanUpdater ] x K  <-- both target networks
                                                            | labelled transitions
                                     [ Labelled store ] -> [ Learner ] -> [ Targets ], [ Params ]

    The learner never sees a transition without a label. With logged data (demonstrations) it can begin before there are
    any steps of the run's own.
    """
    store, params, counters = add_shared(program, config, env)
    labelled, targets = add_labelled(program, config, env, counters)
    add_learner(program, config, env, labelled, params, counters, on=targets, updater=targets)
    for i in range(config.updaters):
        add_updater(program, config, env, i, store, labelled, targets, counters)
    for i in range(config.actors):
        add_actor(program, config, env, i, store, params, counters)
    add_evaluator(program, config, env, params, counters)


def workers(program: Program, config: Any, env: EnvSpec) -> None:
    """A3C: see `add_workers`. The evaluator copies the shared weights."""
    shared, counters = add_workers(program, config, env)
    add_evaluator(program, config, env, shared, counters)


def evolution(program: Program, config: Config, env: EnvSpec) -> None:
    """Evolution Strategies: see `evolution.py`. The evaluator plays the weights without noise."""
    params, counters = add_evolution(program, config, env)
    add_evaluator(program, config, env, params, counters)


Topology = Callable[[Program, Any, EnvSpec], None]  # of a Config of its family
TOPOLOGIES: dict[str, Topology] = {  # by Config.topology
    "single": single,
    "apex": apex,
    "impala": apex,
    "gorila": gorila,
    "qt-opt": qt_opt,
    "workers": workers,
    "evolution": evolution,
}


def make_program(config: Config, env: EnvSpec) -> Program:
    """Central inference cuts any chain between the actor and its recorder."""
    program = Program()
    topology = seed if config.inference == "central" else TOPOLOGIES[config.topology]
    topology(program, config, env)
    return program


def add_shared(program: Program, config: Config, env: EnvSpec) -> tuple[Any, Any, Any]:
    """What actors and learner meet in: store, params and counters."""
    counters = program.add("counters", Counters, ROWS)
    params = program.add("params", LatestParams, CELL)
    return add_store(program, config, config.schema(env), counters, env), params, counters


def add_learner(
    program: Program,
    config: Config,
    env: EnvSpec,
    store: Any,
    params: Any,  # None: its updater's servers publish
    counters: Any,
    name: str = "learner",
    on: Any = None,
    **updater: Any,
) -> Any:
    """In the store's process, and before the policies: the first weights are the learner's."""
    how = (config.learner, config.steps, derive(config.seed, "learner"), config.learner_device)
    args = (config.algorithm, env, store, params, counters, *how)
    return program.add(name, Learner, *args, on=on or store, threads=config.threads, keep=True, **updater)


def add_actor(
    program: Program, config: Config, env: EnvSpec, i: int, store: Any, params: Any, counters: Any, on: Any = None
) -> None:
    """The i-th actor with its policy and recorder, in one process: that of `on`, or a new one."""
    seed, n, name = config.seed, config.envs_per_actor, f"actor/{i}"
    explore = config.actor.explore(i * n, n, n * config.own_actors)
    how = (explore, derive(seed, "policy", i), config.refresh, config.actor.hold)
    args = (config.algorithm, env, params, counters, *how)
    policy = program.add(f"policy/{i}", LocalPolicy, *args, incarnation=INCARNATION, on=on)
    on = on or policy
    recorder = _add_recorder(program, config, env, f"recorder/{i}", policy, store, on=on)
    program.add(name, Actor, config.envs, n, recorder, counters, seed, name, (0,), INCARNATION, on=on, elsewhere=True)


def add_inference(program: Program, config: Config, env: EnvSpec, store: Any, params: Any, counters: Any) -> Any:
    """One policy for all actors, and the recorder around it, in a process of their own. Returns the recorder."""
    central, each = config.central, config.envs_per_actor
    total = each * config.total_actors
    local, n = config.runtime == "local", each // central.groups
    explore, seed = config.actor.explore(0, total, each * config.own_actors), derive(config.seed, "policy", 0)
    args = (config.algorithm, env, params, counters, explore, seed)
    policy = program.add(
        "inference",
        BatchedPolicy,
        *args,
        hold=config.actor.hold,
        groups=config.total_actors * central.groups,
        n=n,
        batch=central.batch or total,
        wait=1e-3 * central.wait_ms if local else 0.0,  # inline nothing could arrive meanwhile
        together=central.groups,
        device=config.inference_device,
        graph=central.graph == "auto",
        threads=config.threads,
    )
    examples = send_examples(env, n)
    return _add_recorder(program, config, env, "recorder", policy, store, later=local, on=policy, examples=examples)


def _add_recorder(program: Program, config: Config, env: EnvSpec, name: str, policy: Any, store: Any, **how: Any) -> Any:
    args, first = (policy, store, config.algorithm, config.schema(env)), config.store.first_priorities
    return program.add(name, Recorder, *args, first_priorities=first, **how)


def add_light_actor(program: Program, config: Config, i: int, recorder: Any, counters: Any) -> None:
    """The i-th actor under central inference, in a process without torch."""
    envs = partial(make_env, config.env, **config.env_options)
    groups = tuple(range(i * config.central.groups, (i + 1) * config.central.groups))
    n, name = config.envs_per_actor // config.central.groups, f"actor/{i}"
    args = (envs, n, recorder, counters, config.seed, name, groups, INCARNATION)
    program.add(name, Actor, *args, light=True, elsewhere=True)


def add_evaluator(program: Program, config: Config, env: EnvSpec, params: Any, counters: Any, on: Any = None) -> None:
    """Greedy episodes with the newest weights, in a process of their own; none where eval.every is 0."""
    if not config.eval.every:
        return
    algorithm, epsilon, policy_seed = config.algorithm, config.eval.epsilon, derive(config.seed, "greedy")
    greedy = program.add("policy/greedy", LocalPolicy, algorithm, env, params, counters, epsilon, policy_seed, on=on)
    every, episodes, max_length = config.eval.every, config.eval.episodes, config.eval.max_length
    evaluated = program.add("evaluated", LatestParams, CELL)  # what the newest evaluation was of: perhaps the best so far
    how = (every, episodes, max_length, config.seed, evaluated)
    program.add("evaluator", Evaluator, config.envs, greedy, counters, *how, on=greedy)
