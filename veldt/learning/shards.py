"""Gorila's parameter servers (Nair et al., Massively parallel methods for deep reinforcement learning, 2015).

    learner/i  -- push(gradient slice, version) -->  shard/k  -- weights, the newest -->  learners, policies, the evaluator

paper                                        here
parameter server, sharded                    `ParamShard`: owns a slice of the flat vector and its optimizer
gradient, sent with the parameters' version  `ParamShard.push`; each slice has the version of its own shard
AdaGrad                                      `learner.optimizer`; any other, on slices
gradients that are too old are discarded     `GuardConfig.max_age`
losses above mean + several deviations       `LossGuard`; the bounds of both guards are ours: the paper has no numbers
target network, every N server updates       `Learner`; the version that counts is that of shard 0

A gradient is applied when it arrives. Shards do not wait for each other: a learner may read slices of different versions,
as in the paper. Optimizers work element by element, so K shards that get the same gradients in the same order end with the
weights of one.

A shard's slice, averages and counts are arrays of the program. They outlive its process: a shard that was killed goes on
from its last update. The gradient that it was applying then is applied again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from veldt.algorithms.base import Algorithm
from veldt.bounds import above, at_least
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning import optim, params
from veldt.learning.learner import LearnerConfig, learning_rate, make_optimizer
from veldt.learning.optim import Flat
from veldt.learning.params import Weights
from veldt.metrics import SHARD
from veldt.ports import latest, stream
from veldt.records.step import EnvSpec
from veldt.records.tree import Array

BEGUN, VERSION, DROPPED, ENV_STEPS = range(4)  # the counts of a shard
COUNTS = 4
MEMORY = 1_000  # batches over which the mean of the losses is taken
LEAST_DEVIATION = 0.1  # of the mean: where all losses are alike, a little more is not an outlier
ROW = 3  # of the statistics of one learner: batches, mean, mean of squares


@dataclass(frozen=True)
class GuardConfig:
    max_age: Annotated[int, at_least(0)] = 100
    """A server drops gradients of weights that are more than this many updates old; 0: none."""
    deviations: Annotated[float, at_least(0)] = 4.0
    """A learner drops a gradient if the mean |error| of its batch is more than this many standard deviations above the
    running mean; 0: none."""
    against: Literal["others", "own"] = "others"
    """Whose losses that mean is of. others: all other learners', so that one whose losses are always too large is kept out;
    own: those of the learner itself (the paper), so that it is kept out only while they are unusual."""
    warm_up: Annotated[int, above(0)] = 100
    """Batches of a learner before its losses count."""


class Part(NamedTuple):
    """What a shard owns."""

    gradient: slice  # of the parameters
    weights: slice  # of the flat vector: these parameters; for the last shard also the buffers, which follow all parameters


def cut(parameters: int, size: int, shards: int) -> list[Part]:
    """A flat vector of `size`, which begins with the parameters, for this many shards."""
    ends = [parameters * k // shards for k in range(shards + 1)]
    parts = [slice(*pair) for pair in pairwise(ends)]
    return [Part(part, slice(part.start, size if part is parts[-1] else part.stop)) for part in parts]


class ParamShard:
    """A service: applies gradient slices in the order in which they arrive."""

    METRICS: ClassVar = SHARD
    TAKES_WEIGHTS: ClassVar = True  # as `initial`
    STREAM_NAMES: ClassVar = {"messages": "gradient_slices", "bytes": "gradient_bytes"}

    def __init__(
        self,
        first: Callable[[], Array],  # the weights that the run starts with, as one vector
        part: Part,
        vector: Array,  # these three outlive the process
        averages: Mapping[str, Array],
        counts: Array,
        config: LearnerConfig,
        max_age: int,
        env_steps: int,  # of the whole run
        counters: Counters,
        counting: bool,  # its updates are those of the run
        initial: Mapping[str, Array] | None = None,  # weights to start with, by name
    ) -> None:
        self.vector, self.counts, self.counters, self.max_age, self.counting = vector, counts, counters, max_age, counting
        begun, self.size = bool(counts[BEGUN]), part.gradient.stop - part.gradient.start
        if not begun:
            vector[:] = first(**({} if initial is None else {"initial": initial}))[part.weights]
        self.gradient = np.zeros(self.size, np.float32)
        self.optimizer = make_optimizer(config, torch.from_numpy(vector[: self.size]), torch.from_numpy(self.gradient))
        for name, x in self.optimizer.averages.items():
            kept = torch.from_numpy(averages[name])
            self.optimizer.averages[name] = kept if begun else kept.copy_(x)
        counts[BEGUN] = 1
        self.rate = learning_rate(config, counters, env_steps)
        self._diverged = False
        self._ages: list[int] = []  # of the gradients since the last `metrics`
        self._busy_s, self._since = 0.0, time.perf_counter()

    @property
    def version(self) -> int:
        """The number of updates."""
        return int(self.counts[VERSION])

    @stream
    def push(self, gradient: Array, buffers: Array, at: int) -> bool:
        """Of a learner that had the weights of version `at`. The newest buffers of any learner are everyone's."""
        began, age = time.perf_counter(), self.version - at
        self._ages.append(age)
        if self.max_age and age > self.max_age:
            self.counts[DROPPED] += 1
        else:
            self._apply(gradient, buffers)
        self._busy_s += time.perf_counter() - began
        return True

    def _apply(self, gradient: Array, buffers: Array) -> None:
        """Unless the weights would not be finite then: they stay as they are, and the run ends (`weights`)."""
        self.gradient[:] = gradient
        before = self.vector[: self.size].copy()
        if isinstance(self.optimizer, optim.Adam):
            self.optimizer.steps = self.version
        self.optimizer.step(self.rate())
        if not np.isfinite(self.vector[: self.size]).all():
            self.vector[: self.size] = before
            self._diverged = True
            return
        self.vector[self.size :] = buffers
        self.counts[ENV_STEPS] = self.counters.get("env_steps")
        self.counts[VERSION] += 1
        if self.counting:
            self.counters.add("learner_steps", 1)

    @latest
    def weights(self, have: int = -1) -> Weights | None:
        version = self.version
        if self._diverged:
            raise Diverged(
                f"The learners diverged: update {version + 1} would make weights that are not finite. Lower learner.lr; "
                "the last checkpoint is from before."
            )
        if version == have:
            return None
        return Weights(version, self.vector, int(self.counts[ENV_STEPS]), time.monotonic())

    def metrics(self) -> dict[str, float]:
        now, ages = time.perf_counter(), self._ages
        out = {"gradients_applied": float(self.version), "gradients_dropped_age": float(self.counts[DROPPED])}
        out |= {"busy/shard": self._busy_s / max(1e-9, now - self._since), "learning_rate": self.rate()}
        if ages:
            out |= {"staleness": sum(ages) / len(ages), "staleness_max": float(max(ages))}
        self._ages, self._busy_s, self._since = [], 0.0, now
        return out


def first_weights(algorithm: Algorithm, env: EnvSpec, seed: int, initial: Mapping[str, Array] | None = None) -> Array:
    """Those with which a learner of this seed begins, as one vector."""
    torch.manual_seed(seed)
    net = algorithm.network(env)
    if initial is not None:
        params.restore(net, params.export(net) | dict(initial))
    return params.flatten(net).numpy()


class ShardedParams:
    """The newest weights of all shards, put together; each slice has a version of its own. One object for each reader."""

    def __init__(self, shards: Sequence[ParamShard], parts: Sequence[Part]) -> None:
        self._shards = [*zip(shards, [part.weights for part in parts], strict=True)]
        self.versions = [-1] * len(parts)
        self._vector = np.zeros(parts[-1].weights.stop, np.float32)
        self._when = (-1, float("nan"))

    def pull(self, have: int) -> Weights | None:
        """Under the version of shard 0. None: no slice is newer than at the last call, or some were never published."""
        changed = have != self.versions[0]
        for k, (shard, where) in enumerate(self._shards):
            found = shard.weights(self.versions[k])
            if found is not None:
                self._vector[where], self.versions[k], changed = found.vector, found.version, True
                self._when = self._when if k else (found.env_steps, found.published_at)
        return Weights(self.versions[0], self._vector, *self._when) if changed and min(self.versions) >= 0 else None


class NamedWeights:
    """All slices as one network: the one place in a checkpoint that has the weights by name."""

    def __init__(self, algorithm: Algorithm, env: EnvSpec, slices: Sequence[Array]) -> None:
        self.slices: Sequence[Array] = slices
        self.net: nn.Module = algorithm.network(env)
        self.vector = params.flatten(self.net)

    def state(self) -> dict[str, Any]:
        self.vector.copy_(torch.from_numpy(np.concatenate(self.slices)))
        return {f"weights/{name}": x for name, x in params.export(self.net).items()}


class LossGuard:
    """Rejects batches whose errors are far above the usual ones.

    `statistics` [learners, ROW] has a row for each learner, which only that learner writes. It adds every batch, the
    rejected ones too: otherwise errors that grow for good would be rejected for ever.
    """

    def __init__(self, config: GuardConfig, statistics: Array, learner: int) -> None:
        self.config, self.statistics, self.own = config, statistics, statistics[learner]
        others = np.arange(len(statistics)) != learner
        self._usual = others if config.against == "others" and others.any() else ~others
        self.rejected = 0

    def accepts(self, error: float) -> bool:
        bound = self.bound()
        batches = self.own[0] + 1
        rate = max(1 / batches, 1 / MEMORY)
        self.own[:] = batches, *(self.own[1:] + rate * (np.array([error, error * error]) - self.own[1:]))
        fine = error <= bound
        self.rejected += not fine
        return fine

    def bound(self) -> float:
        """Infinite as long as nothing is usual."""
        known = self.statistics[self._usual & (self.statistics[:, 0] >= self.config.warm_up)]
        if not len(known) or not self.config.deviations:
            return float("inf")
        _, mean, square = known.mean(0)
        deviation = max(float(np.sqrt(max(0.0, square - mean * mean))), LEAST_DEVIATION * mean)
        return float(mean + self.config.deviations * deviation)


class Sharded:
    """An updater: cuts a gradient into slices and pushes each to its shard, with the version of the weights that it is of.

    While a shard's stream is full, its slice is kept, and the learner takes no other gradient.
    """

    owns_weights: ClassVar = False
    target: ClassVar = None

    def __init__(
        self, shards: Sequence[ParamShard], parts: Sequence[Part], guard: LossGuard, clip_norm: float, flat: Flat
    ) -> None:
        self.servers = self
        self.shards, self.parts, self.guard, self.clip_norm, self.flat = shards, parts, guard, clip_norm, flat
        self.params = ShardedParams(shards, parts)
        self.pushed = 0  # gradients
        self._unsent: list[int] = []  # shards that have not got their slice of the newest gradient
        self._waited_s, self._waits_since, self._since = 0.0, 0.0, time.perf_counter()

    @property
    def version(self) -> int:
        return self.params.versions[0]

    def ready(self) -> bool:
        if self._unsent:
            if not self._send():
                return False
            self._waited_s += time.perf_counter() - self._waits_since
        newest = self.params.pull(self.version)
        if newest is not None:
            self.flat.weights.copy_(torch.from_numpy(newest.vector))
        return min(self.params.versions) >= 0

    def accepts(self, errors: Tensor) -> bool:
        return self.guard.accepts(float(errors.mean()))

    def update(self, groups: Iterable[str], norm: float) -> bool:
        assert list(groups) == [""], "shards have one optimizer for all parameters"
        if self.clip_norm and norm > self.clip_norm:
            self.flat.gradient.mul_(self.clip_norm / norm)
        self._gradient, self._buffers = (x.detach().cpu().numpy() for x in (self.flat.gradient, self.flat.buffers))
        self._unsent = list(range(len(self.shards)))
        self.pushed += 1
        if not self._send():
            self._waits_since = time.perf_counter()
        return False

    def _send(self) -> bool:
        """Whether all slices of the gradient are sent."""
        self._unsent = [k for k in self._unsent if not self._push(k)]
        return not self._unsent

    def _push(self, k: int) -> bool:
        buffers = self._buffers if k == len(self.shards) - 1 else self._buffers[:0]
        return self.shards[k].push(self._gradient[self.parts[k].gradient], buffers, self.params.versions[k])

    def metrics(self) -> dict[str, float]:
        now = time.perf_counter()
        if self._unsent:
            self._waited_s += now - self._waits_since
            self._waits_since = now
        waits = {"wait/shards": self._waited_s / max(1e-9, now - self._since)}
        self._waited_s, self._since = 0.0, now
        return waits | {"gradients_pushed": float(self.pushed), "gradients_dropped_loss": float(self.guard.rejected)}

    def state(self) -> dict[str, Array]:
        return {"counts": np.array([self.pushed, self.guard.rejected])}

    def load_state(self, state: dict[str, Any]) -> None:
        self.pushed, self.guard.rejected = (int(x) for x in state["counts"])


def sharded(
    shards: Sequence[ParamShard],
    parts: Sequence[Part],
    guard: GuardConfig,
    statistics: Array,
    learner: int,
    clip_norm: float,
) -> Callable[[Flat], Sharded]:
    """A node: what makes the updater of the learner in its process."""
    return partial(Sharded, shards, parts, LossGuard(guard, statistics, learner), clip_norm)
