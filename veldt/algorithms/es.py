"""Evolution Strategies (Salimans et al., Evolution strategies as a scalable alternative to reinforcement learning, 2017):
the policies that it perturbs. The update is in `learning/evolution.py`, the evaluations in `acting/worker.py`.

paper                                       here
policy pi_theta                             `EvolvedPolicy`: hidden layers with tanh, a CNN for images, an LSTM if `lstm`
virtual batch normalisation                 `batch_norm`: statistics of a fixed reference batch, for each perturbed network
normalised observations, clipped to +-5     `normalize_obs`
actions in 10 bins (Hopper, Swimmer)        `bins`
noise on actions, 0.01                      `explore` of `act`, in units of half a range

Actions are the most likely ones, or the outputs themselves: the noise is in the weights. `explore` adds noise to actions:
of a Box, its standard deviation; of choices, the fraction that is sampled from the softmax of the outputs.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.algorithms.base import Batch, Observer, Tensors
from veldt.bounds import above, at_least
from veldt.errors import UserError
from veldt.learning.distributions import Categories, Gaussian, distribution_for
from veldt.nets.networks import LSTM, TAKEN, Recurrent, Vector, state_spec
from veldt.nets.normalize import ObservationNorm
from veldt.nets.torsos import ConvNet, Torso, blank_rows, on_device, torso_for, user_network
from veldt.records.block import Window
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, spec
from veldt.seeds import Random

UNIT = "unit"  # the column of a continuous action in units of half its range
MOST_BINS = 1_000


class Choices:
    """Outputs [n, P] -> choices: the largest output of each, or with probability explore[i] one drawn from the softmax."""

    taken = "action"

    def __init__(self, categories: Categories) -> None:
        self.categories, self.size, self.encoded = categories, categories.size, categories.encoded
        self.extras: Spec = {}

    def columns(self, out: Array, explore: Array, rng: Random) -> Tree:
        kinds = self.categories
        if explore.any():
            return kinds.draw(kinds.normalize(torch.from_numpy(out)).numpy(), explore, rng)
        return {"action": best_of(out, kinds.choices).reshape(len(out), *kinds.shape)}

    def encode(self, taken: Tensor) -> Tensor:
        return self.categories.encode(taken)


class Continuous:
    """Outputs -> actions of a Box, in units of half its range; with `bins` each is one of that many steps from -1 to 1."""

    taken = UNIT

    def __init__(self, box: Gaussian, bins: int) -> None:
        self.box, self.bins, self.encoded = box, bins, box.encoded
        self.size = self.encoded * (bins or 1)
        self.extras: Spec = {UNIT: spec((self.encoded,), np.float32)}

    def columns(self, out: Array, explore: Array, rng: Random) -> Tree:
        box, unit = self.box, out.astype(np.float64)
        if self.bins:
            unit = best_of(out, [self.bins] * self.encoded) * (2 / (self.bins - 1)) - 1
        if explore.any():
            unit = unit + explore[:, None] * rng.standard_normal(unit.shape)
        action = np.clip(box.center + box.radius * unit, box.low, box.high).astype(np.float32)
        return {"action": action.reshape(len(out), *box.shape), UNIT: unit.astype(np.float32)}

    def encode(self, taken: Tensor) -> Tensor:
        return taken.clamp(-1, 1)


def best_of(out: Array, choices: list[int]) -> Array:
    """The largest of each group of outputs: [n, sum of choices] -> [n, number of choices]."""
    if len(set(choices)) == 1:
        return np.asarray(out.reshape(len(out), len(choices), choices[0]).argmax(2))
    return np.stack([part.argmax(1) for part in np.split(out, np.cumsum(choices)[:-1], axis=1)], 1)


class Features(Torso):
    """What is no image, normalised, through layers with tanh; beside it the features of images: [B, ...] -> [B, F]."""

    def __init__(self, vector: Vector, inputs: int, hidden: tuple[int, ...], normalize: bool, sight: Torso | None) -> None:
        super().__init__()
        self.vector, self.sight, self.inputs = vector, sight, inputs
        self.norm = ObservationNorm(inputs) if normalize and inputs else None
        sizes = (inputs, *hidden) if inputs else ()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.features = (sizes[-1] if sizes else 0) + (sight.features if sight is not None else 0)

    def forward(self, obs: Any) -> Tensor:
        parts = []
        if self.inputs:
            x = self.vector(obs)
            x = x if self.norm is None else self.norm(x)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            parts.append(x)
        if self.sight is not None:
            parts.append(self.sight(obs))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class EvolvedPolicy(Recurrent):
    """A torso, an LSTM if `lstm`, and a linear head: rows [B, T, ...] -> outputs [B, T, P]."""

    head: nn.Linear

    def __init__(self, torso: nn.Module, features: int, actions: Choices | Continuous, lstm: int) -> None:
        super().__init__()
        self.torso, self.actions = torso, actions
        self.taken, self.encode = actions.taken, actions.encode
        self.core = LSTM(features + actions.encoded + 1, lstm) if lstm else None
        self.head = nn.Linear(lstm or features, actions.size)
        with torch.no_grad():
            self.head.weight *= 0.1
            self.head.bias.zero_()

    @property
    def layers(self) -> list[nn.Linear] | None:
        """All of it, if it is nothing but these layers with tanh between them, after `torso.vector` and `torso.norm`."""
        torso = self.torso
        if self.core is not None or not isinstance(torso, Features) or torso.sight is not None:
            return None
        return [*(layer for layer in torso.layers if isinstance(layer, nn.Linear)), self.head]

    @property
    def norm(self) -> ObservationNorm | None:
        return self.torso.norm if isinstance(self.torso, Features) else None

    @property
    def refers(self) -> bool:
        """Whether it has virtual batch normalisation."""
        return any(isinstance(module, VIRTUAL) for module in self.modules())

    @torch.no_grad()
    def refer(self, reference: Any) -> None:
        """Sets the statistics of virtual batch normalisation to those of a batch of observations, for these weights."""
        for module in self.modules():
            if isinstance(module, VIRTUAL):
                module.train()
        self.torso(reference)
        self.eval()


VIRTUAL = (nn.BatchNorm1d, nn.BatchNorm2d)


def with_batch_norm(module: nn.Module) -> None:
    """Adds a batch normalisation after every layer with weights. In training mode it takes the statistics of its batch and
    keeps them (a momentum of 1); otherwise it uses what it kept."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Conv2d):
            setattr(module, name, nn.Sequential(child, nn.BatchNorm2d(child.out_channels, momentum=1.0)))
        elif isinstance(child, nn.Linear):
            setattr(module, name, nn.Sequential(child, nn.BatchNorm1d(child.out_features, momentum=1.0)))
        else:
            with_batch_norm(child)


@dataclass(frozen=True)
class ES(Observer):
    hidden: Annotated[tuple[int, ...], above(0)] = (16, 16)
    """Hidden layers, with tanh, for observations that are vectors."""
    lstm: Annotated[int, at_least(0)] = 0
    """Units of an LSTM over the features, the last action and the last reward; 0: none."""
    bins: Annotated[int, at_least(0)] = 0
    """Continuous actions: choose among this many equal steps of each action's range, as the paper in Hopper and Swimmer
    (10); 0: the action is what the network gives."""
    batch_norm: bool = False
    """Virtual batch normalisation in the convolutional network: the statistics of a fixed batch of observations, which a
    random policy made. Without it many perturbed policies for pixels take the same action always."""
    convnet: str = "auto"
    """Convolutional network for images: auto, nature, impala-shallow, impala (ResNet) or minatar; mlp: none."""
    network_from: str = ""
    """module:callable that makes the network below the head from an EnvSpec: [B, ...] -> [B, features]."""

    uses_target: ClassVar[bool] = False
    exploration: ClassVar[str] = ""

    @property
    def window(self) -> Window:
        return Window(history=self.history)

    def check(self, env: EnvSpec) -> None:
        distribution_for(env, "es")
        super().check(env)
        if self.bins and not isinstance(env.action_space, spaces.Box):
            raise UserError(f"algorithm.bins is for continuous actions, but {env.name} has {env.action_space}.")
        if self.bins == 1 or self.bins > MOST_BINS:
            raise UserError(f"algorithm.bins must be 0, or from 2 to {MOST_BINS:,}, not {self.bins}.")
        if self.batch_norm and (self.network_from or not _has_images(self, env)):
            raise UserError(
                f"algorithm.batch_norm is for the package's convolutional networks; {env.name} has none here: turn it off "
                "with --algorithm.no-batch-norm."
            )

    def actions(self, env: EnvSpec) -> Choices | Continuous:
        found = distribution_for(env, "es")
        return Choices(found) if isinstance(found, Categories) else Continuous(found, self.bins)

    def extras(self, env: EnvSpec) -> Spec:
        return self.actions(env).extras

    def state(self, env: EnvSpec) -> Spec:
        return state_spec(self.lstm, self.actions(env).encoded)

    def network(self, env: EnvSpec) -> EvolvedPolicy:
        if self.network_from:
            return EvolvedPolicy(*user_network(self.network_from, env, self.history, self.stacked), *self._above(env))
        how, sight = (env, self.history, self.stacked), None
        vector = Vector(*how)
        if len(vector.keys) < len(env.observation) and self.convnet != "mlp":
            sight = torso_for(*how, hidden=(), convnet=self.convnet, large="impala-shallow", only_pictures=True)
            if self.batch_norm:
                with_batch_norm(sight)
        elif self.convnet == "mlp":
            torso = torso_for(*how, hidden=self.hidden, convnet="mlp")
            return EvolvedPolicy(torso, torso.features, *self._above(env))
        seen = self.observe(blank_rows(env, self.history), self.history - 1)
        size = vector(seen).shape[1] if vector.keys else 0
        features = Features(vector, size, self.hidden, self.normalize_obs, sight)
        return EvolvedPolicy(features, features.features, *self._above(env))

    def _above(self, env: EnvSpec) -> tuple[Choices | Continuous, int]:
        return self.actions(env), self.lstm

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        assert isinstance(net, EvolvedPolicy)
        if not self.lstm:
            x = net.torso(self.observe(rows, self.history - 1))
            return {"out": F.linear(x, net.head.weight, net.head.bias)}, {}
        out, after = net.step(self.newest(rows, state), state)
        return {"out": out[:, 0]}, after

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        assert isinstance(net, EvolvedPolicy)
        return net.actions.columns(out["out"], explore, rng)

    def taken(self, net: nn.Module, columns: Tree) -> Tensors:
        assert isinstance(net, EvolvedPolicy)
        return {TAKEN: net.encode(on_device(columns[net.taken], net.device))}

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> NoReturn:
        raise TypeError("evolution strategies have no loss")


def _has_images(algorithm: ES, env: EnvSpec) -> bool:
    torso = algorithm.network(env).torso
    return isinstance(torso, Features) and any(isinstance(module, ConvNet) for module in torso.modules())
