"""What a network sees: observations, stacked over the last rows of their episode where the algorithm has a history."""

from collections.abc import Callable
from typing import Any

import numpy as np

from veldt.errors import UserError
from veldt.records.step import EnvSpec, is_observation
from veldt.records.tree import Tree, namespace, zeros


class History:
    """The last `history` records of n environments, as rows [n, history, ...] that `observation` can read.

    `rewards`: with the rewards, which a recurrent network sees too.
    """

    def __init__(self, env: EnvSpec, history: int, n: int, rewards: bool = False) -> None:
        self.history, self.at = history, history - 1
        others = ("reward",) if rewards else ()
        self.names = [*env.seen, *others]
        room = 1 if history == 1 else 8 * history
        columns = {name: env.step[name] for name in (*env.seen, "first", "valid", *others)}
        self.rows = zeros(columns, n, room) if history > 1 else {}

    def append(self, step: Tree) -> Tree:
        if self.history == 1:  # nothing is stacked, so no flags are needed
            return {name: step[name][:, None] for name in self.names}
        keep = self.history - 1
        if self.at == self.rows["first"].shape[1]:  # full: the newest rows go back to the start
            for row in self.rows.values():
                row[:, :keep] = row[:, -keep:]
            self.at = keep
        for name, row in self.rows.items():
            row[:, self.at] = step[name]
        self.at += 1
        return {name: row[:, self.at - self.history : self.at] for name, row in self.rows.items()}


def check_stacked(env: EnvSpec, stacked: tuple[str, ...]) -> None:
    for key in stacked:
        if f"obs/{key}" not in env.observation:
            known = ", ".join(name.removeprefix("obs/") for name in env.observation)
            raise UserError(f"{env.name} has no observation {key!r} to stack, only {known}.")


def stack_history(x: Any, first: Any, valid: Any, at: int, history: int) -> Any:
    """The rows at-history+1 ... at of x [B, T, ...] as [B, history, ...], numpy or torch.

    What lies before the episode's first row, or beyond a row that is not valid, reads as zero.
    """
    x = x[:, at - history + 1 : at + 1]
    if history == 1:
        return x
    same = _same_episode(first[:, at - history + 1 : at + 1], valid[:, at - history + 1 : at + 1], history)[:, 0]
    if isinstance(x, np.ndarray) and same.all():
        return x
    return x * same.reshape(*same.shape, *[1] * (x.ndim - 2))


def stack_windows(x: Any, first: Any, valid: Any, history: int) -> Any:
    """`stack_history` of every row from history - 1 on: torch [B, T, ...] -> [B, T - history + 1, history, ...]."""
    same = _same_episode(first, valid, history)
    return x.unfold(1, history, 1).movedim(-1, 2) * same.reshape(*same.shape, *[1] * (x.ndim - 2))


def _same_episode(first: Any, valid: Any, history: int) -> Any:
    """[B, T] -> [B, T - history + 1, history]: which rows of a stack are of the episode of its last one."""
    rows = first.shape[1] - history + 1
    same = [namespace(first).ones_like(first[:, :rows])]
    for j in range(history - 2, -1, -1):
        same.append(same[-1] & ~first[:, j + 1 : j + 1 + rows] & valid[:, j : j + rows])
    return namespace(first).stack(same[::-1], -1)


def observation(rows: Any, at: int, history: int, stacked: tuple[str, ...] = (), blanked: bool = False) -> Any:
    """What a network sees at row `at` of rows [B, T, ...]: a tensor, or a dict of them for a Dict observation.

    Shapes are [B, *space.shape], and [B, history, *space.shape] for stacked keys when history > 1. `stacked` names the
    keys of a Dict observation that history stacks; none given means all. `blanked`: what lies before the episode is zero
    already (`Window.slices`), and a stack is a view.
    """

    def see(name: str) -> Any:
        if not _is_stacked(name, history, stacked):
            return rows[name][:, at]
        if blanked:
            return rows[name][:, at - history + 1 : at + 1]
        return stack_history(rows[name], rows["first"], rows["valid"], at, history)

    return _by_key(rows, see)


def observation_at(rows: Any, at: Any, history: int, stacked: tuple[str, ...] = ()) -> Any:
    """`observation` at another row of each window, where history is blanked: `at` and the rows are torch tensors, [B]."""
    xp = namespace(at)

    def see(name: str) -> Any:
        x = rows[name]
        stack = history if _is_stacked(name, history, stacked) else 1
        steps, windows = (xp.arange(n, device=at.device) for n in (stack, len(x)))
        index = (windows * x.shape[1] + at - stack + 1)[:, None] + steps  # [B, stack], into the flattened rows
        found = x.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)
        return found if stack > 1 else found[:, 0]

    return _by_key(rows, see)


def observations(rows: Any, history: int, stacked: tuple[str, ...] = ()) -> Any:
    """What a network sees at every row from history - 1 on, as in `observation`: [B, T - history + 1, ...]."""

    def see(name: str) -> Any:
        if _is_stacked(name, history, stacked):
            return stack_windows(rows[name], rows["first"], rows["valid"], history)
        return rows[name][:, history - 1 :]

    return _by_key(rows, see)


def _is_stacked(name: str, history: int, stacked: tuple[str, ...]) -> bool:
    return history > 1 and (not stacked or name.removeprefix("obs/") in stacked)


def _by_key(rows: Any, see: Callable[[str], Any]) -> Any:
    if "obs" in rows:
        return see("obs")
    return {name.removeprefix("obs/"): see(name) for name in rows if is_observation(name)}
