"""BatchedPolicy: central inference for many actors, in one forward pass for all groups that wait (SEED RL)."""

from __future__ import annotations

import math
import time
from typing import ClassVar

import numpy as np
import torch

from veldt.acting.policy import Explore, NetworkPolicy
from veldt.algorithms.base import Algorithm, Tensors
from veldt.counters import Counters
from veldt.learning.params import Params
from veldt.metrics import INFERENCE
from veldt.records.step import EnvSpec, is_observation
from veldt.records.tree import Array, Tree

MOST_ORDERS = 1000  # orders of groups in a batch whose indices are cached


class BatchedPolicy(NetworkPolicy):
    """Collects the records of groups of n environments each, and answers many groups with one forward pass.

    A batch is run once it has `batch` environments, or all groups of one actor wait, or the first group has waited for
    `wait` seconds: a slow group never delays the others. History and recurrent state of every environment are kept here,
    on the device of the network.
    """

    METRICS: ClassVar = INFERENCE

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        params: Params,
        counters: Counters,
        explore: Explore | Array,  # a schedule, or one amount for each environment of all groups
        seed: int,
        groups: int,
        n: int,
        batch: int,
        wait: float,
        together: int = 1,  # groups of one actor; their numbers are consecutive
        refresh: int = 1,  # batches between two pulls
        device: str = "cpu",
    ) -> None:
        super().__init__(algorithm, env, params, counters, explore, seed, refresh, device)
        self.groups, self.n, self.batch, self.wait, self.together = groups, n, batch, wait, together
        self.due = math.inf  # time.monotonic() at which the batch is run at the latest
        self.asked: list[int] = []  # groups that wait, in the order of their rows in the batch
        self._refused: set[int] = set()  # groups for which `recv` returned None in this batch
        self._asks = [0] * -(-groups // together)  # by actor: groups that wait
        self._batches = self._rows_run = 0  # since the last `metrics`
        self._slices: dict[int, Tensors] = {}  # by size of the batch
        self._lanes: dict[tuple[int, ...], tuple[Array, torch.Tensor]] = {}  # by groups
        history, state, total = algorithm.window.history, algorithm.state(env), groups * n
        self._seen = [name for name in env.step if is_observation(name) or (name == "reward" and state)]
        columns = {name: env.step[name] for name in [*self._seen, *(["first"] if state else [])]}
        if history > 1:
            columns |= {name: env.step[name] for name in ("first", "valid")}
            self._seen = list(columns)
        # Rows of the batch that is being collected, on the host; `_staged` are numpy views of them.
        self._stage = {name: torch.from_numpy(np.zeros((total, *c.shape), c.dtype)) for name, c in columns.items()}
        if device != "cpu":
            self._stage = {name: x.pin_memory() for name, x in self._stage.items()}
        self._staged = [(name, x.numpy()) for name, x in self._stage.items()]
        # By environment, on the device: rows [total, history, ...], the newest last; and the recurrent state.
        self._rows = {
            name: torch.zeros(total, history, *x.shape[1:], dtype=x.dtype, device=device)
            for name, x in (self._stage.items() if history > 1 else ())
        }
        self._states = {name: torch.zeros(total, *c.shape, device=device) for name, c in state.items()}

    def send(self, group: int, step: Tree) -> bool:
        n, at = self.n, self.n * len(self.asked)
        assert group not in self.asked and len(step["first"]) == n, (group, self.asked, len(step["first"]))
        for name, column in self._staged:
            column[at : at + n] = step[name]
        if not self.asked:
            self.due = time.monotonic() + self.wait
        self.asked.append(group)
        self._asks[group // self.together] += 1
        return True

    def recv(self, group: int) -> Tree | None:
        if group in self.asked and self._is_due(group):
            self._run()
        return super().recv(group)

    def reset(self, group: int) -> None:
        if group in self.asked:
            self._withdraw(group)
        self._ready.pop(group, None)
        for x in (*self._rows.values(), *self._states.values()):
            x[group * self.n : (group + 1) * self.n] = 0

    def _is_due(self, group: int) -> bool:
        """The first `recv` of a group is refused, so that other groups can join the batch."""
        if len(self.asked) == self.groups or self.n * len(self.asked) >= self.batch:
            return True
        if group not in self._refused:
            self._refused.add(group)
            return False
        return self.together in self._asks or time.monotonic() >= self.due

    def _withdraw(self, group: int) -> None:
        place, stop = self.asked.index(group), self.n * len(self.asked)
        for _, column in self._staged:
            column[self.n * place : stop - self.n] = column[self.n * (place + 1) : stop].copy()
        self.asked.remove(group)
        self._asks[group // self.together] -= 1
        if not self.asked:
            self.due = math.inf

    @torch.inference_mode()
    def _run(self) -> None:
        self.pull_if_due()
        asked, n, size = self.asked, self.n, self.n * len(self.asked)
        new = self._collected(size)
        lanes, index = self._lanes_of(tuple(asked))
        before = {name: self._state_before(x[index], new["first"]) for name, x in self._states.items()}
        out, after = self.act(self._append(new, index), before, size, lanes)
        for name, x in after.items():
            self._states[name][index] = x
        for place, group in enumerate(asked):
            self._ready[group] = {name: x[place * n : (place + 1) * n] for name, x in out.items()}
        self._batches += 1
        self._rows_run += size
        self.asked, self.due = [], math.inf
        self._asks = [0] * len(self._asks)
        self._refused.clear()

    def _collected(self, size: int) -> Tensors:
        """The rows of the batch, on the device."""
        if self.device != "cpu":
            return {name: x[:size].to(self.device, non_blocking=True) for name, x in self._stage.items()}
        if size not in self._slices:  # the same views every time
            self._slices[size] = {name: x[:size] for name, x in self._stage.items()}
        return self._slices[size]

    def _lanes_of(self, asked: tuple[int, ...]) -> tuple[Array, torch.Tensor]:
        """The environments of these groups, in their order."""
        found = self._lanes.get(asked)
        if found is None:
            lanes = (np.array(asked)[:, None] * self.n + np.arange(self.n)).ravel()
            if len(self._lanes) == MOST_ORDERS:
                self._lanes.clear()
            found = self._lanes[asked] = lanes, torch.from_numpy(lanes).to(self.device)
        return found

    def _state_before(self, state: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The recurrent state before this step: zero where an episode begins."""
        return state.masked_fill_(first.view(-1, *[1] * (state.ndim - 1)), 0)

    def _append(self, new: Tensors, index: torch.Tensor) -> Tensors:
        """Rows [size, history, ...] that end with the new ones."""
        if not self._rows:
            return {name: new[name][:, None] for name in self._seen}
        rows = {name: torch.cat((x[index, 1:], new[name][:, None]), 1) for name, x in self._rows.items()}
        for name, x in rows.items():
            self._rows[name][index] = x
        return rows

    def metrics(self) -> dict[str, float]:
        metrics = super().metrics()
        if self._batches:
            metrics["inference_batch"] = self._rows_run / self._batches
        self._batches = self._rows_run = 0
        return metrics
