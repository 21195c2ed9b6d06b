"""Learner: samples windows, takes a gradient step, writes priorities back, publishes weights.

feed -> loss -> one flat gradient -> updater -> publisher
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from veldt.algorithms.base import Algorithm, Batch, Loss
from veldt.bounds import above, at_least, between
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.gpus import memory_of
from veldt.learning import optim, params
from veldt.learning.captured import LAG, NORM, Captured, Launched
from veldt.learning.feed import Feed
from veldt.learning.optim import Flat, Owned, Servers, Updater
from veldt.learning.params import LatestParams, Publisher
from veldt.metrics import LEARNER
from veldt.nets.torsos import use_bfloat16
from veldt.records.step import EnvSpec
from veldt.records.tree import Array
from veldt.storing.store import Sample, Store

log = logging.getLogger("veldt")
BAD_IN_A_ROW = 10  # updates that are not finite before the run stops
DIAGNOSE_EVERY = 500  # updates
DIAGNOSED_BLOCKS, DIAGNOSED_ROWS = 16, 2_000  # read at most


@dataclass(frozen=True)
class LearnerConfig:
    batch: Annotated[int, above(0)] = 64
    """Batch size: items in one update."""
    optimizer: Literal["adam", "rmsprop", "adagrad", "sgd"] = "adam"
    """rmsprop is the variant that the papers use, with epsilon inside the square root."""
    lr: Annotated[float, above(0)] = 1e-3
    """Learning rate."""
    anneal: bool = False
    """Anneal the learning rate linearly to 0 over the run."""
    eps: Annotated[float, at_least(0)] = 1e-5
    """Epsilon of the optimizer."""
    decay: Annotated[float, between(0, 1)] = 0.95
    """Decay of RMSProp's averages."""
    centered: bool = True
    """RMSProp divides by the standard deviation of the gradient (DQN) instead of its root mean square (A3C, IMPALA)."""
    square_start: Annotated[float, at_least(0)] = 0.0
    """Initial value of RMSProp's average of squares and of AdaGrad's sum; 1: small first steps, as in TensorFlow."""
    clip_norm: Annotated[float, at_least(0)] = 10.0
    """Maximum norm of the gradient; 0: no clipping."""
    target_every: Annotated[int, above(0)] = 100
    """Updates between two copies of the weights to the target network."""
    publish_every: Annotated[int, above(0)] = 4
    """Updates between two publications of the weights."""
    publish_lag: Annotated[int, at_least(0)] = 0
    """Delay of the published weights in updates, to study the effect of lag; a checkpoint publishes the newest ones."""
    bfloat16: bool = False
    """Compute convolutions in bfloat16: faster on a GPU, but less precise."""
    prefetch: Annotated[int, above(0)] = 1
    """Batches sampled from the store in one call; priorities are updated up to that many updates later."""
    trim_every: Annotated[int, above(0)] = 100
    """Updates between two trims of the store to its capacity."""
    graph: Literal["auto", "off"] = "auto"
    """auto: on a GPU the whole update is one CUDA graph, unless something in it cannot be captured, which is logged; off:
    operations are launched one by one, for networks that compute something else from one forward pass to the next."""


class Learner:
    """A worker: each `step()` is one update, or False if the store has no batch now."""

    METRICS: ClassVar = LEARNER
    TAKES_WEIGHTS: ClassVar = True  # as `initial`

    def __init__(
        self,
        algorithm: Algorithm,
        env: EnvSpec,
        store: Store,
        params_: LatestParams | None,  # where weights are published; None: the updater does not own them
        counters: Counters,
        config: LearnerConfig,
        env_steps: int,  # of the whole run
        seed: int,
        device: str = "cpu",
        updater: Callable[..., Updater] | None = None,  # made with a Flat; None: the config's optimizer, in this process
        initial: Mapping[str, Array] | None = None,  # weights to start with, by name; others are random
    ) -> None:
        self.algorithm, self.store, self.params, self.counters = algorithm, store, params_, counters
        self.config, self.device = config, torch.device(device)
        torch.manual_seed(seed)
        self.net = algorithm.network(env).to(self.device)
        if initial is not None:
            params.restore(self.net, params.export(self.net) | dict(initial))
        if config.bfloat16:
            use_bfloat16(self.net)
        self.target = copy.deepcopy(self.net).requires_grad_(False).eval()
        self.flat = Flat.of(self.net)
        self.vector, self.target_vector = self.flat.weights, params.flatten(self.target)
        self.feed = Feed(store, config.batch, config.prefetch, self.device, early=self.device.type == "cuda")
        self.updater = updater(self.flat) if updater else owned(self.flat, config, counters, env_steps)
        self.servers = self.updater.servers
        if self.updater.target is not None:
            self.target_vector = params.flatten(self.target, self.updater.target)
        self.captured: Captured | None = None
        self._launched: tuple[int, Sample, Launched] | None = None  # an update whose end is not known: its number, sample
        assert self.updater.owns_weights == (params_ is not None)
        self.publisher = None if params_ is None else Publisher(params_, self.vector, config.publish_lag)
        self._own_target = self.updater.owns_weights or self.servers is not None  # otherwise it is shared, or not used
        self.steps = 0
        self.env_steps = counters.get("env_steps")  # of the run, at the last update
        self.bad = 0  # updates skipped because the loss or the gradient was not finite
        self.timings = self.feed.timings
        self._bad_in_a_row = 0
        self._latest: dict[str, Tensor] = {}  # metrics
        self._diagnosis: dict[str, float] = {}  # the latest
        self._acted = algorithm.window.before  # the row of a window whose action is the first that is trained
        self._lag = math.nan  # updates between acting and learning
        self._copied = -1  # what was due of the servers' updates when the target was copied last
        # A restarted learner keeps the weights already published until its state is loaded.
        if self.publisher is not None and self.publisher.params.pull(-1) is None:
            self.publisher.publish(0, self.env_steps)
        if config.graph == "auto" and self.device.type == "cuda":
            self.use_graph()

    def use_graph(self) -> None:
        """From now on an update is one graph of operations on the device, if the updater has one to offer."""
        if isinstance(self.updater, Owned):
            self.captured = Captured(self.algorithm, self.target, self.flat, self.updater, self.device)
            self.feed.early = self.feed.tensors = True
        else:
            log.info("learner: no CUDA graph: %s takes gradients from the host", type(self.updater).__name__)

    def step(self) -> bool:
        if self.servers is not None and not self._take_newest(self.servers):
            return False
        if self.captured is not None:
            captured = self.captured
            with captured.on_stream():
                worked = self._launch(captured)
            if self.captured is not captured:  # the next update is on another stream
                captured.synchronize()
            return worked
        found = self.feed.next()
        return found is not None and self._step(*found)

    def _take_newest(self, servers: Servers) -> bool:
        """The weights of the servers. The target network follows every `target_every` updates that these have made."""
        if not servers.ready():
            return False
        due = servers.version // self.config.target_every
        if due != self._copied:
            self.target_vector.copy_(self.vector)
            self._copied = due
        return True

    def _launch(self, captured: Captured) -> bool:
        """Starts an update and, while the device works on it, ends the one before it and draws the next batch. What follows
        an update does not wait for it: nothing here does, but for the update before."""
        found = self.feed.next()
        if found is None:
            return self._complete()
        sample, batch = found
        try:
            launched = captured.launch(batch, self.steps)
        except Exception as error:
            if captured.columns is not None:  # it was captured, so this is another failure
                raise
            self._go_on_without_graph(error)
            return self._step(sample, self.feed.batch(sample))
        self.feed.columns = captured.columns
        self._count()
        self._complete()
        self._launched = self.steps, sample, launched
        self._follow_up()
        self.feed.prepare()
        return True

    def _complete(self) -> bool:
        """Waits for the update that was launched last, and writes its priorities to the store."""
        launched, self._launched = self._launched, None
        if launched is None:
            return False
        number, sample, update = launched
        report = update.wait()
        if self._check(number, report.fine):
            self._latest = report.metrics
            self.store.update(sample.keys, report.priorities)
        if self.publisher is not None:
            self.publisher.finish()
        return True

    def _go_on_without_graph(self, error: Exception) -> None:
        """The update in which the error came has not changed anything."""
        said = str(error).strip().partition("\n")[0]
        log.warning("learner: no CUDA graph, which is slower: %s: %s", type(error).__name__, said)
        self._complete()
        assert self.captured is not None
        self.captured.synchronize()
        self.feed.numpy = self.captured.launches == 0  # perhaps the loss computes with NumPy
        self.captured, self.feed.tensors = None, False
        self.feed.early = self.device.type == "cuda"

    def _step(self, sample: Sample, batch: Batch) -> bool:
        """One update whose end the host waits for."""
        buffers = self.flat.buffers.clone() if len(self.flat.buffers) else None  # the forward pass may change them
        self._measure_lag(sample)
        loss = self.algorithm.loss(self.net, self.target, batch)
        self.flat.backward(loss.losses)
        self.feed.prepare()
        if self._update(loss):
            self.store.update(sample.keys, loss.priorities.cpu().numpy())
        elif buffers is not None:
            self.flat.buffers.copy_(buffers)
        self._count()
        self._follow_up()
        return True

    def _count(self) -> None:
        self.steps += 1
        if self.servers is None:  # which count their own
            self.counters.add("learner_steps", 1)
        self.env_steps = self.counters.get("env_steps")

    def _follow_up(self) -> None:
        """What is done every so many updates."""
        alone = self.servers is None and self.updater.target is None  # otherwise the target follows the updates of all
        if alone and self.steps % self.config.target_every == 0:
            self.target_vector.copy_(self.vector)
        if self.publisher is not None and self.steps % self.config.publish_every == 0:
            publish = self.publisher.publish if self.captured is None else self.publisher.begin
            publish(self.steps, self.env_steps)
        if self.steps % self.config.trim_every == 0:
            self.store.trim()
        if self.steps % DIAGNOSE_EVERY == 0:
            self._diagnose()

    def _settle(self) -> None:
        """Ends what is under way: then the weights are those after `steps` updates, for any stream."""
        self._complete()
        if self.captured is not None:
            self.captured.synchronize()

    def cut(self) -> bool:
        """At a checkpoint: publishes the newest weights and drops prefetched batches, as after a resume."""
        self._settle()
        self.feed.clear()
        self._publish_newest()
        return True

    def _publish_newest(self) -> None:
        if self.publisher is not None:
            self.publisher.publish_newest(self.steps, self.env_steps)

    def _measure_lag(self, sample: Sample) -> None:
        if "version" in sample.rows:
            acted: Any = sample.rows["version"][:, self._acted]
            version = self.steps if self.servers is None else self.servers.version
            lag = version - (acted.cpu().numpy() if isinstance(acted, Tensor) else acted)
            self._lag = float(np.maximum(lag, 0).mean())  # a restarted learner may be behind the weights that acted

    def _update(self, loss: Loss) -> bool:
        """False: the loss or the gradient is not finite, or far too large. Then nothing changes but counters."""
        norm = float(torch.linalg.vector_norm(self.flat.gradient))
        # A Huber loss has a finite gradient even where the loss is infinite, so both are checked.
        fine = all(map(math.isfinite, (norm, *(value.item() for value in loss.losses.values()))))
        if not self._check(self.steps + 1, fine):
            return False
        if self.servers is not None and not self.servers.accepts(loss.priorities):
            return False
        if self.updater.update(loss.losses, norm) and loss.after is not None:
            loss.after()
        self._latest = loss.metrics | {NORM: torch.tensor(norm)}
        return True

    def _check(self, number: int, fine: bool) -> bool:
        """Counts updates that are skipped because they are not finite."""
        if fine:
            self._bad_in_a_row = 0
            return True
        self.bad += 1
        self._bad_in_a_row += 1
        log.warning("learner: update %d skipped: its loss or gradient is not finite", number)
        if self._bad_in_a_row >= BAD_IN_A_ROW:
            raise Diverged(
                f"The learner diverged: {BAD_IN_A_ROW} updates in a row were not finite. Lower learner.lr, or check "
                "the scale of the rewards and observations; the last checkpoint is from before that."
            )
        return False

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
        metrics = {"skipped_updates": float(self.bad)} | self.updater.metrics()
        if self.publisher is not None:
            metrics["published"] = float(self.publisher.published)
        if not math.isnan(self._lag):
            metrics[LAG] = self._lag
        metrics |= memory_of("learner", str(self.device))
        return metrics | self._diagnosis | {name: float(x.mean()) for name, x in self._latest.items()}

    def state(self) -> dict[str, Any]:
        """Weights that are owned by servers are saved there."""
        self._settle()
        state: dict[str, Any] = {}
        if self.updater.owns_weights:
            state |= {f"weights/{name}": x for name, x in params.export(self.net).items()}
        if self._own_target:
            state |= {f"target/{name}": x for name, x in params.export(self.target).items()}
        state |= {f"optimizer/{name}": x for name, x in self.updater.state().items()}
        counts = {"steps": self.steps, "bad": self.bad, "env_steps": self.env_steps}
        counts |= {} if self.servers is None else {"copied": self._copied}
        return state | counts | {"torch_rng": torch.get_rng_state().numpy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._settle()
        if self.updater.owns_weights:
            params.restore(self.net, params.under("weights/", state))
        if self._own_target:
            params.restore(self.target, params.under("target/", state))
        self.updater.load_state(params.under("optimizer/", state))
        self.steps, self.bad = int(state["steps"]), int(state["bad"])
        torch.set_rng_state(torch.from_numpy(state["torch_rng"]))
        self.env_steps = int(state.get("env_steps", self.counters.get("env_steps")))  # older checkpoints lack it
        self._copied = int(state.get("copied", -1))
        self._publish_newest()


def owned(flat: Flat, config: LearnerConfig, counters: Counters, env_steps: int) -> Owned:
    """The optimizer of the config, in this process."""
    return Owned(flat, partial(make_optimizer, config), learning_rate(config, counters, env_steps), config.clip_norm)


def learning_rate(config: LearnerConfig, counters: Counters, env_steps: int) -> Callable[[], float]:
    """That of now: it may be annealed over `env_steps`."""

    def rate() -> float:
        left = max(0.0, 1 - counters.get("env_steps") / env_steps) if config.anneal else 1.0
        return config.lr * left

    return rate


def make_optimizer(config: LearnerConfig, weights: Tensor, gradient: Tensor) -> optim.Optimizer:
    if config.optimizer == "adam":
        return optim.Adam(weights, gradient, config.eps)
    if config.optimizer == "rmsprop":
        return optim.RMSProp(weights, gradient, config.eps, config.decay, config.centered, config.square_start)
    if config.optimizer == "adagrad":
        return optim.AdaGrad(weights, gradient, config.eps, config.square_start)
    return optim.SGD(weights, gradient)
