"""Master: collects the returns of a generation of perturbed weights, updates the weights, begins the next generation.

It sends no tasks and gets no gradients: pairs and their noise follow from the seed (`learning/evolution.py`).
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from veldt.algorithms.es import ES
from veldt.counters import Counters
from veldt.learning import optim, params
from veldt.learning.evolution import EvolutionConfig, Generation, estimate, fill_noise, noise_index, noiseless_episodes
from veldt.learning.optim import Flat, Owned
from veldt.learning.params import LatestParams, Publisher
from veldt.metrics import MASTER
from veldt.ports import latest, stream
from veldt.records.step import EnvSpec
from veldt.records.tree import Array

log = logging.getLogger("veldt")
LIFE = 1 << 40  # versions that one life of the master may have


class Master:
    """A worker of the program: each `step()` is one update, or False while its generation is not complete.

    A generation that is begun again, after a restart or a resume, has another version, so workers evaluate it again.
    """

    METRICS: ClassVar = MASTER
    TAKES_WEIGHTS: ClassVar = True  # as `initial`

    def __init__(
        self,
        algorithm: ES,
        env: EnvSpec,
        params_: LatestParams,
        counters: Counters,
        config: EvolutionConfig,
        env_steps: int,  # of the whole run: no generation begins after so many
        seed: int,
        table: Array,  # of noise, which it fills
        reference: Any = None,  # observations for virtual batch normalisation, or a function that makes them
        incarnation: int = 0,
        initial: Mapping[str, Array] | None = None,  # weights to start with, by name; others are random
    ) -> None:
        self.config, self.counters, self.seed, self.table = config, counters, seed, table
        self.last_step = env_steps
        fill_noise(table, seed)
        torch.manual_seed(seed)
        self.net = algorithm.network(env).eval()
        if initial is not None:
            params.restore(self.net, params.export(self.net) | dict(initial))
        self.flat = Flat.of(self.net)
        self.size = len(self.flat.gradient)
        self.updater = Owned(self.flat, self._optimizer, self._rate, clip_norm=0.0)
        self.publisher = Publisher(params_, self.flat.weights)
        self.reference = reference() if callable(reference) else reference
        norm = self.net.norm
        self.observed = np.zeros(1 + 2 * (0 if norm is None else len(norm.mean)))  # count, sums, sums of squares
        self.number = 0  # updates
        self.env_steps = 0  # of all that was evaluated before this generation
        self.episodes = 0
        self.skipped = 0  # updates
        self.late = self.repeated = self.evaluated = 0  # results of an earlier generation; that came twice; episodes ever
        self.cap = config.cap
        self.version = incarnation * LIFE
        self._latest: dict[str, float] = {}
        # A restarted master keeps the weights that are published already until its state is loaded.
        self._begin(publish=params_.pull(-1) is None)

    # What workers call.

    @latest
    def generation(self, have: int = -1) -> Generation | None:
        return None if have == self.version else self._generation

    @stream
    def result(self, generation: int, pair: int, plus: float, minus: float, plus_steps: int, minus_steps: int) -> None:
        """Returns and lengths of a pair's two episodes. Below 0, `pair` is an episode without noise: the first of them."""
        steps, episodes = plus_steps + minus_steps, 2 if pair >= 0 else 1
        self.evaluated += episodes
        if generation != self.number or self.done or not self._wanted(pair):
            self.late += 1
            self._waste(steps)
        elif pair in self._results:
            self.repeated += 1
            self._waste(steps)
        else:
            self._results[pair] = (plus, minus, plus_steps, minus_steps)
            self._steps += steps
            self._missing -= pair >= 0
            self._unperturbed += pair < 0

    @stream
    def observations(self, generation: int, pair: int, sums: Array) -> None:
        """Count, sums and sums of squares of the observations of a pair. They come before its result."""
        if generation == self.number:
            self._observed.setdefault(pair, sums.copy())

    @stream
    def broken_off(self, steps: int) -> None:
        """Steps of episodes that ended when the next generation began."""
        self._waste(steps)

    def step(self) -> bool:
        complete = self._complete()
        if complete:
            self._update()
            self._begin()
        self._count()
        return complete

    def _wanted(self, pair: int) -> bool:
        exact = self.config.mode == "exact"
        return -self._noiseless <= pair < self.config.pairs if exact else self._missing > 0

    def _complete(self) -> bool:
        waits = self.config.mode == "exact" and self._unperturbed < self._noiseless
        return not self.done and self._missing == 0 and not waits

    def _waste(self, steps: int) -> None:
        """Counts steps of results that no update uses. In mode exact they do not count: the run must not depend on them."""
        if self.config.mode == "first":
            self.env_steps += steps
            self._count()

    def _begin(self, publish: bool = True) -> None:
        """Drops the results of this generation so far, and publishes it to the workers."""
        self.version += 1
        self.done = self.env_steps >= self.last_step  # the run has all its steps
        self._results: dict[int, tuple[float, float, int, int]] = {}
        self._observed: dict[int, Array] = {}
        self._missing, self._steps, self._unperturbed = self.config.pairs, 0, 0
        self._noiseless = noiseless_episodes(self.config, self.number)
        if self.reference is not None:
            self.net.refer(self.reference)
        vector = self.flat.weights.numpy().copy()
        self._generation = Generation(self.version, -1 if self.done else self.number, self.cap, vector)
        if publish:
            self.publisher.publish(self.number, self.env_steps)

    def _update(self) -> None:
        pairs = sorted(pair for pair in self._results if pair >= 0)
        found = [self._results[pair] for pair in pairs]
        returns = np.array([result[:2] for result in found])
        steps = np.array([result[2:] for result in found])
        before = self.flat.weights[: self.size].clone()
        if (returns == returns[0, 0]).all():  # then the ranks say nothing, and momentum and decay alone would move weights
            self.skipped += 1
        else:
            self._ascend(returns, pairs)
        step = torch.linalg.vector_norm(self.flat.weights[: self.size] - before)
        ratio = float(step / torch.linalg.vector_norm(before).clamp_min(1e-12))
        self._count_observations(pairs)
        self.env_steps += self._steps
        self.episodes += returns.size + self._unperturbed
        self._report(returns, steps, ratio)
        if self.cap and (steps >= self.cap).mean() >= self.config.cap_fraction:
            self.cap = int(self.cap * self.config.cap_growth) + 1
        self.number += 1

    def _ascend(self, returns: Array, pairs: list[int]) -> None:
        at = [noise_index(self.seed, self.number, pair, len(self.table), self.size) for pair in pairs]
        gradient = self.flat.gradient.numpy()
        estimate(returns, [self.table[i : i + self.size] for i in at], gradient)
        np.negative(gradient, out=gradient)  # optimizers descend
        if self.config.weight_decay:
            gradient += np.float32(self.config.weight_decay) * self.flat.weights.numpy()[: self.size]
        self.updater.update([""], 0.0)

    def _count_observations(self, pairs: list[int]) -> None:
        """Adds those of the generation's pairs, in their order, to the statistics."""
        norm = self.net.norm
        if norm is None:
            return
        for pair in pairs:
            if pair in self._observed:
                self.observed += self._observed[pair]
        count, sums, squares = self.observed[0], *np.split(self.observed[1:], 2)
        if count > 1:
            mean = sums / count
            norm.mean.copy_(torch.from_numpy(mean))
            norm.variance.copy_(torch.from_numpy(np.maximum(squares / count - mean**2, 0)))

    def _report(self, returns: Array, steps: Array, ratio: float) -> None:
        self._latest = {
            "train_return": float(returns.mean()),
            "train_length": float(steps.mean()),
            "best_pair_return": float(returns.mean(1).max()),
            "update_ratio": ratio,
            "episode_cap": float(self.cap),
        }
        unperturbed = [result[0] for pair, result in self._results.items() if pair < 0]
        if unperturbed:
            self._latest["mean_weights_return"] = float(np.mean(unperturbed))

    def _optimizer(self, weights: torch.Tensor, gradient: torch.Tensor) -> optim.Optimizer:
        if self.config.optimizer == "adam":
            return optim.Adam(weights, gradient, self.config.eps)
        return optim.Momentum(weights, gradient, self.config.sgd_momentum)

    def _rate(self) -> float:
        return self.config.lr * (max(0.0, 1 - self.env_steps / self.last_step) if self.config.anneal else 1.0)

    def _count(self) -> None:
        """Sets the counts of the run, which ends when its env steps are done: so the last of them is counted when the
        generation is complete."""
        steps = self.env_steps + self._steps
        if not self.done:
            steps = min(steps, self.last_step - 1)
        for name, n in (("env_steps", steps), ("learner_steps", self.number), ("episodes", self.episodes)):
            if change := n - self.counters.get(name):
                self.counters.add(name, change)

    def metrics(self) -> dict[str, float]:
        counts = {"evaluated": self.evaluated, "late_results": self.late, "repeated_results": self.repeated}
        counts |= {"published": self.publisher.published, "equal_generations": self.skipped}
        return {**counts, "learning_rate": self._rate(), "generation_done": self._part_done, **self._latest}

    @property
    def _part_done(self) -> float:
        return 1 - self._missing / self.config.pairs

    # Checkpoints have no part of a generation: it is begun again.

    def cut(self) -> bool:
        """In mode first what depends on the order of arrival is dropped, and its steps count as they were made."""
        if self.config.mode == "first":
            self.env_steps += self._steps
            self._begin()
            self._count()
        return True

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"weights/{name}": x for name, x in params.export(self.net).items()}
        state |= {f"optimizer/{name}": x for name, x in self.updater.state().items()}
        counts = {"number": self.number, "env_steps": self.env_steps, "episodes": self.episodes, "skipped": self.skipped}
        return state | counts | {"cap": self.cap, "observed": self.observed}

    def load_state(self, state: dict[str, Any]) -> None:
        params.restore(self.net, params.under("weights/", state))
        self.updater.load_state(params.under("optimizer/", state))
        self.number, self.env_steps, self.episodes = (int(state[name]) for name in ("number", "env_steps", "episodes"))
        self.skipped, self.cap = int(state["skipped"]), int(state["cap"])
        self.observed[...] = state["observed"]
        self._begin()
        self._count()
