"""Learner: samples windows, takes a gradient step, writes priorities back, publishes weights.

feed -> loss -> one flat gradient -> updater -> publisher
"""

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from veldt.algorithms.base import Algorithm, Batch, Loss
from veldt.bounds import above, at_least, between
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning import optim, params
from veldt.learning.optim import Flat, Owned, Updater
from veldt.learning.params import LatestParams, Publisher
from veldt.metrics import LEARNER
from veldt.nets.torsos import use_bfloat16
from veldt.records.step import EnvSpec
from veldt.storing.store import Sample, Store

log = logging.getLogger("veldt")
BAD_IN_A_ROW = 10  # updates that are not finite before the run stops
DIAGNOSE_EVERY = 500  # updates
DIAGNOSED_BLOCKS, DIAGNOSED_ROWS = 16, 2_000  # read at most


@dataclass(frozen=True)
class LearnerConfig:
    batch: Annotated[int, above(0)] = 64
    """Items in one update."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """rmsprop is the papers' one, with epsilon inside the square root."""
    lr: Annotated[float, above(0)] = 1e-3
    """Learning rate."""
    anneal: bool = False
    """The learning rate falls linearly to 0 over the run."""
    eps: Annotated[float, at_least(0)] = 1e-5
    """Epsilon of the optimizer."""
    decay: Annotated[float, between(0, 1)] = 0.95
    """Decay of RMSProp's averages."""
    centered: bool = True
    """RMSProp divides by the gradient's standard deviation (DQN), otherwise by its root mean square (A3C, IMPALA)."""
    square_start: Annotated[float, at_least(0)] = 0.0
    """What RMSProp's average of squares starts at; 1: small first steps, as in TensorFlow (IMPALA)."""
    clip_norm: Annotated[float, at_least(0)] = 10.0
    """The gradient's norm is clipped to this; 0: not clipped."""
    target_every: Annotated[int, above(0)] = 100
    """Updates between two copies to the target network."""
    publish_every: Annotated[int, above(0)] = 4
    """Updates between two publications of the weights."""
    publish_lag: Annotated[int, at_least(0)] = 0
    """Updates that published weights are behind on purpose, to see what lag does; a checkpoint publishes the newest."""
    bfloat16: bool = False
    """Convolutions are computed in bfloat16: faster on a GPU, and less exact."""
    prefetch: Annotated[int, above(0)] = 1
    """Batches drawn from the store at once; priorities come back that much later."""
    trim_every: Annotated[int, above(0)] = 100
    """Updates between two trims of the store to its capacity."""


@dataclass(eq=False)
class Feed:
    """Samples windows from the store and moves them to the learner's device; for a GPU, one batch ahead."""

    store: Store
    algorithm: Algorithm
    size: int  # of a batch
    prefetch: int  # batches of one draw
    device: torch.device
    ahead: bool  # begin the next batch while the learner works on this one

    def __post_init__(self) -> None:
        self.timings = {"sample": 0.0}  # seconds that the learner waited
        self._samples: deque[Sample] = deque()
        self._prepared: tuple[Sample, Batch] | None = None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "draw") if self.ahead else None
        self._preparing: Future[None] | None = None

    def next(self) -> tuple[Sample, Batch] | None:
        """A sample and its batch on the device; None: the store has none now."""
        found, self._prepared = self._prepared, None
        if found is None:
            began = time.perf_counter()
            sample = self._draw()
            self.timings["sample"] += time.perf_counter() - began
            if sample is None:
                return None
            found = sample, self._batch(sample)
        if self._stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._stream)  # for this batch
            self._stream.wait_stream(here)  # for the target network, if it was just copied
        return found

    def prepare(self, target: nn.Module | None) -> None:
        """With `ahead`: draws the next batch in another thread, and computes what needs only the target network.

        None: the target network is about to change, so nothing may be computed with it yet.
        """
        if self._thread is not None:
            self._preparing = self._thread.submit(self._prepare, target)

    def wait(self) -> None:
        """The learner calls this before it calls the store: one caller, and the same order of calls every time."""
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            began = time.perf_counter()
            preparing.result()
            self.timings["sample"] += time.perf_counter() - began

    def clear(self) -> None:
        """Drops all batches that were drawn and not used."""
        self._samples.clear()
        self._prepared = None

    def _draw(self) -> Sample | None:
        if not self._samples:
            sample = self.store.sample(self.size * self.prefetch)
            if sample is None:
                return None
            # A batch takes every prefetch-th item, so that each is spread over the whole of the stratified draw.
            self._samples.extend(sample.part(i, self.prefetch) for i in range(self.prefetch))
        return self._samples.popleft()

    def _prepare(self, target: nn.Module | None) -> None:
        sample = self._draw()
        if sample is None:
            return
        with torch.cuda.stream(self._stream):
            batch = self._batch(sample).move()
            if target is not None:
                batch.ahead = self.algorithm.ahead(target, batch)
        self._prepared = sample, batch

    def _batch(self, sample: Sample) -> Batch:
        return Batch(sample.rows, sample.starts, sample.weights, self.device)


class Learner:
    """A worker: each `step()` is one update, or False if the store has no batch now."""

    METRICS: ClassVar = LEARNER

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        store: Store,
        params_: LatestParams,
        counters: Counters,
        config: LearnerConfig,
        env_steps: int,  # of the whole run
        seed: int,
        device: str = "cpu",
        updater: Callable[[Flat], Updater] | None = None,  # None: the optimizer of the config, in this process
    ) -> None:
        self.algorithm, self.store, self.params, self.counters = algorithm, store, params_, counters
        self.config, self.device = config, torch.device(device)
        torch.manual_seed(seed)
        self.net = algorithm.network(env).to(self.device)
        if config.bfloat16:
            use_bfloat16(self.net)
        self.target = copy.deepcopy(self.net).requires_grad_(False).eval()
        self.flat = Flat.of(self.net)
        self.vector, self.target_vector = self.flat.weights, params.flatten(self.target)
        self.feed = Feed(store, algorithm, config.batch, config.prefetch, self.device, ahead=self.device.type == "cuda")
        self.updater = updater(self.flat) if updater else owned(self.flat, config, counters, env_steps)
        self.publisher = Publisher(params_, self.vector, config.publish_lag)
        self.steps = 0
        self.env_steps = counters.get("env_steps")  # of the run, at the last update
        self.bad = 0  # updates skipped because the loss or the gradient was not finite
        self.timings = self.feed.timings
        self._bad_in_a_row = 0
        self._latest: dict[str, Tensor] = {}  # metrics
        self._diagnosis: dict[str, float] = {}  # the latest
        self._acted = algorithm.window.before  # the row of a window whose action is the first that is trained
        self._lag = math.nan  # updates between acting and learning
        if params_.pull(-1) is None:  # a restarted learner keeps the weights already published until its state is loaded
            self.publisher.publish(0, self.env_steps)

    def step(self) -> bool:
        found = self.feed.next()
        if found is None:
            return False
        sample, batch = found
        buffers = self.flat.buffers.clone() if len(self.flat.buffers) else None  # the forward pass may change them
        self._measure_lag(sample)
        self.feed.prepare(self.target if (self.steps + 1) % self.config.target_every else None)
        loss = self.algorithm.loss(self.net, self.target, batch)
        self._backward(loss)
        self.feed.wait()
        if self._update(loss):
            self.store.update(sample.keys, loss.priorities.cpu().numpy())
        elif buffers is not None:
            self.flat.buffers.copy_(buffers)
        self.steps += 1
        self.counters.add("learner_steps", 1)
        self.env_steps = self.counters.get("env_steps")
        if self.steps % self.config.target_every == 0:
            self.target_vector.copy_(self.vector)
        if self.steps % self.config.publish_every == 0:
            self.publisher.publish(self.steps, self.env_steps)
        if self.steps % self.config.trim_every == 0:
            self.store.trim()
        if self.steps % DIAGNOSE_EVERY == 0:
            self._diagnose()
        return True

    def cut(self) -> bool:
        """At a checkpoint: publishes the newest weights and drops prefetched batches, as after a resume."""
        self.feed.clear()
        self.publisher.publish_newest(self.steps, self.env_steps)
        return True

    def _measure_lag(self, sample: Sample) -> None:
        if "version" in sample.rows:
            lag = self.steps - sample.rows["version"][:, self._acted]
            self._lag = float(np.maximum(lag, 0).mean())  # a restarted learner may be behind the weights that acted

    def _backward(self, loss: Loss) -> None:
        """Each loss adds to the gradient of its own group of parameters."""
        self.flat.gradient.zero_()
        for number, (group, value) in enumerate(loss.losses.items()):
            inputs = [p for name, p in self.net.named_parameters() if name.startswith(group)] if group else None
            value.backward(retain_graph=number + 1 < len(loss.losses), inputs=inputs)  # type: ignore[no-untyped-call]

    def _update(self, loss: Loss) -> bool:
        """False: the loss or the gradient is not finite. Then nothing changes but counters."""
        norm = float(torch.linalg.vector_norm(self.flat.gradient))
        # A Huber loss has a finite gradient even where the loss is infinite, so both are checked.
        if not all(map(math.isfinite, (norm, *(value.item() for value in loss.losses.values())))):
            self.bad += 1
            self._bad_in_a_row += 1
            log.warning("learner: update %d skipped: its loss or gradient is not finite", self.steps + 1)
            if self._bad_in_a_row >= BAD_IN_A_ROW:
                raise Diverged(
                    f"The learner diverged: {BAD_IN_A_ROW} updates in a row were not finite. Lower learner.lr, or check "
                    "the scale of the rewards and observations; the last checkpoint is from before."
                )
            return False
        self._bad_in_a_row = 0
        if self.updater.update(loss.losses, norm) and loss.after is not None:
            loss.after()
        self._latest = loss.metrics
        return True

    def _diagnose(self) -> None:
        """What the algorithm measures on whole blocks, which windows do not show. It changes neither weights nor store."""
        self.net.eval()
        self._diagnosis |= self.algorithm.diagnose(self.net, self._blocks, self.store.schema)
        self.net.train()

    def _blocks(self) -> Batch | None:
        """Blocks [N, R, ...] from the oldest to the newest, and their window starts [N, S, ...]."""
        found = self.store.spread_blocks(max(1, min(DIAGNOSED_BLOCKS, DIAGNOSED_ROWS // self.store.schema.rows)))
        if found is None:  # the store is in another process and has not replied yet
            return None
        return Batch(found.rows, found.starts, np.ones(len(found.rows["first"]), np.float32), self.device)

    def metrics(self) -> dict[str, float]:
        metrics = {"skipped_updates": float(self.bad), "published": float(self.publisher.published)}
        if not math.isnan(self._lag):
            metrics["policy_lag"] = self._lag
        return metrics | self._diagnosis | {name: float(x.mean()) for name, x in self._latest.items()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"weights/{name}": x for name, x in params.export(self.net).items()}
        state |= {f"target/{name}": x for name, x in params.export(self.target).items()}
        state |= {f"optimizer/{name}": x for name, x in self.updater.state().items()}
        counts = {"steps": self.steps, "bad": self.bad, "env_steps": self.env_steps}
        return state | counts | {"torch_rng": torch.get_rng_state().numpy()}

    def load_state(self, state: dict[str, Any]) -> None:
        params.restore(self.net, params.under("weights/", state))
        params.restore(self.target, params.under("target/", state))
        self.updater.load_state(params.under("optimizer/", state))
        self.steps, self.bad = int(state["steps"]), int(state["bad"])
        torch.set_rng_state(torch.from_numpy(state["torch_rng"]))
        self.env_steps = int(state.get("env_steps", self.counters.get("env_steps")))  # older checkpoints lack it
        self.publisher.publish_newest(self.steps, self.env_steps)


def owned(flat: Flat, config: LearnerConfig, counters: Counters, env_steps: int) -> Owned:
    """The optimizer of the config, whose learning rate is annealed over `env_steps`."""

    def rate() -> float:
        left = max(0.0, 1 - counters.get("env_steps") / env_steps) if config.anneal else 1.0
        return config.lr * left

    def make(weights: Tensor, gradient: Tensor) -> optim.Optimizer:
        if config.optimizer == "adam":
            return optim.Adam(weights, gradient, config.eps)
        if config.optimizer == "rmsprop":
            return optim.RMSProp(weights, gradient, config.eps, config.decay, config.centered, config.square_start)
        return optim.SGD(weights, gradient)

    return Owned(flat, make, rate, config.clip_norm)
