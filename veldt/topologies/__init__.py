"""Topologies: where the chain env -> policy -> recorder -> store -> learner -> params is cut into processes.

    wiring    adds the nodes of one link to a program
    stores    the stores that a config asks for
    single    one actor, in the learner's process (DQN)
    apex      many actors with a policy each (Ape-X, R2D2, R2D3; with a queue for a store: IMPALA)
    seed      many actors, one policy for all (SEED RL): any of the above with `--inference central`

A topology is a function that fills a program. What a program has (a store, a learner, an evaluator) is read from the
program: nothing outside presumes a node. May import acting, storing, learning, demos, envs and `program`; the config of
`experiment` for type checking only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.topologies.apex import apex
from veldt.topologies.seed import seed
from veldt.topologies.single import single

if TYPE_CHECKING:
    from veldt.experiment.config import Config

Topology = Callable[[Program, "Config", EnvSpec], None]
TOPOLOGIES: dict[str, Topology] = {"single": single, "apex": apex, "impala": apex}  # by Config.topology


def topology_of(config: Config) -> Topology:
    """Central inference cuts any chain between the actor and its recorder."""
    return seed if config.inference == "central" else TOPOLOGIES[config.topology]


def make_program(config: Config, env: EnvSpec) -> Program:
    program = Program()
    topology_of(config)(program, config, env)
    return program
