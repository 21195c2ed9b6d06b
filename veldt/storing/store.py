"""Store: what a recorder and a learner see of any store."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from veldt.ports import Source, call, stream
from veldt.program import walk
from veldt.records.block import Block, Schema
from veldt.records.tree import Array, Tree
from veldt.storing.messages import BlockCodec
from veldt.storing.slots import BlockMemory, MappedBlocks


class Sample(NamedTuple):
    keys: Array  # int64 [n]
    rows: Tree  # columns [n, T, ...]
    starts: Tree  # columns [n, ...]
    weights: Array  # float32 [n], importance weights
    probability: Array  # float64 [n]

    def part(self, first: int, every: int) -> Sample:
        """The items first, first + every, first + 2 * every, ..."""
        if every == 1:
            return self
        keep = slice(first, None, every)
        rows, starts = ({name: x[keep] for name, x in tree.items()} for tree in (self.rows, self.starts))
        return Sample(self.keys[keep], rows, starts, self.weights[keep], self.probability[keep])


class Blocks(NamedTuple):
    """Whole blocks: columns of their rows [n, R, ...] and of their window starts [n, S, ...]."""

    rows: Tree
    starts: Tree


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
    def map_blocks(arguments: Any, memory: BlockMemory, state: dict[str, Any]) -> MappedBlocks:
        """The blocks of a store that was built from these arguments in another process, in the state that it reported."""
        (schema,) = walk(arguments, Schema)
        counts = state["counts"]
        return MappedBlocks(schema, len(state["items"]), memory, int(counts["oldest"]), int(counts["next"]))
