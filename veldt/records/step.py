"""The step record, and the time alignment that everything else relies on.

A step is a flat dict of arrays. The same dict with more leading axes is an unroll `[T]` or a batch `[B, T]`.

    from the env      obs       what the agent sees at t (for pixels: one new frame, never the stack)
                      reward    received on ARRIVING at t (0 where first)
                      discount  0 where t is terminal, else 1        (truncation: last=True, discount=1)
                      first     t begins an episode
                      last      t ends one; the action at t is ignored
                      action_mask   which actions are legal at t, if the environment says so (`records.masks`)
                      valid     False: padding, or a row whose observation or reward was dropped; never trained on
    from the policy   action    taken AT t
                      ...       what the algorithm records beside it (q, log-prob, recurrent state)

So the transition t -> t+1 is (obs[t], action[t], reward[t+1], discount[t+1], obs[t+1]). An episode of k actions is k+1
records: its final observation is an ordinary record, and truncation needs no special case. This is what Gymnasium's
NEXT_STEP autoreset emits. Time is shifted once, in the loss, in words.

A Box observation is the column `obs`; each part of a Dict or Tuple is a column `obs/key` (`records.adapter`).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from veldt.records.adapter import Adapter
from veldt.records.masks import MASK
from veldt.records.tree import ArraySpec, Spec, spec

REWARD = spec((), np.float32)
FLAG = spec((), np.bool_)
SIGNALS: Spec = {"reward": REWARD, "discount": REWARD, "first": FLAG, "last": FLAG, "valid": FLAG}


@dataclass(frozen=True)
class EnvSpec:
    """What an algorithm may know of an environment."""

    name: str
    observation: Spec  # column -> one observation; {"obs": ...} or {"obs/key": ...}
    action: ArraySpec
    action_space: spaces.Space[Any]  # of one environment
    # Columns that hold choices, which a network sees one-hot -> how many choices each of their elements has.
    categories: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mask: int = 0  # elements of the column `action_mask`; 0: all actions are always legal
    # From the environment's own observations to columns, and from recorded actions to its own; None: nobody knows.
    adapter: Adapter | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, adapter: Adapter) -> "EnvSpec":
        columns = {key: column.spec for key, column in adapter.columns.items()}
        mask = adapter.masks.size if adapter.masks is not None else 0
        return cls(name, columns, adapter.action_column, adapter.action_space, adapter.categories, mask, adapter)

    @property
    def notices(self) -> list[str]:
        """What a user should know of how the environment is seen."""
        return [] if self.adapter is None else self.adapter.notices

    @property
    def seen(self) -> Spec:
        """The columns that decide an action: observations, and which actions are legal."""
        return self.observation | ({MASK: spec((self.mask,), np.bool_)} if self.mask else {})

    @property
    def step(self) -> Spec:
        """The columns that come from the environment."""
        return self.seen | SIGNALS

    @property
    def n_actions(self) -> int:
        assert isinstance(self.action_space, spaces.Discrete), self.action_space
        return int(self.action_space.n)


def is_observation(column: str) -> bool:
    return column == "obs" or column.startswith("obs/")
