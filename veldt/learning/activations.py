"""The memory of activations: what a loss makes in its forward pass, and keeps for its backward pass."""

import contextlib
import copy
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veldt.algorithms.base import Algorithm, Batch
from veldt.records.block import Schema
from veldt.records.tree import zeros

PROBE = 100_000  # bytes of windows that show what a loss needs; a single window may have more


def activation_bytes(algorithm: Algorithm, net: nn.Module, schema: Schema, batch: int) -> int:
    """About how many bytes the loss of a batch takes in addition to its windows and the network: the most that its tensors
    have at once in the forward pass, or what is left of them for the backward pass and a gradient as large as the largest.

    The loss runs on a few blank windows, since all this grows with their number. 0: it fails, and the learner will say how.
    """
    window = schema.window.rows * schema.layout.nbytes + schema.start_layout.nbytes
    n = max(1, min(batch, PROBE // window))
    target, tensors = copy.deepcopy(net).requires_grad_(False).eval(), Tensors()
    with contextlib.suppress(Exception), tensors:
        loss = algorithm.loss(net, target, _blank(schema, n))
        found = max(tensors.most, tensors.now + tensors.largest)
        del loss  # until here it keeps what it needs
        return found * batch // n
    return 0


class Tensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is on, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.largest = 0
        self._live: set[int] = set()  # addresses of storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._live | inputs:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._live.add(address)
        weakref.finalize(storage, self._free, address, size)
        self.now += size
        self.most, self.largest = max(self.most, self.now), max(self.largest, size)

    def _free(self, address: int, size: int) -> None:
        self._live.remove(address)
        self.now -= size


def _blank(schema: Schema, n: int) -> Batch:
    """Windows of zeros in the middle of an episode."""
    rows, starts = zeros(schema.layout.spec, n, schema.window.rows), zeros(schema.start_layout.spec, n)
    for name in ("valid", "discount"):  # labelled transitions have neither
        if name in rows:
            rows[name][:] = 1
    return Batch(rows, starts, np.ones(n, np.float32), torch.device("cpu"))
