"""Inference for many actors at once, where SEED RL has it: at the server, in one forward over all who ask."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from veldt.algorithms.base import Algorithm
from veldt.counters import Counters
from veldt.params import Params
from veldt.policy import Explore, LocalPolicy
from veldt.step import EnvSpec, is_observation
from veldt.tree import Array, Tree

LATE = 1.5  # of the time that a group took on average; who has not asked by then is not waited for
FADE = 0.1  # how fast that average follows


class BatchedPolicy(LocalPolicy):
    """Collects the questions of groups of n environments each, and answers many of them with one forward.

    A batch is run once `batch` environments have asked, or every group has that can be expected to within `wait` seconds of
    the first. How long a group takes to ask again is learned, so a slow environment is waited for by nobody. History and
    recurrent state are kept here, for each environment, on the device of the network.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        params: Params,
        counters: Counters,
        explore: Explore | Array,  # one an environment, of all groups
        seed: int,
        groups: int,
        n: int,
        batch: int,
        wait: float,
        refresh: int = 1,  # batches between two looks for newer weights
        device: str = "cpu",
    ) -> None:
        super().__init__(algorithm, env, params, counters, explore, seed, refresh, device)
        self.groups, self.n, self.batch, self.wait = groups, n, batch, wait
        self.asked: list[int] = []  # groups, in the order of their rows in the batch
        self.due = math.inf  # when the batch is run, at the latest
        self._refused: set[int] = set()  # groups that were told "not yet" in this batch
        self._answered_at = [-math.inf] * groups
        self._takes = [0.0] * groups  # seconds from an answer to the next question
        self._batches = self._rows_run = 0  # since they were last told
        history, state, total = algorithm.window.history, algorithm.state(env), groups * n
        self._seen = [name for name in env.step if is_observation(name) or (name == "reward" and state)]
        columns = {name: env.step[name] for name in [*self._seen, *(["first"] if state else [])]}
        if history > 1:
            columns |= {name: env.step[name] for name in ("first", "valid")}
            self._seen = list(columns)
        # Rows of the batch that is being collected, on the host, and the same memory as arrays.
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
        now = time.monotonic()
        if not self.asked:
            self.due = now + self.wait
        self.asked.append(group)
        took, usually = now - self._answered_at[group], self._takes[group]
        if took < math.inf:
            self._takes[group] += (took - usually) * (FADE if usually else 1.0)
        return True

    def recv(self, group: int) -> Tree | None:
        if group in self.asked and self._is_due(group):
            self._run()
        return self._ready.pop(group, None)

    def reset(self, group: int) -> None:
        if group in self.asked:
            self._withdraw(group)
        self._ready.pop(group, None)
        self._answered_at[group] = -math.inf
        for x in (*self._rows.values(), *self._states.values()):
            x[group * self.n : (group + 1) * self.n] = 0

    def _is_due(self, group: int) -> bool:
        """Whoever asks for the answer is told "not yet" once, so that the others can ask their questions."""
        if len(self.asked) == self.groups or self.n * len(self.asked) >= self.batch:
            return True
        if group not in self._refused:
            self._refused.add(group)
            return False
        now = time.monotonic()
        if now >= self.due:
            return True
        for other, (answered_at, takes) in enumerate(zip(self._answered_at, self._takes, strict=True)):
            if now < answered_at + LATE * takes <= self.due and other not in self.asked:
                return False
        return True

    def _withdraw(self, group: int) -> None:
        place, stop = self.asked.index(group), self.n * len(self.asked)
        for _, column in self._staged:
            column[self.n * place : stop - self.n] = column[self.n * (place + 1) : stop].copy()
        self.asked.remove(group)
        if not self.asked:
            self.due = math.inf

    def _run(self) -> None:
        if self.steps % self.refresh == 0:
            self.pull()
        self.steps += 1
        asked, n, size = self.asked, self.n, self.n * len(self.asked)
        new = {name: x[:size] for name, x in self._stage.items()}
        if self.device != "cpu":
            new = {name: x.to(self.device, non_blocking=True) for name, x in new.items()}
        lanes = (np.array(asked)[:, None] * n + np.arange(n)).ravel()
        index = torch.from_numpy(lanes).to(self.device) if self._rows or self._states else torch.Tensor()
        before = {name: self._state_before(x[index], new["first"]) for name, x in self._states.items()}
        out, after = self.algorithm.act(self.net, self._append(new, index), before, self._amounts(lanes), self.rng)
        for name, x in after.items():
            self._states[name][index] = x
        for name, x in before.items():
            out[name] = x.cpu().numpy()
        if self._tells_version:
            out["version"] = np.full(size, self.version)
        now = time.monotonic()
        for place, group in enumerate(asked):
            self._ready[group] = {name: x[place * n : (place + 1) * n] for name, x in out.items()}
            self._answered_at[group] = now
        self._batches += 1
        self._rows_run += size
        self.asked, self.due = [], math.inf
        self._refused.clear()

    def _state_before(self, state: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The recurrent state before this step: zero where an episode begins."""
        return state.masked_fill_(first.view(-1, *[1] * (state.ndim - 1)), 0)

    def _append(self, new: dict[str, torch.Tensor], index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows [size, history, ...] that end with the new ones."""
        if not self._rows:
            return {name: new[name][:, None] for name in self._seen}
        rows = {name: torch.cat((x[index, 1:], new[name][:, None]), 1) for name, x in self._rows.items()}
        for name, x in rows.items():
            self._rows[name][index] = x
        return rows

    def _amounts(self, lanes: Array) -> Array:
        """How much each of these environments explores now."""
        if callable(self.explore):
            self._explored = np.full(len(lanes), self.explore(self.counters.get("env_steps")))
        else:
            self._explored = np.asarray(self.explore, np.float64)[lanes]
        return self._explored

    def metrics(self) -> dict[str, float]:
        told = super().metrics()
        if self._batches:
            told["inference_batch"] = self._rows_run / self._batches
        self._batches = self._rows_run = 0
        return told
