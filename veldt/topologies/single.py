"""One actor, one store, one learner: the chain uncut, in one process.

[ Actor - Recorder - LocalPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.topologies.wiring import add_actor, add_evaluator, add_learner, add_shared

if TYPE_CHECKING:
    from veldt.experiment.config import Config


def single(program: Program, config: Config, env: EnvSpec) -> None:
    store, params, counters = add_shared(program, config, env)
    learner = add_learner(program, config, env, store, params, counters)
    add_actor(program, config, env, 0, store, params, counters, on=learner)
    add_evaluator(program, config, env, params, counters)
