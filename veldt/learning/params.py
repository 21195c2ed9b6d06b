"""Weights: one flat vector of a network, the service that hands out the newest, and the publisher that a learner has."""

import math
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veldt.errors import Diverged, UserError
from veldt.records.tree import Array
from veldt.shared import Cell, PrivateCell


class Weights(NamedTuple):
    version: int  # learner steps
    vector: Array  # float32 [size]
    env_steps: int = -1  # of the run when the learner published them; -1: unknown
    published_at: float = math.nan  # time.monotonic() then, which all processes of a host share


class LatestParams:
    """Keeps the newest weights; `pull(have)` returns None if `have` is their version."""

    def __init__(self, cell: Cell | None = None) -> None:
        self.cell = PrivateCell() if cell is None else cell

    def publish(self, weights: Weights) -> None:
        when = np.array([weights.env_steps, weights.published_at])
        self.cell.write(weights.version, {"vector": weights.vector, "when": when})

    def pull(self, have: int) -> Weights | None:
        # Not "newer than": a restarted learner resumes from its last checkpoint, with an older version.
        found = self.cell.read(have)
        if found is None:
            return None
        env_steps, published_at = found[1]["when"].tolist()
        return Weights(found[0], found[1]["vector"], int(env_steps), published_at)


class Publisher:
    """Publishes finite weights only. With `lag` > 0, to study lag, those published are at least that many updates old."""

    def __init__(self, params: LatestParams, vector: Tensor, lag: int = 0) -> None:
        self.params, self.vector, self.lag = params, vector, lag
        self.published = 0  # publications
        self._delayed: deque[Weights] = deque()
        # A GPU copies to the host; CUDA to pinned memory, which is reused.
        self._host = None if vector.is_cpu else torch.empty(vector.shape, pin_memory=vector.is_cuda)
        self._begun: tuple[int, int] | None = None  # version and env steps of what `begin` copies
        self._snapshot = torch.empty_like(vector) if vector.is_cuda else vector
        self._stream = torch.cuda.Stream(vector.device) if vector.is_cuda else None  # type: ignore[no-untyped-call]

    def publish(self, version: int, env_steps: int) -> None:
        """`version` is the number of updates of these weights, which the learner has after `env_steps` of the run."""
        self.finish()
        vector: Array = (self.vector if self._host is None else self._host.copy_(self.vector)).numpy()
        self._publish(version, vector, env_steps)

    def begin(self, version: int, env_steps: int) -> None:
        """As `publish`, but a GPU goes on meanwhile: it copies the weights as the current stream leaves them, and `finish`
        publishes them."""
        self.finish()
        if self._stream is None or self._host is None:
            return self.publish(version, env_steps)
        self._snapshot.copy_(self.vector)
        self._stream.wait_stream(torch.cuda.current_stream(self.vector.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._snapshot, non_blocking=True)
        self._begun = version, env_steps

    def finish(self) -> None:
        """Publishes what was begun, once it is on the host."""
        begun, self._begun = self._begun, None
        if begun is not None:
            assert self._stream is not None and self._host is not None
            self._stream.synchronize()
            self._publish(begun[0], self._host.numpy(), begun[1])

    def _publish(self, version: int, vector: Array, env_steps: int) -> None:
        if not np.isfinite(vector).all():
            raise Diverged(
                f"The learner diverged: its weights are not finite after {version} updates. Lower learner.lr; the last "
                "checkpoint is from before."
            )
        weights = Weights(version, vector, env_steps, time.monotonic())
        if self.lag:
            self._delayed.append(weights._replace(vector=weights.vector.copy()))
            while len(self._delayed) > 1 and self._delayed[1].version <= version - self.lag:
                self._delayed.popleft()
            weights = self._delayed[0]
        self.params.publish(weights)
        self.published += 1

    def publish_newest(self, version: int, env_steps: int) -> None:
        """Without the lag, which starts again from these weights."""
        self._delayed.clear()
        self.publish(version, env_steps)


def flatten(net: nn.Module, vector: Tensor | None = None) -> Tensor:
    """Moves the parameters and the float buffers of a network into one vector, and makes them views of it. Where a vector
    is given, they become views of that, and take its values.

    Then copying, publishing, clipping and optimizing are one operation on one tensor. Parameters come first, in the order
    of `named_parameters`, so that each submodule's are a contiguous slice.
    """
    tensors: list[Tensor] = list(net.parameters())
    tensors += [b for b in net.buffers() if b.is_floating_point()]
    assert tensors, "a network without parameters"
    assert all(t.dtype == torch.float32 for t in tensors), {t.dtype for t in tensors}
    if vector is None:
        vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    for tensor, part in zip(tensors, torch.split(vector, [t.numel() for t in tensors]), strict=True):
        tensor.data = part.view(tensor.shape)
    return vector


def layout(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes of what `flatten` moves, in the order of the vector: `weights/...` for what `export` has.

    Raises a UserError for a network with more state than that, such as the counts of a batch normalisation.
    """
    named = [*net.named_parameters(), *((name, x) for name, x in net.named_buffers() if x.is_floating_point())]
    exported, found = net.state_dict().keys(), {name for name, _ in named}
    if more := [name for name in exported if name not in found]:
        raise UserError(f"The network keeps {more[0]}, which is no float: its workers could not share it.")
    return {f"weights/{name}" if name in exported else f"derived/{name}": tuple(x.shape) for name, x in named}


def flatten_gradients(net: nn.Module) -> Tensor:
    """One vector that holds the gradient of every parameter; backward adds to it in place."""
    parameters = list(net.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    vector = torch.zeros(sum(sizes), device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(vector, sizes), strict=True):
        parameter.grad = part.view(parameter.shape)
    return vector


def group_slice(net: nn.Module, prefix: str) -> slice:
    """Where the parameters whose names start with `prefix` lie in the vector."""
    at, start, stop = 0, None, 0
    for name, parameter in net.named_parameters():
        if name.startswith(prefix):
            start = at if start is None else start
            stop = at + parameter.numel()
        at += parameter.numel()
    assert start is not None, f"no parameter is named {prefix!r}..."
    return slice(start, stop)


def export(net: nn.Module) -> dict[str, Array]:
    """Parameters and buffers by name, on the host; on a CPU they share memory with the network."""
    return {name: t.detach().cpu().numpy() for name, t in net.state_dict().items()}


def restore(net: nn.Module, state: dict[str, Any]) -> None:
    """Loads exported weights, in place. A module with buffers that are not exported has a `derive` that sets them."""
    ours = net.state_dict()
    wrong = [name for name, x in ours.items() if name not in state or np.shape(state[name]) != tuple(x.shape)]
    if wrong:
        raise UserError(f"The saved weights belong to a different network: {wrong[0]} is missing or has another shape.")
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(torch.from_numpy(np.asarray(state[name])))
    for module in net.modules():
        derive = getattr(module, "derive", None)
        if callable(derive):
            derive()


def under(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    """The entries whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
