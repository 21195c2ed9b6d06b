"""Actor: steps environments with a policy. Evaluator: an actor with a greedy policy and the newest weights."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from veldt.compiled import njit
from veldt.counters import Counters
from veldt.envs import Envs
from veldt.metrics import ACTOR, EVALUATOR
from veldt.records.tree import Array, Tree
from veldt.seeds import derive

if TYPE_CHECKING:  # an actor under central inference imports no torch
    from veldt.acting.policy import LocalPolicy, Policy

MakeEnvs = Callable[[int], Envs]  # how many -> a vector of so many environments


class Actor:
    """A worker: each `step()` moves every group of environments on by one step, where the policy is ready for it."""

    METRICS: ClassVar = ACTOR

    def __init__(
        self,
        envs: MakeEnvs,
        n: int,
        policy: Policy,
        counters: Counters,
        seed: int,
        name: str = "actor/0",
        groups: tuple[int, ...] = (0,),  # names for the policy, unique among all who share it
        incarnation: int = 0,
    ) -> None:
        self.policy, self.counters, self.seed, self.name = policy, counters, seed, name
        self.groups = {number: Group(envs(n)) for number in groups}
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.spent = {"env": 0.0}  # seconds
        self._bad = 0  # observations not passed on that were counted
        self._life = (incarnation,) if incarnation else ()
        self.reset(0)

    def step(self) -> bool:
        worked = False
        for number, group in self.groups.items():
            if group.record is not None and self.policy.send(number, group.record):
                group.record = None
            if group.record is None:
                worked |= self._advance(number, group)
        return worked

    def reset(self, number: int) -> None:
        """Begins new episodes everywhere; the environments' seeds follow from the run's seed and `number`."""
        for index, group in self.groups.items():
            self.policy.reset(index)
            group.begin(derive(self.seed, "env", self.name, index, number, *self._life))

    def cut(self) -> bool:
        """Ends all running episodes as truncated and flushes them to the store; False: not yet, call again.

        The episodes that this cuts short are left out of the returns. `reset` must follow.
        """
        return all([self._cut(number, group) for number, group in self.groups.items()])

    def _cut(self, number: int, group: Group) -> bool:
        if not group.ending:
            if group.record is None and not self._advance(number, group):
                return False
            assert group.record is not None
            group.record["last"] = np.ones_like(group.record["last"])
            if not self.policy.send(number, group.record):
                return False
            group.record, group.ending = None, True
        if not group.ended:
            group.ended = self.policy.recv(number) is not None
        return group.ended and self.policy.flush(number)

    def _advance(self, number: int, group: Group) -> bool:
        """Applies the action that was awaited, if it has come."""
        out = self.policy.recv(number)
        if out is None:
            return False
        self._apply(group, out["action"])
        return True

    def _apply(self, group: Group, action: Array) -> None:
        began = time.perf_counter()
        record = group.envs.step(action)
        self.spent["env"] += time.perf_counter() - began
        group.record = record
        applied, ended = _account(
            record["reward"], record["first"], record["valid"], record["last"], group.returns, group.lengths, group.clean
        )
        self.counters.add("env_steps", int(applied))
        if ended:
            for lane in np.flatnonzero(record["last"]):
                if group.clean[lane]:
                    self.returns.append(float(group.returns[lane]))
                    self.lengths.append(int(group.lengths[lane]))
                    self.counters.add("episodes", 1)
            group.forget(record["last"])

    def metrics(self) -> dict[str, float]:
        """Returns are those of exploring episodes, the mean of the last 100."""
        bad = sum(group.envs.bad for group in self.groups.values())
        self.counters.add("bad_observations", bad - self._bad)
        self._bad = bad
        metrics = {
            "episodes": float(self.counters.get("episodes")),
            "bad_observations": float(self.counters.get("bad_observations")),
        }
        if self.returns:
            metrics["train_return"] = float(np.mean(self.returns))
            metrics["train_length"] = float(np.mean(self.lengths))
        return metrics

    def state(self) -> dict[str, Any]:
        return {"returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])

    def close(self) -> None:
        for group in self.groups.values():
            group.envs.close()


class Group:
    """A vector of environments, the record that waits to be sent, and the sums of the running episodes."""

    def __init__(self, envs: Envs) -> None:
        self.envs = envs
        self.record: Tree | None = None  # None: sent, the action is awaited
        self.ending = self.ended = False
        self.returns = np.zeros(envs.n)
        self.lengths = np.zeros(envs.n, np.int64)
        self.clean = np.ones(envs.n, np.bool_)  # no bad observation in this episode

    def begin(self, seed: int) -> None:
        self.record = self.envs.reset(seed)
        self.ending = self.ended = False
        self.forget(np.ones(self.envs.n, np.bool_))

    def forget(self, lanes: Array) -> None:
        self.returns[lanes] = 0
        self.lengths[lanes] = 0
        self.clean[lanes] = True


@njit("Tuple((i8, b1))(f4[:], b1[:], b1[:], b1[:], f8[::1], i8[::1], b1[::1])")
def _account(reward: Array, first: Array, valid: Array, last: Array, returns: Array, lengths: Array, clean: Array) -> Any:
    """Adds a record [n] to the sums of its episodes; how many actions were applied, and whether an episode ended.

    Where a record is first, the action was ignored and the environment reset.
    """
    applied = ~first
    returns += reward
    lengths += applied
    clean &= valid
    return np.count_nonzero(applied), last.any()


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
    """Plays whole episodes. Each environment has its share of them, so that short ones are not counted more often.

    An episode that has not ended after `max_length` steps counts with what it has until then, and its environment is out
    of the count until the next one begins; if that takes twice as long, there are fewer episodes. None: `stopping` said so.
    """
    share = np.array([(episodes + lane) // envs.n for lane in range(envs.n)])
    returns: list[list[float]] = [[] for _ in range(envs.n)]
    lengths: list[list[int]] = [[] for _ in range(envs.n)]
    total, length = np.zeros(envs.n), np.zeros(envs.n, np.int64)
    policy.reset(0)
    record = envs.reset(seed)
    waiting = np.zeros(envs.n, np.bool_)  # for the next episode to begin, after one was not waited for
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
        if all(len(done) == part for done, part in zip(returns, share, strict=True)):
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
        self.next = 0  # env steps; not known yet
        self.latest: Evaluation | None = None

    def step(self) -> bool:
        steps = self.counters.get("env_steps")
        self.next = self.next or (steps // self.every + 1) * self.every
        if steps < self.next:
            return False
        self.policy.pull()
        seed = derive(self.seed, "evaluation", self.counters.get("evaluations") + 1)
        found = evaluate(self.envs, self.policy, self.episodes, seed, self.max_length, lambda: self.counters.stopping)
        if found is not None:  # otherwise it is made again after the resume
            self.latest = found
            # Where actors do not wait, they may be several evaluations ahead: those are left out.
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
