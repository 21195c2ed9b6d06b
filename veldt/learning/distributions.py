"""Distributions of stochastic policies: categories (Discrete, MultiDiscrete) or a Gaussian (Box).

A distribution has `size` parameters (P): `normalize` makes them from a network's output [..., P], `draw` makes columns [n]
from parameters [n, P], and the recorder stores those parameters. `taken` is the column that holds what was drawn (`extras`,
unless it is the action itself), and `encode` makes it a network's input, [..., encoded]. log_prob, entropy and
kl(parameters, other) = KL(parameters || other) are [...].
"""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from veldt.compiled import njit
from veldt.errors import UserError
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, spec
from veldt.seeds import Random

ILLEGAL = -1e6  # log probability of an illegal choice: its exponential is 0, and unlike -inf it makes no NaN


class Categories:
    """One or several independent choices: parameters are the log probabilities of all, concatenated."""

    taken = "action"

    def __init__(self, choices: Array, shape: tuple[int, ...]) -> None:
        self.choices, self.shape = [int(n) for n in choices.ravel()], shape
        self.size = self.encoded = sum(self.choices)
        self.extras: Spec = {}
        self._edges = np.cumsum([0, *self.choices])
        self._first: dict[torch.device, Tensor] = {}  # of each choice, the index of its first parameter, by device

    def normalize(self, raw: Tensor) -> Tensor:
        if len(self.choices) == 1:
            return F.log_softmax(raw, -1)
        return torch.cat([F.log_softmax(part, -1) for part in torch.split(raw, self.choices, -1)], -1)

    def among(self, parameters: Tensor, legal: Tensor | None) -> Tensor:
        """The same policy without the illegal choices, `legal` [..., P]; None: all are legal. A choice of which nothing is
        legal stays as it is."""
        if legal is None:
            return parameters
        parts = [(legal, parameters)]
        if len(self.choices) > 1:
            parts = list(zip(*(torch.split(x, self.choices, -1) for x in (legal, parameters)), strict=True))
        whole = [torch.where(may | ~may.any(-1, keepdim=True), part, ILLEGAL) for may, part in parts]
        return self.normalize(torch.cat(whole, -1) if len(whole) > 1 else whole[0])

    def draw(self, parameters: Array, explore: Array, rng: Random) -> Tree:
        """With probability explore[i] environment i draws an action, else it takes the most likely one."""
        n = len(parameters)
        random = rng.random((n, 1 + len(self.choices)))
        action = _draw(np.ascontiguousarray(parameters), random, explore, self._edges)
        return {"action": action.reshape(n, *self.shape)}

    def log_prob(self, parameters: Tensor, taken: Tensor) -> Tensor:
        return parameters.gather(-1, self._index(taken)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return -(parameters.exp() * parameters).sum(-1)

    def kl(self, parameters: Tensor, other: Tensor) -> Tensor:
        return (parameters.exp() * (parameters - other)).sum(-1)

    def encode(self, taken: Tensor) -> Tensor:
        """One-hot for each choice, concatenated."""
        index = self._index(taken)
        return torch.zeros(*index.shape[:-1], self.size, device=index.device).scatter_(-1, index, 1.0)

    def _index(self, taken: Tensor) -> Tensor:
        """Indices of the taken choices' parameters: [..., number of choices]."""
        leading = taken.shape[: taken.ndim - len(self.shape)]
        flat = taken.reshape(*leading, len(self.choices)).long()
        if len(self.choices) == 1:
            return flat
        if flat.device not in self._first:  # a copy from the host cannot be a part of a CUDA graph
            self._first[flat.device] = torch.from_numpy(self._edges[:-1]).to(flat.device)
        return flat + self._first[flat.device]


@njit("i8[:,::1](f4[:,::1], f8[:,::1], f8[:], i8[::1])")
def _draw(log_p: Array, random: Array, explore: Array, edges: Array) -> Any:
    """Choices [n, k] by inversion, from log probabilities and 1 + k random numbers each."""
    n, k = len(log_p), len(edges) - 1
    action = np.zeros((n, k), np.int64)
    for i in range(n):
        for j in range(k):
            first, count = edges[j], edges[j + 1] - edges[j]
            best, total = 0, np.exp(np.float64(log_p[i, first]))
            for a in range(1, count):
                total += np.exp(np.float64(log_p[i, first + a]))
                if log_p[i, first + a] > log_p[i, first + best]:
                    best = a
            action[i, j] = best
            if random[i, 0] < explore[i]:
                left = random[i, 1 + j] * total
                for a in range(count):
                    left -= np.exp(np.float64(log_p[i, first + a]))
                    if left < 0:
                        action[i, j] = a
                        break
    return action


LOG_2PI = math.log(2 * math.pi)
LEAST, MOST = -2.0, 1.0  # bounds of a log standard deviation
WIDEST = float(np.finfo(np.float32).max)  # of a bound: actions are float32
FARTHEST = 3.0  # bound of a mean whose tanh is taken: tanh(3) is 0.995
NODES = 16  # of the quadrature of an expectation


class Gaussian:
    """Independent normal distributions: parameters are means, then log deviations.

    `drawn` records what was drawn. An element of the action that has a lower and an upper bound is its tanh, in units of
    half the range; any other is what was drawn, added to the allowed action nearest to 0 and clipped to its bound.
    Densities are those of what was drawn: tanh changes neither a ratio nor a divergence. The entropy is that of the action
    before it is clipped: the bonus for it does not push draws beyond the bounds, where all of them are the same action.
    """

    taken = "drawn"

    def __init__(self, space: spaces.Box) -> None:
        low, high = (np.asarray(x, np.float64).ravel() for x in (space.low, space.high))
        bounded = (np.abs(low) <= WIDEST) & (np.abs(high) <= WIDEST)
        low, high = low.clip(-WIDEST, WIDEST), high.clip(-WIDEST, WIDEST)
        self.low, self.high, self.shape = low, high, space.shape
        self.bounded = bounded
        self.center = np.where(bounded, low / 2 + high / 2, np.clip(0.0, low, high))
        self.radius = np.where(bounded, high / 2 - low / 2, 1.0)
        self.encoded = len(low)
        self.size = 2 * self.encoded
        self.extras: Spec = {"drawn": spec((self.encoded,), np.float32)}
        x, weights = np.polynomial.hermite_e.hermegauss(NODES)
        self._constants = tuple(torch.from_numpy(c) for c in (x, weights / weights.sum(), bounded))
        self._on: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def normalize(self, raw: Tensor) -> Tensor:
        """The log deviation is bounded by a tanh: beyond a hard bound the gradient would be zero. So is the mean, where the
        action is: far out all actions are the same, and the way back is long."""
        mean, log_std = raw.chunk(2, -1)
        if self.bounded.any():
            mean = torch.where(self._quadrature(raw)[2] > 0, FARTHEST * torch.tanh(mean / FARTHEST), mean)
        bound = torch.where(log_std > 0, MOST, -LEAST)
        return torch.cat((mean, bound * torch.tanh(log_std / bound)), -1)

    def among(self, parameters: Tensor, legal: Tensor | None) -> Tensor:
        assert legal is None, "continuous actions have no masks"
        return parameters

    def draw(self, parameters: Array, explore: Array, rng: Random) -> Tree:
        """With probability explore[i] environment i draws an action, else it takes the mean."""
        mean, log_std = np.split(parameters.astype(np.float64), 2, axis=-1)
        noise = rng.standard_normal(mean.shape) * (rng.random((len(mean), 1)) < explore[:, None])
        drawn = (mean + np.exp(log_std) * noise).astype(np.float32)
        unit = np.where(self.bounded, np.tanh(drawn), drawn)
        action = np.clip(self.center + self.radius * unit, self.low, self.high).astype(np.float32)
        return {"action": action.reshape(len(action), *self.shape), "drawn": drawn}

    def log_prob(self, parameters: Tensor, taken: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        return (-0.5 * ((taken - mean) * (-log_std).exp()).square() - log_std - 0.5 * LOG_2PI).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Of a tanh it is the normal distribution's plus the mean of log(1 - tanh(x)^2), by Gauss-Hermite quadrature."""
        mean, log_std = parameters.chunk(2, -1)
        entropy = log_std + 0.5 * (1 + LOG_2PI)
        if self.bounded.any():
            nodes, weights, bounded = self._quadrature(parameters)
            x = mean[..., None] + log_std.exp()[..., None] * nodes  # [..., encoded, NODES]
            log_slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
            entropy = entropy + (log_slope * weights).sum(-1) * bounded
        return entropy.sum(-1)

    def _quadrature(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes and weights of an expectation under the standard normal distribution, and which elements are bounded."""
        if like.device not in self._on:  # a copy from the host cannot be a part of a CUDA graph
            nodes, weights, bounded = (c.to(like) for c in self._constants)
            self._on[like.device] = nodes, weights, bounded
        return self._on[like.device]

    def kl(self, parameters: Tensor, other: Tensor) -> Tensor:
        (mean, log_std), (mean2, log_std2) = parameters.chunk(2, -1), other.chunk(2, -1)
        spread = (2 * (log_std - log_std2)).exp() + ((mean - mean2) * (-log_std2).exp()).square()
        return (log_std2 - log_std + 0.5 * (spread - 1)).sum(-1)

    def encode(self, taken: Tensor) -> Tensor:
        """Within [-1, 1]: of a bounded element its place in the range."""
        return torch.where(self._quadrature(taken)[2] > 0, taken.tanh(), taken.clamp(-1, 1))


Distribution = Categories | Gaussian


def distribution_for(env: EnvSpec, name: str) -> Distribution:
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return Categories(np.array([space.n]), ())
    if isinstance(space, spaces.MultiDiscrete):
        return Categories(np.asarray(space.nvec), space.nvec.shape)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space)
    raise UserError(f"{name} needs Discrete, MultiDiscrete or Box actions of floats, but {env.name} has {space}.")
