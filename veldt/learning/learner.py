"""Learner: samples windows, takes a gradient step, writes priorities back, publishes weights.

feed -> loss -> one flat gradient -> updater -> publisher
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from veldt.algorithms.base import Algorithm, Loss
from veldt.bounds import above, at_least, between
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning import diagnosis, optim, params
from veldt.learning.diagnosis import Diagnosis
from veldt.learning.feed import Feed
from veldt.learning.params import Params
from veldt.learning.publisher import Publisher
from veldt.learning.updater import Flat, Owned, Updater
from veldt.metrics import LEARNER
from veldt.nets.torsos import use_bfloat16
from veldt.records.step import EnvSpec
from veldt.storing.store import Sample, Store

log = logging.getLogger("veldt")
BAD_IN_A_ROW = 10  # updates that are not finite before the run stops


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
    momentum: Annotated[float, at_least(0)] = 0.0
    """Momentum of RMSProp."""
    centered: bool = True
    """RMSProp divides by the gradient's standard deviation (DQN), otherwise by its root mean square (A3C, IMPALA)."""
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


class Learner:
    """A worker: each `step()` is one update, or False if the store has no batch now."""

    METRICS: ClassVar = LEARNER

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        store: Store,
        params_: Params,
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
        self.diagnosis = Diagnosis(algorithm, self.net, store, self.device)
        self.steps = 0
        self.bad = 0  # updates skipped because the loss or the gradient was not finite
        self.timings = self.feed.timings
        self._bad_in_a_row = 0
        self._latest: dict[str, Tensor] = {}  # metrics
        self._acted = algorithm.window.before  # the row of a window whose action is the first that is trained
        self._lag = math.nan  # updates between acting and learning
        if params_.pull(-1) is None:  # a restarted learner keeps the weights already published until its state is loaded
            self.publisher.publish(0)

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
        if self.steps % self.config.target_every == 0:
            self.target_vector.copy_(self.vector)
        if self.steps % self.config.publish_every == 0:
            self.publisher.publish(self.steps)
        if self.steps % self.config.trim_every == 0:
            self.store.trim()
        if self.steps % diagnosis.EVERY == 0:
            self.diagnosis.run()
        return True

    def cut(self) -> bool:
        """At a checkpoint: publishes the newest weights and drops prefetched batches, as after a resume."""
        self.feed.clear()
        self.publisher.publish_newest(self.steps)
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
            self._skip()
            return False
        self._bad_in_a_row = 0
        if self.updater.update(loss.losses, norm) and loss.after is not None:
            loss.after()
        self._latest = loss.metrics
        return True

    def _skip(self) -> None:
        self.bad += 1
        self._bad_in_a_row += 1
        log.warning("learner: update %d skipped: its loss or gradient is not finite", self.steps + 1)
        if self._bad_in_a_row >= BAD_IN_A_ROW:
            raise Diverged(
                f"The learner diverged: {BAD_IN_A_ROW} updates in a row were not finite. Lower learner.lr, or check the "
                "scale of the rewards and observations; the last checkpoint is from before."
            )

    def metrics(self) -> dict[str, float]:
        metrics = {"skipped_updates": float(self.bad), "published": float(self.publisher.published)}
        if not math.isnan(self._lag):
            metrics["policy_lag"] = self._lag
        return metrics | self.diagnosis.metrics | {name: float(x.mean()) for name, x in self._latest.items()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"weights/{name}": x for name, x in params.export(self.net).items()}
        state |= {f"target/{name}": x for name, x in params.export(self.target).items()}
        state |= {f"optimizer/{name}": x for name, x in self.updater.state().items()}
        return state | {"steps": self.steps, "bad": self.bad, "torch_rng": torch.get_rng_state().numpy()}

    def load_state(self, state: dict[str, Any]) -> None:
        params.restore(self.net, params.under("weights/", state))
        params.restore(self.target, params.under("target/", state))
        self.updater.load_state(params.under("optimizer/", state))
        self.steps, self.bad = int(state["steps"]), int(state["bad"])
        torch.set_rng_state(torch.from_numpy(state["torch_rng"]))
        self.publisher.publish_newest(self.steps)


def owned(flat: Flat, config: LearnerConfig, counters: Counters, env_steps: int) -> Owned:
    """The optimizer of the config, whose learning rate is annealed over `env_steps`."""
    rate = partial(learning_rate, config, counters, env_steps)
    return Owned(flat, partial(make_optimizer, config), rate, config.clip_norm)


def learning_rate(config: LearnerConfig, counters: Counters, env_steps: int) -> float:
    if not config.anneal:
        return config.lr
    return config.lr * max(0.0, 1 - counters.get("env_steps") / env_steps)


def make_optimizer(config: LearnerConfig, weights: Tensor, gradient: Tensor) -> optim.Optimizer:
    if config.optimizer == "adam":
        return optim.Adam(weights, gradient, config.eps)
    if config.optimizer == "rmsprop":
        return optim.RMSProp(weights, gradient, config.eps, config.decay, config.momentum, config.centered)
    return optim.SGD(weights, gradient)
