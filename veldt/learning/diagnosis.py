"""Diagnosis: what an algorithm measures on whole blocks, which windows do not show."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from veldt.algorithms.base import Algorithm, Batch
from veldt.storing.store import Store

EVERY = 500  # updates
BLOCKS, ROWS = 16, 2_000  # read at most


class Diagnosis:
    """It changes nothing: neither the weights nor the store."""

    def __init__(self, algorithm: Algorithm, net: nn.Module, store: Store, device: torch.device) -> None:
        self.net, self.store, self.device = net, store, device
        self._diagnose = algorithm.diagnose
        self.metrics: dict[str, float] = {}  # the latest

    def run(self) -> None:
        self.net.eval()
        self.metrics |= self._diagnose(self.net, self._blocks, self.store.schema)
        self.net.train()

    def _blocks(self) -> Batch | None:
        """Blocks [N, R, ...] from the oldest to the newest, and their window starts [N, S, ...]."""
        found = self.store.spread_blocks(max(1, min(BLOCKS, ROWS // self.store.schema.rows)))
        if found is None:  # the store is in another process and has not replied yet
            return None
        return Batch(found.rows, found.starts, np.ones(len(found.rows["first"]), np.float32), self.device)
