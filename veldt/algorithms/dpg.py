"""Ape-X DPG (Horgan et al., Distributed prioritized experience replay, 2018): the deterministic policy gradient of DDPG
(Lillicrap et al. 2016) with n-step targets, from prioritized replay. Equation numbers are those of Lillicrap et al.

paper                                       here                                 equation
critic q(s, a; psi)                         `net.q`                              4, 5: y = r + gamma^n q(s', pi(s'); psi-)
actor pi(s; phi)                            `net.pi`                             6: ascends q(s, pi(s; phi); psi)
dq/da clipped to [-1, 1] by element         `clip_dqda`
target networks phi-, psi-                  `target`, copied by the learner
Gaussian noise on actions                   `explore`, in units of half the action's range
n-step returns, priority |y - q|            see `base.ActionValues`
critic 400 tanh 300, actor 300 tanh 200     `critic`, `actor`; ours normalise the first layer before its tanh (LayerNorm)
Adam, rate 1e-4, its epsilon not given      `learner.lr`, `learner.eps` 1e-5 (the usual default is 1e-8)
eviction by priority, exponent -0.4         oldest first
-                                           `invert_gradients` (Hausknecht and Stone 2016): on outside MuJoCo
-                                           `twin` critics (TD3, Fujimoto et al. 2018): on outside MuJoCo
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from veldt.algorithms.base import ActionValues, Batch, Loss, Tensors, require_bounded_box
from veldt.bounds import above, at_least
from veldt.nets.networks import NormedMLP, Vector
from veldt.nets.normalize import RunningNorm
from veldt.nets.torsos import Torso, rows_of
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.seeds import Random


class ActorCritic(nn.Module):
    """A policy `pi` and an action value `q`, separate networks. Their actions [B, A] are scaled to [-1, 1].

    Twin critics are two networks that learn the same; `q` is the first's value, `qs` are both. Images are seen through
    convolutions that the critics' loss trains, and the policy's does not.
    """

    center: Tensor  # [A], of the environment's range
    radius: Tensor  # [A], half of that range

    def __init__(
        self,
        vector: Vector,
        inputs: int,  # of the vector
        space: spaces.Box,
        actor: tuple[int, ...],
        critic: tuple[int, ...],
        normalize: bool = False,
        twin: bool = False,
        sight: Torso | None = None,
    ) -> None:
        super().__init__()
        self.vector = vector
        self.norm = RunningNorm(inputs) if normalize and inputs else nn.Identity()
        inputs += sight.features if sight is not None else 0
        low, high = (np.asarray(x, np.float64).ravel() for x in (space.low, space.high))
        self.shape = space.shape
        self.actor = NormedMLP(inputs, actor, len(low))
        critics: list[nn.Module] = [NormedMLP(inputs + len(low), critic, 1) for _ in range(1 + twin)]
        self.critics, seeing = len(critics), [] if sight is None else [sight]
        self.critic = nn.ModuleList([*critics, *seeing]) if twin or seeing else critics[0]
        self.register_buffer("center", torch.from_numpy(low / 2 + high / 2).float())
        self.register_buffer("radius", torch.from_numpy(high / 2 - low / 2).float())

    def see(self, obs: Any) -> Tensor:
        """An observation, or a dict of them, as one vector [B, D], normalised; features of images follow."""
        parts = [self.norm(self.vector(obs))] if self.vector.keys else []
        if isinstance(self.critic, nn.ModuleList):
            parts += [sight(obs) for sight in self.critic[self.critics :]]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def pi(self, x: Tensor) -> Tensor:
        return torch.tanh(self.actor(x))

    def q(self, x: Tensor, a: Tensor) -> Tensor:
        return self.qs(x, a, 1)[0]  # [B]

    def qs(self, x: Tensor, a: Tensor, most: int = 2) -> list[Tensor]:
        """The values of all critics, `most` at most."""
        both = torch.cat((x, a), 1)
        critics = self.critic[: self.critics] if isinstance(self.critic, nn.ModuleList) else [self.critic]
        return [critic(both).squeeze(1) for critic in critics[:most]]

    def unit(self, action: Tensor) -> Tensor:
        """The environment's actions [B, ...] scaled to [-1, 1]; 0 where the range is empty."""
        return (rows_of(action) - self.center) / torch.where(self.radius > 0, self.radius, 1.0)

    forward = pi


@dataclass(frozen=True)
class DPG(ActionValues):
    clip_dqda: Annotated[float, at_least(0)] = 1.0
    """Clip each element of the critic's gradient with respect to the action to [-x, x] (0: no clipping)."""
    invert_gradients: bool = False
    """Near a bound of the action, shrink only gradients that point towards it (Hausknecht and Stone 2016), so that the
    policy's tanh cannot stay saturated. Otherwise the gradient vanishes there in both directions."""
    twin: bool = False
    """Two critics; the smaller of their values is bootstrapped from (TD3), which keeps errors from growing."""
    critic: Annotated[tuple[int, ...], above(0)] = (400, 300)
    """Hidden layers of the critic; the first is layer-normalised, with tanh."""
    actor: Annotated[tuple[int, ...], above(0)] = (300, 200)
    """Hidden layers of the actor; the first is layer-normalised, with tanh."""

    exploration: ClassVar[str] = "sigma"

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        require_bounded_box(env, "dpg")

    def network(self, env: EnvSpec) -> nn.Module:
        assert isinstance(env.action_space, spaces.Box)
        vector, size, sight = self.senses(env)
        return ActorCritic(vector, size, env.action_space, self.actor, self.critic, self.normalize_obs, self.twin, sight)

    def act(self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: Random) -> tuple[Tree, Tensors]:
        """The policy's action plus Gaussian noise of standard deviation explore[i], clipped to the bounds."""
        assert isinstance(net, ActorCritic)
        x = net.see(self.observe(rows, self.history - 1))
        pi = net.pi(x)  # [n, A]
        noise = explore[:, None] * rng.standard_normal(tuple(pi.shape))
        a = (pi + torch.from_numpy(noise).to(pi)).clamp_(-1, 1)
        q, v = net.q(torch.cat((x, x)), torch.cat((a, pi))).cpu().numpy().reshape(2, -1)
        action = torch.addcmul(net.center, net.radius, a).cpu().numpy()
        return {"action": action.reshape(len(action), *net.shape), "q": q, "v": v}, state

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        assert isinstance(net, ActorCritic)
        x = net.see(self.observe(rows, self.history - 1))
        v = net.q(x, net.pi(x))
        return {"value": v, "q": v if action is None else net.q(x, net.unit(action))}

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        assert isinstance(net, ActorCritic) and isinstance(target, ActorCritic)
        s_tm1, a_tm1, r_t, discount_t, s_t = self.transitions(batch)
        x_tm1, x_t = net.see(s_tm1), target.see(s_t)
        q_tm1, *others = net.qs(x_tm1, net.unit(a_tm1))  # [B] each
        with torch.no_grad():
            v_t, *more = target.qs(x_t, target.pi(x_t))
            y = torch.addcmul(r_t, discount_t, torch.minimum(v_t, more[0]) if more else v_t)
            priorities = (y - q_tm1).abs_()
        squares = (y - q_tm1).square()
        for q in others:
            squares = squares + (y - q).square()
        critic = torch.dot(batch.weights, 0.5 * squares) / len(y)
        u = net.actor(x_tm1)  # [B, A], the policy before its tanh
        pi = torch.tanh(u)
        a = pi.detach().requires_grad_()
        q = net.q(x_tm1, a)
        (dqda,) = torch.autograd.grad(q.sum(), a)
        if self.clip_dqda:
            dqda = dqda.clamp(-self.clip_dqda, self.clip_dqda)
        if self.invert_gradients:
            actor = -(dqda * (1 - a.detach() * dqda.sign()) * u).sum(1).mean()
        else:
            actor = -(dqda * pi).sum(1).mean()  # its gradient is that of -q, with dq/da clipped
        metrics = {"loss": critic.detach(), "q_mean": q_tm1.detach(), "q_policy": q.detach(), "dqda": dqda.abs()}
        return Loss({"critic.": critic, "actor.": actor}, priorities, metrics)
