"""DQN (Mnih et al., Human-level control through deep reinforcement learning, Nature 2015) and its extensions.

paper                                       here                                 equation
target y, network copy theta-               `target`, copied by the learner      y = r + gamma max_a' Q(s', a'; theta-)
error clipped to [-1, 1]                    `huber` (its gradient is the clipped error)
double DQN (van Hasselt et al. 2016)        `double`                             its eq. 4: a' = argmax_a Q(s', a; theta)
dueling (Wang et al. 2016)                  `dueling`                            its eq. 9: Q = V + A - mean A
its two streams of 512 on the convolutions  two streams as wide as the last hidden layer, on what is below it
n-step returns (Rainbow, Ape-X)             `n`                                  see `returns.n_step`
prioritized replay (Schaul et al. 2016)     the store's selector                 its eq. 1, priority |y - Q|
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from veldt.algorithms.base import ActionValues, Batch, Loss, Tensors, among_legal, require_one_choice
from veldt.bounds import above
from veldt.compiled import njit
from veldt.nets.networks import QHead, QNetwork
from veldt.nets.torsos import torso_for, user_network
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.seeds import Random


@dataclass(frozen=True)
class DQN(ActionValues):
    double: bool = False
    """Choose the bootstrap action with the online network."""
    dueling: bool = False
    """Dueling network: separate streams for value and advantages, each with its own last hidden layer."""
    huber: bool = True
    """Huber loss (errors are clipped to [-1, 1]) instead of the squared error."""
    hidden: Annotated[tuple[int, ...], above(0)] = (128, 128)
    """Hidden layers for vector observations."""
    convnet: Literal["auto", "nature", "minatar", "impala", "mlp"] = "auto"
    """Network for images; auto: nature for uint8 of at least 36 x 36, minatar for small ones with channels, else mlp."""
    network_from: str = ""
    """`module:callable` that builds the network below the head from an EnvSpec: [B, ...] -> [B, features]."""

    masks: ClassVar = True
    one_choice: ClassVar = True

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        require_one_choice(env, "dqn")

    def network(self, env: EnvSpec) -> nn.Module:
        if self.network_from:
            own, features = user_network(self.network_from, env, self.history, self.stacked)
            return QNetwork(own, QHead(features, env.n_actions, self.dueling))
        last, hidden, normalize = not self.dueling, self.hidden, self.normalize_obs
        torso = torso_for(env, self.history, self.stacked, hidden, self.convnet, last=last, normalize=normalize)
        return QNetwork(torso, QHead(torso.features, env.n_actions, self.dueling, torso.width if self.dueling else 0))

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        at = self.history - 1
        return {"q": among_legal(net(self.observe(rows, at)), self.legal(rows, at))}, {}

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        """Epsilon-greedy: with probability explore[i] environment i takes a uniformly random one of the legal actions."""
        return epsilon_greedy(out["q"], explore, rng)

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        (s_tm1, a_tm1, r_t, discount_t, s_t), legal_t = self.masked_transitions(batch)
        q_tm1 = net(s_tm1).gather(1, a_tm1[:, None]).squeeze(1)  # [B]
        with torch.no_grad():
            q_t = among_legal(target(s_t), legal_t)
            best = among_legal(net(s_t), legal_t).argmax(1, keepdim=True) if self.double else None
            v_t = q_t.amax(1) if best is None else q_t.gather(1, best).squeeze(1)
            y = torch.addcmul(r_t, discount_t, v_t)
            priorities = (y - q_tm1).abs_()
        error = F.smooth_l1_loss(q_tm1, y, reduction="none") if self.huber else 0.5 * (y - q_tm1).square()
        loss = torch.dot(batch.weights, error) / len(error)
        return Loss({"": loss}, priorities, {"loss": loss.detach(), "q_mean": q_tm1.detach()})


def epsilon_greedy(q: Array, explore: Array, rng: Random) -> Tree:
    """Columns [n] from values q [n, actions]: `action`, `q` (its value) and `v` (the largest value). Illegal actions, whose
    value is -inf, are not taken."""
    values, amounts = np.ascontiguousarray(q), explore if explore.flags.writeable else explore.copy()
    return dict(zip(("action", "q", "v"), _epsilon_greedy(values, rng.random((len(q), 2)), amounts), strict=True))


@njit("Tuple((i8[::1], f4[::1], f4[::1]))(f4[:,::1], f8[:,::1], f8[::1])")
def _epsilon_greedy(q: Array, random: Array, explore: Array) -> Any:
    n, actions = q.shape
    action, q_taken, v = np.empty(n, np.int64), np.empty(n, np.float32), np.empty(n, np.float32)
    for i in range(n):
        best = 0
        for a in range(1, actions):
            if q[i, a] > q[i, best] or (q[i, best] == -np.inf and q[i, a] != -np.inf):
                best = a
        v[i] = q[i, best]
        action[i] = best
        if random[i, 0] < explore[i]:
            legal = np.flatnonzero(q[i] != -np.inf)
            if len(legal) == 0:  # the network's values have overflowed
                legal = np.arange(actions)
            action[i] = legal[np.int64(random[i, 1] * len(legal))]
        q_taken[i] = q[i, action[i]]
    return action, q_taken, v
