"""What becomes of a gradient: updaters, and optimizers on one flat vector (Adam, the two RMSProps of the papers).

`torch.optim` takes over a second to import its compiler, and its RMSProp adds epsilon outside the square root where DQN's
and A3C's add it inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
import torch
from torch import Tensor, nn

from veldt.learning.params import flatten, flatten_gradients, group_slice, under
from veldt.records.tree import Array


class Optimizer:
    """Changes `weights` by their `gradient`, and keeps running averages of it; each starts at the value given."""

    def __init__(self, weights: Tensor, gradient: Tensor, **averages: float) -> None:
        self.weights, self.gradient = weights, gradient
        self.averages = {name: torch.full_like(gradient, start) for name, start in averages.items()}

    def step(self, lr: float) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Array]:
        return {name: x.cpu().numpy() for name, x in self.averages.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, x in self.averages.items():
            x.copy_(torch.from_numpy(state[name]))


class Adam(Optimizer):
    """Kingma and Ba 2015, as in `torch.optim.Adam`."""

    def __init__(self, weights: Tensor, gradient: Tensor, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(weights, gradient, mean=0.0, square=0.0)
        self.eps, self.betas, self.steps = eps, betas, 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        b1, b2 = self.betas
        self.steps += 1
        # lr * (mean / c1) / (sqrt(square / c2) + eps), with numerator and denominator multiplied by sqrt(c2)
        scale = math.sqrt(1 - b2**self.steps)
        size, eps = lr * scale / (1 - b1**self.steps), self.eps * scale
        mean, square = self.averages.values()
        if self.weights.device.type == "cpu":  # one pass over the arrays instead of six
            w, g, m, s = (x.numpy() for x in (self.weights, self.gradient, mean, square))
            _adam(w, g, m, s, 1 - b1, b2, 1 - b2, size, eps)
            return
        mean.lerp_(self.gradient, 1 - b1)
        square.mul_(b2).addcmul_(self.gradient, self.gradient, value=1 - b2)
        self.weights.addcdiv_(mean, square.sqrt().add_(eps), value=-size)

    def state(self) -> dict[str, Array]:
        return super().state() | {"steps": np.array(self.steps)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steps = int(state["steps"])


class RMSProp(Optimizer):
    """delta = lr * g / sqrt(E[g^2] - E[g]^2 + eps), epsilon inside the root (Mnih et al. 2015; not centred: A3C).

    The difference of the two averages is a variance; in float32 it may come out below 0, which counts as 0.
    """

    def __init__(
        self,
        weights: Tensor,
        gradient: Tensor,
        eps: float,
        decay: float,
        centered: bool = True,
        square_start: float = 0.0,  # of E[g^2]
    ) -> None:
        super().__init__(weights, gradient, mean=0.0, square=square_start)
        self.eps, self.decay, self.centered = eps, decay, centered

    @torch.no_grad()
    def step(self, lr: float) -> None:
        mean, square = self.averages.values()
        if self.weights.device.type == "cpu":
            w, g, m, s = (x.numpy() for x in (self.weights, self.gradient, mean, square))
            _rmsprop(w, g, m, s, 1 - self.decay, lr, self.eps, self.centered)
            return
        square.lerp_(self.gradient.square(), 1 - self.decay)
        spread = square
        if self.centered:
            mean.lerp_(self.gradient, 1 - self.decay)
            spread = square.addcmul(mean, mean, value=-1).clamp_min_(0)
        self.weights.addcdiv_(self.gradient, spread.add(self.eps).sqrt_(), value=-lr)


class SGD(Optimizer):
    """weights -= lr * gradient."""

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.weights.add_(self.gradient, alpha=-lr)


@numba.njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, f4, f4)", cache=True, error_model="numpy")
def _adam(w: Array, g: Array, m: Array, s: Array, c1: Any, b2: Any, c2: Any, size: Any, eps: Any) -> None:
    for i in range(len(g)):
        m[i] += c1 * (g[i] - m[i])
        s[i] = b2 * s[i] + c2 * g[i] * g[i]
        w[i] -= size * m[i] / (np.sqrt(s[i]) + eps)


@numba.njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, b1)", cache=True, error_model="numpy")
def _rmsprop(w: Array, g: Array, m: Array, s: Array, c: Any, lr: Any, eps: Any, centered: bool) -> None:
    for i in range(len(g)):
        if centered:  # otherwise the mean stays 0
            m[i] += c * (g[i] - m[i])
        s[i] += c * (g[i] * g[i] - s[i])
        w[i] -= lr * g[i] / np.sqrt(max(s[i] - m[i] * m[i], np.float32(0)) + eps)


class Flat(NamedTuple):
    """A network whose parameters and their gradients are views of two vectors."""

    net: nn.Module
    weights: Tensor  # [size], the parameters, then the float buffers
    gradient: Tensor  # [number of parameters]
    buffers: Tensor  # the end of `weights`

    @classmethod
    def of(cls, net: nn.Module) -> Flat:
        weights, gradient = flatten(net), flatten_gradients(net)
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


@dataclass(eq=False)
class Owned:
    """The optimizers are in this process: one for each group of parameters, made when its loss is first seen."""

    flat: Flat
    optimizer: Callable[[Tensor, Tensor], Optimizer]  # of weights and their gradient
    lr: Callable[[], float]
    clip_norm: float  # 0: not clipped
    optimizers: dict[str, Optimizer] = field(default_factory=dict)

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
            self.optimizers[group].load_state(under(f"{group}/", state))

    def _make(self, group: str) -> Optimizer:
        where = group_slice(self.flat.net, group)
        return self.optimizer(self.flat.weights[where], self.flat.gradient[where])
