"""Optimizers on one flat vector: Adam, and the two RMSProps of the papers.

`torch.optim` takes over a second to import its compiler, and its RMSProp adds epsilon outside the square root where DQN's
and A3C's add it inside.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numba
import numpy as np
import torch
from torch import Tensor

from veldt.records.tree import Array


class Optimizer(Protocol):
    def step(self, lr: float) -> None: ...
    def state(self) -> dict[str, Array]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class Adam:
    """Kingma and Ba 2015, as in `torch.optim.Adam`."""

    def __init__(self, weights: Tensor, gradient: Tensor, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.weights, self.gradient, self.eps, self.betas = weights, gradient, eps, betas
        self.mean = torch.zeros_like(gradient)
        self.square = torch.zeros_like(gradient)
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        b1, b2 = self.betas
        self.steps += 1
        # lr * (mean / c1) / (sqrt(square / c2) + eps), with numerator and denominator multiplied by sqrt(c2)
        scale = math.sqrt(1 - b2**self.steps)
        size, eps = lr * scale / (1 - b1**self.steps), self.eps * scale
        if self.weights.device.type == "cpu":  # one pass over the arrays instead of six
            w, g, m, s = (x.numpy() for x in (self.weights, self.gradient, self.mean, self.square))
            _adam(w, g, m, s, 1 - b1, b2, 1 - b2, size, eps)
            return
        self.mean.lerp_(self.gradient, 1 - b1)
        self.square.mul_(b2).addcmul_(self.gradient, self.gradient, value=1 - b2)
        self.weights.addcdiv_(self.mean, self.square.sqrt().add_(eps), value=-size)

    def state(self) -> dict[str, Array]:
        return {"mean": _host(self.mean), "square": _host(self.square), "steps": np.array(self.steps)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.mean.copy_(torch.from_numpy(state["mean"]))
        self.square.copy_(torch.from_numpy(state["square"]))
        self.steps = int(state["steps"])


class RMSProp:
    """delta = lr * g / sqrt(E[g^2] - E[g]^2 + eps), epsilon inside the root (Mnih et al. 2015; not centred: A3C)."""

    def __init__(
        self, weights: Tensor, gradient: Tensor, eps: float, decay: float, momentum: float = 0.0, centered: bool = True
    ) -> None:
        self.weights, self.gradient = weights, gradient
        self.eps, self.decay, self.momentum, self.centered = eps, decay, momentum, centered
        self.mean = torch.zeros_like(gradient)
        self.square = torch.zeros_like(gradient)
        self.velocity = torch.zeros_like(gradient)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.weights.device.type == "cpu":
            w, g, m, s, v = (x.numpy() for x in (self.weights, self.gradient, self.mean, self.square, self.velocity))
            _rmsprop(w, g, m, s, v, 1 - self.decay, self.decay, self.momentum, lr, self.eps, self.centered)
            return
        self.square.mul_(self.decay).addcmul_(self.gradient, self.gradient, value=1 - self.decay)
        spread = self.square
        if self.centered:
            self.mean.lerp_(self.gradient, 1 - self.decay)
            spread = self.square.addcmul(self.mean, self.mean, value=-1)
        step = self.gradient / spread.add(self.eps).sqrt_()
        if self.momentum:
            step = self.velocity.mul_(self.momentum).add_(step)
        self.weights.add_(step, alpha=-lr)

    def state(self) -> dict[str, Array]:
        return {"mean": _host(self.mean), "square": _host(self.square), "velocity": _host(self.velocity)}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in ("mean", "square", "velocity"):
            getattr(self, name).copy_(torch.from_numpy(state[name]))


class SGD:
    """weights -= lr * gradient."""

    def __init__(self, weights: Tensor, gradient: Tensor) -> None:
        self.weights, self.gradient = weights, gradient

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.weights.add_(self.gradient, alpha=-lr)

    def state(self) -> dict[str, Array]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


@numba.njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, f4, f4)", cache=True, error_model="numpy")
def _adam(w: Array, g: Array, m: Array, s: Array, c1: Any, b2: Any, c2: Any, size: Any, eps: Any) -> None:
    for i in range(len(g)):
        m[i] += c1 * (g[i] - m[i])
        s[i] = b2 * s[i] + c2 * g[i] * g[i]
        w[i] -= size * m[i] / (np.sqrt(s[i]) + eps)


@numba.njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, f4, f4, b1)", cache=True, error_model="numpy")
def _rmsprop(
    w: Array, g: Array, m: Array, s: Array, v: Array, c: Any, decay: Any, momentum: Any, lr: Any, eps: Any, centered: bool
) -> None:
    for i in range(len(g)):
        if centered:  # otherwise the mean stays 0
            m[i] += c * (g[i] - m[i])
        s[i] = decay * s[i] + c * g[i] * g[i]
        v[i] = momentum * v[i] + g[i] / np.sqrt(s[i] - m[i] * m[i] + eps)
        w[i] -= lr * v[i]


def _host(tensor: Tensor) -> Array:
    array: Array = tensor.cpu().numpy()
    return array
