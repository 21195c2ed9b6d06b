"""IMPALA (Espeholt et al., Scalable distributed deep-RL with importance weighted actor-learner architectures, 2018): an
actor-critic whose actors lag behind its learner, corrected by V-trace.

paper                                       here                                 equation
unrolls of n steps, each used once          `unroll`; the store is a queue
behaviour policy mu                         the column `logits`, recorded with each action
rho_t, c_t                                  `ratio`, clipped                     min(1, pi(a_t | x_t) / mu(a_t | x_t))
their clips, 1 in the paper                 `clip_rho`, `clip_c`; `clip_pg` for the rho_s of the policy gradient (its code)
value target v_s                            `returns.vtrace`                     (1)
policy-gradient advantage                   `returns.vtrace`                     rho_s (r_s + gamma v_{s+1} - V(x_s))
loss                                        -A log pi + baseline_cost (v - V)^2 / 2 - entropy_cost H(pi)
LSTM over features, last action and reward  `lstm`; reset where an episode begins
"no correction", "1-step importance sampling" of the paper's comparison          `correction`
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.algorithms.base import Batch, Loss, Observer, Tensors
from veldt.bounds import above, at_least, between
from veldt.errors import UserError
from veldt.learning.distributions import Distribution, distribution_for
from veldt.learning.returns import VTrace, vtrace
from veldt.nets.networks import LSTM, TAKEN, Recurrent, state_spec
from veldt.nets.torsos import on_device
from veldt.records.block import Window, trainable
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, namespace, spec
from veldt.seeds import Random

MIN_RATE = 0.01  # weight of a new batch in the running mean square of value targets; the first 100 weigh the same
MOST_SQUARE = 1e30  # of a target in that mean: a few absurd observations may make values whose square is infinite


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
class VTraceActorCritic(Observer):
    unroll: Annotated[int, above(0)] = 20
    """Steps of an unroll, which an actor sends as one block; also the longest return before the bootstrap."""
    lstm: Annotated[int, at_least(0)] = 0
    """Units of an LSTM over the features, the last action and the last reward; 0: none."""
    correction: Literal["vtrace", "one-step", "none"] = "vtrace"
    """Off-policy correction. one-step: only the policy gradient has importance weights; none: no weights."""
    clip_rho: Annotated[float, at_least(0, infinite=True)] = 1.0
    """Largest importance weight of a step in the value targets; it determines which policy's values are learned."""
    clip_c: Annotated[float, at_least(0, infinite=True)] = 1.0
    """Largest weight in the product over earlier steps; it determines how fast values converge, not to what."""
    clip_pg: Annotated[float, at_least(0, infinite=True)] = 1.0
    """Largest importance weight of a step in the policy gradient."""
    trace: Annotated[float, between(0, 1)] = 1.0
    """The paper's lambda: less than 1 shortens the traces."""
    baseline_cost: Annotated[float, at_least(0)] = 0.5
    """Weight of the value loss."""
    entropy_cost: Annotated[float, at_least(0)] = 0.01
    """Weight of the entropy bonus."""
    normalize: bool = False
    """Divide values and advantages by the root mean square of the value targets if it is greater than 1."""
    sum_losses: bool = False
    """Sum the losses over all steps of a batch, as in the paper, instead of averaging them."""
    hidden: Annotated[tuple[int, ...], above(0)] = (64, 64)
    """Hidden layers for vector observations."""
    convnet: Literal["auto", "nature", "minatar", "impala", "impala-shallow", "mlp"] = "auto"
    """Network for images; auto: impala-shallow for uint8 of at least 36 x 36, minatar for small ones, else mlp."""
    network_from: str = ""
    """`module:callable` that builds the network below the LSTM and the heads from an EnvSpec: [B, ...] -> [B, features]."""

    masks: ClassVar = True
    exploration: ClassVar[str] = ""  # the policy itself is stochastic
    uses_target: ClassVar[bool] = False

    @property
    def window(self) -> Window:
        return Window(history=self.history, length=self.unroll, stride=self.unroll, lookahead=1)

    def check(self, env: EnvSpec) -> None:
        distribution_for(env, "impala")
        super().check(env)
        if self.clip_rho < self.clip_c:
            raise UserError(f"algorithm.clip_c ({self.clip_c}) must not be greater than clip_rho ({self.clip_rho}).")

    def extras(self, env: EnvSpec) -> Spec:
        distribution = distribution_for(env, "impala")
        own = {"logits": spec((distribution.size,), np.float32), "version": spec((), np.int64)}
        return own | distribution.extras

    def state(self, env: EnvSpec) -> Spec:
        return state_spec(self.lstm, distribution_for(env, "impala").encoded)

    def network(self, env: EnvSpec) -> nn.Module:
        torso, features = self.torso(env, self.hidden, self.convnet, self.network_from, large="impala-shallow")
        return PolicyAndValue(torso, features, distribution_for(env, "impala"), self.lstm)

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        assert isinstance(net, PolicyAndValue)
        at = self.history - 1
        if not self.lstm:
            return {
                "logits": net.distribution.among(net.policy(self.observe(rows, at)), self.legal(rows, at))
            }, {}  # [n, P]
        (parameters, _), after = net.step(self.newest(rows, state), state)
        return {"logits": net.distribution.among(parameters[:, 0], self.legal(rows, at))}, after

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        """With probability explore[i] environment i samples from the policy, else it takes the most likely action."""
        assert isinstance(net, PolicyAndValue)
        return {"logits": out["logits"], **net.distribution.draw(out["logits"], explore, rng)}

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        assert isinstance(net, PolicyAndValue)
        if self.lstm:
            return {"value": net.step(self.newest(rows, state), state)[0][1][:, 0]}
        return {"value": net.out(net.torso(self.observe(rows, self.history - 1)))[1]}

    def taken(self, net: nn.Module, columns: Tree) -> Tensors:
        assert isinstance(net, PolicyAndValue)
        return {TAKEN: net.encode(on_device(columns[net.taken], net.device))}

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Unrolls [B, T + 1]: the steps 0 ... T - 1 are trained, row T is the bootstrap."""
        assert isinstance(net, PolicyAndValue)
        distribution, at = net.distribution, self.history - 1
        parameters, value = net(self.sequence(net, batch, batch.starts), batch.starts)  # [B, T + 1, P], [B, T + 1]
        pi = distribution.among(parameters[:, :-1], self.legal(batch, slice(at, -1)))
        mu = batch["logits"][:, at:-1]
        taken = batch[distribution.taken][:, at:-1]  # [B, T, ...]
        log_pi = distribution.log_prob(pi, taken)  # [B, T]
        trains = trainable(batch.host["valid"][:, at:], batch.host["last"][:, at:], 1)  # [B, T]
        with torch.no_grad():
            log_ratio = log_pi - distribution.log_prob(mu, taken)
            ratio = log_ratio.clamp(-20, 20).exp()
            learned = self._returns(batch, value.detach(), trains, ratio)
            kl = distribution.kl(mu, pi)
        mask = on_device(trains, value.device).to(value)
        steps = max(1, int(trains.sum())) if namespace(trains) is np else trains.sum().clamp_min(1)
        entropy = distribution.entropy(pi)
        each = (
            self.baseline_cost * 0.5 * ((learned.target - value[:, :-1]) / net.scale).square()
            - learned.advantage / net.scale * log_pi
            - self.entropy_cost * entropy
        )
        loss = (each * mask).sum() / (1 if self.sum_losses else steps)
        metrics = {
            "loss": loss.detach(),
            "entropy": (entropy.detach() * mask).sum() / steps,
            "value_mean": (value.detach()[:, :-1] * mask).sum() / steps,
            "value_loss": 0.5 * ((learned.target - value.detach()[:, :-1]).square() * mask).sum() / steps,
            "kl": (kl * mask).sum() / steps,
            "ratio_clipped": ((ratio > self.clip_rho) * mask).sum() / steps,
        }
        mean_square = (learned.target.square().clamp_max(MOST_SQUARE) * mask).sum() / steps
        after = partial(net.rescale, mean_square) if self.normalize else None
        return Loss({"": loss}, value.new_zeros(len(value)), metrics, after)

    def _returns(self, batch: Batch, value: Tensor, trains: Array | Tensor, ratio: Tensor) -> VTrace:
        """In NumPy where all is on a CPU: there the loop over time is compiled."""
        at = self.history - 1
        reward, discount = self.clipped(batch.host["reward"][:, at:]), batch.host["discount"][:, at:]
        trusted, clips = ratio, (self.clip_rho, self.clip_c, self.clip_pg)
        if self.correction != "vtrace":  # all ratios are 1
            trusted, clips = torch.ones_like(ratio), (1.0, 1.0, 1.0)
        how = (self.gamma, self.trace, *clips)
        if value.device.type == "cpu" and namespace(trains) is np:
            found = vtrace(value.numpy(), reward, discount, trains, trusted.numpy(), *how)
            out = VTrace(*map(torch.from_numpy, found))
        else:
            r, d, t = (on_device(x, value.device) for x in (reward, discount, trains))
            out = vtrace(value, r, d, t, trusted, *how)
        if self.correction == "one-step":
            return out._replace(advantage=out.advantage * ratio.clamp(max=self.clip_pg))
        return out
