"""Actor: steps groups of environments with a policy. Imports no torch: under central inference its process is light."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from veldt.compiled import njit
from veldt.counters import Counters
from veldt.envs import Envs
from veldt.metrics import ACTOR
from veldt.records.tree import Array, Tree
from veldt.seeds import derive

if TYPE_CHECKING:  # policy.py imports torch
    from veldt.acting.seam import Policy

MakeEnvs = Callable[[int], Envs]  # n -> a vector of n environments


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
        self._bad = 0  # bad observations that are in the counters already
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
        self._apply(group, out["action"])
        return True

    def _apply(self, group: Group, action: Array) -> None:
        began = time.perf_counter()
        record = group.envs.step(action)
        self.timings["env"] += time.perf_counter() - began
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
            group.clear(record["last"])

    def metrics(self) -> dict[str, float]:
        """Returns include exploration; they are the mean of the last 100 episodes."""
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
    """A vector of environments, the record that is to be sent, and the returns and lengths of the running episodes."""

    def __init__(self, envs: Envs) -> None:
        self.envs = envs
        self.record: Tree | None = None  # None: it was sent, and its actions have not come yet
        self.ending = self.ended = False
        self.returns = np.zeros(envs.n)
        self.lengths = np.zeros(envs.n, np.int64)
        self.clean = np.ones(envs.n, np.bool_)  # no bad observation in this episode so far

    def begin(self, seed: int) -> None:
        self.record = self.envs.reset(seed)
        self.ending = self.ended = False
        self.clear(np.ones(self.envs.n, np.bool_))

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
