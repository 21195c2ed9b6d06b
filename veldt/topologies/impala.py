"""IMPALA (Espeholt et al. 2018): many actors, a queue of unrolls, one learner.

    [ Actor - Recorder - LocalPolicy ] x N
            | unrolls          ^ weights
        [ Store ] -> [ Learner ] -> [ Params ]

The store is a queue: each unroll is learned from once, in the order of arrival, and actors wait while it is full. An actor
takes newer weights at the start of each unroll, and records the parameters of the policy that it drew its actions from:
what the learner has become since then is corrected by V-trace. Inline, actors and learner take turns: the reference. In
processes, unrolls also wait in the streams to the store (`--queue` of them for each actor), which adds to the lag.
"""

from __future__ import annotations

from veldt.experiment.config import Config
from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.topologies.apex import apex


def impala(program: Program, config: Config, env: EnvSpec) -> None:
    apex(program, config, env)  # with the store that the config asks for: a queue
