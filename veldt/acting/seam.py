"""The seam between acting and inference. Needs no torch: an actor under central inference has none."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from veldt.ports import Examples, call, stream
from veldt.records.step import EnvSpec
from veldt.records.tree import Tree


class Policy(Protocol):
    """Where inference happens: takes the step records of groups of environments and returns actions.

    policy.send(group, step)          # records [n] of the environments of one group
    actions = policy.recv(group)      # None: not yet, step another group meanwhile

    Where a runtime serves a policy to other processes, it sends the replies first and calls `record` after that.
    """

    @call(reply="recv", after="record", due="due", only=("action",))
    def send(self, group: int, step: Tree) -> bool: ...  # False: not now, keep it and try again

    def recv(self, group: int) -> Tree | None: ...  # `action` [n], and other columns for a recorder

    @call
    def flush(self, group: int) -> bool: ...  # True: all that was recorded is in the store

    @stream(cancels="send")
    def reset(self, group: int) -> None: ...  # the environments restart: drop partial blocks, zero recurrent state

    def record(self) -> None: ...  # does the work that replies need not wait for

    @property
    def due(self) -> float: ...  # when a reply will be ready, in seconds of time.monotonic; inf: nothing is waiting


def send_examples(env: EnvSpec, n: int) -> dict[str, Examples]:
    """For groups of n environments."""
    step = {name: np.zeros((n, *c.shape), c.dtype) for name, c in env.step.items()}
    action = np.zeros((n, *env.action.shape), env.action.dtype)
    return {"send": Examples([(0, step)], [{"action": action}])}
