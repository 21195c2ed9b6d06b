"""Handover: one block at a time, from the recorder to the learner of the same process."""

import numpy as np

from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.records.tree import Array
from veldt.storing.store import Blocks, Sample, Store


class Handover(Store):
    """A queue of one unroll. `insert` returns True once the learner has taken the block, so that the next action is chosen
    after the update. So nothing is left at a checkpoint: what was recorded was learned from."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._offered: Block | None = None
        self._taken: Block | None = None
        self._keys, self._weights, self._probability = np.zeros(1, np.int64), np.ones(1, np.float32), np.ones(1)

    def insert(self, block: Block, priorities: Array | None, source: Source | None = None) -> bool:
        if block is self._taken:
            self._taken = None
            return True
        self._offered = block
        return False

    def sample(self, n: int) -> Sample | None:
        block, self._offered = self._offered, None
        if block is None:
            return None
        self._taken = block
        schema, rows, starts = self.schema, block.rows, block.starts
        columns = schema.layout.columns({name: x[None].copy() for name, x in rows.items()})
        states = schema.start_layout.columns({name: x.copy() for name, x in starts.items()})
        return Sample(self._keys, columns, states, self._weights, self._probability)

    def update(self, keys: Array, priorities: Array) -> None:
        """Has no effect: each block is used once."""

    def trim(self) -> None: ...

    def spread_blocks(self, n: int) -> Blocks | None:
        return None
