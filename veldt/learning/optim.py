"""What becomes of a gradient: updaters, and optimizers on one flat vector (Adam, AdaGrad, the two RMSProps of the papers).

`torch.optim` takes over a second to import its compiler, and its RMSProp adds epsilon outside the square root where DQN's
and A3C's add it inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from veldt.compiled import njit
from veldt.learning.params import flatten, flatten_gradients, group_slice, under
from veldt.records.tree import Array

TINY = 1e-30  # instead of a division by 0


class Optimizer:
    """Changes `weights` by their `gradient`, and keeps running averages of it; each starts at the value given."""

    def __init__(self, weights: Tensor, gradient: Tensor, **averages: float) -> None:
        self.weights, self.gradient = weights, gradient
        self.averages = {name: torch.full_like(gradient, start) for name, start in averages.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.weights.device.type == "cpu":
            self.step_on_cpu(lr)
        else:
            one = self.gradient.new_ones(())
            self.masked_step(lr * one, one)

    def step_on_cpu(self, lr: float) -> None:
        raise NotImplementedError

    def masked_step(self, lr: Tensor, fine: Tensor) -> None:
        """The same as operations on the device alone, which a CUDA graph can hold: `lr` and `fine` are scalars there. Where
        `fine` is 0 instead of 1 nothing changes; the gradient has to be finite all the same."""
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
        self.eps, self.betas = eps, betas
        self.steps = 0  # on a CPU
        # Steps on a device, which has to know them. Apple's GPU has no float64.
        self.count = gradient.new_zeros((), dtype=torch.float32 if gradient.device.type == "mps" else torch.float64)

    def step_on_cpu(self, lr: float) -> None:
        b1, b2 = self.betas
        self.steps += 1
        # lr * (mean / c1) / (sqrt(square / c2) + eps), with numerator and denominator multiplied by sqrt(c2)
        scale = math.sqrt(1 - b2**self.steps)
        size, eps = lr * scale / (1 - b1**self.steps), self.eps * scale
        w, g, m, s = (x.numpy() for x in (self.weights, self.gradient, *self.averages.values()))
        _adam(w, g, m, s, 1 - b1, b2, 1 - b2, size, eps)  # one pass over the arrays instead of six

    def masked_step(self, lr: Tensor, fine: Tensor) -> None:
        b1, b2 = self.betas
        mean, square = self.averages.values()
        self.count += fine
        steps = (self.count + self.steps).clamp_min(1)  # before the first step that is fine there is none
        scale = (1 - b2**steps).sqrt()
        size, eps = (lr * fine * scale / (1 - b1**steps)).float(), (self.eps * scale).float()
        mean.lerp_(self.gradient, fine * (1 - b1))
        square.lerp_(self.gradient.square(), fine * (1 - b2))
        self.weights.sub_(mean.div(square.sqrt().add_(eps)).mul_(size))

    def state(self) -> dict[str, Array]:
        return super().state() | {"steps": np.array(self.steps + int(self.count))}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        steps, on_cpu = int(state["steps"]), self.weights.device.type == "cpu"
        self.steps = steps if on_cpu else 0
        self.count.fill_(0 if on_cpu else steps)


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

    def step_on_cpu(self, lr: float) -> None:
        w, g, m, s = (x.numpy() for x in (self.weights, self.gradient, *self.averages.values()))
        _rmsprop(w, g, m, s, 1 - self.decay, lr, self.eps, self.centered)

    def masked_step(self, lr: Tensor, fine: Tensor) -> None:
        mean, square = self.averages.values()
        rate = fine * (1 - self.decay)
        square.lerp_(self.gradient.square(), rate)
        spread = square
        if self.centered:
            mean.lerp_(self.gradient, rate)
            spread = square.addcmul(mean, mean, value=-1).clamp_min_(0)
        self.weights.sub_(self.gradient.div(spread.add(self.eps).sqrt_()).mul_(lr * fine))


class AdaGrad(Optimizer):
    """delta = lr * g / (sqrt(sum of g^2) + eps) (Duchi et al. 2011; Gorila's servers), as in `torch.optim.Adagrad`."""

    def __init__(self, weights: Tensor, gradient: Tensor, eps: float, square_start: float = 0.0) -> None:
        super().__init__(weights, gradient, square=square_start)
        self.eps = eps

    def step_on_cpu(self, lr: float) -> None:
        w, g, s = (x.numpy() for x in (self.weights, self.gradient, *self.averages.values()))
        _adagrad(w, g, s, lr, self.eps)

    def masked_step(self, lr: Tensor, fine: Tensor) -> None:
        square = self.averages["square"]
        square.add_(self.gradient.square().mul_(fine))
        self.weights.sub_(self.gradient.div(square.sqrt().add_(self.eps).clamp_min_(TINY)).mul_(lr * fine))


class SGD(Optimizer):
    """weights -= lr * gradient."""

    def step_on_cpu(self, lr: float) -> None:
        self.weights.add_(self.gradient, alpha=-lr)

    def masked_step(self, lr: Tensor, fine: Tensor) -> None:
        self.weights.sub_(self.gradient * (lr * fine))


class Momentum(Optimizer):
    """velocity = momentum * velocity + (1 - momentum) * gradient; weights -= lr * velocity (Salimans et al. 2017)."""

    def __init__(self, weights: Tensor, gradient: Tensor, momentum: float) -> None:
        super().__init__(weights, gradient, velocity=0.0)
        self.momentum = momentum

    def step_on_cpu(self, lr: float) -> None:
        velocity = self.averages["velocity"].mul_(self.momentum).add_(self.gradient, alpha=1 - self.momentum)
        self.weights.add_(velocity, alpha=-lr)

    def masked_step(self, lr: Tensor, fine: Tensor) -> None:
        velocity = self.averages["velocity"]
        velocity.lerp_(self.gradient, fine * (1 - self.momentum))
        self.weights.sub_(velocity * (lr * fine))


@njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, f4, f4)", error_model="numpy")
def _adam(w: Array, g: Array, m: Array, s: Array, c1: Any, b2: Any, c2: Any, size: Any, eps: Any) -> None:
    for i in range(len(g)):
        m[i] += c1 * (g[i] - m[i])
        s[i] = b2 * s[i] + c2 * g[i] * g[i]
        w[i] -= size * m[i] / (np.sqrt(s[i]) + eps)


@njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, b1)", error_model="numpy")
def _rmsprop(w: Array, g: Array, m: Array, s: Array, c: Any, lr: Any, eps: Any, centered: bool) -> None:
    for i in range(len(g)):
        if centered:  # otherwise the mean stays 0
            m[i] += c * (g[i] - m[i])
        s[i] += c * (g[i] * g[i] - s[i])
        w[i] -= lr * g[i] / np.sqrt(max(s[i] - m[i] * m[i], np.float32(0)) + eps)


@njit("void(f4[::1], f4[::1], f4[::1], f4, f4)", error_model="numpy")
def _adagrad(w: Array, g: Array, s: Array, lr: Any, eps: Any) -> None:
    for i in range(len(g)):
        s[i] += g[i] * g[i]
        w[i] -= lr * g[i] / max(np.sqrt(s[i]) + eps, np.float32(TINY))  # with eps 0 and a gradient that was always 0


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

    def backward(self, losses: dict[str, Tensor]) -> None:
        """Computes the gradient: each loss adds to that of its own group of parameters."""
        self.gradient.zero_()
        for number, (group, value) in enumerate(losses.items()):
            inputs = [p for name, p in self.net.named_parameters() if name.startswith(group)] if group else None
            value.backward(retain_graph=number + 1 < len(losses), inputs=inputs)  # type: ignore[no-untyped-call]


class Updater(Protocol):
    """Made with a `Flat`, whose gradient it reads and whose weights it writes."""

    owns_weights: bool  # False: others change them too; then the learner neither publishes nor saves them
    servers: Servers | None  # the nodes that own the weights instead
    target: Tensor | None  # the vector of a target network that several learners share; None: each has its own

    def update(self, groups: Iterable[str], norm: float) -> bool:
        """Takes the gradient, which is finite and has this norm. `groups` are the prefixes of the parameters that have a
        loss; the gradient of all others is 0.

        True: the weights are updated. False: the gradient is sent, and new weights come with a later update.
        """

    def metrics(self) -> dict[str, float]: ...
    def state(self) -> dict[str, Array]: ...  # GROUP/name -> array
    def load_state(self, state: dict[str, Any]) -> None: ...


class Servers(Protocol):
    """Other nodes that own the weights: they publish them and count their updates (`shards.Sharded`)."""

    version: int  # updates of the newest weights that were taken

    def ready(self) -> bool:
        """Called before each gradient: takes the newest weights. False: no gradient can be used now."""

    def accepts(self, errors: Tensor) -> bool:
        """Whether the gradient of a batch is used; `errors` [B] are its |y - q|, which nothing has clipped."""


@dataclass(eq=False)
class Owned:
    """The optimizers are in this process: one for each group of parameters, made when its loss is first seen."""

    flat: Flat
    optimizer: Callable[[Tensor, Tensor], Optimizer]  # of weights and their gradient
    lr: Callable[[], float]
    clip_norm: float  # 0: not clipped
    optimizers: dict[str, Optimizer] = field(default_factory=dict)

    owns_weights: ClassVar = True
    servers: ClassVar = None
    target: ClassVar = None

    def update(self, groups: Iterable[str], norm: float) -> bool:
        if self.clip_norm and norm > self.clip_norm:
            self.flat.gradient.mul_(self.clip_norm / norm)
        for group in groups:
            self._of(group).step(self.lr())
        return True

    @torch.no_grad()
    def masked_update(self, groups: Iterable[str], norm: Tensor, fine: Tensor, lr: Tensor) -> None:
        """`update` as operations on the device alone, for a CUDA graph: all but `groups` are scalars there. Where `fine` is
        0 the gradient may have any values, and weights and averages stay as they are."""
        most = (self.clip_norm / norm).clamp(max=1) if self.clip_norm else torch.ones_like(norm)
        self.flat.gradient.mul_(torch.where(fine > 0, most, 0.0)).nan_to_num_(0.0, 0.0, 0.0)
        for group in groups:
            self._of(group).masked_step(lr, fine)

    def metrics(self) -> dict[str, float]:
        return {"learning_rate": self.lr()}

    def state(self) -> dict[str, Array]:
        return {f"{group}/{name}": x for group, one in self.optimizers.items() for name, x in one.state().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for group in sorted({key.partition("/")[0] for key in state}):
            # In place: a captured graph has the addresses of these averages.
            self._of(group).load_state(under(f"{group}/", state))

    def _of(self, group: str) -> Optimizer:
        if group not in self.optimizers:
            self.optimizers[group] = self._make(group)
        return self.optimizers[group]

    def _make(self, group: str) -> Optimizer:
        where = group_slice(self.flat.net, group)
        return self.optimizer(self.flat.weights[where], self.flat.gradient[where])
