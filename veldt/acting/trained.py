"""TrainedPolicy: a learned policy as a function of observations, without environments or a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from veldt.acting.actor import Policy
from veldt.algorithms.base import Algorithm, Tensors
from veldt.errors import UserError
from veldt.records.checks import ActionCheck
from veldt.records.masks import MASK
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree


class State(NamedTuple):
    """What a policy keeps of the episodes of n environments. No call changes it."""

    rows: Tree  # the last history - 1 step records [n, history - 1, ...]; empty: nothing is stacked
    recurrent: Tensors  # [n, ...]

    @property
    def n(self) -> int:
        """0: it holds nothing."""
        return max((len(x) for x in self.rows.values()), default=max((len(x) for x in self.recurrent.values()), default=0))


@dataclass(eq=False, repr=False)
class TrainedPolicy(Policy):
    """Takes one observation, or a batch of them, as the environment returns it; for a Dict space, a dict.

    action, state = policy(obs, state)      # state None: an episode begins

    `explore` is how much it explores unless a call says otherwise: a fraction of random actions or, depending on the
    algorithm, the deviation of noise, or the fraction of actions that are sampled. It is a `Policy` too, for step records.
    """

    algorithm: Algorithm
    env: EnvSpec
    device: str = "cpu"
    explore: float = 0.0
    trained_explore: float = 0.0  # of an actor at the end of training
    seed: int = 0
    clip: bool = False  # observations outside their space are clipped, as they were in training
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.net = self.algorithm.network(self.env).to(self.device).requires_grad_(False).eval()
        self._recurrent = self.algorithm.state(self.env)
        self._history = self.algorithm.window.history
        self._states: dict[int, State] = {}  # by group
        self._ready: dict[int, Tree] = {}
        self._warned = False

    def __call__(
        self,
        obs: Any,
        state: State | None = None,
        *,
        explore: float | None = None,
        first: Any = None,
        reward: Any = None,
        action_mask: Any = None,
    ) -> tuple[Any, State | None]:
        """The action in the format of the environment's action space, and the next state.

        `first` [n]: where an episode begins; their state is ignored. `reward` [n]: what the last action earned, which a
        recurrent policy sees too (0 where an episode begins). `action_mask` [n, ...]: which actions are legal, if the
        environment says so in its info. The state is None for a policy that keeps nothing.
        """
        step, single = self._record(obs, state, first, reward, action_mask)
        out, after = self._act(step, state, self.explore if explore is None else explore)
        action = self._to_env(out["action"][0] if single else out["action"])
        return action, (after if self.keeps_state else None)

    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
        action_masks: Any = None,
    ) -> tuple[Any, State | None]:
        """As the method of this name in Stable-Baselines3. Not deterministic: it explores as at the end of training."""
        amount = 0.0 if deterministic else self.trained_explore
        return self(observation, state, explore=amount, first=episode_start, action_mask=action_masks)

    def q(
        self,
        obs: Any,
        state: State | None = None,
        action: Any = None,
        *,
        first: Any = None,
        reward: Any = None,
        action_mask: Any = None,
    ) -> Any:
        """Action values [actions], or [n, actions] of a batch, -inf where illegal; of the given actions alone, if there are
        any. For continuous actions: the value of the policy's own, unless others are given."""
        return self._value("q", self._record(obs, state, first, reward, action_mask), state, action)

    def value(
        self, obs: Any, state: State | None = None, *, first: Any = None, reward: Any = None, action_mask: Any = None
    ) -> Any:
        """The value of the observation under the greedy policy; of the policy itself for an actor-critic."""
        return self._value("value", self._record(obs, state, first, reward, action_mask), state)

    @property
    def keeps_state(self) -> bool:
        return bool(self._recurrent) or self._history > 1

    # The protocol of a policy for step records. Groups have states of their own.

    def send(self, group: int, step: Tree) -> bool:
        self._ready[group], self._states[group] = self._act(step, self._states.get(group), self.explore)
        return True

    def recv(self, group: int) -> Tree | None:
        return self._ready.pop(group, None)

    def reset(self, group: int) -> None:
        self._states.pop(group, None)
        self._ready.pop(group, None)

    @torch.inference_mode()
    def _act(self, step: Tree, state: State | None, explore: float) -> tuple[Tree, State]:
        rows, tensors, before = self._rows(step, state)
        amounts = np.full(len(step["first"]), explore, np.float64)
        out, after = self.algorithm.act(self.net, tensors, before, amounts, self.rng)
        return out, State({name: x[:, 1:] for name, x in rows.items()} if self._history > 1 else {}, after)

    @torch.inference_mode()
    def _value(self, name: str, record: tuple[Tree, bool], state: State | None, action: Any = None) -> Any:
        step, single = record
        _, tensors, before = self._rows(step, state)
        taken = None
        if action is not None:
            taken = torch.from_numpy(self._recorded(action, len(step["first"]))).to(self.device)
        values = self.algorithm.values(self.net, tensors, before, taken)
        if name not in values:
            known = f"; it has {', '.join(values)}" if values else ""
            raise UserError(f"{type(self.algorithm).__name__} has no {name}{known}.")
        found = values[name].cpu().numpy()
        return found[0] if single else found

    def _rows(self, step: Tree, state: State | None) -> tuple[Tree, Tensors, Tensors]:
        """The record and those before it [n, history, ...], the same as tensors, and the recurrent state before it."""
        n, first = len(step["first"]), step["first"]
        names = [*self.env.seen, *(["reward"] if self._recurrent else [])]
        names += ["first", "valid"] if self._history > 1 else []
        rows = {name: step[name][:, None] for name in names}
        if self._history > 1:
            blank = {name: np.zeros((n, self._history - 1, *x.shape[2:]), x.dtype) for name, x in rows.items()}
            kept = state.rows if state is not None else blank
            rows = {name: np.concatenate((kept[name], x), 1) for name, x in rows.items()}
        if state is None:
            before = {name: torch.zeros(n, *c.shape, device=self.device) for name, c in self._recurrent.items()}
        else:
            begins = torch.from_numpy(first).to(self.device)
            before = {
                name: torch.where(begins.view(-1, *[1] * (x.ndim - 1)), 0.0, x) for name, x in state.recurrent.items()
            }
        return rows, {name: torch.from_numpy(x).to(self.device) for name, x in rows.items()}, before

    def _record(self, obs: Any, state: State | None, first: Any, reward: Any, action_mask: Any) -> tuple[Tree, bool]:
        """The step record of observations from the user, and whether it was a single one."""
        columns = _columns(self.env, obs, self.clip)
        shapes = {name: c.shape for name, c in self.env.observation.items()}
        single = all(x.shape == shapes[name] for name, x in columns.items())
        if single:
            columns = {name: x[None] for name, x in columns.items()}
        n = len(next(iter(columns.values()))) if columns else 0
        for name, x in columns.items():
            if x.shape != (n, *shapes[name]):
                want, got = list(shapes[name]), list(x.shape)
                raise UserError(f"{name} has the shape {got}; the policy takes {want}, or a batch [n, ...] of them.")
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                raise UserError(f"{name} has values that are not finite.")
        step: Tree = columns | {"valid": np.ones(n, np.bool_)}
        step["first"] = np.full(n, state is None) if first is None else np.asarray(first, np.bool_).reshape(n)
        if self._recurrent:
            if reward is None and state is not None and not step["first"].all() and not self._warned:
                self._warned = True
                warnings.warn("A recurrent policy sees the last reward: without reward= it is taken as 0.", stacklevel=3)
            given = np.zeros(n, np.float32) if reward is None else np.asarray(reward, np.float32).reshape(n)
            step["reward"] = np.where(step["first"], np.float32(0), given)
        if self.env.mask:
            step[MASK] = self._legal(obs, action_mask, n, single)
        kept = 0 if state is None else state.n
        if kept not in (0, n):
            raise UserError(f"The state is that of {kept} environments, but there are {n} observations.")
        return step, single

    def _legal(self, obs: Any, action_mask: Any, n: int, single: bool) -> Array:
        """The rows [n, ...] of the action masks, from the observation or from the user."""
        adapter = self.env.adapter
        assert adapter is not None
        if action_mask is None and adapter.settings["masks"] == "info":
            raise UserError(f"The actions of {self.env.name} are masked: give action_mask=info['action_mask'].")
        try:
            rows = adapter.legal(obs, {MASK: action_mask}, *(() if single else (n,)))
        except ValueError as error:
            raise UserError(f"This is no action_mask of {self.env.name}: {error}.") from None
        return rows[None] if single else rows

    def _recorded(self, action: Any, n: int) -> Array:
        """The actions of the user, as the network takes them."""
        env = self.env
        try:
            if env.adapter is not None:
                found = env.adapter.recorded(action, n)
            else:
                found = np.asarray(action, env.action.dtype).reshape(n, *env.action.shape) - _start(env.action_space)
            wrong = ActionCheck(env)({"action": found})
        except (TypeError, ValueError, IndexError, KeyError) as error:
            wrong = str(error)
        if wrong:
            taken = env.action_space if env.adapter is None else env.adapter.taken
            raise UserError(f"These are no {n} actions of {taken}: {wrong}.")
        return found

    def _to_env(self, action: Array) -> Any:
        if self.env.adapter is not None:
            return self.env.adapter.action(action)
        space = self.env.action_space
        if isinstance(space, spaces.Box):
            return np.clip(action, space.low, space.high).astype(space.dtype)
        return np.asarray(action + _start(space))


def _start(space: spaces.Space[Any]) -> Any:
    """The least action of a discrete space: networks count from 0."""
    return space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0


def _columns(env: EnvSpec, obs: Any, clip: bool) -> Tree:
    """The columns of an observation in the environment's own format."""
    if env.adapter is not None:
        keys = [str(key) for key in getattr(env.adapter.observation_space, "spaces", ())]
    else:
        keys = [name.removeprefix("obs/") for name in env.observation if name != "obs"]
    if isinstance(env.adapter and env.adapter.observation_space, spaces.Tuple):
        if not isinstance(obs, tuple | list) or len(obs) != len(keys):
            raise UserError(f"The observation of {env.name} is a tuple of {len(keys)}.")
    elif keys and not (isinstance(obs, Mapping) and all(key in obs for key in keys)):
        raise UserError(f"The observation of {env.name} is a dict of {', '.join(keys)}.")
    elif not keys and isinstance(obs, Mapping):
        raise UserError(f"The observation of {env.name} is an array, not a dict of {', '.join(map(str, obs))}.")
    try:
        if env.adapter is not None:
            return env.adapter.observation(obs, clip)
        parts = {name: obs[name.removeprefix("obs/")] if keys else obs for name in env.observation}
        return {name: np.asarray(x, env.observation[name].dtype) for name, x in parts.items()}
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"This is no observation of {env.name}: {error}.") from None
