"""How many items, slots and bytes a store has, known before the run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.records.block import Schema

LEAF_BYTES = 11  # a leaf of the sum tree, its share of the nodes above (8 / 7 of it), and the item flag
TREE_BYTES = 1024  # a sum tree rounds every level up to a cache line
BLOCK_BYTES = 32  # a block's name and commit word
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Size:
    """How large a store will be."""

    capacity: int  # items
    slots: int  # blocks
    nbytes: int


def plan_size(capacity: str | int, schema: Schema, slack: float = 0.0) -> Size:
    """The slots and bytes for a capacity in steps (`100_000`) or in bytes (`2GB`)."""
    block = schema.nbytes + LEAF_BYTES * schema.starts + BLOCK_BYTES
    amount, unit = parse_capacity(capacity)
    if unit:
        slots = int((amount - TREE_BYTES) // block)
        if slots < 2:
            raise UserError(
                f"A store of {capacity} holds less than two blocks of {format_bytes(block)}; give it at least "
                f"{format_bytes(2 * block + TREE_BYTES)}."
            )
        items = int(slots * schema.starts / (1 + slack))
    else:
        items = max(1, int(amount) // schema.window.stride)
        slots = max(2, -(-int(items * (1 + slack)) // schema.starts))
    return Size(items, slots, slots * block + TREE_BYTES)


def parse_capacity(text: str | int) -> tuple[float, str]:
    """(amount, unit); the amount is in bytes if there is a unit, otherwise in steps."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?) ?([a-z]*)", str(text).strip().lower())
    if not match or match[2] not in UNITS or float(match[1].replace("_", "")) * UNITS[match[2]] < 1:
        raise UserError(f"store.capacity {text!r} is neither steps nor bytes; write it as 100_000 or as 2GB.")
    return float(match[1].replace("_", "")) * UNITS[match[2]], match[2]
