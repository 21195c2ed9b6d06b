"""The contract between a paper and the rest: an algorithm knows tensors and time, and no process, queue, file or clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from veldt.nets.tensors import on_device
from veldt.records.block import Schema, Window
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree

Tensors = dict[str, Tensor]


class Batch:
    """Sampled windows. `batch[name]` is a column [B, T, ...] on the learner's device, copied there on first use.

    `host` has the same columns as NumPy arrays: small computations are faster there than on a GPU.
    """

    def __init__(self, host: Tree, starts: Tree, weights: Array, device: torch.device) -> None:
        self.host, self.device = host, device
        self.weights = on_device(weights, device)  # [B]
        self._host_starts = starts
        self._starts: Tensors | None = None
        self._moved: Tensors = {}
        self.ahead: Any = None  # what `Algorithm.ahead` returned for this batch, or None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._moved:
            self._moved[name] = on_device(self.host[name], self.device)
        return self._moved[name]

    def move(self) -> Batch:
        """Starts copying all columns to the device."""
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
        """A batch of the windows at these indices."""
        host = {name: x[index] for name, x in self.host.items()}
        starts = {name: x[index] for name, x in self._host_starts.items()}
        return Batch(host, starts, self.weights.cpu().numpy()[index], self.device)


class Loss(NamedTuple):
    losses: dict[str, Tensor]  # a scalar for each parameter group, named by the prefix of its parameters; "" is all
    priorities: Tensor  # [B], finite and not negative
    metrics: dict[str, Tensor]  # their means are reported
    after: Callable[[], None] | None = None  # called after the update, unless it is skipped


class Algorithm(Protocol):
    exploration: ClassVar[str]  # the name of `explore` in metrics: epsilon, sigma...; empty: not reported

    @property
    def window(self) -> Window: ...

    def check(self, env: EnvSpec) -> None:
        """Raises a UserError that names the space this algorithm cannot take."""

    def extras(self, env: EnvSpec) -> Spec:
        """The columns that `act` records beside the action."""

    def state(self, env: EnvSpec) -> Spec:
        """The recurrent state; recorded at window starts."""

    def known_state(self, action: Array, state: Spec) -> Tree:
        """For demonstrations, which record no state: the columns [n, ...] of the state after a step that follow from its
        action [n] alone. All others are zero. `state` is what `state(env)` returned."""

    def network(self, env: EnvSpec) -> nn.Module: ...

    def act(
        self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: np.random.Generator
    ) -> tuple[Tree, Tensors]:
        """One batched forward. Rows are [n, history, ...]; returns columns [n] with `action`, and the next state."""

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        """Initial priorities [..., S] of block columns [..., R, ...] from what acting recorded; None: the largest."""

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """The batch holds windows [B, T, ...], T = window.rows."""

    def ahead(self, target: nn.Module, batch: Batch) -> Any:
        """The part of the loss that does not need `net`, or None. A learner with a GPU computes it for the next batch while
        it works on this one; `loss` finds it in `batch.ahead`, or None there if it was not computed."""

    def diagnose(self, net: nn.Module, blocks: Callable[[], Batch | None], schema: Schema) -> dict[str, float]:
        """Metrics of whole blocks [N, R, ...] and their window starts [N, S, ...], which `blocks()` reads from the store
        (None: not now). Called every few hundred updates."""


class Defaults:
    """What an algorithm does unless it says otherwise: it records nothing beside the action, has no recurrent state, and
    explores by an epsilon."""

    exploration: ClassVar[str] = "epsilon"

    def extras(self, env: EnvSpec) -> Spec:
        return {}

    def state(self, env: EnvSpec) -> Spec:
        return {}

    def known_state(self, action: Array, state: Spec) -> Tree:
        return {}

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        return None

    def ahead(self, target: nn.Module, batch: Batch) -> Any:
        return None

    def diagnose(self, net: nn.Module, blocks: Callable[[], Batch | None], schema: Schema) -> dict[str, float]:
        return {}
