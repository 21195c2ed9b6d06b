"""Policies that run a network: NetworkPolicy has the newest weights and knows how much each environment explores.

LocalPolicy runs it in the actor's own process; batched.py for many actors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from veldt.acting.actor import Policy
from veldt.algorithms.base import Algorithm, Tensors
from veldt.counters import Counters
from veldt.learning.params import Params, flatten
from veldt.metrics import POLICY
from veldt.records.history import History
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree

# How much each environment explores: an epsilon, or the standard deviation of noise; 0 is greedy.
Explore = Callable[[int], float | Array]  # env steps of the run -> one amount for all environments, or one for each


@dataclass(frozen=True)
class LinearDecay:
    """Falls linearly from `start` to `end` over `steps` env steps of the run, and stays there."""

    start: float
    end: float
    steps: int

    def __call__(self, env_steps: int) -> float:
        fraction = min(1.0, env_steps / max(1, self.steps))
        return self.start + fraction * (self.end - self.start)


def ladder(epsilon: float, alpha: float, first: int, n: int, total: int) -> Array:
    """epsilon^(1 + alpha i / (total - 1)) of environments i = first ... first + n - 1 (Horgan et al. 2018).

    A single environment is in the middle of the ladder.
    """
    rung = np.arange(first, first + n) / (total - 1) if total > 1 else np.full(n, 0.5)
    return epsilon ** (1 + alpha * rung)


@dataclass(eq=False, repr=False)
class NetworkPolicy(Policy):
    """A network with the newest weights of `params`, an amount of exploration and a random generator. Records nothing."""

    algorithm: Algorithm
    env: EnvSpec
    params: Params
    counters: Counters
    explore: Explore | Array | float  # a schedule, one amount for each environment, or one for all: an evaluation
    seed: int
    refresh: int = 1  # forward passes between two pulls
    device: str = "cpu"

    due = math.inf

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        # In eval mode: dropout is off, and running averages are the learner's.
        self.net = self.algorithm.network(self.env).to(self.device).requires_grad_(False).eval()
        self.vector = flatten(self.net)
        self.version = -1
        self.steps = 0  # forward passes
        self._ready: dict[int, Tree] = {}  # answers by group
        self._explored = np.zeros(0)  # how much each environment explored last
        self._records_version = "version" in self.algorithm.extras(self.env)

    def recv(self, group: int) -> Tree | None:
        return self._ready.pop(group, None)

    def record(self) -> None: ...

    def flush(self, group: int) -> bool:
        return True

    def pull(self) -> None:
        """Takes the newest weights, unless it has them."""
        newer = self.params.pull(self.version)
        if newer is not None:
            self.version = newer.version
            vector = newer.vector if newer.vector.flags.writeable else newer.vector.copy()
            self.vector.copy_(torch.from_numpy(vector))

    def pull_if_due(self) -> None:
        """Counts one forward pass; pulls before every `refresh`-th."""
        if self.steps % self.refresh == 0:
            self.pull()
        self.steps += 1

    def act(self, rows: Tensors, before: Tensors, n: int, lanes: Array | None = None) -> tuple[Tree, Tensors]:
        """Actions of n environments and the columns recorded with them; and the next recurrent state.

        Rows are [n, history, ...]. `before` is the recurrent state [n, ...] before this step, which is recorded too.
        """
        out, after = self.algorithm.act(self.net, rows, before, self._amounts(n, lanes), self.rng)
        for name, tensor in before.items():
            out[name] = tensor.cpu().numpy()
        if self._records_version:
            out["version"] = np.full(n, self.version)
        return out, after

    def _amounts(self, n: int, lanes: Array | None) -> Array:
        """How much each of n environments explores now; `lanes` are their places in `explore`, if it holds more."""
        if callable(self.explore):
            self._explored = np.full(n, self.explore(self.counters.get("env_steps")))
        elif lanes is not None:
            self._explored = np.asarray(self.explore, np.float64)[lanes]
        elif len(self._explored) != n:
            self._explored = np.array(np.broadcast_to(self.explore, (n,)), np.float64)
        return self._explored

    def metrics(self) -> dict[str, float]:
        """The mean amount of exploration, and by how many updates the weights lag; nothing for an evaluation."""
        if not len(self._explored) or isinstance(self.explore, float | int):
            return {}
        lag = max(0, self.counters.get("learner_steps") - max(0, self.version))
        name = self.algorithm.exploration  # empty: the algorithm has no such amount
        return {"lag_updates": float(lag)} | ({name: float(self._explored.mean())} if name else {})

    def state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class LocalPolicy(NetworkPolicy):
    """Inference in this process: `send` computes the answer."""

    METRICS: ClassVar = POLICY

    def __post_init__(self) -> None:
        super().__post_init__()
        self._history: dict[int, History] = {}
        self._state: dict[int, Tensors] = {}

    @torch.inference_mode()
    def send(self, group: int, step: Tree) -> bool:
        self.pull_if_due()
        n = len(step["first"])
        if group not in self._history:
            state = self.algorithm.state(self.env)
            self._history[group] = History(self.env, self.algorithm.window.history, n, rewards=bool(state))
            self._state[group] = {name: torch.zeros(n, *c.shape, device=self.device) for name, c in state.items()}
        rows = self._history[group].append(step)
        tensors = {name: torch.from_numpy(x if x.flags.writeable else x.copy()) for name, x in rows.items()}
        if self.device != "cpu":
            tensors = {name: x.to(self.device) for name, x in tensors.items()}
        self._ready[group], self._state[group] = self.act(tensors, self._before(group, step), n)
        return True

    def reset(self, group: int) -> None:
        self.pull()
        self.steps = 0  # pulls stay in step with the blocks that follow a reset
        self._history.pop(group, None)
        self._state.pop(group, None)
        self._ready.pop(group, None)

    def _before(self, group: int, step: Tree) -> Tensors:
        """The recurrent state before this step: zero where an episode begins."""
        state = self._state[group]
        if state and step["first"].any():
            begins = torch.from_numpy(step["first"]).to(self.device)
            for tensor in state.values():
                tensor[begins] = 0
        return state
