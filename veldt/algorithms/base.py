"""The contract between a paper and the rest: an algorithm knows tensors and time, and no process, queue, file or clock."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from veldt import bounds
from veldt.bounds import above, at_least, between
from veldt.errors import UserError
from veldt.learning.distributions import WIDEST
from veldt.learning.returns import NStep, n_step
from veldt.nets.networks import TAKEN, Recurrent, Rows, Vector
from veldt.nets.torsos import Torso, blank_rows, each, on_device, torso_for, user_network
from veldt.records.adapter import MOST_COMBINED
from veldt.records.block import Schema, Window
from veldt.records.history import check_stacked, observation, observation_at, observations
from veldt.records.masks import MASK
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, namespace, spec
from veldt.seeds import Random

Tensors = dict[str, Tensor]


class Batch:
    """Sampled windows. `batch[name]` is a column [B, T, ...] on the learner's device, copied there on first use.

    `host` has the same columns where they were sampled: NumPy arrays, with which small computations are faster than on a
    GPU; or tensors on the GPU, if they lie there already. A loss that a CUDA graph can hold computes with either.
    """

    def __init__(
        self, host: Mapping[str, Any], starts: Mapping[str, Any], weights: Array | Tensor, device: torch.device
    ) -> None:
        self.host, self.device = host, device
        self.weights = on_device(weights, device)  # [B]
        self._host_starts = starts
        self._moved: Tensors = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._moved:
            self._moved[name] = on_device(self.host[name], self.device)
        return self._moved[name]

    def move(self, names: Iterable[str] | None = None) -> "Batch":
        """Starts copying these columns (None: all) to the device; the batch that has them as tensors."""
        return Batch({name: self[name] for name in names or self.host}, self.starts, self.weights, self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.host)

    def __contains__(self, name: str) -> bool:
        return name in self.host

    @cached_property
    def starts(self) -> Tensors:
        """Columns [B, ...] of the window starts: the recurrent state."""
        return {name: on_device(x, self.device) for name, x in self._host_starts.items()}


class Loss(NamedTuple):
    losses: dict[str, Tensor]  # a scalar for each parameter group, named by the prefix of its parameters; "" is all
    priorities: Tensor  # [B], finite and not negative
    metrics: dict[str, Tensor]  # their means are reported
    after: Callable[[], None] | None = None  # called after the update, unless it is skipped


class Algorithm(Protocol):
    """To inherit. By default it records nothing beside the action, has no recurrent state, and explores by an epsilon."""

    uses_target: ClassVar[bool] = True  # whether `loss` reads the target network
    masks: ClassVar[bool] = False  # it honours action masks (`records.masks`), when acting and in bootstraps
    one_choice: ClassVar[bool] = False  # it takes Discrete actions alone: a few combinations of choices become one
    exploration: ClassVar[str] = "epsilon"  # the name of `explore` in metrics: epsilon, sigma...; empty: not reported

    @property
    def window(self) -> Window: ...

    def check(self, env: EnvSpec) -> None:
        """Raises a UserError that names the space this algorithm cannot take."""

    def extras(self, env: EnvSpec) -> Spec:
        """The columns that `act` records beside the action."""
        return {}

    def state(self, env: EnvSpec) -> Spec:
        """The recurrent state; recorded at window starts."""
        return {}

    def known_state(self, action: Array, state: Spec) -> Tree:
        """For demonstrations, which record no state: the columns [n, ...] of the state after a step that follow from its
        action [n] alone. All others are zero. `state` is what `state(env)` returned."""
        return {}

    def network(self, env: EnvSpec) -> nn.Module: ...

    def act(self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: Random) -> tuple[Tree, Tensors]:
        """One batched forward. Rows are [n, history, ...]; returns columns [n] with `action`, and the next state.

        It may be defined as a whole, or in three parts. Of these, central inference on a GPU captures the first.
        """
        out, after = self.forward(net, rows, state)
        columns = self.decide(net, {name: x.cpu().numpy() for name, x in out.items()}, explore, rng)
        return columns, after | self.taken(net, columns) if after else after

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """What the device does: all that `decide` needs, [n, ...], and the next state as far as it needs no action."""
        raise TypeError(f"{type(self).__name__} defines neither act nor forward")

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        """What the host does: columns [n] with `action`."""
        raise TypeError(f"{type(self).__name__} defines neither act nor decide")

    def taken(self, net: nn.Module, columns: Tree) -> Tensors:
        """The part of the next state that follows from the actions, on the device of the network."""
        return {}

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        """What `TrainedPolicy.value` and `.q` return: `value` [n]; `q` [n, actions], or [n] of the given actions [n, ...].

        Rows and state are those of `act`. Empty: it learns no values.
        """
        return {}

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        """Initial priorities [..., S] of block columns [..., R, ...] from what acting recorded; None: the largest."""
        return None

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """The batch holds windows [B, T, ...], T = window.rows.

        A GPU learner captures it as a part of one CUDA graph, with the columns as tensors. What a graph cannot hold (values
        that the host reads, NumPy) is found then, and the learner goes on without a graph.
        """

    def diagnose(self, net: nn.Module, blocks: Callable[[], Batch | None], schema: Schema) -> dict[str, float]:
        """Metrics of whole blocks [N, R, ...] and their window starts [N, S, ...], which `blocks()` reads from the store
        (None: not now). Called every few hundred updates."""
        return {}


@dataclass(frozen=True)
class Observer(Algorithm):
    """What the algorithms of the package share: how they see, and how they discount."""

    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of a reward one step later."""
    history: Annotated[int, above(0)] = 1
    """Observations stacked for the network, the current one included."""
    clip_reward: Annotated[float, at_least(0)] = 0.0
    """Clip rewards to [-x, x] in the loss (0: no clipping); reported returns are not clipped."""
    stacked: tuple[str, ...] = ()
    """Keys of a Dict observation to stack (default: all)."""
    normalize_obs: bool = False
    """Bring elements of float vectors that are very large or very small to an ordinary size (nets/normalize.py). apex-dpg,
    qt-opt: all elements to mean 0 and deviation 1, by the running statistics of the observations in training batches."""

    def check(self, env: EnvSpec) -> None:
        bounds.check(self, "algorithm.")
        check_stacked(env, self.stacked)

    def observe(self, rows: Tensors | Batch, at: int) -> Any:
        """The network's input at row `at` of rows [B, T, ...]: a tensor, or a dict of them for a Dict observation. In a
        batch the store has already blanked history of earlier episodes."""
        return observation(rows, at, self.history, self.stacked, isinstance(rows, Batch) and self.window.slices)

    def legal(self, rows: Tensors | Batch, at: int | slice) -> Tensor | None:
        """Which actions are legal at row `at` of rows [B, T, ...]: [B, choices]; None: all, always."""
        return rows[MASK][:, at] if MASK in rows else None

    def clipped(self, reward: Any) -> Any:
        return reward.clip(-self.clip_reward, self.clip_reward) if self.clip_reward else reward

    def torso(
        self, env: EnvSpec, hidden: tuple[int, ...], convnet: str, network_from: str, large: str = "nature"
    ) -> tuple[nn.Module, int]:
        """The torso that `network_from` makes, or else the package's, and the width of its features."""
        if not network_from:
            torso = torso_for(env, self.history, self.stacked, hidden, convnet, large, normalize=self.normalize_obs)
            return torso, torso.features
        return user_network(network_from, env, self.history, self.stacked)

    def senses(self, env: EnvSpec) -> tuple[Vector, int, Torso | None]:
        """What a value of actions sees: what is no image as one vector, its size, and convolutions for images."""
        how = (env, self.history, self.stacked)
        vector, blank = Vector(*how), self.observe(blank_rows(env, self.history), self.history - 1)
        images = len(vector.keys) < len(env.observation)
        sight = torso_for(*how, hidden=(), only_pictures=True) if images else None
        return vector, vector(blank).shape[1] if vector.keys else 0, sight

    def last_reward(self, reward: Tensor) -> Tensor:
        """The last reward as an LSTM gets it: clipped to [-1, 1], as in IMPALA."""
        return reward.clamp(-1, 1)

    def newest(self, rows: Tensors, state: Tensors) -> Rows:
        """What an LSTM acts on: the last of rows [n, history, ...], as [n, 1, ...]."""
        obs = each(self.observe(rows, self.history - 1), lambda x: x[:, None])
        return Rows(obs, state[TAKEN][:, None], self.last_reward(rows["reward"][:, -1:]), None)

    def sequence(self, net: Recurrent, batch: Batch, starts: Tensors) -> Rows:
        """What a network sees of all rows from row history - 1 on."""
        at = self.history - 1
        obs, reward = observations(batch, self.history, self.stacked), batch["reward"][:, at:]
        if net.core is None:
            return Rows(obs, reward, reward, None)
        reward = self.last_reward(reward)
        own = net.encode(batch[net.taken][:, at:-1])  # [B, T - 1, E], taken at the row before
        taken = torch.cat((starts[TAKEN][:, None], own), 1) * (~batch["first"][:, at:])[:, :, None]
        return Rows(obs, taken, reward, batch.host["first"][:, at:])


def require_one_choice(env: EnvSpec, name: str) -> None:
    """Raises a UserError unless actions are Discrete."""
    space = env.action_space
    if isinstance(space, spaces.MultiDiscrete):
        n = math.prod(np.ravel(space.nvec).tolist())
        raise UserError(
            f"{name} chooses one of at most {MOST_COMBINED} actions, but {env.name} has {space}, {n:,} combinations; use "
            "impala, which makes each choice by itself."
        )
    if not isinstance(space, spaces.Discrete):
        raise UserError(f"{name} needs a Discrete action space, but {env.name} has {space}; try apex-dpg.")


def require_bounded_box(env: EnvSpec, name: str) -> None:
    """Raises a UserError unless actions are floats between bounds."""
    space = env.action_space
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        other = "apex-dqn" if isinstance(space, spaces.Discrete) else "impala"
        raise UserError(f"{name} needs a Box action space of floats, but {env.name} has {space}; {other} takes that.")
    if not all((np.abs(bound.astype(np.float64)) <= WIDEST).all() for bound in (space.low, space.high)):
        raise UserError(
            f"{name} needs bounded actions, but {env.name} has {space}; set bounds in a wrapper "
            "(gymnasium.wrappers.TransformAction), or use impala, which needs none."
        )


def among_legal(q: Tensor, legal: Tensor | None) -> Tensor:
    """Values [..., actions], -inf for illegal actions. Rows without a legal one, such as padding, stay as they are."""
    return q if legal is None else q.masked_fill(~legal & legal.any(-1, keepdim=True), -torch.inf)


class Transitions(NamedTuple):
    """Input of a one-step loss; observations are tensors, or dicts of them for a Dict observation."""

    s_tm1: Any  # [B, ...]
    a_tm1: Tensor  # [B, ...]
    r_t: Tensor  # [B], the sum of m discounted rewards
    discount_t: Tensor  # [B]
    s_t: Any  # [B, ...]


@dataclass(frozen=True)
class ActionValues(Observer):
    """A bootstrapped action value (DQN, DPG, R2D2): n-step transitions from sampled windows, and initial priorities.

    While acting it records `q`, the value of the action taken, and `v`, the value that a bootstrap would use.
    """

    n: Annotated[int, above(0)] = 1
    """Number of reward steps before the bootstrap (n-step return)."""

    @property
    def window(self) -> Window:
        return Window(history=self.history, lookahead=self.n)

    def extras(self, env: EnvSpec) -> Spec:
        return {"q": spec((), np.float32), "v": spec((), np.float32)}

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        """From the values `q` [n, actions] of the forward pass."""
        q = self.forward(net, rows, state)[0]["q"]
        legal = q > -torch.inf
        q = torch.where(legal, self.h_inverse(torch.where(legal, q, 0.0)), q)
        return {"value": q.amax(1), "q": q if action is None else q.gather(1, action[:, None])[:, 0]}

    def h(self, x: Any) -> Any:
        """Values are learned under h: of the return x, the network learns h(x)."""
        return x

    def h_inverse(self, x: Any) -> Any:
        return x

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        before = schema.window.before
        return self.first_errors(columns)[..., before : before + schema.fresh]

    def first_errors(self, columns: Tree) -> Array:
        """|y - q| [..., R - n] from the values recorded while acting."""
        step = self.returns(columns["reward"], columns["discount"], columns["last"])
        rows = np.arange(step.m.shape[-1])
        v_t = np.take_along_axis(columns["v"], rows + step.m, axis=-1)
        with np.errstate(all="ignore"):
            y = self.h(step.reward + step.discount * self.h_inverse(v_t))
            return np.asarray(np.abs(y - columns["q"][..., : len(rows)]))

    def returns(self, reward: Any, discount: Any, last: Any) -> NStep:
        return n_step(self.clipped(reward), discount, last, self.n, self.gamma)

    def transitions(self, batch: Batch) -> Transitions:
        return self.masked_transitions(batch)[0]

    def masked_transitions(self, batch: Batch) -> tuple[Transitions, Tensor | None]:
        """Row `at` is s_tm1, where the action was taken. The rewards and discounts of later rows make the return, which is
        bootstrapped at row at + m, s_t. And which actions are legal there, [B, actions]; None: all, always."""
        at = self.history - 1
        step = self.returns(*(batch.host[name][:, at:] for name in ("reward", "discount", "last")))
        if namespace(step.m) is torch:
            return self._transitions_on_device(batch, step)
        r_t, discount_t = (torch.from_numpy(x[:, 0]).to(batch.device) for x in (step.reward, step.discount))
        s_t, legal_t = self.observe(batch, at + self.n), self.legal(batch, at + self.n)
        # Where an episode was truncated m is less than n. Where it terminated the discount is 0, so any row will do.
        truncated = (step.m < self.n) & (step.discount > 0)  # [B, 1]
        if truncated.any():  # rare
            for k in range(1, self.n):
                short = on_device(np.flatnonzero(truncated & (step.m == k)), batch.device)
                s_t = each(s_t, partial(_put, short), self.observe(batch, at + k))
                if legal_t is not None:
                    legal_t = _put(short, legal_t, batch[MASK][:, at + k])
        return Transitions(self.observe(batch, at), batch["action"][:, at], r_t, discount_t, s_t), legal_t

    def _transitions_on_device(self, batch: Batch, step: NStep) -> tuple[Transitions, Tensor | None]:
        """The same without a decision on the host: the row of each bootstrap is looked up there."""
        at, reward, discount, m = self.history - 1, step.reward[:, 0], step.discount[:, 0], step.m[:, 0]
        s_t, legal_t = self.observe(batch, at + 1), self.legal(batch, at + 1)
        if self.n > 1:
            row = at + torch.where(discount > 0, m, self.n)
            s_t = observation_at(batch, row, self.history, self.stacked)
            if legal_t is not None:
                legal_t = batch[MASK][torch.arange(len(row), device=row.device), row]
        return Transitions(self.observe(batch, at), batch["action"][:, at], reward, discount, s_t), legal_t


def _put(index: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return x.index_copy(0, index, other[index])
