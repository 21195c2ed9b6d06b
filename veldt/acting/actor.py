"""Actor and Evaluator: workers that step environments with a policy. Policy: what they ask, wherever inference happens.

Imports no torch: under central inference the process of an actor is light.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from veldt.compiled import njit
from veldt.counters import Counters
from veldt.envs import Envs
from veldt.metrics import ACTOR, EVALUATOR
from veldt.ports import Examples, call, stream
from veldt.records.checks import StepCheck
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree, zeros
from veldt.seeds import derive

if TYPE_CHECKING:  # it imports torch
    from veldt.acting.policy import LocalPolicy
    from veldt.learning.params import LatestParams

MakeEnvs = Callable[[int], Envs]  # n -> a vector of n environments


class Policy(Protocol):
    """Where inference happens: takes the step records of groups of environments and returns actions.

    policy.send(group, step)          # records [n] of the environments of one group
    actions = policy.recv(group)      # None: not yet, step another group meanwhile

    Where a runtime serves a policy to other processes, it sends the replies first and calls `record` after that.
    """

    @call(reply="recv", after="record", due="due", only=("action",))
    def send(self, group: int, step: Tree) -> bool: ...  # False: not now, keep it and try again

    def recv(self, group: int) -> Tree | None: ...  # `action` [n], and other columns for a recorder

    @stream(cancels="send")
    def reset(self, group: int) -> None: ...  # the environments restart: drop partial blocks, zero recurrent state

    # The rest is for policies that record, or that answer several groups at once.

    @call
    def flush(self, group: int) -> bool:
        """True: all that was recorded is in the store."""
        return True

    def record(self) -> None:
        """Does the work that replies need not wait for."""
        return

    @property
    def due(self) -> float:
        """When a reply will be ready, in seconds of time.monotonic; inf: nothing is waiting."""
        return math.inf


def send_examples(env: EnvSpec, n: int) -> dict[str, Examples]:
    """For groups of n environments."""
    return {"send": Examples([(0, zeros(env.step, n))], [zeros({"action": env.action}, n)], StepCheck(env, n))}


def ask(policy: Policy, record: Tree) -> Tree:
    """What a policy that answers at once gives for this record."""
    sent, out = policy.send(0, record), policy.recv(0)
    assert sent and out is not None
    return out


class Actor:
    """A worker: each `step()` steps every group of environments whose actions the policy has ready."""

    METRICS: ClassVar = ACTOR

    def __init__(
        self,
        envs: MakeEnvs,
        n: int,
        policy: Policy,
        counters: Counters,
        seed: int,
        name: str = "actor/0",
        groups: tuple[int, ...] = (0,),  # their numbers, unique among all actors that share the policy
        incarnation: int = 0,
    ) -> None:
        self.policy, self.counters, self.seed, self.name = policy, counters, seed, name
        self.groups = {number: Group(envs(n)) for number in groups}
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.timings = {"env": 0.0}  # seconds
        self._life = (incarnation,) if incarnation else ()
        self.resume(0)

    def step(self) -> bool:
        worked = False
        for number, group in self.groups.items():
            if group.record is not None and self.policy.send(number, group.record):
                group.record = None
            if group.record is None:
                worked |= self._advance(number, group)
        return worked

    def resume(self, number: int) -> None:
        """Begins new episodes in all environments; their seeds follow from the run's seed and `number`."""
        for index, group in self.groups.items():
            self.policy.reset(index)
            group.begin(derive(self.seed, "env", self.name, index, number, *self._life))

    def cut(self) -> bool:
        """Ends all running episodes as truncated and flushes them to the store; False: not yet, call again.

        The returns of these episodes are not reported. `resume` must follow.
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
        """Applies the group's actions, if the policy has them."""
        out = self.policy.recv(number)
        if out is None:
            return False
        began = time.perf_counter()
        record = group.envs.step(out["action"])
        self.timings["env"] += time.perf_counter() - began
        group.record = record
        applied, ended = _account(
            record["reward"], record["first"], record["valid"], record["last"], group.returns, group.lengths, group.clean
        )
        self.counters.add("env_steps", int(applied))
        if group.envs.bad > group.bad:
            self.counters.add("bad_observations", group.envs.bad - group.bad)
            group.bad = group.envs.bad
        if ended:
            for lane in np.flatnonzero(record["last"]):
                self.returns.append(float(group.returns[lane]))
                self.lengths.append(int(group.lengths[lane]))
                self.counters.add("episodes", 1)
                self.counters.add("bad_episodes", int(not group.clean[lane]))
            group.clear(record["last"])
        return True

    def metrics(self) -> dict[str, float]:
        """Returns include exploration; they are the mean of the last 100 episodes."""
        metrics = {name: float(self.counters.get(name)) for name in ("episodes", "bad_episodes", "bad_observations")}
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
    """A vector of environments, the record that is to be sent, and the returns and lengths of the running episodes."""

    def __init__(self, envs: Envs) -> None:
        self.envs = envs
        self.record: Tree | None = None  # None: it was sent, and its actions have not come yet
        self.ending = self.ended = False
        self.returns = np.zeros(envs.n)
        self.lengths = np.zeros(envs.n, np.int64)
        self.clean = np.ones(envs.n, np.bool_)  # nothing of this episode was dropped so far
        self.bad = 0  # observations that were dropped, and counted

    def begin(self, seed: int) -> None:
        self.record = self.envs.reset(seed)
        self.ending = self.ended = False
        self.clear(np.ones(self.envs.n, np.bool_))
        self.clean &= self.record["valid"]

    def clear(self, lanes: Array) -> None:
        self.returns[lanes] = 0
        self.lengths[lanes] = 0
        self.clean[lanes] = True


@njit("Tuple((i8, b1))(f4[:], b1[:], b1[:], b1[:], f8[::1], i8[::1], b1[::1])")
def _account(reward: Array, first: Array, valid: Array, last: Array, returns: Array, lengths: Array, clean: Array) -> Any:
    """Adds a record [n] to the sums of its episodes. Returns the number of actions applied, and whether an episode ended.

    Where a record is first, the environment was reset and ignored the action.
    """
    applied = ~first
    returns += reward
    lengths += applied
    clean &= valid
    return np.count_nonzero(applied), last.any()


class Evaluation(NamedTuple):
    returns: list[float]  # sums of the finite rewards
    lengths: list[int]
    bad_episodes: int = 0  # that had observations or rewards which were dropped

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
    bad_episodes = 0
    total, length = np.zeros(envs.n), np.zeros(envs.n, np.int64)
    policy.reset(0)
    record = envs.reset(seed)
    clean = record["valid"].copy()  # nothing of this episode was dropped so far
    waiting = np.zeros(envs.n, np.bool_)  # for the next episode to begin, after a long one was cut off
    for _ in range(2 * max_length * int(share.max())):
        if stopping():
            return None
        previous, record = record, envs.step(ask(policy, record)["action"])
        waiting &= ~record["first"]
        total += record["reward"]
        length += ~previous["last"]
        clean &= record["valid"]
        for lane in np.flatnonzero(record["last"] | (length >= max_length)):
            if len(returns[lane]) < share[lane] and not waiting[lane]:
                returns[lane].append(float(total[lane]))
                lengths[lane].append(int(length[lane]))
                bad_episodes += not clean[lane]
            waiting[lane] |= not record["last"][lane]
            total[lane], length[lane], clean[lane] = 0, 0, True
        if all(len(done) == wanted for done, wanted in zip(returns, share, strict=True)):
            break
    return Evaluation([x for lane in returns for x in lane], [x for lane in lengths for x in lane], bad_episodes)


class Evaluator:
    """A worker: every `every` env steps it plays greedy episodes with the newest weights, in environments of its own.

    All episodes of an evaluation are played by one version of the weights, which the policy takes before it and keeps. What
    is reported with the returns are the updates, the env steps and the time of that version.
    """

    METRICS: ClassVar = EVALUATOR
    OPTIONAL: ClassVar = True  # training goes on without it

    def __init__(
        self,
        envs: MakeEnvs,
        policy: LocalPolicy,
        counters: Counters,
        every: int,
        episodes: int,
        max_length: int,
        seed: int,
        evaluated: LatestParams | None = None,  # where the weights of an evaluation are left
    ) -> None:
        self.policy, self.counters, self.every, self.episodes, self.seed = policy, counters, every, episodes, seed
        self.evaluated = evaluated
        self.max_length = max_length
        policy.refresh = 0
        self.envs = envs(min(episodes, 16))
        self.next = 0  # env steps; 0: not known yet
        self.latest: dict[str, float] = {}  # metrics of an evaluation that was not reported yet

    def step(self) -> bool:
        steps = self.counters.get("env_steps")
        self.next = self.next or (steps // self.every + 1) * self.every
        if steps < self.next:
            return False
        self.policy.pull()
        seed = derive(self.seed, "evaluation", self.counters.get("evaluations") + 1)
        found = evaluate(self.envs, self.policy, self.episodes, seed, self.max_length, lambda: self.counters.stopping)
        if found is not None:  # None: the run stops; a resumed run repeats this evaluation
            self.latest = {"eval_return": found.mean_return, "eval_length": found.mean_length}
            self.latest["eval_bad_episodes"] = found.bad_episodes
            env_steps, published_at = self.policy.when
            if env_steps >= 0:  # else the weights do not say from when they are
                self.latest |= {"eval_learner_steps": self.policy.version, "eval_env_steps": env_steps}
                self.latest["eval_published_at"] = published_at
            # Actors may have passed several evaluation points meanwhile; skip all but the newest.
            steps = self.counters.get("env_steps")
            self.next = max(self.next + self.every, steps // self.every * self.every)
            if self.evaluated is not None:
                self.evaluated.publish(self.policy.weights())
            self.counters.add("evaluations", 1)
        return True

    def metrics(self) -> dict[str, float]:
        """The newest evaluation, once."""
        latest, self.latest = self.latest, {}
        return latest

    def state(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state(self, state: dict[str, Any]) -> None:
        self.next = int(state["next"])

    def close(self) -> None:
        self.envs.close()
