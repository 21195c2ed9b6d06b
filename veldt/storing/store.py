"""Store: what a recorder and a learner see of any store."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from veldt.records.block import Block, Schema, Source
from veldt.records.tree import Array, Tree


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


class Store(Protocol):
    schema: Schema

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        """Takes a block; False: not now, keep it and try again. `priorities` has one for each window start, or is None.

        `source` names the message that brought the block: a store takes each message once. A block without a source is
        never a duplicate.
        """

    def sample(self, n: int) -> Sample | None:
        """n items and their windows; None: not now. The arrays are copies, never views of the store."""

    def update(self, keys: Array, priorities: Array) -> None: ...  # of sampled items
    def trim(self) -> None: ...  # to the capacity, which inserts may exceed
    def spread_blocks(self, n: int) -> tuple[Tree, Tree]:
        """At most n whole blocks, evenly spread from the oldest to the newest: columns of rows [n, R, ...] and of starts
        [n, S, ...]."""
