"""Blocks as messages: the columns of a block's storage, so that a store copies them in one piece."""

from __future__ import annotations

import numpy as np

from veldt.ports import Examples
from veldt.records.block import Block, Schema
from veldt.records.tree import PACKED, Array, Tree


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
        rows, starts = (
            {
                name: message[kind + name].view(layout.record) if name == PACKED else message[kind + name]
                for name in (*layout.large, *([PACKED] if layout.record.names else []))
            }
            for kind, layout in (("rows/", schema.layout), ("starts/", schema.start_layout))
        )
        return Block(schema, rows, starts, message["items"]), message.get("priorities")


def insert_examples(schema: Schema) -> dict[str, Examples]:
    """One block with priorities and one without."""
    rows, states = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    block = Block(schema, rows, states, np.zeros(schema.starts, np.bool_))
    return {"insert": Examples([(block, None), (block, np.zeros(schema.starts))])}
