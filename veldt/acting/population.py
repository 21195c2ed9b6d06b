"""Population: the policies of several lanes, each with weights of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veldt.algorithms.base import Tensors
from veldt.algorithms.es import ES, EvolvedPolicy
from veldt.learning.params import flatten
from veldt.records.history import History, observation
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.seeds import Random

LINE = 16  # numbers in a cache line: all rows begin at one, so that a product has the same bits in every lane


class Population:
    """Row i of `vectors` [lanes, size] has the parameters and float buffers of the policy of lane i.

    A network of nothing but linear layers and tanh is computed for all lanes at once, by batched products in NumPy: with 16
    lanes they take a quarter of the time of torch's, and a fifth of that of 16 forward passes. Others are computed lane by
    lane.
    """

    def __init__(self, algorithm: ES, env: EnvSpec, lanes: int) -> None:
        self.algorithm, self.env, self.lanes = algorithm, env, lanes
        self.net = algorithm.network(env).requires_grad_(False).eval()
        own = flatten(self.net)
        self.parameters = sum(parameter.numel() for parameter in self.net.parameters())
        padded = torch.zeros(lanes, -(-len(own) // LINE) * LINE)
        self.vectors = padded[:, : len(own)]
        self._layers = _layers(self.net, padded.numpy())
        self._nets: list[EvolvedPolicy] = []
        for row in self.vectors if self._layers is None else ():
            self._nets.append(algorithm.network(env).requires_grad_(False).eval())
            flatten(self._nets[-1], row)
        state = algorithm.state(env)
        self._state = {name: torch.zeros(lanes, *c.shape) for name, c in state.items()}
        self._history = History(env, algorithm.window.history, lanes, rewards=bool(state))
        self.seen: Array | None = (
            None  # vectors [lanes, D] that the last actions were computed from, before they are normed
        )

    def share(self, vector: Array) -> None:
        """New weights before they are perturbed: what all lanes have in common."""
        self._center = torch.from_numpy(vector.copy())
        if self.net.norm is not None:
            at = self.parameters
            for buffer in self.net.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self._center[at : at + buffer.numel()].view(buffer.shape))
                    at += buffer.numel()

    def perturb(self, lane: int, noise: Array | None, scale: float, reference: Any = None) -> None:
        row, n = self.vectors[lane], self.parameters
        row.copy_(self._center)
        if noise is not None:
            row[:n].add_(torch.from_numpy(noise), alpha=scale)
            if reference is not None:
                self._nets[lane].refer(reference)

    @torch.inference_mode()
    def act(self, step: Tree, explore: Array, rng: Random) -> Array:
        """Actions for the records [lanes]."""
        rows = {name: torch.from_numpy(x) for name, x in self._history.append(step).items()}
        if self._state and step["first"].any():
            begins = torch.from_numpy(step["first"])
            for tensor in self._state.values():
                tensor[begins] = 0
        if self._layers is None:
            out, after = self._lane_by_lane(rows)
        else:
            out, after = self._at_once(rows, self._layers), {}
        columns = self.algorithm.decide(self.net, {"out": out}, explore, rng)
        if after:
            self._state = after | self.algorithm.taken(self.net, columns)
        return columns["action"]

    def _lane_by_lane(self, rows: Tensors) -> tuple[Array, Tensors]:
        if self.net.norm is not None:
            self.seen = self._vector(rows).numpy()
        outs, states = [], []
        for i, net in enumerate(self._nets):
            own, before = ({name: x[i : i + 1] for name, x in part.items()} for part in (rows, self._state))
            out, after = self.algorithm.forward(net, own, before)
            outs.append(out["out"])
            states.append(after)
        return torch.cat(outs).numpy(), {name: torch.cat([state[name] for state in states]) for name in states[0]}

    def _at_once(self, rows: Tensors, layers: Sequence[tuple[Array, Array]]) -> Array:
        x = self._vector(rows)
        self.seen = x.numpy()
        norm = self.net.norm
        y = (x if norm is None else norm(x)).numpy()[:, :, None]
        for weight, bias in layers[:-1]:
            y = weight @ y
            y += bias
            np.tanh(y, y)
        weight, bias = layers[-1]
        return np.asarray(weight @ y + bias)[:, :, 0]

    def _vector(self, rows: Tensors) -> Tensor:
        algorithm = self.algorithm
        seen = observation(rows, algorithm.history - 1, algorithm.history, algorithm.stacked)
        found: Tensor = self.net.torso.vector(seen)  # type: ignore[operator]
        return found


def _layers(net: EvolvedPolicy, rows: Array) -> list[tuple[Array, Array]] | None:
    """Weights [lanes, outputs, inputs] and biases [lanes, outputs, 1] of all layers, as views of rows of parameters."""
    layers, found, at = net.layers, [], 0
    if layers is None:
        return None
    for layer in layers:  # the order of `named_parameters`
        outputs, inputs = layer.weight.shape
        weight = rows[:, at : at + outputs * inputs].reshape(len(rows), outputs, inputs)
        at += outputs * inputs
        bias = rows[:, at : at + outputs].reshape(len(rows), outputs, 1)
        at += outputs
        assert np.shares_memory(weight, rows) and np.shares_memory(bias, rows)
        found.append((weight, bias))
    return found
