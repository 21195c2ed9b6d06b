"""Learner: samples windows, takes a gradient step, writes priorities back, publishes weights."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import nn

from veldt.algorithms.base import Algorithm, Batch, Loss
from veldt.bounds import above, at_least, between
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning import optim, params
from veldt.learning.params import Params, Weights
from veldt.nets import ConvNet
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.storing.replay import Sample, Store

log = logging.getLogger("veldt")
DIAGNOSE_EVERY = 500  # updates between two diagnoses
DIAGNOSED, DIAGNOSED_ROWS = 16, 2_000  # blocks that one of them looks at, and rows of them, at most
BAD_IN_A_ROW = 10  # updates with a loss that is not finite before the run stops


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
    """A worker: each `step()` is one update, or False if the store says "not now"."""

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
    ) -> None:
        self.algorithm, self.store, self.params, self.counters = algorithm, store, params_, counters
        self.config, self.env_steps, self.device = config, env_steps, torch.device(device)
        torch.manual_seed(seed)
        self.net = algorithm.network(env).to(self.device)
        for module in self.net.modules():
            if isinstance(module, ConvNet):
                module.in_bfloat16 = config.bfloat16
        self.target = copy.deepcopy(self.net).requires_grad_(False).eval()
        self.vector, self.target_vector = params.flatten(self.net), params.flatten(self.target)
        self.gradient = params.flatten_gradients(self.net)
        self._buffers = self.vector[len(self.gradient) :]  # running averages, which the forward pass moves
        self.optimizers: dict[str, optim.Optimizer] = {}  # by group of parameters, made when its loss is first seen
        self.steps = 0
        self.bad = 0  # updates skipped because something was not finite
        self._bad_in_a_row = 0
        self.published = 0  # weights
        self._late: deque[Weights] = deque()  # not published yet, by publish_lag
        self.spent = {"sample": 0.0}  # seconds
        self._latest: dict[str, torch.Tensor] = {}
        self._fetched: deque[Sample] = deque()
        self._acted = algorithm.window.before  # the row of a window whose action is the first that it trains
        self._lag = math.nan  # updates between acting and learning
        self._diagnosis: dict[str, float] = {}
        cuda = self.device.type == "cuda"
        self._host = torch.empty(self.vector.shape, pin_memory=True) if cuda else None  # for what is published
        self._stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        self._ahead: Batch | None = None  # the next batch, on its way to the GPU
        self._drawer = ThreadPoolExecutor(1, "draw") if cuda else None
        self._drawing: Future[None] | None = None
        counters.put("learner_steps", 0)
        if params_.pull(-1) is None:  # otherwise we are born again: nobody acts with fresh weights meanwhile
            self._publish()

    def step(self) -> bool:
        if not self._fetched and not self._fetch():
            return False
        sample, batch = self._fetched.popleft(), self._ahead
        if batch is None or batch.host is not sample.rows:
            batch = Batch(sample.rows, sample.starts, sample.weights, self.device)
        if self._stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._stream)  # for this batch
            self._stream.wait_stream(here)  # for the target network, if it was just copied
        self._ahead = None
        buffers = self._buffers.clone() if len(self._buffers) else None
        if "version" in sample.rows:
            lag = self.steps - sample.rows["version"][:, self._acted]
            self._lag = float(np.maximum(lag, 0).mean())  # one that was killed goes on from before what actors have
        if self._drawer is not None:
            self._drawing = self._drawer.submit(self._look_ahead)
        loss = self.algorithm.loss(self.net, self.target, batch)
        if self._update(loss):
            if loss.after is not None:
                loss.after()
            self.store.update(sample.keys, loss.priorities.cpu().numpy())
        elif buffers is not None:
            self._buffers.copy_(buffers)
        self.steps += 1
        self.counters.add("learner_steps", 1)
        if self.steps % self.config.target_every == 0:
            self.target_vector.copy_(self.vector)
        if self.steps % self.config.publish_every == 0:
            self._publish()
        if self.steps % self.config.trim_every == 0:
            self.store.trim()
        if self.steps % DIAGNOSE_EVERY == 0 and hasattr(self.algorithm, "diagnose"):
            self._diagnose(self.algorithm.diagnose)
        return True

    def _diagnose(self, diagnose: Callable[[nn.Module, Batch, Schema], dict[str, float]]) -> None:
        """What an algorithm can tell of whole blocks that no window shows. It changes nothing."""
        rows, starts = self.store.some(max(1, min(DIAGNOSED, DIAGNOSED_ROWS // self.store.schema.rows)))
        self.net.eval()
        blocks = Batch(rows, starts, np.ones(len(rows["first"]), np.float32), self.device)
        self._diagnosis |= diagnose(self.net, blocks, self.store.schema)
        self.net.train()

    def cut(self) -> bool:
        """At a checkpoint everyone has the newest weights and nothing is on its way, as after a resume."""
        self._fetched.clear()
        self._late.clear()
        self._publish()
        return True

    def _fetch(self) -> bool:
        began = time.perf_counter()
        found = self._draw()
        self.spent["sample"] += time.perf_counter() - began
        return found

    def _draw(self) -> bool:
        sample = self.store.sample(self.config.batch * self.config.prefetch)
        if sample is None:
            return False
        # Every prefetch-th draw, so that each batch is spread over the whole of the stratified draw.
        self._fetched.extend(sample.part(i, self.config.prefetch) for i in range(self.config.prefetch))
        return True

    def _update(self, loss: Loss) -> bool:
        """One optimizer step; a gradient that is not finite changes nothing but a counter."""
        self.gradient.zero_()
        for number, (group, value) in enumerate(loss.losses.items()):
            inputs = [p for name, p in self.net.named_parameters() if name.startswith(group)] if group else None
            value.backward(retain_graph=number + 1 < len(loss.losses), inputs=inputs)  # type: ignore[no-untyped-call]
        if self._drawing is not None:
            began = time.perf_counter()
            self._drawing.result()
            self.spent["sample"] += time.perf_counter() - began
        norm = float(torch.linalg.vector_norm(self.gradient))
        # A Huber loss has a finite gradient even where the loss is infinite: both are looked at.
        if not all(map(math.isfinite, (norm, *(value.item() for value in loss.losses.values())))):
            self._skip()
            return False
        self._bad_in_a_row = 0
        if self.config.clip_norm and norm > self.config.clip_norm:
            self.gradient.mul_(self.config.clip_norm / norm)
        for group in loss.losses:
            if group not in self.optimizers:
                self.optimizers[group] = self._optimizer(group)
            self.optimizers[group].step(self._lr())
        self._latest = loss.metrics
        return True

    def _look_ahead(self) -> None:
        """Draws the next batch and begins on it beside this one's work: in a thread of its own, and on a stream of its own.

        It ends before the update does: to the store it is one caller, whose calls come in the same order every time.
        """
        if not self._fetched and not self._draw():
            return
        sample = self._fetched[0]
        with torch.cuda.stream(self._stream):
            self._ahead = Batch(sample.rows, sample.starts, sample.weights, self.device).move()
            if hasattr(self.algorithm, "ahead") and (self.steps + 1) % self.config.target_every:
                self._ahead.ahead = self.algorithm.ahead(self.target, self._ahead)

    def _lr(self) -> float:
        if not self.config.anneal:
            return self.config.lr
        return self.config.lr * max(0.0, 1 - self.counters.get("env_steps") / self.env_steps)

    def _skip(self) -> None:
        self.bad += 1
        self._bad_in_a_row += 1
        log.warning("learner: update %d skipped: its loss or gradient is not finite", self.steps + 1)
        if self._bad_in_a_row >= BAD_IN_A_ROW:
            raise Diverged(
                f"The learner diverged: {BAD_IN_A_ROW} updates in a row were not finite. Lower learner.lr, or look at the "
                "scale of the rewards and observations; the last checkpoint is from before."
            )

    def _optimizer(self, group: str) -> optim.Optimizer:
        where, config = params.group_slice(self.net, group), self.config
        weights, gradient = self.vector[where], self.gradient[where]
        if config.optimizer == "adam":
            return optim.Adam(weights, gradient, config.eps)
        if config.optimizer == "rmsprop":
            return optim.RMSProp(weights, gradient, config.eps, config.decay, config.momentum, config.centered)
        return optim.SGD(weights, gradient)

    def _publish(self) -> None:
        vector = (self.vector if self._host is None else self._host.copy_(self.vector)).numpy()
        if not np.isfinite(vector).all():
            raise Diverged(
                f"The learner diverged: its weights are not finite after {self.steps} updates. Lower learner.lr; the last "
                "checkpoint is from before."
            )
        weights = Weights(self.steps, vector)
        if lag := self.config.publish_lag:
            self._late.append(weights._replace(vector=vector.copy()))
            while len(self._late) > 1 and self._late[1].version <= self.steps - lag:
                self._late.popleft()
            weights = self._late[0]
        self.params.publish(weights)
        self.published += 1

    def metrics(self) -> dict[str, float]:
        told = {"skipped_updates": float(self.bad), "published": float(self.published)}
        if not math.isnan(self._lag):
            told["policy_lag"] = self._lag
        return told | self._diagnosis | {name: float(x.mean()) for name, x in self._latest.items()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"weights/{name}": x for name, x in params.export(self.net).items()}
        state |= {f"target/{name}": x for name, x in params.export(self.target).items()}
        for group, optimizer in self.optimizers.items():
            state |= {f"optimizer/{group}/{name}": x for name, x in optimizer.state().items()}
        return state | {"steps": self.steps, "bad": self.bad, "torch_rng": torch.get_rng_state().numpy()}

    def load_state(self, state: dict[str, Any]) -> None:
        params.restore(self.net, _under("weights/", state))
        params.restore(self.target, _under("target/", state))
        for name in sorted({key.split("/")[1] for key in state if key.startswith("optimizer/")}):
            self.optimizers[name] = self._optimizer(name)
            self.optimizers[name].load_state(_under(f"optimizer/{name}/", state))
        self.steps, self.bad = int(state["steps"]), int(state["bad"])
        torch.set_rng_state(torch.from_numpy(state["torch_rng"]))
        self.counters.put("learner_steps", self.steps)
        self._late.clear()
        self._publish()


def _under(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
