"""What the actor-critics share: a network with a policy and a value, how they act, and what they are asked."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.algorithms.base import Observer, Tensors
from veldt.bounds import above, at_least
from veldt.learning.distributions import Distribution, distribution_for
from veldt.nets.networks import LSTM, TAKEN, Recurrent, state_spec
from veldt.nets.torsos import on_device
from veldt.records.block import Window
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree
from veldt.seeds import Random

MIN_RATE = 0.01  # weight of a new batch in the running mean square of value targets; the first 100 weigh the same


class PolicyAndValue(Recurrent):
    """A torso, an LSTM if `lstm`, and a linear head: rows [B, T, ...] -> parameters of the policy [B, T, P], values [B, T].

    The head's value is in units of `scale`: the running root mean square of value targets, at least 1. When the scale
    changes the head is rescaled, so that values stay the same (Pop-Art, van Hasselt et al. 2016, without the mean).
    """

    head: nn.Linear
    square: Tensor  # [], running mean square of value targets
    batches: Tensor  # [], in that mean

    def __init__(self, torso: nn.Module, features: int, distribution: Distribution, lstm: int) -> None:
        super().__init__()
        self.torso, self.distribution = torso, distribution
        self.taken, self.encode = distribution.taken, distribution.encode
        self.core = LSTM(features + distribution.encoded + 1, lstm) if lstm else None
        self.head = nn.Linear(lstm or features, distribution.size + 1)
        with torch.no_grad():  # the first policy is near uniform
            self.head.weight[:-1] *= 0.1
            self.head.bias.zero_()
        self.register_buffer("square", torch.zeros(()))
        self.register_buffer("batches", torch.zeros(()))

    @property
    def scale(self) -> Tensor:
        return self.square.sqrt().clamp_min(1)

    @torch.no_grad()
    def rescale(self, mean_square: Tensor) -> None:
        """Adds the value targets of a batch to the running mean square."""
        before = self.scale
        self.batches += 1
        self.square.lerp_(mean_square, (1 / self.batches).clamp_min(MIN_RATE))
        self.head.weight[-1] *= before / self.scale
        self.head.bias[-1] *= before / self.scale

    def policy(self, obs: Any) -> Tensor:
        """Without an LSTM, parameters alone: [B, ...] -> [B, P]."""
        out = F.linear(self.torso(obs), self.head.weight, self.head.bias)
        return self.distribution.normalize(out[..., :-1])

    def out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(x)
        return self.distribution.normalize(out[..., :-1]), out[..., -1] * self.scale


@dataclass(frozen=True)
class ActorCritic(Observer):
    """Learns from unrolls: the steps 0 ... T - 1 are trained, and the value of row T is the bootstrap."""

    unroll: Annotated[int, above(0)] = 20
    """Steps of an unroll, which an actor sends as one block; also the longest return before the bootstrap."""
    lstm: Annotated[int, at_least(0)] = 0
    """Units of an LSTM over the features, the last action and the last reward; 0: none."""
    entropy_cost: Annotated[float, at_least(0)] = 0.01
    """Weight of the entropy bonus."""
    hidden: Annotated[tuple[int, ...], above(0)] = (64, 64)
    """Hidden layers for vector observations."""
    convnet: Literal["auto", "nature", "minatar", "impala", "impala-shallow", "mlp"] = "auto"
    """Network for images; auto: impala-shallow for uint8 of at least 36 x 36, minatar for small ones, else mlp."""
    network_from: str = ""
    """`module:callable` that builds the network below the LSTM and the heads from an EnvSpec: [B, ...] -> [B, features]."""

    name: ClassVar[str]  # in errors
    masks: ClassVar = True
    exploration: ClassVar[str] = ""  # the policy itself is stochastic
    uses_target: ClassVar[bool] = False

    @property
    def window(self) -> Window:
        return Window(history=self.history, length=self.unroll, stride=self.unroll, lookahead=1)

    def check(self, env: EnvSpec) -> None:
        distribution_for(env, self.name)
        super().check(env)

    def extras(self, env: EnvSpec) -> Spec:
        return distribution_for(env, self.name).extras

    def state(self, env: EnvSpec) -> Spec:
        return state_spec(self.lstm, distribution_for(env, self.name).encoded)

    def network(self, env: EnvSpec) -> nn.Module:
        torso, features = self.torso(env, self.hidden, self.convnet, self.network_from, large="impala-shallow")
        return PolicyAndValue(torso, features, distribution_for(env, self.name), self.lstm)

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        assert isinstance(net, PolicyAndValue)
        at = self.history - 1
        legal = self.legal(rows, at)
        if not self.lstm:
            return {"logits": net.distribution.among(net.policy(self.observe(rows, at)), legal)}, {}  # [n, P]
        (parameters, _), after = net.step(self.newest(rows, state), state)
        return {"logits": net.distribution.among(parameters[:, 0], legal)}, after

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        """With probability explore[i] environment i samples from the policy, else it takes the most likely action."""
        assert isinstance(net, PolicyAndValue)
        return net.distribution.draw(out["logits"], explore, rng)

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        assert isinstance(net, PolicyAndValue)
        if self.lstm:
            return {"value": net.step(self.newest(rows, state), state)[0][1][:, 0]}
        return {"value": net.out(net.torso(self.observe(rows, self.history - 1)))[1]}

    def taken(self, net: nn.Module, columns: Tree) -> Tensors:
        assert isinstance(net, PolicyAndValue)
        return {TAKEN: net.encode(on_device(columns[net.taken], net.device))}
