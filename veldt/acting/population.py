"""Population: the policies of several lanes, each with weights of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veldt.algorithms.base import Tensors
from veldt.algorithms.es import ES, EvolvedPolicy
from veldt.compiled import njit
from veldt.learning.params import flatten
from veldt.nets.normalize import LIMIT, ObservationNorm
from veldt.records.history import History, observation
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.seeds import Random

LINE = 16  # numbers in a cache line: all rows begin at one, so that a product has the same bits in every lane

NARROW = 64  # units of a layer, up to which the compiled loop is faster than batched products


class Population:
    """Row i of `vectors` [lanes, size] has the parameters and float buffers of the policy of lane i.

    A network of nothing but linear layers and tanh is computed for all lanes at once: a narrow one in a compiled loop, a
    wide one by batched products in NumPy. Others are computed lane by lane, in torch.
    """

    def __init__(self, algorithm: ES, env: EnvSpec, lanes: int) -> None:
        self.algorithm, self.env, self.lanes = algorithm, env, lanes
        self.net = algorithm.network(env).requires_grad_(False).eval()
        own = flatten(self.net)
        self.parameters = sum(parameter.numel() for parameter in self.net.parameters())
        padded = torch.zeros(lanes, -(-len(own) // LINE) * LINE)
        self.vectors = padded[:, : len(own)]
        self._rows = self.vectors.numpy()
        self._layers = _layers(self.net, padded.numpy())
        self._narrow: Narrow | None = None
        if self._layers is not None and max(weight.shape[1] for weight, _ in self._layers) <= NARROW:
            self._narrow = Narrow(padded.numpy(), [weight.shape[1:] for weight, _ in self._layers])
        self._nets: list[EvolvedPolicy] = []
        for row in self.vectors if self._layers is None else ():
            self._nets.append(algorithm.network(env).requires_grad_(False).eval())
            flatten(self._nets[-1], row)
        state = algorithm.state(env)
        self._whole = self._narrow is not None and _is_vector(env, algorithm.window.history)
        self._state = {name: torch.zeros(lanes, *c.shape) for name, c in state.items()}
        self._history = History(env, algorithm.window.history, lanes, rewards=bool(state))
        self.seen: Array | None = (
            None  # vectors [lanes, D] that the last actions were computed from, before they are normed
        )

    def share(self, vector: Array) -> None:
        """New weights before they are perturbed: what all lanes have in common."""
        self._center = vector.copy()
        if self.net.norm is not None:
            at = self.parameters
            for buffer in self.net.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.from_numpy(self._center[at : at + buffer.numel()]).view(buffer.shape))
                    at += buffer.numel()
            if self._narrow is not None:
                self._narrow.normalize(self.net.norm)

    def perturb(self, lane: int, noise: Array | None, scale: float, reference: Any = None) -> None:
        row, n = self._rows[lane], self.parameters
        row[:] = self._center
        if noise is not None:
            row[:n] += np.float32(scale) * noise
            if reference is not None:
                self._nets[lane].refer(reference)

    def act(self, step: Tree, explore: Array, rng: Random) -> Array:
        """Actions for the records [lanes]."""
        if self._narrow is None or not self._whole:
            return self._act(step, explore, rng)
        self.seen = step["obs"]
        return self.algorithm.decide(self.net, {"out": self._narrow(self.seen)}, explore, rng)["action"]

    @torch.inference_mode()
    def _act(self, step: Tree, explore: Array, rng: Random) -> Array:
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
        if self._narrow is not None:
            return self._narrow(self.seen)
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


class Narrow:
    """A network of few units, for all lanes: x [lanes, inputs] -> [lanes, outputs]."""

    def __init__(self, rows: Array, shapes: list[tuple[int, ...]]) -> None:
        self.rows = rows
        self.sizes = np.array([shapes[0][1], *(outputs for outputs, _ in shapes)])
        self.mean, self.deviation = np.zeros(shapes[0][1], np.float32), np.ones(shapes[0][1], np.float32)
        self.limit = np.inf

    def normalize(self, norm: ObservationNorm) -> None:
        """Observations are normalised as `norm` does it now."""
        self.mean, self.limit = norm.mean.numpy(), LIMIT
        self.deviation = norm.variance.sqrt().clamp_min(norm.LEAST).numpy()

    def __call__(self, x: Array) -> Array:
        return _forward(np.ascontiguousarray(x), self.mean, self.deviation, self.limit, self.rows, self.sizes)


@njit("f4[:,::1](f4[:,::1], f4[::1], f4[::1], f8, f4[:,::1], i8[::1])")
def _forward(x: Array, mean: Array, deviation: Array, limit: float, rows: Array, sizes: Array) -> Array:
    """Row i of `rows` has the weights and biases of all layers for x[i]."""
    lanes, layers, most = len(x), len(sizes) - 1, np.float32(limit)
    out = np.empty((lanes, sizes[-1]), np.float32)
    y, z = np.empty(sizes.max(), np.float32), np.empty(sizes.max(), np.float32)
    for lane in range(lanes):
        row, at = rows[lane], 0
        for j in range(sizes[0]):
            y[j] = min(max((x[lane, j] - mean[j]) / deviation[j], -most), most)
        for layer in range(layers):
            inputs, outputs = sizes[layer], sizes[layer + 1]
            bias = at + inputs * outputs
            for i in range(outputs):
                total = row[bias + i]
                for j in range(inputs):
                    total += row[at + i * inputs + j] * y[j]
                z[i] = total if layer == layers - 1 else np.tanh(total)
            y, z = z, y
            at = bias + outputs
        out[lane] = y[: sizes[-1]]
    return out


def _is_vector(env: EnvSpec, history: int) -> bool:
    """Whether a step's observation is what the first layer gets, before it is normed."""
    column = env.observation.get("obs")
    return column is not None and not env.categories and history == 1 and len(column.shape) == 1 and column.dtype == "f4"


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
