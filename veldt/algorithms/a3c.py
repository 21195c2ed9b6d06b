"""A3C (Mnih et al., Asynchronous methods for deep reinforcement learning, 2016), advantage actor-critic: algorithm S3.

paper                                       here                                 equation
t_max                                       `unroll`, 5
R                                           `returns.forward_view`               R <- r_i + gamma R, from 0 or V(s_t)
d theta'                                    the policy's part of the loss        sum_i -log pi(a_i | s_i) (R - V(s_i))
entropy regularisation, beta                `entropy_cost`, 0.01                 -beta H(pi(s_i))
d theta_v'                                  the value's part                     `value_cost` (R - V(s_i))^2, 0.5
losses summed over the steps                they are
LSTM variant                                `lstm`, 256 in the paper; its state goes on from unroll to unroll
shared RMSProp, Hogwild                     `learning.hogwild`, `topologies.workers`

An unroll of the paper ends with its episode. Ours goes on into the next one: the record of the reset is masked, the sum
ends at the episode's end, and so the gradient is that of the two parts together.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from veldt.algorithms.actor_critic import ActorCritic, PolicyAndValue
from veldt.algorithms.base import Batch, Loss
from veldt.bounds import above, at_least
from veldt.errors import UserError
from veldt.learning.returns import forward_view
from veldt.records.block import trainable
from veldt.records.step import EnvSpec


@dataclass(frozen=True)
class A3C(ActorCritic):
    unroll: Annotated[int, above(0)] = 5
    """The paper's t_max: steps between two updates; also the longest return before the bootstrap."""
    value_cost: Annotated[float, at_least(0)] = 0.5
    """Weight of the squared error of the value."""

    name: ClassVar = "a3c"
    reads_last_action: ClassVar = False

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        refuse_statistics(self.normalize_obs, "a3c")

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Unrolls [B, T + 1]: the steps 0 ... T - 1 are trained, row T is the bootstrap."""
        assert isinstance(net, PolicyAndValue)
        distribution, at, host = net.distribution, self.history - 1, batch.host
        parameters, value = net(self.sequence(net, batch, batch.starts), batch.starts)  # [B, T + 1, P], [B, T + 1]
        trains = trainable(host["valid"][:, at:], host["last"][:, at:], 1)  # [B, T]
        reward, discount = self.clipped(host["reward"][:, at:]), host["discount"][:, at:]
        returns = torch.from_numpy(forward_view(value.detach().numpy(), reward, discount, trains, self.gamma))
        pi = distribution.among(parameters[:, :-1], self.legal(batch, slice(at, -1)))
        mask, v = torch.from_numpy(trains), value[:, :-1]
        error = torch.where(mask, returns - v, 0.0)
        log_pi, entropy = distribution.log_prob(pi, batch[distribution.taken][:, at:-1]), distribution.entropy(pi)
        gain = torch.where(mask, error.detach() * log_pi + self.entropy_cost * entropy, 0.0)
        loss = self.value_cost * error.square().sum() - gain.sum()
        metrics = {"loss": loss.detach(), "entropy": entropy.detach(), "value_mean": v.detach()}
        return Loss({"": loss}, loss.new_zeros(len(v)), metrics)


def refuse_statistics(normalize_obs: bool, name: str) -> None:
    """Without a lock, workers would overwrite each other's running statistics."""
    if normalize_obs:
        raise UserError(
            f"{name} cannot normalise observations in the network (algorithm.normalize_obs): its workers would overwrite "
            "each other's statistics; use a wrapper, such as --wrappers gymnasium.wrappers:NormalizeObservation."
        )
