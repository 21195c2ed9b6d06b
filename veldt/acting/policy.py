"""Policies that run a network: in the process that asks, or for many groups of environments at once."""

import contextlib
import logging
import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from veldt.acting.actor import Policy
from veldt.acting.exploration import Explore, HeldRandom
from veldt.acting.graphed import GraphedForward, gather
from veldt.algorithms.base import Algorithm, Tensors
from veldt.counters import Counters
from veldt.gpus import memory_of
from veldt.learning.params import LatestParams, Weights, flatten
from veldt.metrics import INFERENCE, POLICY
from veldt.records.history import History
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree, zeros
from veldt.seeds import derive

log = logging.getLogger("veldt")
MOST_ORDERS = 1000  # orders of groups in a batch whose indices are cached


@dataclass(eq=False, repr=False)
class NetworkPolicy(Policy):
    """A network with the newest weights of `params`, an amount of exploration and a random generator. Records nothing."""

    algorithm: Algorithm
    env: EnvSpec
    params: LatestParams
    counters: Counters
    # An epsilon, or the deviation of noise: a schedule, one for each environment, or one for all (an evaluation); 0: greedy
    explore: Explore | Array | float
    seed: int
    refresh: int = 1  # forward passes between two pulls; 0: it never pulls by itself, as in an evaluation
    hold: int = 1  # steps for which an environment keeps its random numbers, at most
    device: str = "cpu"
    incarnation: int = 0  # how often its process was restarted: each life draws other numbers

    def __post_init__(self) -> None:
        seed = derive(self.seed, "life", self.incarnation) if self.incarnation else self.seed
        self.rng = np.random.default_rng(seed)
        # In eval mode: dropout is off, and running averages are the learner's.
        self.net = self.algorithm.network(self.env).to(self.device).requires_grad_(False).eval()
        self.vector = flatten(self.net)
        self.version = -1
        self.when: tuple[int, float] = (-1, math.nan)  # `env_steps` and `published_at` of the weights
        self.steps = 0  # forward passes
        self._ready: dict[int, Tree] = {}  # answers by group
        self._explored = np.zeros(0)  # how much each environment explored last
        self._records_version = "version" in self.algorithm.extras(self.env)
        self._versions = np.zeros(0, np.int64)  # the version, for each of the last environments

    def recv(self, group: int) -> Tree | None:
        return self._ready.pop(group, None)

    def pull(self) -> None:
        """Takes the newest weights, unless it has them."""
        newer = self.params.pull(self.version)
        if newer is not None:
            self.version, self.when = newer.version, (newer.env_steps, newer.published_at)
            vector = newer.vector if newer.vector.flags.writeable else newer.vector.copy()
            self.vector.copy_(torch.from_numpy(vector))

    def weights(self) -> Weights:
        """Those that it has."""
        return Weights(self.version, self.vector.cpu().numpy(), *self.when)

    def pull_if_due(self) -> None:
        """Counts one forward pass; pulls before every `refresh`-th."""
        if self.refresh and self.steps % self.refresh == 0:
            self.pull()
        self.steps += 1

    def act(
        self, rows: Tensors, before: Tensors, n: int, held: HeldRandom | None, lanes: Array | None = None
    ) -> tuple[Tree, Tensors]:
        """Actions of n environments and the columns recorded with them; and the next recurrent state.

        Rows are [n, history, ...]. `before` is the recurrent state [n, ...] before this step, which is recorded too.
        """
        if held is not None:
            held.begin(np.arange(n) if lanes is None else lanes)
        out, after = self.algorithm.act(self.net, rows, before, self._amounts(n, lanes), held or self.rng)
        for name, tensor in before.items():
            out[name] = tensor.cpu().numpy()
        if self._records_version:
            if len(self._versions) != n or self._versions[0] != self.version:
                self._versions = np.full(n, self.version)
                self._versions.flags.writeable = False  # it is given out again and again
            out["version"] = self._versions
        return out, after

    def _amounts(self, n: int, lanes: Array | None) -> Array:
        """How much each of n environments explores now; `lanes` are their places in `explore`, if it holds more."""
        if callable(self.explore):
            self._explored = np.full(n, self.explore(self.counters.get("env_steps")))
        elif lanes is not None:
            self._explored = np.asarray(self.explore, np.float64)[lanes]
        elif len(self._explored) != n:
            self._explored = np.array(np.broadcast_to(self.explore, (n,)), np.float64)
        return self._explored

    def _held_for(self, n: int) -> HeldRandom | None:
        return HeldRandom(self.rng, n, self.hold) if self.hold > 1 else None

    def metrics(self) -> dict[str, float]:
        """The mean amount of exploration, and by how many updates the weights lag; nothing for an evaluation."""
        if not len(self._explored) or isinstance(self.explore, float | int):
            return {}
        lag = max(0, self.counters.get("learner_steps") - max(0, self.version))
        name = self.algorithm.exploration  # empty: the algorithm has no such amount
        return {"lag_updates": float(lag)} | ({name: float(self._explored.mean())} if name else {})

    def state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class LocalPolicy(NetworkPolicy):
    """Inference in this process: `send` computes the answer."""

    METRICS: ClassVar = POLICY

    def __post_init__(self) -> None:
        super().__post_init__()
        self._history: dict[int, History] = {}
        self._state: dict[int, Tensors] = {}
        self._held: dict[int, HeldRandom | None] = {}

    @torch.inference_mode()
    def send(self, group: int, step: Tree) -> bool:
        self.pull_if_due()
        n = len(step["first"])
        if group not in self._history:
            state = self.algorithm.state(self.env)
            self._history[group] = History(self.env, self.algorithm.window.history, n, rewards=bool(state))
            self._state[group] = {name: torch.zeros(n, *c.shape, device=self.device) for name, c in state.items()}
            self._held[group] = self._held_for(n)
        rows = self._history[group].append(step)
        tensors = {name: torch.from_numpy(x if x.flags.writeable else x.copy()) for name, x in rows.items()}
        if self.device != "cpu":
            tensors = {name: x.to(self.device) for name, x in tensors.items()}
        before, held = self._before(group, step), self._held[group]
        self._ready[group], self._state[group] = self.act(tensors, before, n, held)
        return True

    def reset(self, group: int) -> None:
        self.steps = 0  # the next pass pulls: pulls stay in step with the blocks that follow a reset
        for kept in (self._history, self._state, self._held, self._ready):
            kept.pop(group, None)

    def _before(self, group: int, step: Tree) -> Tensors:
        """The recurrent state before this step: zero where an episode begins."""
        state = self._state[group]
        if state and step["first"].any():
            begins = torch.from_numpy(step["first"]).to(self.device)
            for tensor in state.values():
                tensor[begins] = 0
        return state


@dataclass(eq=False, repr=False, kw_only=True)
class BatchedPolicy(NetworkPolicy):
    """Collects the records of groups of n environments each, and answers many groups with one forward pass (SEED RL).

    A batch is run once it has `batch` environments, or all groups of one actor wait, or the first group has waited for
    `wait` seconds: a slow group never delays the others. History and recurrent state of every environment are kept here,
    on the device of the network.
    """

    METRICS: ClassVar = INFERENCE

    groups: int
    n: int
    batch: int
    wait: float
    together: int = 1  # groups of one actor; their numbers are consecutive
    graph: bool = True  # on a GPU, forward passes are CUDA graphs

    due = math.inf  # time.monotonic() at which the batch is run at the latest

    def __post_init__(self) -> None:
        super().__post_init__()
        env, device = self.env, self.device
        self.asked: list[int] = []  # groups that wait, in the order of their rows in the batch
        self._refused: set[int] = set()  # groups for which `recv` returned None in this batch
        self._asks = [0] * -(-self.groups // self.together)  # by actor: groups that wait
        self._batches = self._rows_run = 0  # since the last `metrics`
        self._slices: dict[int, Tensors] = {}  # by size of the batch
        self._lanes = lru_cache(MOST_ORDERS)(self._lanes_of)
        self._held = self._held_for(self.groups * self.n)
        history, state, total = self.algorithm.window.history, self.algorithm.state(env), self.groups * self.n
        self._seen = [*env.seen, *(["reward"] if state else [])]
        columns = {name: env.step[name] for name in [*self._seen, *(["first"] if state else [])]}
        if history > 1:
            columns |= {name: env.step[name] for name in ("first", "valid")}
        # Rows of the batch that is being collected, on the host; `_staged` are numpy views of them.
        self._stage = {name: torch.from_numpy(x) for name, x in zeros(columns, total).items()}
        if device != "cpu":
            self._stage = {name: x.pin_memory() for name, x in self._stage.items()}
        self._staged = [(name, x.numpy()) for name, x in self._stage.items()]
        # By environment, on the device: rows [total, history, ...], the newest last; and the recurrent state.
        # One row more is for environments that do not exist.
        self._rows = {
            name: torch.zeros(total + 1, history, *x.shape[1:], dtype=x.dtype, device=device)
            for name, x in (self._stage.items() if history > 1 else ())
        }
        self._states = {name: torch.zeros(total + 1, *c.shape, device=device) for name, c in state.items()}
        self.graphs: GraphedForward | None = None
        if self.graph and str(device).startswith("cuda"):
            self.use_graphs()

    def use_graphs(self) -> None:
        """From now on forward passes are graphs, if the algorithm has that part of `act` apart."""
        if type(self.algorithm).act is Algorithm.act:
            how = (self.algorithm, self.net, self._rows, self._states, self._stage, self._seen)
            self.graphs = GraphedForward(*how)

    def send(self, group: int, step: Tree) -> bool:
        n, at = self.n, self.n * len(self.asked)
        assert group not in self.asked and len(step["first"]) == n, (group, self.asked, len(step["first"]))
        for name, column in self._staged:
            column[at : at + n] = step[name]
        if not self.asked:
            self.due = time.monotonic() + self.wait
        self.asked.append(group)
        self._asks[group // self.together] += 1
        return True

    def recv(self, group: int) -> Tree | None:
        if group in self.asked and self._is_due(group):
            self._run()
        return super().recv(group)

    def reset(self, group: int) -> None:
        if group in self.asked:
            self._withdraw(group)
        self._ready.pop(group, None)
        lanes = slice(group * self.n, (group + 1) * self.n)
        with contextlib.nullcontext() if self.graphs is None else torch.cuda.stream(self.graphs.stream):
            for x in (*self._rows.values(), *self._states.values()):
                x[lanes] = 0
        if self._held is not None:
            self._held.reset(lanes)

    def _is_due(self, group: int) -> bool:
        """The first `recv` of a group is refused, so that other groups can join the batch."""
        if len(self.asked) == self.groups or self.n * len(self.asked) >= self.batch:
            return True
        if group not in self._refused:
            self._refused.add(group)
            return False
        return self.together in self._asks or time.monotonic() >= self.due

    def _withdraw(self, group: int) -> None:
        place, stop = self.asked.index(group), self.n * len(self.asked)
        for _, column in self._staged:
            column[self.n * place : stop - self.n] = column[self.n * (place + 1) : stop].copy()
        self.asked.remove(group)
        self._asks[group // self.together] -= 1
        if not self.asked:
            self.due = math.inf

    @torch.inference_mode()
    def _run(self) -> None:
        asked, n, size = self.asked, self.n, self.n * len(self.asked)
        if self.graphs is None:
            out = self._forward(size)
        else:
            with torch.cuda.stream(self.graphs.stream):
                out = self._replay(self.graphs, size)
        for place, group in enumerate(asked):
            self._ready[group] = {name: x[place * n : (place + 1) * n] for name, x in out.items()}
        self._batches += 1
        self._rows_run += size
        self.asked, self.due = [], math.inf
        self._asks = [0] * len(self._asks)
        self._refused.clear()

    def _forward(self, size: int) -> Tree:
        self.pull_if_due()
        lanes, index = self._lanes(tuple(self.asked))
        rows, before = gather(self._rows, self._states, index, self._collected(size), self._seen)
        out, after = self.act(rows, before, size, self._held, lanes)
        for name, x in self._rows.items():
            x[index] = rows[name]
        for name, x in after.items():
            self._states[name][index] = x
        return out

    def _replay(self, graphs: GraphedForward, size: int) -> Tree:
        self.pull_if_due()
        lanes, index = self._lanes(tuple(self.asked))
        try:
            found = graphs.run(index)
        except Exception as error:
            log.warning("inference: no CUDA graph, which is slower: %s: %s", type(error).__name__, error)
            self.graphs = None
            out = self._forward(size)
            if graphs.stream is not None:
                graphs.stream.synchronize()  # the next pass reads its histories and states on another stream
            return out
        if self._held is not None:
            self._held.begin(lanes)
        before = {name: found.pop(name) for name in self._states}
        out = self.algorithm.decide(self.net, found, self._amounts(size, lanes), self._held or self.rng) | before
        if before:
            for name, x in self.algorithm.taken(self.net, out).items():
                self._states[name].index_copy_(0, index, x)
        if self._records_version:
            out["version"] = np.full(size, self.version)
        return out

    def _collected(self, size: int) -> Tensors:
        """The rows of the batch, on the device."""
        if self.device != "cpu":
            return {name: x[:size].to(self.device, non_blocking=True) for name, x in self._stage.items()}
        if size not in self._slices:  # the same views every time
            self._slices[size] = {name: x[:size] for name, x in self._stage.items()}
        return self._slices[size]

    def _lanes_of(self, asked: tuple[int, ...]) -> tuple[Array, torch.Tensor]:
        """The environments of these groups, in their order."""
        lanes = (np.array(asked)[:, None] * self.n + np.arange(self.n)).ravel()
        return lanes, torch.from_numpy(lanes).to(self.device)

    def metrics(self) -> dict[str, float]:
        metrics = super().metrics()
        if self._batches:
            metrics["inference_batch"] = self._rows_run / self._batches
        self._batches = self._rows_run = 0
        return metrics | memory_of("inference", self.device)
