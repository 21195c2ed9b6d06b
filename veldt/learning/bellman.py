"""Bellman updaters (QT-Opt, Kalashnikov et al. 2018): workers that label transitions with the target networks.

replay -- sample --> updater -- block of labelled transitions --> train store --> learner
                        ^ both target networks
"""

from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from veldt.algorithms.base import Batch
from veldt.counters import Counters
from veldt.learning.params import flatten
from veldt.learning.targets import Targets
from veldt.metrics import BELLMAN
from veldt.records.block import Block, Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import read_only
from veldt.seeds import Random, derive
from veldt.storing.store import Sample, Store


class Labeller(Protocol):
    """An algorithm whose labels others compute (`algorithms.qt_opt`)."""

    history: int

    def network(self, env: EnvSpec) -> nn.Module: ...
    def label(self, net: nn.Module, lagged: nn.Module, batch: Batch, rng: Random) -> Tensor: ...


class BellmanUpdater:
    """Each `step()` samples a batch, labels it and sends it as one block; False if there is nothing to do now."""

    METRICS: ClassVar = BELLMAN

    def __init__(
        self,
        algorithm: Labeller,
        env: EnvSpec,
        store: Store,
        train: Store,
        targets: Targets,
        schema: Schema,  # of labelled transitions
        counters: Counters,
        seed: int,
        device: str = "cpu",
        incarnation: int = 0,  # how often its process was restarted: each life draws other numbers
    ) -> None:
        self.algorithm, self.store, self.train, self.targets = algorithm, store, train, targets
        self.schema, self.counters, self.device = schema, counters, torch.device(device)
        self.rng = np.random.default_rng(derive(seed, "life", incarnation) if incarnation else seed)
        self.net, self.lagged = (algorithm.network(env).to(device).requires_grad_(False).eval() for _ in range(2))
        self._vectors = flatten(self.net), flatten(self.lagged)
        self.version = -1  # of the target networks
        self.labels = 0  # transitions that were labelled and sent
        self._age = 0.0  # updates between the target networks and the label, of the newest block
        self._block: Block | None = None  # labelled, and not sent yet

    def step(self) -> bool:
        block = self._block or self._make()
        if block is None:
            return False
        made = self._block is None
        self._block = block
        if self.train.insert(block, None):
            self._block = None
            self.labels += self.schema.starts
            return True
        return made

    def _make(self) -> Block | None:
        self._pull()
        sample = self.store.sample(self.schema.starts) if self.version >= 0 else None
        return None if sample is None else self.labelled(sample)

    def _pull(self) -> None:
        newest = self.targets.weights(self.version)
        if newest is not None:
            self.version, size = newest.version, len(self._vectors[0])
            both = torch.from_numpy(newest.vector if newest.vector.flags.writeable else newest.vector.copy())
            for vector, part in zip(self._vectors, (both[:size], both[size:]), strict=True):
                vector.copy_(part)

    def labelled(self, sample: Sample) -> Block:
        """The transitions of a sample [n, T, ...] with their labels, as a block of n rows."""
        batch = Batch(sample.rows, sample.starts, sample.weights, self.device)
        with torch.inference_mode():
            label = self.algorithm.label(self.net, self.lagged, batch, self.rng).cpu().numpy()
        history, n = self.algorithm.history, len(label)
        rows = self.schema.layout.zeros(n)
        columns = self.schema.layout.columns(rows)
        for name, column in columns.items():
            if name in sample.rows:
                x: Any = sample.rows[name]
                column[...] = x[:, history - 1] if name == "action" else x[:, :history]
        columns["label"][:], columns["labelled_at"][:] = label, self.version
        self._age = max(0, self.counters.get("learner_steps") - self.version)
        return Block(self.schema, read_only(rows), {}, np.ones(n, np.bool_))

    def cut(self) -> bool:
        """At a checkpoint: drops a block that was not sent; the newest target networks come next, as after a resume."""
        self._block, self.version = None, -1
        return True

    def metrics(self) -> dict[str, float]:
        return {"labels": float(self.labels), "target_age": float(self._age)}

    def state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "labels": self.labels}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.labels = int(state["labels"])
