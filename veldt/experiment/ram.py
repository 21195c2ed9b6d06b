"""How much RAM a run takes, planned before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from veldt.errors import UserError
from veldt.experiment.config import Config
from veldt.machine import available_memory, format_bytes, used_memory
from veldt.program import Program
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.runtime.local.plan import STREAM_BYTES
from veldt.storing.slots import Size
from veldt.topologies.stores import demos_size, store_size

NETWORK_COPIES = 15  # weights, target, gradient, moments, published weights, copies at the policies, activations
LIBRARIES = 20_000_000  # bytes that libraries take when first used
PROCESS = 30_000_000  # private bytes of a process, beside the pages it shares with its zygote
ZYGOTE = 130_000_000
LIGHT_PROCESS, LIGHT_ZYGOTE = 12_000_000, 40_000_000  # the same of processes without torch


@dataclass(frozen=True)
class RamPlan:
    store: Size
    rest: int  # bytes beside the store
    total: int  # bytes of the whole run when the store is full, with what this process has now


def plan_ram(config: Config, env: EnvSpec, program: Program, parameters: int) -> RamPlan:
    """Plans the RAM of a run. Raises a UserError where that much is not free."""
    schema = config.schema(env)
    store = store_size(config, schema) if "store" in program.nodes else Size(0, 0, 0)
    rest = plan_rest(schema, config.learner.batch * config.learner.prefetch, parameters)
    rest += demos_size(config, schema).nbytes
    if config.runtime == "local":
        rest += plan_processes(program, schema, config.queue)
    check_memory(store, available_memory() - rest, rest)
    return RamPlan(store, rest, used_memory() + store.nbytes + rest)


def plan_rest(schema: Schema, sampled: int, parameters: int) -> int:
    """About how many bytes a run needs beside its store: two samples of that many windows, and copies of the network.

    Measured on two cores: 1 % less than CartPole took, 1 % less than MinAtar, 2 % less than Atari.
    """
    window = schema.window.rows * schema.layout.nbytes + schema.start_layout.nbytes
    return 2 * sampled * window + 4 * NETWORK_COPIES * parameters + LIBRARIES


def plan_processes(program: Program, schema: Schema, queue: int) -> int:
    """About how many bytes it takes to run the nodes in processes of their own, with streams from recorders elsewhere."""
    nodes = program.nodes
    own = [node for node in nodes.values() if node.on is None and node.name not in ("counters", "params")]
    light = sum(node.light for node in own)
    streams = sum(name.startswith("recorder") and node.on != "learner" for name, node in nodes.items())
    stream = queue * min(STREAM_BYTES, schema.nbytes + 9 * schema.starts + 1024)
    zygotes = ZYGOTE + (LIGHT_ZYGOTE if light else 0)
    return zygotes + (len(own) - light) * PROCESS + light * LIGHT_PROCESS + streams * stream


def check_memory(size: Size, available: int, rest: int = 0) -> None:
    """Refuses a store that cannot fit, before anything is allocated. `available` is what is free beside `rest`."""
    if available < 0:
        raise UserError(
            f"The run needs about {format_bytes(rest)} of RAM beside its store, but {format_bytes(available + rest)} is "
            "free; use fewer --actors, or --runtime inline."
        )
    if size.nbytes > 0.9 * available:
        half = format_bytes(0.5 * available).replace(" ", "")
        raise UserError(
            f"The store needs {format_bytes(size.nbytes)} for {size.capacity:,} items, but {format_bytes(available)} of "
            f"RAM is free; lower store.capacity, for example to {half}."
        )
