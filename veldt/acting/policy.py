"""Policy: where inference happens. A policy takes step records and gives actions; a Recorder is one that wraps another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from veldt.algorithms.base import Algorithm
from veldt.counters import Counters
from veldt.learning.params import Params, flatten
from veldt.metrics import POLICY
from veldt.records.step import EnvSpec, is_observation
from veldt.records.tree import Array, Tree

Explore = Callable[[int], float | Array]  # env steps -> how much to explore, 0 is greedy; one number or one an environment


class Policy(Protocol):
    """policy.send(group, step)          # records [n] of the environments of one group
    actions = policy.recv(group)      # None: not yet, step another group meanwhile
    """

    def send(self, group: int, step: Tree) -> bool: ...  # False: not now, keep it and try again
    def recv(self, group: int) -> Tree | None: ...  # actions, and what the algorithm records beside them
    def flush(self, group: int) -> bool: ...  # True: all that was recorded is in the store
    def reset(self, group: int) -> None: ...  # a new incarnation: drop partial blocks, zero state


class LocalPolicy:
    """Inference in this process, with the newest weights that `params` has."""

    METRICS: ClassVar = POLICY

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        params: Params,
        counters: Counters,
        explore: Explore | Array | float,  # always that much, if it is a number (an evaluation's), or one an environment
        seed: int,
        refresh: int = 1,  # steps between two looks for newer weights
        device: str = "cpu",
    ) -> None:
        self.algorithm, self.env, self.params, self.counters = algorithm, env, params, counters
        self.explore, self.refresh, self.device = explore, refresh, device
        self.rng = np.random.default_rng(seed)
        # In eval mode: dropout is off, and running averages are the learner's.
        self.net = algorithm.network(env).to(device).requires_grad_(False).eval()
        self.vector = flatten(self.net)
        self.version = -1
        self.steps = 0
        self._explored = np.zeros(0)  # how much each environment explored last
        self._tells_version = "version" in algorithm.extras(env)
        self._history: dict[int, History] = {}
        self._state: dict[int, dict[str, torch.Tensor]] = {}
        self._ready: dict[int, Tree] = {}

    @torch.inference_mode()
    def send(self, group: int, step: Tree) -> bool:
        if self.steps % self.refresh == 0:
            self.pull()
        self.steps += 1
        if group not in self._history:
            n = len(step["first"])
            state = self.algorithm.state(self.env)
            self._history[group] = History(self.env, self.algorithm.window.history, n, rewards=bool(state))
            self._state[group] = {name: torch.zeros(n, *c.shape, device=self.device) for name, c in state.items()}
        rows = self._history[group].append(step)
        amount = self._amount(len(step["first"]))
        tensors = {name: torch.from_numpy(x if x.flags.writeable else x.copy()) for name, x in rows.items()}
        if self.device != "cpu":
            tensors = {name: x.to(self.device) for name, x in tensors.items()}
        before = self._before(group, step)
        out, self._state[group] = self.algorithm.act(self.net, tensors, before, amount, self.rng)
        for name, tensor in before.items():
            out[name] = tensor.cpu().numpy()
        if self._tells_version:
            out["version"] = np.full(len(amount), self.version)
        self._ready[group] = out
        return True

    def _amount(self, n: int) -> Array:
        """How much each of n environments explores now."""
        if callable(self.explore):
            self._explored = np.full(n, self.explore(self.counters.get("env_steps")))
        elif len(self._explored) != n:
            self._explored = np.array(np.broadcast_to(self.explore, (n,)), np.float64)
        return self._explored

    def recv(self, group: int) -> Tree | None:
        return self._ready.pop(group, None)

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self.pull()
        self.steps = 0  # from here on it is counted when to look for newer weights, as blocks are
        self._history.pop(group, None)
        self._state.pop(group, None)
        self._ready.pop(group, None)

    def pull(self) -> None:
        newer = self.params.pull(self.version)
        if newer is not None:
            self.version = newer.version
            vector = newer.vector if newer.vector.flags.writeable else newer.vector.copy()
            self.vector.copy_(torch.from_numpy(vector))

    def _before(self, group: int, step: Tree) -> dict[str, torch.Tensor]:
        """The recurrent state before this step: zero where an episode begins."""
        state = self._state[group]
        if state and step["first"].any():
            begins = torch.from_numpy(step["first"]).to(self.device)
            for tensor in state.values():
                tensor[begins] = 0
        return state

    def metrics(self) -> dict[str, float]:
        """Of a policy that explores: how much, and how many updates the learner is ahead of its weights."""
        if not len(self._explored) or isinstance(self.explore, float | int):
            return {}
        lag = max(0, self.counters.get("learner_steps") - max(0, self.version))
        name = getattr(self.algorithm, "exploration", "epsilon")  # empty: there is no such number
        return {"lag_updates": float(lag)} | ({name: float(self._explored.mean())} if name else {})

    def state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class History:
    """The last `history` records of n environments, as rows [n, history, ...] that a window function can read.

    Rewards are among them where the network sees them: if it is recurrent.
    """

    def __init__(self, env: EnvSpec, history: int, n: int, rewards: bool = False) -> None:
        self.history, self.at = history, history - 1
        others = ("reward",) if rewards else ()
        self.names = [*env.observation, *others]
        room = 1 if history == 1 else 8 * history
        columns = {name: c for name, c in env.step.items() if is_observation(name) or name in ("first", "valid", *others)}
        self.rows = {name: np.zeros((n, room, *c.shape), c.dtype) for name, c in columns.items()} if history > 1 else {}

    def append(self, step: Tree) -> Tree:
        if self.history == 1:  # where there is nothing to stack, nobody asks where episodes begin
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
