"""Evaluator: plays greedy episodes with the newest weights, in environments of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from veldt.acting.actor import MakeEnvs
from veldt.counters import Counters
from veldt.envs import Envs
from veldt.metrics import EVALUATOR
from veldt.seeds import derive

if TYPE_CHECKING:
    from veldt.acting.policy import LocalPolicy
    from veldt.acting.seam import Policy


class Evaluation(NamedTuple):
    returns: list[float]
    lengths: list[int]

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.lengths))


def evaluate(
    envs: Envs,
    policy: Policy,
    episodes: int,
    seed: int,
    max_length: int = 27_000,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Plays whole episodes, the same number in each environment (or one more): short ones get no extra weight.

    An episode longer than `max_length` steps counts with its return so far, and its environment adds nothing until its
    next episode begins. After twice the longest possible time it returns the episodes it has. None: `stopping` was true.
    """
    share = np.array([(episodes + lane) // envs.n for lane in range(envs.n)])
    returns: list[list[float]] = [[] for _ in range(envs.n)]
    lengths: list[list[int]] = [[] for _ in range(envs.n)]
    total, length = np.zeros(envs.n), np.zeros(envs.n, np.int64)
    policy.reset(0)
    record = envs.reset(seed)
    waiting = np.zeros(envs.n, np.bool_)  # for the next episode to begin, after a long one was cut off
    for _ in range(2 * max_length * int(share.max())):
        if stopping():
            return None
        sent, out = policy.send(0, record), policy.recv(0)
        assert sent and out is not None
        previous, record = record, envs.step(out["action"])
        waiting &= ~record["first"]
        total += record["reward"]
        length += ~previous["last"]
        for lane in np.flatnonzero(record["last"] | (length >= max_length)):
            if len(returns[lane]) < share[lane] and not waiting[lane]:
                returns[lane].append(float(total[lane]))
                lengths[lane].append(int(length[lane]))
            waiting[lane] |= not record["last"][lane]
            total[lane], length[lane] = 0, 0
        if all(len(done) == wanted for done, wanted in zip(returns, share, strict=True)):
            break
    return Evaluation([x for lane in returns for x in lane], [x for lane in lengths for x in lane])


class Evaluator:
    """A worker: every `every` env steps it plays greedy episodes with the newest weights, in environments of its own."""

    METRICS: ClassVar = EVALUATOR

    def __init__(
        self, envs: MakeEnvs, policy: LocalPolicy, counters: Counters, every: int, episodes: int, max_length: int, seed: int
    ) -> None:
        self.policy, self.counters, self.every, self.episodes, self.seed = policy, counters, every, episodes, seed
        self.max_length = max_length
        self.envs = envs(min(episodes, 16))
        self.next = 0  # env steps; 0: not known yet
        self.latest: Evaluation | None = None

    def step(self) -> bool:
        steps = self.counters.get("env_steps")
        self.next = self.next or (steps // self.every + 1) * self.every
        if steps < self.next:
            return False
        self.policy.pull()
        seed = derive(self.seed, "evaluation", self.counters.get("evaluations") + 1)
        found = evaluate(self.envs, self.policy, self.episodes, seed, self.max_length, lambda: self.counters.stopping)
        if found is not None:  # None: the run stops; a resumed run repeats this evaluation
            self.latest = found
            # Actors may have passed several evaluation points meanwhile; skip all but the newest.
            steps = self.counters.get("env_steps")
            self.next = max(self.next + self.every, steps // self.every * self.every)
            self.counters.add("evaluations", 1)
        return True

    def metrics(self) -> dict[str, float]:
        """The newest evaluation, once."""
        latest, self.latest = self.latest, None
        if latest is None:
            return {}
        return {"eval_return": latest.mean_return, "eval_length": latest.mean_length}

    def state(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state(self, state: dict[str, Any]) -> None:
        self.next = int(state["next"])

    def close(self) -> None:
        self.envs.close()
