"""Store: what a recorder and a learner see of any store, and how a block travels to one in another process."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from veldt.ports import Examples, Source, call, stream
from veldt.program import walk
from veldt.records.block import Block, Schema
from veldt.records.checks import BlockCheck
from veldt.records.step import EnvSpec
from veldt.records.tree import PACKED, Array, Tree
from veldt.storing.slots import BlockMemory, Slots


class Sample(NamedTuple):
    """Arrays; of a store on a GPU, rows and starts are tensors there."""

    keys: Array  # int64 [n]
    rows: Tree  # columns [n, T, ...]
    starts: Tree  # columns [n, ...]
    weights: Array  # float32 [n], importance weights
    probability: Array  # float64 [n]

    def part(self, first: int, every: int) -> "Sample":
        """The items first, first + every, first + 2 * every, ... as a batch: its largest weight is 1."""
        if every == 1:
            return self
        keep = slice(first, None, every)
        rows, starts = ({name: x[keep] for name, x in tree.items()} for tree in (self.rows, self.starts))
        weights = self.weights[keep] / self.weights[keep].max()
        return Sample(self.keys[keep], rows, starts, weights, self.probability[keep])


class Blocks(NamedTuple):
    """Whole blocks: columns of their rows [n, R, ...] and of their window starts [n, S, ...]."""

    rows: Tree
    starts: Tree


class BlockCodec:
    """`insert(block, priorities)` as one message. The receiving store knows the schema of its blocks."""

    views = False

    def pack(self, block: Block, priorities: Array | None) -> Tree:
        message: Tree = {"items": block.items}
        if priorities is not None:
            message["priorities"] = np.asarray(priorities, np.float64)
        for kind, arrays in (("rows/", block.rows), ("starts/", block.starts)):
            for name, array in arrays.items():
                message[kind + name] = array.view(np.uint8) if name == PACKED else array
        return message

    def unpack(self, store: object, message: Tree) -> tuple[Block, Array | None]:
        schema: Schema = store.schema  # type: ignore[attr-defined]
        rows, starts = schema.layout.received(message, "rows/"), schema.start_layout.received(message, "starts/")
        return Block(schema, rows, starts, message["items"]), message.get("priorities")


class Store(Protocol):
    schema: Schema

    @stream(codec=BlockCodec())
    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        """Takes a block; False: not now, keep it and try again. `priorities` has one for each window start, or is None.

        `source` names the message that brought the block: a store takes each message once. A block without a source is
        never a duplicate.
        """

    @call
    def sample(self, n: int) -> Sample | None:
        """n items and their windows; None: not now. The arrays are copies, never views of the store."""

    @stream
    def update(self, keys: Array, priorities: Array) -> None: ...  # of sampled items

    @stream
    def trim(self) -> None: ...  # to the capacity, which inserts may exceed

    @call
    def spread_blocks(self, n: int) -> Blocks | None:
        """At most n whole blocks, evenly spread from the oldest to the newest."""

    @staticmethod
    def map_blocks(arguments: Any, memory: BlockMemory, state: dict[str, Any]) -> Slots:
        """The blocks of a store that was built from these arguments in another process, in the state that it reported."""
        (schema,) = walk(arguments, Schema)
        counts = state["counts"]
        return Slots(schema, len(state["items"]), memory, int(counts["oldest"]), int(counts["next"]))


def insert_examples(schema: Schema, env: EnvSpec | None = None) -> dict[str, Examples]:
    """What an actor elsewhere may send: blocks, of this environment, and nothing else."""
    rows, states = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    block = Block(schema, rows, states, np.zeros(schema.starts, np.bool_))
    check = None if env is None else BlockCheck(schema, env)
    return {"insert": Examples([(block, None), (block, np.zeros(schema.starts))], check=check), "trim": Examples()}
