"""Evolution Strategies (Salimans et al. 2017): one master, N workers. No store, no learner, no task is sent.

    [ Master ] -- weights, statistics of observations (the newest wins) --> [ Worker ] x N
        ^-------- (generation, pair, two returns, two lengths) ----------------'

Master and workers map one table of noise. Which pair a worker evaluates, where its noise is in the table and how its
environments are seeded follows from the seed and the generation.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from veldt.acting.reference import reference_batch
from veldt.acting.worker import Worker
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.learning.evolution import ALIGN
from veldt.learning.master import Master
from veldt.learning.params import LatestParams
from veldt.ports import Examples
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive

if TYPE_CHECKING:
    from veldt.experiment.config import Config


def add_evolution(program: Program, config: Config, env: EnvSpec) -> tuple[Any, Any]:
    """Returns the weights and the counters."""
    counters = program.add("counters", Counters, ROWS)
    params = program.add("params", LatestParams, CELL)
    table = program.array("noise", (config.learner.table,), np.float32, saved=False)
    net = config.algorithm.network(env)
    size = sum(parameter.numel() for parameter in net.parameters())
    if size + ALIGN > config.learner.table:
        raise UserError(
            f"The network has {size:,} parameters, more than the table of noise has numbers ({config.learner.table:,}); "
            f"raise learner.table to {10 * size:,} or more."
        )
    how = (config.algorithm, env)
    reference = partial(reference_batch, *how, config.envs, config.learner.reference, config.seed) if net.refers else None
    args = (*how, params, counters, config.learner, config.steps, derive(config.seed, "master"), table, reference)
    examples = {"observations": Examples([(0, 0, np.zeros(1 + 2 * (0 if net.norm is None else len(net.norm.mean))))])}
    master = program.add("master", Master, *args, INCARNATION, threads=config.threads, keep=True, examples=examples)
    envs = partial(make_env, config.env, **config.env_options, separate=True)
    for i in range(config.actors):
        add_worker(program, config, env, i, envs, master, counters, table, reference, 4 * size)
    return params, counters


def add_worker(
    program: Program,
    config: Config,
    env: EnvSpec,
    i: int,
    envs: Any,
    master: Any,
    counters: Any,
    table: Any,
    reference: Any,
    weights: int,  # bytes
) -> None:
    """The i-th worker, in a process of its own. Each lane has weights of its own."""
    how = (config.learner, config.actor.noise, derive(config.seed, "master"), i, config.actors, table, reference)
    args = (config.algorithm, env, envs, config.envs_per_actor, master, counters, *how)
    ram = config.envs_per_actor * weights
    program.add(f"worker/{i}", Worker, *args, threads=config.threads, elsewhere=True, ram=ram)
