"""Recorder: a policy that wraps a policy and packs the steps and actions that pass through it into blocks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from veldt.acting.actor import Policy
from veldt.algorithms.base import Algorithm
from veldt.records.block import Block, Schema, window_items
from veldt.records.tree import Array, Tree, read_only
from veldt.storing.store import Store


@dataclass(eq=False, repr=False)
class Recorder(Policy):
    """Records in the process that runs inference. The environments of a group step together, so their blocks end together.

    When the store refuses a block, finished blocks wait here, and `send` returns False to the actor.
    """

    policy: Policy
    store: Store
    algorithm: Algorithm
    schema: Schema
    max_age: float = float("inf")  # seconds before a block is sent short
    first_priorities: str = "acted"  # or "largest"
    early: bool = False  # a block ends when its last row arrives, before an action is chosen there, which no loss reads
    later: bool = False  # answers are recorded by `record`, not by `recv`; steps must not change until then

    def __post_init__(self) -> None:
        self.finished: deque[tuple[Block, Array | None]] = deque()
        self._steps: dict[int, Tree] = {}
        self._tapes: dict[int, Tape] = {}
        self._answered: list[tuple[int, Tree, Tree]] = []  # not yet recorded

    @property
    def due(self) -> float:
        return self.policy.due

    def send(self, group: int, step: Tree) -> bool:
        if self.early:
            self._end_block(group, step)
        if not self._insert() or not self.policy.send(group, step):
            return False
        self._steps[group] = step
        return True

    def recv(self, group: int) -> Tree | None:
        """The actions alone; all other columns are recorded here."""
        out = self.policy.recv(group)
        if out is None:
            return None
        self._answered.append((group, self._steps.pop(group), out))
        if not self.later:
            self.record()
        return {"action": out["action"]}

    def record(self) -> None:
        """Records the answers since the last call."""
        for group, step, out in self._answered:
            self._record(group, step, out)
        self._answered.clear()

    def flush(self, group: int) -> bool:
        self.record()
        tape = self._tapes.get(group)
        if tape is not None:
            while (steps := tape.end - self.schema.window.before) > 0:  # may be more than one block
                self._emit(tape, self.schema.fresh)
                tape.drop(min(steps, self.schema.fresh))
            tape.clear()
        return self._insert() and self.policy.flush(group)

    def reset(self, group: int) -> None:
        self.record()
        self._steps.pop(group, None)
        self._tapes.pop(group, None)
        self.policy.reset(group)

    def _record(self, group: int, step: Tree, out: Tree) -> None:
        if group not in self._tapes:
            self._tapes[group] = Tape(self.schema, len(step["first"]))
        tape = self._tapes[group]
        tape.append(step, out)
        if tape.end == self.schema.rows or time.monotonic() - tape.began > self.max_age:
            window = self.schema.window
            fresh = (tape.end - window.before - window.after) // window.stride * window.stride
            if fresh > 0:
                self._emit(tape, fresh)
                tape.drop(fresh)

    def _end_block(self, group: int, step: Tree) -> None:
        """If only this step is missing. It is recorded again, with its action, as a row of the next block."""
        tape, schema = self._tapes.get(group), self.schema
        if tape is not None and tape.end == schema.rows - 1:
            tape.peek(step)
            self._emit(tape, schema.fresh)
            tape.drop(schema.fresh)

    def _emit(self, tape: Tape, fresh: int) -> None:
        """Makes a block for each environment from its first `fresh` steps and their context."""
        window = self.schema.window
        rows = {name: array.copy() for name, array in tape.rows.items()}
        states = slice(window.history - 1, window.history - 1 + self.schema.fresh, window.stride)
        starts = {name: array[:, states].copy() for name, array in tape.states.items()}
        columns = self.schema.layout.columns(rows)
        items = window_items(columns["valid"], columns["last"], window, self.schema.fresh)
        items[:, fresh // window.stride :] = False
        priorities = self.algorithm.priority(columns, self.schema) if self.first_priorities == "acted" else None
        if priorities is not None and not np.isfinite(priorities).all():
            priorities = None  # the values overflowed while acting; the learner will report it
        items.flags.writeable = False
        read_only(rows), read_only(starts)
        for lane in range(len(items)):
            if not items[lane].any():
                continue
            block = Block(
                self.schema,
                {name: array[lane] for name, array in rows.items()},
                {name: array[lane] for name, array in starts.items()},
                items[lane],
            )
            self.finished.append((block, None if priorities is None else priorities[lane]))

    def _insert(self) -> bool:
        while self.finished:
            if not self.store.insert(*self.finished[0]):
                return False
            self.finished.popleft()
        return True


class Tape:
    """The rows of the block that is being written, for n environments: arrays [n, R]."""

    def __init__(self, schema: Schema, n: int) -> None:
        self.schema = schema
        self.rows = schema.layout.zeros(n, schema.rows)
        self.states = schema.start_layout.zeros(n, schema.rows)
        self._columns = schema.layout.columns(self.rows)
        self._both = [*self._columns.items(), *schema.start_layout.columns(self.states).items()]
        self.clear()

    def clear(self) -> None:
        """Begins a new stream; the context before its first step is padding."""
        for array in (*self.rows.values(), *self.states.values()):
            array[...] = np.zeros((), array.dtype)
        self.end = self.schema.window.before
        self.began = time.monotonic()

    def append(self, step: Tree, out: Tree) -> None:
        end, row = self.end, step | out
        for name, column in self._both:
            column[:, end] = row[name]
        self.end += 1

    def peek(self, step: Tree) -> None:
        """Writes what the environment gave, as a row after the last one that does not count yet."""
        for name, x in step.items():
            self._columns[name][:, self.end] = x

    def drop(self, fresh: int) -> None:
        """Drops the first `fresh` steps, which are in a block; moves the context of the next block to the start."""
        keep = self.end - fresh
        for array in (*self.rows.values(), *self.states.values()):
            array[:, :keep] = array[:, fresh : self.end].copy()
        self._columns["valid"][:, keep:] = False
        self.end = keep
        self.began = time.monotonic()
