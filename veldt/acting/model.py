"""Model: the network that a policy acts with. It holds the newest weights, and knows how much to explore."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from veldt.acting.exploration import Explore
from veldt.algorithms.base import Algorithm, Tensors
from veldt.counters import Counters
from veldt.learning.params import Params, flatten
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree


class Model:
    """A network with the newest weights of `params`, an amount of exploration and a random generator.

    `explore` is a schedule, one amount for each environment, or one number for all; an evaluation gives a number.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        params: Params,
        counters: Counters,
        explore: Explore | Array | float,
        seed: int,
        refresh: int = 1,  # forward passes between two pulls
        device: str = "cpu",
    ) -> None:
        self.algorithm, self.params, self.counters = algorithm, params, counters
        self.explore, self.refresh = explore, refresh
        self.rng = np.random.default_rng(seed)
        # In eval mode: dropout is off, and running averages are the learner's.
        self.net = algorithm.network(env).to(device).requires_grad_(False).eval()
        self.vector = flatten(self.net)
        self.version = -1
        self.steps = 0  # forward passes since `restart`
        self._explored = np.zeros(0)  # how much each environment explored last
        self._records_version = "version" in algorithm.extras(env)

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

    def restart(self) -> None:
        """Pulls now, and counts forward passes from here: pulls stay in step with the blocks that follow a reset."""
        self.pull()
        self.steps = 0

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
