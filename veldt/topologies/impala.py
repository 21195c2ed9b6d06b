"""IMPALA (Espeholt et al. 2018): many actors, a queue of unrolls, one learner.

    [ Actor - Recorder - LocalPolicy ] x N
            | unrolls          ^ weights
        [ Store ] -> [ Learner ] -> [ Params ]

The store is a queue: each unroll is learned from once, in the order of arrival, and actors wait while it is full. An actor
takes newer weights at the start of each unroll, and records the parameters of the policy that it drew its actions from:
what the learner has become since then is corrected by V-trace. Inline, actors and learner take turns: the reference.
"""

from __future__ import annotations

from veldt.config import Config
from veldt.counters import Counters
from veldt.params import LatestParams
from veldt.program import MEMORY, Program
from veldt.step import EnvSpec
from veldt.topologies.apex import add_actors
from veldt.topologies.single import add_evaluator, add_learner


def impala(program: Program, config: Config, env: EnvSpec) -> None:
    counters = program.add("counters", Counters)
    params = program.add("params", LatestParams)
    store = program.add("store", config.make_store, config.schema(env), MEMORY)
    add_learner(program, config, env, store, params, counters)
    add_actors(program, config, env, store, params, counters)
    if config.eval.every:
        add_evaluator(program, config, env, params, counters)
