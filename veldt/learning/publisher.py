"""Publisher: hands a learner's weights to the params service."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from veldt.errors import Diverged
from veldt.learning.params import Params, Weights
from veldt.records.tree import Array


class Publisher:
    """Publishes finite weights only. With `lag` > 0, to study lag, those published are at least that many updates old."""

    def __init__(self, params: Params, vector: Tensor, lag: int = 0) -> None:
        self.params, self.vector, self.lag = params, vector, lag
        self.published = 0  # publications
        self._delayed: deque[Weights] = deque()
        # A GPU copies to pinned memory, which is reused.
        self._host = torch.empty(vector.shape, pin_memory=True) if vector.is_cuda else None

    def publish(self, version: int) -> None:
        """`version` is the number of updates of these weights."""
        weights = Weights(version, self._finite(version))
        if self.lag:
            self._delayed.append(weights._replace(vector=weights.vector.copy()))
            while len(self._delayed) > 1 and self._delayed[1].version <= version - self.lag:
                self._delayed.popleft()
            weights = self._delayed[0]
        self.params.publish(weights)
        self.published += 1

    def publish_newest(self, version: int) -> None:
        """Without the lag, which starts again from these weights."""
        self._delayed.clear()
        self.publish(version)

    def _finite(self, version: int) -> Array:
        vector: Array = (self.vector if self._host is None else self._host.copy_(self.vector)).numpy()
        if not np.isfinite(vector).all():
            raise Diverged(
                f"The learner diverged: its weights are not finite after {version} updates. Lower learner.lr; the last "
                "checkpoint is from before."
            )
        return vector
