"""Hogwild: many learners change one vector of weights without a lock (Niu et al. 2011; Mnih et al. 2016).

Weights, mean squares and the target network are arrays that all workers of a run map, and that outlive each of them. A
worker copies the weights, computes a gradient on its copy, and subtracts the step from the shared weights, element by
element. Two workers may change one element at once: then one of the two steps is lost there. Elements are aligned and are
stored whole, so each is always a value that some worker wrote; a copy that is taken meanwhile is a mixture of versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch

from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning import optim
from veldt.learning.learner import LearnerConfig, learning_rate
from veldt.learning.optim import Flat
from veldt.learning.params import Weights
from veldt.records.tree import Array


class SharedWeights:
    """The weights of a run whose workers all change them: each process builds its own around the same arrays.

    `pull` copies them, as `LatestParams` does. A version is the number of updates of all workers.
    """

    def __init__(
        self,
        vector: Array,  # [size]
        begun: Array,  # [1], 1 once the vector has its first weights
        counters: Counters,
        target: Array | None = None,  # [size]
        copied: Array | None = None,  # [1], how often the target network was due when it was copied last
        target_every: int = 0,  # env steps of all workers
    ) -> None:
        self.vector, self.counters, self.target_every = vector, counters, target_every
        self.target = target
        self._begun, self._copied = begun, copied

    def begin(self, first: Array) -> None:
        """All workers start with equal weights, so it does not matter who writes them, or how often. A worker that is
        restarted later changes nothing."""
        if not self._begun[0]:
            self.vector[:] = first
            if self.target is not None:
                self.target[:] = first
            self._begun[0] = 1

    def pull(self, have: int) -> Weights | None:
        version, env_steps = self.counters.get("learner_steps"), self.counters.get("env_steps")
        return None if version == have else Weights(version, self.vector.copy(), env_steps, time.monotonic())

    def copy_target_if_due(self) -> None:
        if self.target is None or self._copied is None:
            return
        due = self.counters.get("env_steps") // self.target_every
        if due > self._copied[0]:
            self._copied[0] = due
            self.target[:] = self.vector


class Hogwild:
    """The updater of one worker, and where its policy gets weights from: `pull` copies the shared weights into the
    learner's network. So a worker acts with the weights on which it computes the gradient.

    The learner calls it with its network.
    """

    owns_weights: ClassVar = False
    servers: ClassVar = None

    def __init__(
        self,
        shared: SharedWeights,
        square: Array | None,  # RMSProp's mean squares, of all workers or of this one; None: SGD
        config: LearnerConfig,
        counters: Counters,
        env_steps: int,  # of the whole run
    ) -> None:
        self.shared, self.square, self.config, self.counters = shared, square, config, counters
        self.lr = learning_rate(config, counters, env_steps)
        self.target = None if shared.target is None else torch.from_numpy(shared.target)
        self._updates = self._stale = 0  # since the last report; stale: of others, between copy and step
        self._at = 0  # updates of all workers when the copy was taken

    def __call__(self, flat: Flat) -> Hogwild:
        self.flat, self._copy = flat, flat.weights.numpy()
        self.shared.begin(self._copy)
        weights, config = torch.from_numpy(self.shared.vector)[: len(flat.gradient)], self.config
        if self.square is None:
            self._optimizer: optim.Optimizer = optim.SGD(weights, flat.gradient)
        else:
            self._optimizer = optim.RMSProp(weights, flat.gradient, config.eps, config.decay, centered=False)
            self._optimizer.averages["square"] = torch.from_numpy(self.square)
        return self

    def pull(self, have: int) -> Weights:
        """Always new: another worker may have changed the weights since."""
        self._at = self.counters.get("learner_steps")
        self._copy[:] = self.shared.vector
        if not np.isfinite(self._copy).all():
            raise Diverged(
                f"The workers diverged: the shared weights are not finite after {self._at} updates. Lower learner.lr; the "
                "last checkpoint is from before."
            )
        return Weights(self._at, self._copy)

    def update(self, groups: Iterable[str], norm: float) -> bool:
        if self.config.clip_norm and norm > self.config.clip_norm:
            self.flat.gradient.mul_(self.config.clip_norm / norm)
        self._updates += 1
        self._stale += max(0, self.counters.get("learner_steps") - self._at)
        self._optimizer.step_on_cpu(self.lr())
        self.shared.copy_target_if_due()
        return True

    def metrics(self) -> dict[str, float]:
        out = {"learning_rate": self.lr()}
        if self._updates:
            out["stale_updates"] = self._stale / self._updates
            self._updates = self._stale = 0
        return out

    def state(self) -> dict[str, Array]:
        return {}  # all of it is in arrays of the program

    def load_state(self, state: dict[str, Any]) -> None: ...
