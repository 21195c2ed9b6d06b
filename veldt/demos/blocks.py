"""Cuts the episodes of a demonstration set into blocks for a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Algorithm
from veldt.demos.recording import Immediate
from veldt.demos.set import Demos
from veldt.records.block import Block, Schema
from veldt.records.tree import Array, Tree


def cut_blocks(demos: Demos, schema: Schema, algorithm: Algorithm) -> Iterator[tuple[Block, None]]:
    """The episodes as blocks of a run's schema. No window has steps of two episodes.

    The columns that an algorithm records beside the action are zero, and so is its recurrent state (Gulcehre et al. 2020),
    except for what it knows without a network (its `known_state`). There are no priorities: the store gives
    new items the largest.
    """
    sink: Any = _Sink()  # a recorder only inserts
    recorder = Recorder(_Replayed(schema, algorithm), sink, algorithm, schema, first_priorities="largest")
    for episode in demos.episodes():
        for t in range(len(episode["first"])):
            recorder.send(0, {name: x[t : t + 1] for name, x in episode.items()})
            recorder.recv(0)
        recorder.flush(0)
        yield from sink.blocks
        sink.blocks.clear()


class _Sink:
    """A store that collects every block."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Block, None]] = []

    def insert(self, block: Block, priorities: Array | None) -> bool:
        assert priorities is None, priorities
        self.blocks.append((block, None))
        return True


class _Replayed(Immediate):
    """Answers with the recorded action, and zeros for the other columns of an algorithm."""

    def __init__(self, schema: Schema, algorithm: Algorithm) -> None:
        self.algorithm, self.starts = algorithm, schema.start_layout.spec
        columns = {**schema.layout.spec, **self.starts}
        self._zeros = {name: np.zeros((1, *c.shape), c.dtype) for name, c in columns.items()}
        self._state: Tree = {}  # known state before the next record

    def answer(self, step: Tree) -> Tree:
        before = {} if step["first"][0] else self._state
        self._state = self.algorithm.known_state(step["action"], self.starts)
        return {**self._zeros, **before, **step}
