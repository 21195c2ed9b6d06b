"""What QT-Opt has between its replay and its learner: updaters that label, and the store of labelled transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veldt.learning.bellman import BellmanUpdater
from veldt.learning.targets import Targets
from veldt.program import BLOCK_MEMORY, INCARNATION, Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.topologies.stores import labelled_size, make_labelled

if TYPE_CHECKING:
    from veldt.experiment.recipes.bellman import QTOptConfig


def add_labelled(program: Program, config: QTOptConfig, env: EnvSpec, counters: Any) -> tuple[Any, Any]:
    """The store of labelled transitions and, in its process, the target networks. Returns both."""
    schema = config.learner_schema(env)
    ram, constants = labelled_size(config, schema).nbytes, {"schema": schema}
    labelled = program.add("labelled", make_labelled, config, schema, BLOCK_MEMORY, counters, ram=ram, constants=constants)
    how = (config.targets, config.learner, counters, config.steps)
    return labelled, program.add("targets", Targets, *how, on=labelled, keep=True)


def add_updater(
    program: Program, config: QTOptConfig, env: EnvSpec, i: int, store: Any, labelled: Any, targets: Any, counters: Any
) -> None:
    """The i-th Bellman updater, in a process of its own."""
    args = (config.algorithm, env, store, labelled, targets, config.learner_schema(env), counters)
    how = (derive(config.seed, "bellman", i), "cpu", INCARNATION)
    program.add(f"bellman/{i}", BellmanUpdater, *args, *how, threads=config.threads)
