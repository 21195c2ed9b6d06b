"""Topologies: where the chain env -> policy -> recorder -> store -> learner -> params is cut into processes.

    __init__  single, apex and seed: which links a program has, and how many
    wiring    adds the nodes of one link to a program
    stores    the stores that a config asks for

A topology is a function that fills a program. What a program has (a store, a learner, an evaluator) is read from the
program: nothing outside presumes a node. May import acting, storing, learning, demos, envs and `program`; the config of
`experiment` for type checking only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.topologies.wiring import add_actor, add_evaluator, add_inference, add_learner, add_light_actor, add_shared

if TYPE_CHECKING:
    from veldt.experiment.config import Config


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
    not the learner's process: there, a forward pass would wait for every update. The store and the algorithm are the
    config's.
    """
    store, params, counters = add_shared(program, config, env)
    add_learner(program, config, env, store, params, counters)
    recorder = add_inference(program, config, env, store, params, counters)
    for i in range(config.actors):
        add_light_actor(program, config, i, recorder, counters)
    add_evaluator(program, config, env, params, counters)


Topology = Callable[[Program, "Config", EnvSpec], None]
TOPOLOGIES: dict[str, Topology] = {"single": single, "apex": apex, "impala": apex}  # by Config.topology


def make_program(config: Config, env: EnvSpec) -> Program:
    """Central inference cuts any chain between the actor and its recorder."""
    program = Program()
    topology = seed if config.inference == "central" else TOPOLOGIES[config.topology]
    topology(program, config, env)
    return program
