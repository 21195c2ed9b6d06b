"""Updater: what becomes of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from veldt.learning import params
from veldt.learning.optim import Optimizer
from veldt.records.tree import Array


class Flat(NamedTuple):
    """A network whose parameters and their gradients are views of two vectors."""

    net: nn.Module
    weights: Tensor  # [size], the parameters, then the float buffers
    gradient: Tensor  # [number of parameters]
    buffers: Tensor  # the end of `weights`

    @classmethod
    def of(cls, net: nn.Module) -> Flat:
        weights, gradient = params.flatten(net), params.flatten_gradients(net)
        return cls(net, weights, gradient, weights[len(gradient) :])


class Updater(Protocol):
    """Made with a `Flat`, whose gradient it reads and whose weights it writes."""

    def update(self, groups: Iterable[str], norm: float) -> bool:
        """Takes the gradient, which is finite and has this norm. `groups` are the prefixes of the parameters that have a
        loss; the gradient of all others is 0.

        True: the weights are updated. False: the gradient is sent, and new weights come with a later update.
        """

    def state(self) -> dict[str, Array]: ...  # GROUP/name -> array
    def load_state(self, state: dict[str, Any]) -> None: ...


class Owned:
    """The optimizers are in this process: one for each group of parameters, made when its loss is first seen."""

    def __init__(
        self,
        flat: Flat,
        optimizer: Callable[[Tensor, Tensor], Optimizer],  # of weights and their gradient
        lr: Callable[[], float],
        clip_norm: float,  # 0: not clipped
    ) -> None:
        self.flat, self.lr, self.clip_norm = flat, lr, clip_norm
        self.optimizers: dict[str, Optimizer] = {}
        self._optimizer = optimizer

    def update(self, groups: Iterable[str], norm: float) -> bool:
        if self.clip_norm and norm > self.clip_norm:
            self.flat.gradient.mul_(self.clip_norm / norm)
        for group in groups:
            if group not in self.optimizers:
                self.optimizers[group] = self._make(group)
            self.optimizers[group].step(self.lr())
        return True

    def state(self) -> dict[str, Array]:
        return {f"{group}/{name}": x for group, one in self.optimizers.items() for name, x in one.state().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for group in sorted({key.partition("/")[0] for key in state}):
            self.optimizers[group] = self._make(group)
            self.optimizers[group].load_state(params.under(f"{group}/", state))

    def _make(self, group: str) -> Optimizer:
        where = params.group_slice(self.flat.net, group)
        return self._optimizer(self.flat.weights[where], self.flat.gradient[where])
