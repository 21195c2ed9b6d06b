"""Windows that are gathered on a GPU, from a copy of a store's blocks there.

The blocks in the host's memory stay what they are for every other store: they outlive the process, checkpoints are made of
them, and a restarted process copies them to the GPU again. A block that is written goes to pinned memory first, and from
there to the GPU with others, without waiting. All work is on one stream: nothing that is gathered is overwritten meanwhile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.records.block import Schema
from veldt.records.step import is_observation
from veldt.records.tree import PACKED, Array, Layout, Tree

STAGED = 16 << 20  # bytes of blocks that go to the GPU in one go, at most
MOST = 0.9  # of the free memory of a GPU


class DeviceWindows:
    """Reads windows and window starts as `Windows` does, as tensors on any device of torch."""

    outdated = False

    def __init__(self, schema: Schema, rows: Tree, starts: Tree, device: torch.device) -> None:
        self.schema, self.device = schema, device
        check_free(schema.nbytes * len(next(iter(rows.values()))) // schema.rows, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        room = max(1, STAGED // schema.nbytes)
        with torch.cuda.stream(self._stream):
            self._rows = Copy(schema.layout, rows, schema.rows, room, device)
            self._starts = Copy(schema.start_layout, starts, schema.starts, room, device)
        self._room, self._half = room, 0
        self._staged: list[int] = []  # slots in the present half of the pinned memory
        self._copied: list[torch.cuda.Event | None] = [None, None]  # of each half
        self._blanks = schema.window.slices and schema.window.before > 0

    def wrote(self, slot: int) -> None:
        """The block in this slot is another now."""
        for copy in (self._rows, self._starts):
            copy.stage(slot, self._half, len(self._staged))
        self._staged.append(slot)
        if len(self._staged) == self._room:
            self.flush()

    def flush(self) -> None:
        """Starts the copy of what was written. The next writes use the other half of the pinned memory."""
        if not self._staged:
            return
        with torch.cuda.stream(self._stream):
            for at, slot, n in runs(self._staged):
                for copy in (self._rows, self._starts):
                    copy.send(slot, self._half, at, n)
            if self._stream is not None:
                event = self._copied[self._half] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._stream)
        self._half, self._staged = 1 - self._half, []
        busy = self._copied[self._half]
        if busy is not None:
            busy.synchronize()

    def read(self, first: Array) -> dict[str, Tensor]:
        """The columns [n, T, ...] of the windows that start at these rows; as in `Windows`, blank before the episode."""
        self.flush()
        schema, layout = self.schema, self.schema.layout
        with torch.cuda.stream(self._stream):
            rows = self._index(first)[:, None] + torch.arange(schema.window.rows, device=self.device)  # [n, T]
            out = self._rows.small(rows)
            earlier, seen = None, rows
            if self._blanks:
                earlier = earlier_rows(out["first"], out["valid"], schema.window.before)
                seen = torch.where(earlier, self._rows.blank, rows)  # a row of zeros
            for name in layout.large:
                out[name] = self._rows.large(name, seen if is_observation(name) else rows)
            if earlier is not None:
                for name in layout.spec:
                    if is_observation(name) and name not in layout.large:
                        out[name].masked_fill_(earlier.view(*earlier.shape, *[1] * (out[name].ndim - 2)), 0)
        return self._handed_over({name: out[name] for name in layout.spec})

    def read_starts(self, leaves: Array) -> dict[str, Tensor]:
        """The columns [n, ...] of these window starts."""
        self.flush()
        with torch.cuda.stream(self._stream):
            rows, layout = self._index(leaves), self.schema.start_layout
            out = self._starts.small(rows) | {name: self._starts.large(name, rows) for name in layout.large}
        return self._handed_over({name: out[name] for name in layout.spec})

    def _index(self, index: Array) -> Tensor:
        tensor = torch.from_numpy(index)
        return tensor if self._stream is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def _handed_over(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The caller's stream waits for them, and their memory for the caller's stream."""
        if self._stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._stream)
            for x in columns.values():
                x.record_stream(here)
        return columns


class Copy:
    """The storage of one layout on a device: rows of words, as wide as a row allows, and one more row of zeros."""

    def __init__(self, layout: Layout, storage: Tree, rows: int, room: int, device: torch.device) -> None:
        self.layout, self.per_block = layout, rows
        self._host = {name: _words(array) for name, array in storage.items()}  # [N, words], views
        self._device: dict[str, Tensor] = {}
        self._stage: dict[str, Tensor] = {}
        self._staged: Tree = {}  # the same memory as `_stage`
        self.blank = len(next(iter(self._host.values()))) if self._host else 0  # the row of zeros
        for name, words in self._host.items():
            dtype = _torch_dtype(words.dtype)
            self._device[name] = torch.zeros(self.blank + 1, words.shape[1], dtype=dtype, device=device)
            self._stage[name] = torch.empty(2, room, rows, words.shape[1], dtype=dtype, pin_memory=device.type == "cuda")
            self._staged[name] = self._stage[name].numpy()

    def stage(self, slot: int, half: int, at: int) -> None:
        for name, words in self._host.items():
            self._staged[name][half, at] = words[slot * self.per_block : (slot + 1) * self.per_block]

    def send(self, slot: int, half: int, at: int, n: int) -> None:
        """n blocks that were staged one after another, to as many slots."""
        for name, stage in self._stage.items():
            to = self._device[name][slot * self.per_block : (slot + n) * self.per_block]
            to.copy_(stage[half, at : at + n].flatten(0, 1), non_blocking=True)

    def small(self, rows: Tensor) -> dict[str, Tensor]:
        """The columns [*rows.shape, ...] that are packed in one record."""
        if PACKED not in self._device:
            return {}
        record, out = self._gather(PACKED, rows).view(torch.uint8), {}
        fields: Any = self.layout.record.fields
        for name, (dtype, offset) in fields.items():
            column = record[..., offset : offset + dtype.itemsize].view(_torch_dtype(dtype.base))
            out[name] = column.reshape(*rows.shape, *dtype.shape)
        return out

    def large(self, name: str, rows: Tensor) -> Tensor:
        column = self.layout.large[name]
        return self._gather(name, rows).view(_torch_dtype(column.dtype)).view(*rows.shape, *column.shape)

    def _gather(self, name: str, rows: Tensor) -> Tensor:
        words = self._device[name]
        return words.index_select(0, rows.flatten()).view(*rows.shape, words.shape[1])


def earlier_rows(first: Tensor, valid: Tensor, at: int) -> Tensor:
    """Which rows of each window [n, T] lie before the episode of its row `at`, or before a row that is not valid."""
    rows = torch.arange(first.shape[1], device=first.device)
    begins = first[:, 1 : at + 1] | ~valid[:, :at]  # an episode begins at row 1 ... at, as far as one can look back
    return rows < (begins * rows[1 : at + 1]).amax(1, keepdim=True)


def runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """(place, slot, n) for each run of consecutive slots."""
    begins = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(place, slots[place], after - place) for place, after in pairwise(begins)]


def check_free(nbytes: int, device: torch.device) -> None:
    """Raises a UserError where the blocks of a store do not fit on a GPU."""
    free = free_bytes(device)
    if nbytes > MOST * free:
        half = format_bytes(0.5 * free).replace(" ", "")
        raise UserError(
            f"The store has {format_bytes(nbytes)} of blocks, but {format_bytes(free)} is free on the GPU; lower "
            f"store.capacity, for example to {half}, or leave them in RAM with --store.device cpu."
        )


def free_bytes(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")


def _words(array: Array) -> Array:
    """An array [N, ...] as rows of words [N, words]."""
    rows = array.reshape(len(array), -1).view(np.uint8)
    width = next(size for size in (8, 4, 1) if rows.shape[1] % size == 0)
    return rows.view({8: np.int64, 4: np.int32, 1: np.uint8}[width])


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype
