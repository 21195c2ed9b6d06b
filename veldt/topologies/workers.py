"""Workers that each act and learn, and share their weights without a lock: A3C and the asynchronous value-based methods."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from veldt.acting.actor import Actor
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.counters import Counters
from veldt.learning import params
from veldt.learning.hogwild import Hogwild, SharedWeights
from veldt.learning.learner import Learner
from veldt.program import INCARNATION, ROWS, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.storing.handover import Handover

if TYPE_CHECKING:
    from veldt.experiment.recipes.asynchronous import WorkersConfig


def add_workers(program: Program, config: WorkersConfig, env: EnvSpec) -> tuple[Any, Any]:
    """A3C (Mnih et al. 2016): each worker has one environment, a copy of the weights, and a queue of one unroll.

        [ Actor - Recorder - LocalPolicy - Handover - Learner ] x N
                                 ^ copies of weights   | steps of the optimizer
                              [ one array of weights, one of mean squares ]

    A worker copies the weights, acts for one unroll, computes the gradient on that copy, and changes the shared weights.
    Returns the shared weights and the counters.
    """
    counters = program.add("counters", Counters, ROWS)
    shared = _add_shared(program, config, env, counters)
    parameters = sum(x.numel() for x in config.algorithm.network(env).parameters())
    squares = {"shared": 1, "own": config.workers}[config.statistics] if config.learner.optimizer == "rmsprop" else 0
    arrays = [program.array(f"square/{i}", (parameters,), np.float32) for i in range(squares)]
    for i in range(config.workers):
        _add_worker(program, config, env, i, shared, arrays[i % squares] if squares else None, counters)
    return shared, counters


def _add_shared(program: Program, config: WorkersConfig, env: EnvSpec, counters: Any) -> Any:
    """Arrays, which outlive every worker. The named weights of a checkpoint are the parts of the first."""
    parts = params.layout(config.algorithm.network(env))
    size = sum(int(np.prod(shape)) for shape in parts.values())
    weights, begun = program.array("weights", (size,), np.float32, parts), program.array("begun", (1,), np.int64)
    if not config.algorithm.uses_target:
        return program.add("params", SharedWeights, weights, begun, counters)
    target, copied = program.array("target", (size,), np.float32), program.array("copied", (1,), np.int64)
    return program.add("params", SharedWeights, weights, begun, counters, target, copied, config.target_every)


def _add_worker(
    program: Program, config: WorkersConfig, env: EnvSpec, i: int, shared: Any, square: Any, counters: Any
) -> None:
    algorithm, seed, schema = config.algorithm, config.seed, config.schema(env)
    store = program.add(f"store/{i}", Handover, schema)
    own = program.add(f"updater/{i}", Hogwild, shared, square, config.learner, counters, config.steps, on=store)
    early = not algorithm.reads_last_action
    # An unroll that ends with an action ends after the next one has begun: its worker copies the weights at every step.
    refresh = config.refresh if early else 1
    how = (config.explore(i), derive(seed, "policy", i), refresh)
    policy = program.add(f"policy/{i}", LocalPolicy, algorithm, env, own, counters, *how, on=store)
    recorder = program.add(f"recorder/{i}", Recorder, policy, store, algorithm, schema, early=early, on=store)
    envs, name = partial(config.envs, alone=True), f"actor/{i}"
    program.add(name, Actor, envs, 1, recorder, counters, seed, name, (0,), INCARNATION, on=store)
    learning = (config.learner, config.steps, derive(seed, "learner"))  # the same seed: equal first weights
    more: dict[str, Any] = {"updater": own, "on": store, "threads": config.threads}
    program.add(f"learner/{i}", Learner, algorithm, env, store, None, counters, *learning, **more)
