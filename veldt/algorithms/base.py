"""The seam between a paper and the rest: an algorithm knows tensors and time, and no process, queue, file or clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from veldt.nets import on_device
from veldt.records.block import Schema, Window
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree

Tensors = dict[str, Tensor]


class Batch:
    """Sampled windows. `batch[name]` is a column [B, T, ...] on the learner's device, moved there when first asked for.

    `host` has the same columns as numpy arrays: what is small is computed there faster than on any device.
    """

    def __init__(self, host: Tree, starts: Tree, weights: Array, device: torch.device) -> None:
        self.host, self.device = host, device
        self.weights = on_device(weights, device)  # [B]
        self._host_starts = starts
        self._starts: Tensors | None = None
        self._moved: Tensors = {}
        self.ahead: Any = None  # what the algorithm computed of it before its turn came

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._moved:
            self._moved[name] = on_device(self.host[name], self.device)
        return self._moved[name]

    def move(self) -> Batch:
        """Begins to bring all of it to the device."""
        for name in self.host:
            self[name]
        assert self.starts is not None
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(self.host)

    def __contains__(self, name: str) -> bool:
        return name in self.host

    @property
    def starts(self) -> Tensors:
        """Columns [B, ...] of the window starts: the recurrent state."""
        if self._starts is None:
            self._starts = {name: on_device(x, self.device) for name, x in self._host_starts.items()}
        return self._starts

    def select(self, index: Array) -> Batch:
        """Some of the windows."""
        host = {name: x[index] for name, x in self.host.items()}
        starts = {name: x[index] for name, x in self._host_starts.items()}
        return Batch(host, starts, self.weights.cpu().numpy()[index], self.device)


class Loss(NamedTuple):
    losses: dict[str, Tensor]  # a scalar for each group of parameters, by the prefix of their names; "" is all
    priorities: Tensor  # [B], finite and not negative
    metrics: dict[str, Tensor]  # their means are reported
    after: Callable[[], None] | None = None  # called once the update was made


class Algorithm(Protocol):
    @property
    def window(self) -> Window: ...

    def check(self, env: EnvSpec) -> None:
        """Raises a UserError that names the space this algorithm cannot take."""

    def extras(self, env: EnvSpec) -> Spec:
        """The columns that `act` records beside the action."""

    def state(self, env: EnvSpec) -> Spec:
        """The recurrent state; recorded at window starts."""

    def network(self, env: EnvSpec) -> nn.Module: ...

    def act(
        self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: np.random.Generator
    ) -> tuple[Tree, Tensors]:
        """One batched forward. Rows are [n, history, ...]; returns columns [n] with `action`, and the next state."""

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        """Initial priorities [..., S] of block columns [..., R, ...] from what acting recorded; None: the largest."""

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """The batch holds windows [B, T, ...], T = window.rows.

        What of it needs no `net` may be in a method `ahead(target, batch)`: a learner with a GPU calls that for the next
        batch while it works on this one, and `batch.ahead` is what it returned.
        """
