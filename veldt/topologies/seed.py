"""SEED RL (Espeholt et al. 2020): inference at the server. The cut through the chain moves; the links are the same.

    [ Actor ] x N
       | step  ^ action                                   (calls, answered in batches)
    [ Recorder - BatchedPolicy ] -> [ Store ] -> [ Learner ] -> [ Params ] -> (back to the policy)

Actors step environments and nothing else: they hold no network, load no torch, and get no weights. One process computes
the actions of all of them in one forward pass, keeps their histories and recurrent states, and records. It is not the
learner's process: there, a forward pass would wait for every update. The store and the algorithm are the config's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.topologies.wiring import add_evaluator, add_inference, add_learner, add_light_actor, add_shared

if TYPE_CHECKING:
    from veldt.experiment.config import Config


def seed(program: Program, config: Config, env: EnvSpec) -> None:
    store, params, counters = add_shared(program, config, env)
    add_learner(program, config, env, store, params, counters)
    recorder = add_inference(program, config, env, store, params, counters)
    for i in range(config.actors):
        add_light_actor(program, config, i, recorder, counters)
    add_evaluator(program, config, env, params, counters)
