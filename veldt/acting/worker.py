"""Worker: evaluates perturbed weights. It gets no tasks: it takes pairs i, i + W, ... until the next generation begins."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from veldt.acting.population import Population
from veldt.algorithms.es import ES
from veldt.compiled import njit
from veldt.counters import Counters
from veldt.envs import Envs
from veldt.learning.evolution import (
    EvolutionConfig,
    Generation,
    episode_seed,
    noise_index,
    noiseless_episodes,
    observes,
)
from veldt.learning.master import Master
from veldt.metrics import WORKER
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.seeds import derive


class Episode(NamedTuple):
    pair: int  # below 0: without noise
    sign: int


NOTHING = Generation(-1, -1, 0, np.zeros(0, np.float32))  # to do


class Outcome(NamedTuple):
    total: float
    steps: int
    sums: Array | None  # count, sums, sums of squares of its observations


class Worker:
    """Each `step()` is one step of all its environments. Every lane plays one episode after the other."""

    METRICS: ClassVar = WORKER

    def __init__(
        self,
        algorithm: ES,
        env: EnvSpec,
        envs: Callable[[int], Envs],  # `separate` ones
        lanes: int,
        master: Master,
        counters: Counters,
        config: EvolutionConfig,
        noise_on_actions: float,
        seed: int,
        index: int,
        workers: int,
        table: Array,
        reference: Any = None,  # observations for virtual batch normalisation, or a function that makes them
    ) -> None:
        self.master, self.counters, self.config, self.seed = master, counters, config, seed
        self.index, self.workers, self.table = index, workers, table
        self.envs = envs(lanes)
        self.population = Population(algorithm, env, lanes)
        self.reference = reference() if callable(reference) else reference
        self.explore = np.full(lanes, float(noise_on_actions))
        self.random = LaneRandom(lanes)
        self.timings = {"env": 0.0}  # seconds
        self.have = -1  # version of the generation
        self.number, self.cap = -1, 0
        self._steps = np.zeros(lanes, np.int64)
        self._record = self.envs.reset(derive(seed, "rest"))
        for lane in range(lanes):
            self.envs.rest(lane)
        self._bad = 0
        self._begin(NOTHING)

    def step(self) -> bool:
        found = self.master.generation(self.have)
        if found is not None:
            self._begin(found)
        self._begin_episodes()
        if not self._active.any():
            return False
        action = self.population.act(self._record, self.explore, self.random)
        if self._observing.any():
            self._observe()
        began = time.perf_counter()
        self._record = self.envs.step(action)
        self.timings["env"] += time.perf_counter() - began
        self._account(self._record)
        return True

    def _begin(self, found: Generation) -> None:
        """Drops all running episodes: they are of earlier weights."""
        lanes = self.population.lanes
        if self.number >= 0 and (broken := int(self._steps.sum())):
            self.master.broken_off(broken)
        self.have, self.number, self.cap = found.version, found.number, found.cap
        if self.number >= 0:
            self.population.share(found.vector)
        self._todo = self._episodes() if self.number >= 0 else iter(())
        self._episode = [Episode(0, 0)] * lanes
        self._done: dict[int, dict[int, Outcome]] = {}  # of pairs with one episode that ended, by its sign
        # started: it has its first record; ended: with the last step
        self._active, self._started, self._observing, self._ended = np.zeros((4, lanes), np.bool_)
        self._returns, self._steps = np.zeros(lanes), np.zeros_like(self._steps)
        self._limit = np.zeros(lanes, np.int64)
        size = 0 if self.population.net.norm is None else len(self.population.net.norm.mean)
        self._sums = np.zeros((lanes, 1 + 2 * size))
        self._left = True  # there may be more to do
        for lane in range(lanes):
            self.envs.rest(lane)

    def _episodes(self) -> Iterator[Episode]:
        """Those of this worker: first any without noise, then both of each of its pairs."""
        for i in range(noiseless_episodes(self.config, self.number)):
            if (self.number + i) % self.workers == self.index:
                yield Episode(-1 - i, 0)
        last = self.config.pairs if self.config.mode == "exact" else None
        for pair in itertools.takewhile(lambda j: last is None or j < last, itertools.count(self.index, self.workers)):
            yield Episode(pair, 1)
            yield Episode(pair, -1)

    def _begin_episodes(self) -> None:
        """In lanes that have none."""
        if not self._left or self._active.all():
            return
        for lane in np.flatnonzero(~self._active):
            episode = next(self._todo, None)
            if episode is None:
                self._left = False
                return
            self._begin_episode(int(lane), *episode)

    def _begin_episode(self, lane: int, pair: int, sign: int) -> None:
        noise, size = None, self.population.parameters
        if sign:
            at = noise_index(self.seed, self.number, pair, len(self.table), size)
            noise = self.table[at : at + size]
        self.population.perturb(lane, noise, sign * self.config.sigma, self.reference)
        seed = episode_seed(self.config, self.seed, self.number, pair, sign)
        self.envs.begin(lane, seed)
        if self.explore.any():
            self.random.begin(lane, derive(seed, "actions", 1 + sign))
        self._episode[lane] = Episode(pair, sign)
        self._active[lane], self._started[lane] = True, False
        self._returns[lane] = self._steps[lane] = 0
        self._limit[lane] = self.cap if self.cap and sign else np.iinfo(np.int64).max
        self._observing[lane] = self._sums.shape[1] > 1 and observes(self.config, self.seed, self.number, pair)
        self._sums[lane] = 0

    def _observe(self) -> None:
        """Adds what the last actions were chosen from, in episodes that have begun."""
        x = self.population.seen
        assert x is not None
        _add(self._observing, self._started, np.ascontiguousarray(x), self._sums)

    def _account(self, record: Tree) -> None:
        """An episode's first record comes with the step that resets its environment; no action was applied there."""
        columns = record["reward"], record["first"], record["last"]
        ends = _account(self._active, self._started, *columns, self._returns, self._steps, self._limit, self._ended)
        if self.envs.bad > self._bad:
            self.counters.add("bad_observations", self.envs.bad - self._bad)
            self._bad = self.envs.bad
        if ends:
            for lane in np.flatnonzero(self._ended):
                self._end_episode(int(lane))

    def _end_episode(self, lane: int) -> None:
        pair, sign = self._episode[lane]
        sums = self._sums[lane].copy() if self._observing[lane] else None
        outcome = Outcome(float(self._returns[lane]), int(self._steps[lane]), sums)
        self._active[lane] = self._started[lane] = self._observing[lane] = False
        self._steps[lane] = 0
        self.envs.rest(lane)
        if pair < 0:
            self.master.result(self.number, pair, outcome.total, 0.0, outcome.steps, 0)
            return
        both = self._done.setdefault(pair, {})
        both[sign] = outcome
        if len(both) == 2:
            plus, minus = both[1], both[-1]
            if plus.sums is not None and minus.sums is not None:
                self.master.observations(self.number, pair, plus.sums + minus.sums)
            self.master.result(self.number, pair, plus.total, minus.total, plus.steps, minus.steps)
            del self._done[pair]

    def cut(self) -> bool:
        """For a checkpoint. In mode first the generation is begun again, with nothing under way."""
        if self.config.mode == "first":
            self._begin(NOTHING)
        return True

    def close(self) -> None:
        self.envs.close()


@njit("b1(b1[::1], b1[::1], f4[::1], b1[::1], b1[::1], f8[::1], i8[::1], i8[::1], b1[::1])")
def _account(
    active: Array,
    started: Array,
    reward: Array,
    first: Array,
    last: Array,
    returns: Array,
    steps: Array,
    limit: Array,
    ended: Array,
) -> bool:
    """Adds a step to the episodes that have begun. Fills in which of them ended with it, and returns whether any did."""
    some = False
    for lane in range(len(active)):
        ended[lane] = False
        if started[lane]:
            returns[lane] += reward[lane]
            steps[lane] += 1
            ended[lane] = last[lane] or steps[lane] >= limit[lane]
            some |= ended[lane]
        elif active[lane] and first[lane]:
            started[lane] = True
    return some


@njit("void(b1[::1], b1[::1], f4[:,::1], f8[:,::1])")
def _add(observing: Array, started: Array, x: Array, sums: Array) -> None:
    """Adds x [lanes, D] to the count, the sums and the sums of squares of each lane."""
    size = x.shape[1]
    for lane in range(len(x)):
        if observing[lane] and started[lane]:
            sums[lane, 0] += 1
            for j in range(size):
                wide = np.float64(x[lane, j])
                sums[lane, 1 + j] += wide
                sums[lane, 1 + size + j] += wide * wide


class LaneRandom:
    """Random numbers of which each lane has its own stream, so that they do not depend on what other lanes do."""

    def __init__(self, lanes: int) -> None:
        self._streams = [np.random.default_rng(0)] * lanes

    def begin(self, lane: int, seed: int) -> None:
        self._streams[lane] = np.random.default_rng(seed)

    def random(self, size: tuple[int, ...], /) -> Array:
        return np.stack([stream.random(size[1:]) for stream in self._streams])

    def standard_normal(self, size: tuple[int, ...], /) -> Array:
        return np.stack([stream.standard_normal(size[1:]) for stream in self._streams])
