"""The two target networks of QT-Opt: an average of the weights, and the same average some updates ago.

learner -- weights after each update --> Targets -- both vectors, the newest --> Bellman updaters
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from veldt.bounds import above, at_least, between
from veldt.counters import Counters
from veldt.learning.learner import LearnerConfig, owned
from veldt.learning.optim import Flat, Owned
from veldt.learning.params import Weights
from veldt.metrics import TARGETS
from veldt.ports import latest
from veldt.records.tree import Array

PER_LAG = 8  # copies of the average that are made in one lag
COPIES = PER_LAG + 2


@dataclass(frozen=True)
class TargetsConfig:
    average: Annotated[float, between(0, 1)] = 0.9999
    """Decay of the average of the weights that makes labels: how much of it stays at each update."""
    lag: Annotated[int, at_least(0)] = 6_000
    """Updates by which the second target network is behind that average, or up to an eighth more."""
    publish_every: Annotated[int, above(0)] = 10
    """Updates between two publications of both target networks."""


class Targets:
    """Follows the weights of the learner in its process: called with a `Flat` it makes the learner's updater.

    average  <- d average + (1 - d) weights, at each update
    lagged   the newest copy of the average that is `lag` updates old or older; before there is one, the oldest copy
    """

    METRICS: ClassVar = TARGETS

    def __init__(self, config: TargetsConfig, learner: LearnerConfig, counters: Counters, env_steps: int) -> None:
        self.config, self.counters = config, counters
        self._owned: Callable[[Flat], Owned] = lambda flat: owned(flat, learner, counters, env_steps)
        self.every = max(1, -(-config.lag // PER_LAG))  # updates between two copies
        self.version = -1  # updates of the newest weights in the average; -1: there are none
        self.average = self.copies = torch.zeros(0)
        self.numbers = [-1] * COPIES  # the version of each copy; -1: it is empty

    def __call__(self, flat: Flat) -> "Averaged":
        self.average = flat.weights.clone()
        self.copies = torch.zeros(COPIES, len(flat.weights), device=flat.weights.device)
        self.version = self.counters.get("learner_steps")
        self._copy()
        return Averaged(self._owned(flat), self)

    def follow(self, weights: Tensor) -> None:
        """After an update."""
        before, self.version = self.version, self.counters.get("learner_steps") + 1  # counted after it
        self.average.lerp_(weights, 1 - self.config.average)
        if self.version // self.every != before // self.every:
            self._copy()

    def _copy(self) -> None:
        slot = self._slot(self.version)
        self.copies[slot], self.numbers[slot] = self.average, self.version

    def _slot(self, version: int) -> int:
        return version // self.every % COPIES

    @property
    def lagged(self) -> Tensor:
        if not self.config.lag:
            return self.average
        known = sorted((number, slot) for slot, number in enumerate(self.numbers) if 0 <= number <= self.version)
        old = [slot for number, slot in known if number <= self.version - self.config.lag]
        return self.copies[old[-1] if old else known[0][1]]

    @latest
    def weights(self, have: int = -1) -> Weights | None:
        """Both vectors, one after the other."""
        if self.version < 0 or (have >= 0 and 0 <= self.version - have < self.config.publish_every):
            return None
        both: Array = torch.cat((self.average, self.lagged)).cpu().numpy()
        return Weights(self.version, both, self.counters.get("env_steps"), time.monotonic())

    def metrics(self) -> dict[str, float]:
        return {"target_distance": float(torch.linalg.vector_norm(self.average - self.lagged))} if self.version >= 0 else {}

    # In a checkpoint a copy has an age: a member of a population that gets the averages of another has updates of its own.

    def state(self) -> dict[str, Any]:
        ages = [self.version - number if 0 <= number <= self.version else -1 for number in self.numbers]
        return {
            "target/average": self.average.cpu().numpy(),
            "target/copies": self.copies.cpu().numpy(),
            "target/ages": np.array(ages, np.float64),  # updates; -1: it is empty
            "version": self.version,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.version, self.numbers = int(state["version"]), [-1] * COPIES
        self.average.copy_(torch.from_numpy(state["target/average"]))
        copies, ages = torch.from_numpy(state["target/copies"]), state["target/ages"].astype(np.int64)
        for saved in np.argsort(-ages, kind="stable").tolist():  # the oldest first
            if ages[saved] >= 0:
                number = max(0, self.version - int(ages[saved]))
                slot = self._slot(number)
                self.copies[slot], self.numbers[slot] = copies[saved], number


class Averaged:
    """An updater: the optimizer in this process, and the averages that follow it."""

    owns_weights: ClassVar = True
    servers: ClassVar = None
    target: ClassVar = None

    def __init__(self, owned: Owned, targets: Targets) -> None:
        self.owned, self.targets = owned, targets
        self.metrics, self.state, self.load_state = owned.metrics, owned.state, owned.load_state

    def update(self, groups: Iterable[str], norm: float) -> bool:
        self.owned.update(groups, norm)
        self.targets.follow(self.owned.flat.weights)
        return True
