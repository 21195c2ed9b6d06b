"""The parameter servers of a program: how the weights are cut, and what outlives a server's process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from veldt.learning import params
from veldt.learning.learner import make_optimizer
from veldt.learning.shards import COUNTS, NamedWeights, ParamShard, Part, cut, first_weights
from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.seeds import derive

if TYPE_CHECKING:
    from veldt.experiment.recipes.parameter_servers import GorilaConfig


def add_shards(program: Program, config: GorilaConfig, env: EnvSpec, counters: Any) -> tuple[list[Any], list[Part]]:
    """Each in a process of its own. Returns their Refs and what they own."""
    net = config.algorithm.network(env)
    parameters, size = sum(x.numel() for x in net.parameters()), len(params.flatten(net))
    parts = cut(parameters, size, config.shards)
    averages = make_optimizer(config.learner, torch.zeros(1), torch.zeros(1)).averages
    first = partial(first_weights, config.algorithm, env, derive(config.seed, "learner"))
    how = (config.learner, config.guard.max_age, config.steps, counters)
    shards, slices = [], []
    for k, part in enumerate(parts):
        name, length = f"shard/{k}", part.gradient.stop - part.gradient.start
        slices.append(program.array(f"{name}/vector", (part.weights.stop - part.weights.start,), "f4"))
        kept = {average: program.array(f"{name}/{average}", (length,), "f4") for average in averages}
        counts = program.array(f"{name}/counts", (COUNTS,), "i8")  # after the others: a resume fills arrays in this order
        shards.append(program.add(name, ParamShard, first, part, slices[k], kept, counts, *how, k == 0))
    program.add("weights", NamedWeights, config.algorithm, env, slices, on=shards[0])
    return shards, parts
