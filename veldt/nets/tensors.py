"""Small functions of tensors and observations that networks and algorithms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veldt.records.tree import Array


def on_device(x: Array, device: torch.device) -> Tensor:
    """Copies to the device without waiting for the GPU. Pageable memory is staged at once; pinned memory must not change
    until the copy is done."""
    return torch.from_numpy(x).to(device, non_blocking=True)


def as_float(x: Tensor) -> Tensor:
    """float32; uint8 is scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        return x.float().mul_(1 / 255)
    return x if x.dtype == torch.float32 else x.float()


def each(obs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to an observation, or to every value of a dict of them."""
    return {key: function(x) for key, x in obs.items()} if isinstance(obs, dict) else function(obs)


def flat_rows(obs: Any) -> Any:
    """Rows [B, T, ...] as [B * T, ...]."""
    return each(obs, lambda x: x.flatten(0, 1))
