"""Cuts the episodes of a demonstration set into blocks for a store."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Algorithm
from veldt.demos.recording import Immediate
from veldt.demos.set import Demos
from veldt.records.block import Block, Schema
from veldt.records.tree import Array, Tree


def cut_blocks(demos: Demos, schema: Schema, algorithm: Algorithm) -> Iterator[Block]:
    """The episodes as blocks of a run's schema. No window has steps of two episodes.

    The columns that an algorithm records beside the action are zero, and so is its recurrent state (Gulcehre et al. 2020),
    except for what it knows without a network (its `known_state`). There are no priorities: the store gives
    new items the largest.
    """
    starts = schema.start_layout.spec
    zeros = {name: np.zeros((1, *c.shape), c.dtype) for name, c in {**schema.layout.spec, **starts}.items()}
    state: Tree = {}  # known state before the next record

    def replay(step: Tree) -> Tree:
        nonlocal state
        before = {} if step["first"][0] else state
        state = algorithm.known_state(step["action"], starts)
        return {**zeros, **before, **step}

    sink: Any = _Sink()  # a recorder only inserts
    recorder = Recorder(Immediate(replay), sink, algorithm, schema, first_priorities="largest")
    for episode in demos.episodes():
        for t in range(len(episode["first"])):
            recorder.send(0, {name: x[t : t + 1] for name, x in episode.items()})
            recorder.recv(0)
        recorder.flush(0)
        yield from sink.blocks
        sink.blocks.clear()


class _Sink:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def insert(self, block: Block, priorities: Array | None) -> bool:
        assert priorities is None, priorities
        self.blocks.append(block)
        return True
