"""Ape-X (Horgan et al., Distributed prioritized experience replay, 2018): many actors, one store, one learner.

    [ Actor - Recorder - LocalPolicy ] x N
            | blocks           ^ weights
        [ Store ] -> [ Learner ] -> [ Params ]

Actors compute the first priorities from the values that they acted on, send blocks, and take newer weights every
`actor.refresh` steps. They wait only for an explicit limiter.

IMPALA (Espeholt et al. 2018) is the same drawing with a queue for a store: each unroll is learned from once, in the order
of arrival, and actors wait while the queue is full. An actor takes newer weights at the start of each unroll, and records
the parameters of the policy that it sampled its actions from; V-trace corrects for what the learner has become since
then. In processes, unrolls also wait in the streams to the store (`--queue` of them for each actor), which adds to the lag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.topologies.wiring import add_actor, add_evaluator, add_learner, add_shared

if TYPE_CHECKING:
    from veldt.experiment.config import Config


def apex(program: Program, config: Config, env: EnvSpec) -> None:
    store, params, counters = add_shared(program, config, env)
    add_learner(program, config, env, store, params, counters)
    for i in range(config.actors):
        add_actor(program, config, env, i, store, params, counters)
    add_evaluator(program, config, env, params, counters)
