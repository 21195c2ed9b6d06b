"""Asynchronous one-step Q-learning, one-step Sarsa and n-step Q-learning (Mnih et al. 2016): algorithms 1, S1 and S2.

paper                                       here                                 target
one-step Q                                  `returns` one-step                   r + gamma max_a' Q(s', a'; theta-)
one-step Sarsa                              `returns` sarsa                      r + gamma Q(s', a'; theta-), a' taken in s'
n-step Q, forward view                      `returns` n-step                     R <- r_i + gamma R, from max_a Q(s_t, a)
I_AsyncUpdate, t_max                        `unroll`, 5
loss                                        sum_i (R - Q(s_i, a_i; theta'))^2
I_target                                    `target_every` of the run's config, in env steps of all workers
epsilon: a final value for each worker      `AnnealedConfig`

As in A3C, an unroll goes on after the end of an episode, with the record of the reset masked.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from veldt.algorithms.a3c import refuse_statistics
from veldt.algorithms.base import Batch, Loss, Observer, Tensors, require_one_choice
from veldt.algorithms.dqn import epsilon_greedy
from veldt.bounds import above
from veldt.learning.returns import forward_view
from veldt.nets.networks import QHead, QNetwork
from veldt.nets.torsos import each
from veldt.records.block import Window, trainable
from veldt.records.history import observations
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.seeds import Random


@dataclass(frozen=True)
class AsyncQ(Observer):
    unroll: Annotated[int, above(0)] = 5
    """Steps between two updates; with n-step returns also the longest return before the bootstrap."""
    returns: Literal["one-step", "n-step", "sarsa"] = "one-step"
    """What the action values learn: one-step and n-step Q-learning, or one-step Sarsa."""
    hidden: Annotated[tuple[int, ...], above(0)] = (64, 64)
    """Hidden layers for vector observations."""
    convnet: Literal["auto", "nature", "minatar", "impala", "impala-shallow", "mlp"] = "auto"
    """Network for images; auto: impala-shallow for uint8 of at least 36 x 36, minatar for small ones, else mlp."""
    network_from: str = ""
    """`module:callable` that builds the network below the head from an EnvSpec: [B, ...] -> [B, features]."""

    one_choice: ClassVar = True

    @property
    def reads_last_action(self) -> bool:
        return self.returns == "sarsa"

    @property
    def window(self) -> Window:
        return Window(history=self.history, length=self.unroll, stride=self.unroll, lookahead=1)

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        require_one_choice(env, "async-q")
        refuse_statistics(self.normalize_obs, "async-q")

    def network(self, env: EnvSpec) -> nn.Module:
        torso, features = self.torso(env, self.hidden, self.convnet, self.network_from, large="impala-shallow")
        return QNetwork(torso, QHead(features, env.n_actions, dueling=False))

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        return {"q": net(self.observe(rows, self.history - 1))}, {}

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        """Epsilon-greedy."""
        return {"action": epsilon_greedy(out["q"], explore, rng)["action"]}

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        q = self.forward(net, rows, state)[0]["q"]
        return {"value": q.amax(1), "q": q if action is None else q.gather(1, action[:, None])[:, 0]}

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Unrolls [B, T + 1]: the steps 0 ... T - 1 are trained, row T is the bootstrap."""
        at, host = self.history - 1, batch.host
        obs: Any = each(observations(batch, self.history, self.stacked), lambda x: x.flatten(0, 1))
        action = batch["action"][:, at:, None]  # [B, T + 1, 1]
        shape = action.shape[:2]
        q = net(obs).unflatten(0, shape)[:, :-1].gather(2, action[:, :-1])[..., 0]  # [B, T]
        with torch.no_grad():
            q_t = target(obs).unflatten(0, shape)  # [B, T + 1, actions]
            v_t = q_t.gather(2, action)[..., 0] if self.returns == "sarsa" else q_t.amax(2)
        trains = trainable(host["valid"][:, at:], host["last"][:, at:], 1)  # [B, T]
        reward, discount = self.clipped(host["reward"][:, at:]), host["discount"][:, at:]
        if self.returns == "n-step":
            returns = torch.from_numpy(forward_view(v_t.numpy(), reward, discount, trains, self.gamma))
        else:
            returns = torch.from_numpy(reward[:, 1:]) + self.gamma * torch.from_numpy(discount[:, 1:]) * v_t[:, 1:]
        error = torch.where(torch.from_numpy(trains), returns - q, 0.0)
        loss = error.square().sum()
        return Loss({"": loss}, loss.new_zeros(len(q)), {"loss": loss.detach(), "q_mean": q.detach()})
