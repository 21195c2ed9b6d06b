"""Policy: takes step records and returns actions. LocalPolicy runs the network in the actor's own process."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from veldt.acting.exploration import Explore
from veldt.acting.model import Model
from veldt.acting.seam import Policy
from veldt.algorithms.base import Algorithm, Tensors
from veldt.counters import Counters
from veldt.learning.params import Params
from veldt.metrics import POLICY
from veldt.records.history import History
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree


class LocalPolicy(Policy):
    """Inference in this process, with the newest weights of `params`."""

    METRICS: ClassVar = POLICY

    due = math.inf  # `send` computes the answer

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        params: Params,
        counters: Counters,
        explore: Explore | Array | float,
        seed: int,
        refresh: int = 1,  # steps between two pulls
        device: str = "cpu",
    ) -> None:
        self.algorithm, self.env, self.device = algorithm, env, device
        self.model = Model(algorithm, env, params, counters, explore, seed, refresh, device)
        self._history: dict[int, History] = {}
        self._state: dict[int, Tensors] = {}
        self._ready: dict[int, Tree] = {}

    @torch.inference_mode()
    def send(self, group: int, step: Tree) -> bool:
        self.model.pull_if_due()
        n = len(step["first"])
        if group not in self._history:
            state = self.algorithm.state(self.env)
            self._history[group] = History(self.env, self.algorithm.window.history, n, rewards=bool(state))
            self._state[group] = {name: torch.zeros(n, *c.shape, device=self.device) for name, c in state.items()}
        rows = self._history[group].append(step)
        tensors = {name: torch.from_numpy(x if x.flags.writeable else x.copy()) for name, x in rows.items()}
        if self.device != "cpu":
            tensors = {name: x.to(self.device) for name, x in tensors.items()}
        self._ready[group], self._state[group] = self.model.act(tensors, self._before(group, step), n)
        return True

    def recv(self, group: int) -> Tree | None:
        return self._ready.pop(group, None)

    def record(self) -> None:
        """Records nothing."""

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self.model.restart()
        self._history.pop(group, None)
        self._state.pop(group, None)
        self._ready.pop(group, None)

    def pull(self) -> None:
        """Takes the newest weights now."""
        self.model.pull()

    def _before(self, group: int, step: Tree) -> Tensors:
        """The recurrent state before this step: zero where an episode begins."""
        state = self._state[group]
        if state and step["first"].any():
            begins = torch.from_numpy(step["first"]).to(self.device)
            for tensor in state.values():
                tensor[begins] = 0
        return state

    def metrics(self) -> dict[str, float]:
        return self.model.metrics()

    def state(self) -> dict[str, Any]:
        return self.model.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state(state)
