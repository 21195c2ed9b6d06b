"""DQN (Mnih et al., Human-level control through deep reinforcement learning, Nature 2015), and what was added to it.

paper                                       here                                 equation
target y, network copy theta-               `target`, copied by the learner      y = r + gamma max_a' Q(s', a'; theta-)
error clipped to [-1, 1]                    `huber` (its gradient is the clipped error)
double DQN (van Hasselt et al. 2016)        `double`                             a' = argmax_a Q(s', a; theta)
dueling (Wang et al. 2016)                  `dueling`                            Q = V + A - mean A
n-step returns (Rainbow, Ape-X)             `n`                                  see `returns.n_step`
prioritized replay (Schaul et al. 2016)     the store's selector; priority |y - Q|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from veldt import callables
from veldt.algorithms.base import Batch, Loss, Tensors
from veldt.block import Schema, Window, observation
from veldt.errors import UserError
from veldt.nets import QHead, QNetwork, features_of, torso_for
from veldt.returns import NStep, n_step
from veldt.step import EnvSpec
from veldt.tree import Array, Spec, Tree, spec


class Transitions(NamedTuple):
    """What a one-step loss reads; observations are tensors, or dicts of them for a Dict observation."""

    s_tm1: Any  # [B, ...]
    a_tm1: Tensor  # [B]
    r_t: Tensor  # [B], the sum of m discounted rewards
    discount_t: Tensor  # [B]
    s_t: Any  # [B, ...]


@dataclass(frozen=True)
class DQN:
    gamma: float = 0.99
    """Discount of a reward one step later."""
    n: int = 1
    """Steps of reward before the bootstrap."""
    double: bool = False
    """Choose the bootstrap action with the online network."""
    dueling: bool = False
    """Split the last layer into value and advantages."""
    huber: bool = True
    """Huber loss, that is, errors clipped to [-1, 1]; otherwise squared."""
    history: int = 1
    """Observations stacked for the network, the current one included."""
    clip_reward: float = 0.0
    """Rewards are clipped to [-x, x] in the loss (0: not clipped); reported returns are raw."""
    hidden: tuple[int, ...] = (128, 128)
    """Hidden layers for vector observations."""
    convnet: Literal["auto", "nature", "minatar", "impala", "mlp"] = "auto"
    """Network for images; auto: nature for uint8 of at least 36 x 36, minatar for small ones with channels, else mlp."""
    network_from: str = ""
    """`module:callable` that makes the network from an EnvSpec, instead of the built-in one."""
    stacked: tuple[str, ...] = ()
    """Keys of a Dict observation that history stacks (none given: all)."""

    @property
    def window(self) -> Window:
        return Window(history=self.history, lookahead=self.n)

    def check(self, env: EnvSpec) -> None:
        if not isinstance(env.action_space, spaces.Discrete):
            raise UserError(f"dqn needs a Discrete action space, but {env.name} has {env.action_space}.")
        if self.n < 1 or self.history < 1 or not 0 <= self.gamma <= 1:
            raise UserError(f"dqn needs n >= 1, history >= 1 and 0 <= gamma <= 1, not {self}.")
        if self.clip_reward < 0 or not all(isinstance(size, int) and size > 0 for size in self.hidden):
            raise UserError("dqn needs clip_reward >= 0 and hidden layers of at least one unit.")
        for key in self.stacked:
            if f"obs/{key}" not in env.observation:
                known = ", ".join(name.removeprefix("obs/") for name in env.observation)
                raise UserError(f"{env.name} has no observation {key!r} to stack, only {known}.")

    def extras(self, env: EnvSpec) -> Spec:
        return {"q": spec((), np.float32), "v": spec((), np.float32)}  # of the action taken; the largest

    def state(self, env: EnvSpec) -> Spec:
        return {}

    def network(self, env: EnvSpec) -> nn.Module:
        if not self.network_from:
            torso = torso_for(env, self.history, self.stacked, self.hidden, self.convnet)
            return QNetwork(torso, QHead(features_of(torso), env.n_actions, self.dueling))
        make = callables.find(self.network_from)
        if make is None:
            raise UserError(f"There is no {self.network_from!r} to make a network with.")
        blank = {name: np.zeros((2, self.history, *c.shape), c.dtype) for name, c in env.step.items()}
        try:
            net: nn.Module = make(env)
            with torch.no_grad():
                q = net(self.observe({name: torch.from_numpy(x) for name, x in blank.items()}, self.history - 1))
            single = all(parameter.dtype == torch.float32 for parameter in net.parameters())
        except Exception as error:
            raise UserError(
                f"The network of {self.network_from} cannot be made or run: {type(error).__name__}: {error}"
            ) from error
        if not single:
            raise UserError(f"The network of {self.network_from} must have float32 parameters.")
        if tuple(q.shape) != (2, env.n_actions):
            raise UserError(
                f"The network of {self.network_from} must map [B, ...] observations to [B, {env.n_actions}] action values; "
                f"for B = 2 it gave {list(q.shape)}."
            )
        return net

    def observe(self, rows: Tensors | Batch, at: int) -> Tensor | dict[str, Tensor]:
        """What the network sees at row `at` of rows [B, T, ...]. Those of a batch are blanked by the store."""
        blanked = isinstance(rows, Batch) and self.window.slices
        out: Tensor | dict[str, Tensor] = observation(rows, at, self.history, self.stacked, blanked)
        if self.network_from:  # ours take slices as they are; others may want to view them in another shape
            return {key: x.contiguous() for key, x in out.items()} if isinstance(out, dict) else out.contiguous()
        return out

    def act(
        self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: np.random.Generator
    ) -> tuple[Tree, Tensors]:
        """Epsilon-greedy: with probability explore[i] environment i takes a uniformly random action."""
        q = np.ascontiguousarray(net(self.observe(rows, self.history - 1)).cpu().numpy())  # [n, actions]
        action, q_taken, v = _epsilon_greedy(
            q, rng.random((2, len(q))), explore if explore.flags.writeable else explore.copy()
        )
        return {"action": action, "q": q_taken, "v": v}, state

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        """|y - Q| from the values recorded while acting; the bootstrap is their max_a Q."""
        step = self._returns(columns["reward"], columns["discount"], columns["last"])
        rows = np.arange(step.m.shape[-1])
        v_t = np.take_along_axis(columns["v"], rows + step.m, axis=-1)
        with np.errstate(all="ignore"):
            td = step.reward + step.discount * v_t - columns["q"][..., : len(rows)]
        before = schema.window.before
        return np.asarray(np.abs(td[..., before : before + schema.fresh]))

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        s_tm1, a_tm1, r_t, discount_t, s_t = self.transitions(batch)
        q_tm1 = net(s_tm1).gather(1, a_tm1[:, None]).squeeze(1)  # [B]
        with torch.no_grad():
            q_t = target(s_t)
            v_t = q_t.gather(1, net(s_t).argmax(1, keepdim=True)).squeeze(1) if self.double else q_t.amax(1)
            y = torch.addcmul(r_t, discount_t, v_t)
            priorities = (y - q_tm1).abs_()
        error = F.smooth_l1_loss(q_tm1, y, reduction="none") if self.huber else 0.5 * (y - q_tm1).square()
        loss = torch.dot(batch.weights, error) / len(error)
        return Loss({"": loss}, priorities, {"loss": loss.detach(), "q_mean": q_tm1.detach()})

    def transitions(self, batch: Batch) -> Transitions:
        """Row `at` is s_tm1, where the action was taken; reward and discount of arriving at later rows make the return, and
        row at + m is s_t, where the return is bootstrapped."""
        at = self.history - 1
        step = self._returns(*(batch.host[name][:, at:] for name in ("reward", "discount", "last")))
        r_t, discount_t = (torch.from_numpy(x[:, 0]).to(batch.device) for x in (step.reward, step.discount))
        return Transitions(
            self.observe(batch, at), batch["action"][:, at], r_t, discount_t, self._bootstrap(batch, at, step)
        )

    def _returns(self, reward: Any, discount: Any, last: Any) -> NStep:
        if self.clip_reward:
            reward = reward.clip(-self.clip_reward, self.clip_reward)
        return n_step(reward, discount, last, self.n, self.gamma)

    def _bootstrap(self, batch: Batch, at: int, step: NStep) -> Tensor | dict[str, Tensor]:
        """The observations at row at + m. Where m < n and the episode terminated, any will do: the discount is 0."""
        s_t = self.observe(batch, at + self.n)
        if self.n == 1:
            return s_t
        truncated = (step.m < self.n) & (step.discount > 0)  # [B, 1]
        if truncated.any():  # rare, so only these are stacked again
            for k in range(1, self.n):
                short = np.flatnonzero(truncated & (step.m == k))
                s_t = _put(s_t, torch.from_numpy(short).to(batch.device), self.observe(batch.select(short), at + k))
        return s_t


@numba.njit("Tuple((i8[::1], f4[::1], f4[::1]))(f4[:,::1], f8[:,::1], f8[::1])", cache=True)
def _epsilon_greedy(q: Array, random: Array, explore: Array) -> Any:
    """The actions [n], their values, and the largest value: from q [n, actions] and two random numbers each."""
    n, actions = q.shape
    action, q_taken, v = np.empty(n, np.int64), np.empty(n, np.float32), np.empty(n, np.float32)
    for i in range(n):
        best = 0
        for a in range(1, actions):
            if q[i, a] > q[i, best]:
                best = a
        v[i] = q[i, best]
        action[i] = np.int64(random[1, i] * actions) if random[0, i] < explore[i] else best
        q_taken[i] = q[i, action[i]]
    return action, q_taken, v


def _put(whole: Tensor | dict[str, Tensor], index: Tensor, part: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    if isinstance(whole, dict):
        assert isinstance(part, dict)
        return {name: x.index_copy(0, index, part[name]) for name, x in whole.items()}
    assert isinstance(part, Tensor)
    return whole.index_copy(0, index, part)
