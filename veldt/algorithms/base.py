"""The seam between a paper and the rest: an algorithm knows tensors and time, and no process, queue, file or clock."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from veldt.block import Schema, Window
from veldt.step import EnvSpec
from veldt.tree import Array, Spec, Tree

Tensors = dict[str, Tensor]


class Loss(NamedTuple):
    losses: dict[str, Tensor]  # a scalar for each group of parameters, by the prefix of their names; "" is all
    priorities: Tensor  # [B], finite and not negative
    metrics: dict[str, Tensor]  # their means are reported


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

    def loss(self, net: nn.Module, target: nn.Module, rows: Tensors, starts: Tensors, weights: Tensor) -> Loss:
        """Rows are [B, T, ...] of `window`; weights [B]."""
