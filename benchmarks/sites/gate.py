"""What the gate carries: sites that replay one block as fast as it is taken, and a store that keeps nothing.

    python benchmarks/sites/gate.py --env ALE/Pong-v5 --actors 10 100 1000 --seconds 10

The sites' processes share the machine with the gate, so the figure to compare is the gate's own CPU time for a block: its
reciprocal is what one core carries.
"""

import argparse
import contextlib
import logging
import multiprocessing
import re
import time
from typing import Any

import numpy as np

from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.experiment.prepare import make_gate
from veldt.learning.params import LatestParams
from veldt.program import CELL, ROWS, Program
from veldt.records.block import Block, Schema
from veldt.records.tree import Tree
from veldt.runtime.local.local import Local
from veldt.storing.store import BlockCodec, Store, insert_examples
from veldt.topologies import add_actor

TOKEN = "0123456789abcdef" * 4
PER_SITE = 250


class Sink(Store):
    """Takes every block and keeps none."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def insert(self, block: Block, priorities: Any, source: Any = None) -> bool:
        return True


def replay(address: str, actors: int, message: Tree) -> None:
    from veldt.runtime.grpc.link import Link

    link = Link(address, TOKEN, actors=actors)
    link.connect()
    boxes: list[Any] = link.session.boxes
    while not link.session.quit:
        for box in boxes:
            while box.put(message):
                pass
        link.wait(0.01)
    link.close()


class Listening(logging.Handler):
    address = ""

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"listening on (\S+:\d+)", record.getMessage()):
            self.address = found[1]


def honest(schema: Schema) -> Tree:
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    columns = schema.layout.columns(rows)
    columns["valid"][:], columns["discount"][:] = True, 1.0
    index = sorted(name for name in dir(Store) if hasattr(getattr(Store, name), "_veldt_port")).index("insert")
    block = Block(schema, rows, starts, np.ones(schema.starts, np.bool_))
    return {"@port": np.array([index]), **BlockCodec().pack(block, np.ones(schema.starts))}


def measure(env: str, actors: int, seconds: float) -> dict[str, float]:
    config = recipes.make("apex-dqn", env, actors=1, **{"gate.listen": "127.0.0.1:0", "gate.seats": actors})
    spec = config.env_spec()
    schema, program = config.schema(spec), Program()
    counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
    sink = program.add("store", Sink, schema, examples=insert_examples(schema, spec))
    add_actor(program, config, spec, 0, sink, params, counters)
    message, heard, context = honest(schema), Listening(), multiprocessing.get_context("spawn")
    logging.getLogger("veldt").setLevel(logging.INFO)
    logging.getLogger("veldt").addHandler(heard)
    sites = []
    with contextlib.ExitStack() as stack, Local(gate=make_gate(config, TOKEN)).start(program) as nodes:
        nodes.supervisor.children["actor/0"].end("not needed")

        def tick(until: float) -> dict[str, float]:
            seen: dict[str, float] = {}
            while time.monotonic() < until:
                nodes.supervisor.children["actor/0"].due = float("inf")
                nodes.step()
                seen |= nodes.supervisor.reports.take()
            return seen

        while not heard.address:
            tick(time.monotonic() + 0.1)
        for first in range(0, actors, PER_SITE):
            arguments = (heard.address, min(PER_SITE, actors - first), message)
            sites.append(context.Process(target=replay, args=arguments, daemon=True))
            sites[-1].start()
            stack.callback(sites[-1].kill)
        deadline = time.monotonic() + 120
        while tick(time.monotonic() + 0.5).get("gate_actors", 0) < actors:
            assert time.monotonic() < deadline, "the sites did not join"
        tick(time.monotonic() + 2)
        first_seen, began = tick(time.monotonic() + 1), time.monotonic()
        last = tick(began + seconds)
        time_s = time.monotonic() - began
        blocks, bytes_ = (last[name] - first_seen[name] for name in ("stream_blocks", "gate_bytes_in"))
        cpu = last["cpu/gate"]
        out = {"actors": actors, "block_kb": sum(x.nbytes for x in message.values()) / 1e3, "blocks_s": blocks / time_s}
        out |= {"MB_s": bytes_ / 1e6 / time_s, "cpu_gate": cpu, "us_a_block": 1e6 * cpu * time_s / max(1, blocks)}
        return out | {"env_steps_s": blocks * schema.fresh / time_s, "pending": last["gate_pending"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--actors", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    for n in options.actors:
        found = measure(options.env, n, options.seconds)
        print(options.env, {name: round(x, 2) for name, x in found.items()}, flush=True)
