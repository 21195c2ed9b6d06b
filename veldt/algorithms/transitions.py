"""What algorithms with a bootstrapped action value share (DQN, DPG, R2D2): n-step transitions from sampled windows, and
initial priorities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veldt import bounds
from veldt.algorithms.base import Batch, Defaults, Tensors
from veldt.bounds import above, at_least, between
from veldt.learning.returns import NStep, n_step
from veldt.records.block import Schema, Window
from veldt.records.history import check_stacked, observation
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, spec


class Transitions(NamedTuple):
    """Input of a one-step loss; observations are tensors, or dicts of them for a Dict observation."""

    s_tm1: Any  # [B, ...]
    a_tm1: Tensor  # [B, ...]
    r_t: Tensor  # [B], the sum of m discounted rewards
    discount_t: Tensor  # [B]
    s_t: Any  # [B, ...]


@dataclass(frozen=True)
class ActionValues(Defaults):
    """While acting it records `q`, the value of the action taken, and `v`, the value that a bootstrap would use."""

    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of a reward one step later."""
    n: Annotated[int, above(0)] = 1
    """Steps of reward before the bootstrap."""
    history: Annotated[int, above(0)] = 1
    """Observations stacked for the network, the current one included."""
    clip_reward: Annotated[float, at_least(0)] = 0.0
    """Rewards are clipped to [-x, x] in the loss (0: not clipped); reported returns are raw."""
    stacked: tuple[str, ...] = ()
    """Keys of a Dict observation that history stacks (none given: all)."""

    @property
    def window(self) -> Window:
        return Window(history=self.history, lookahead=self.n)

    def check(self, env: EnvSpec) -> None:
        bounds.check(self, "algorithm.")
        check_stacked(env, self.stacked)

    def extras(self, env: EnvSpec) -> Spec:
        return {"q": spec((), np.float32), "v": spec((), np.float32)}

    def observe(self, rows: Tensors | Batch, at: int) -> Tensor | dict[str, Tensor]:
        """The network's input at row `at` of rows [B, T, ...]. In a batch the store has already blanked history of
        earlier episodes."""
        blanked = isinstance(rows, Batch) and self.window.slices
        out: Tensor | dict[str, Tensor] = observation(rows, at, self.history, self.stacked, blanked)
        return out

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        """|y - q| from the values recorded while acting."""
        step = self._returns(columns["reward"], columns["discount"], columns["last"])
        rows = np.arange(step.m.shape[-1])
        v_t = np.take_along_axis(columns["v"], rows + step.m, axis=-1)
        with np.errstate(all="ignore"):
            td = step.reward + step.discount * v_t - columns["q"][..., : len(rows)]
        before = schema.window.before
        return np.asarray(np.abs(td[..., before : before + schema.fresh]))

    def transitions(self, batch: Batch) -> Transitions:
        """Row `at` is s_tm1, where the action was taken. The rewards and discounts of later rows make the return, which is
        bootstrapped at row at + m, s_t."""
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
        """The observations at row at + m. Where the episode terminated the discount is 0, so any row will do."""
        s_t = self.observe(batch, at + self.n)
        if self.n == 1:
            return s_t
        truncated = (step.m < self.n) & (step.discount > 0)  # [B, 1]
        if truncated.any():  # rare: only these windows are stacked again
            for k in range(1, self.n):
                short = np.flatnonzero(truncated & (step.m == k))
                s_t = _put(s_t, torch.from_numpy(short).to(batch.device), self.observe(batch.select(short), at + k))
        return s_t


def _put(whole: Tensor | dict[str, Tensor], index: Tensor, part: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    if isinstance(whole, dict):
        assert isinstance(part, dict)
        return {name: x.index_copy(0, index, part[name]) for name, x in whole.items()}
    assert isinstance(part, Tensor)
    return whole.index_copy(0, index, part)
