"""R2D2 (Kapturowski et al., Recurrent experience replay in distributed reinforcement learning, 2019): Ape-X DQN with an
LSTM, trained on sequences.

paper                                       here                                 equation
sequences of m = 80, overlapping by 40      `length`, `stride`; see `block.Window`
stored state                                `stored_state`: at each window's first row, as it was when acting
burn-in of l = 40                           `burn_in`: rows that only compute the state, for each network
value rescaling h                           `returns.rescale`                    y = h(R + gamma^n h^-1(Q(s', a*; theta-)))
n-step double Q                             `n`                                  a* = argmax_a Q(s', a; theta)
priority of a sequence                      `eta`                                eta max|delta| + (1 - eta) mean|delta|
Delta-Q                                     `diagnose`                           |q - q*| / max|q*|, q*: the true state's

Where an episode ends inside a window, the next starts from a state of zero, and no return crosses the end. A step is
trained if it took an action and its n-step return is complete; only such steps count in the loss and in priorities, which
are both under h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.algorithms.base import Batch, Loss, Tensors
from veldt.algorithms.dqn import epsilon_greedy
from veldt.algorithms.transitions import ActionValues
from veldt.bounds import above, at_least, between
from veldt.errors import UserError
from veldt.learning.returns import NStep, rescale, unrescale
from veldt.nets.heads import QHead
from veldt.nets.make import features_of, torso_for, user_torso
from veldt.nets.recurrent import LSTM, TAKEN, C, H, recurrent_input
from veldt.nets.tensors import each, flat_rows, on_device
from veldt.records.block import Schema, Window, trainable
from veldt.records.history import observations
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, namespace, spec


class RecurrentQ(nn.Module):
    """A torso, an LSTM if `lstm` > 0, and a dueling head: rows [B, T, ...] -> action values [B, T, actions].

    Without the LSTM it is feed-forward, and neither the last action nor the last reward is an input.
    """

    def __init__(self, torso: nn.Module, features: int, actions: int, lstm: int, head: int) -> None:
        super().__init__()
        # First in the vector: elsewhere cuDNN would copy its weights.
        self.core = LSTM(features + actions + 1, lstm) if lstm else None
        self.torso, self.actions = torso, actions
        self.head = QHead(lstm or features, actions, dueling=True, hidden=head)

    def forward(self, rows: Rows, state: Tensors) -> Tensor:
        x = self._input(rows)
        q: Tensor = self.head(x if self.core is None else self.core.outputs(x, state[H], state[C], rows.first))
        return q

    def step(self, rows: Rows, state: Tensors) -> tuple[Tensor, Tensors]:
        """Action values, and the state after the rows."""
        x = self._input(rows)
        if self.core is None:
            return self.head(x), {}
        y, h, c = self.core(x, state[H], state[C], rows.first)
        return self.head(y), {H: h, C: c}

    @torch.no_grad()
    def burn_in(self, rows: Rows, state: Tensors) -> Tensors:
        """The state after the rows, without a gradient."""
        if self.core is None or not rows.reward.shape[1]:
            return state
        h, c = self.core.after(self._input(rows), state[H], state[C], rows.first)
        return {H: h, C: c}

    def _input(self, rows: Rows) -> Tensor:
        """The input of the LSTM, or of the head if there is none: [B, T, ...]."""
        features: Tensor = self.torso(flat_rows(rows.obs)).unflatten(0, rows.reward.shape)
        return features if self.core is None else recurrent_input(features, rows.taken, rows.reward)


@dataclass
class Rows:
    """The network's input: rows [B, T, ...]."""

    obs: Any
    taken: Tensor  # [B, T, actions], the last action, one-hot; zeros where an episode begins
    reward: Tensor  # [B, T], received on arriving at the row
    first: Array | None  # [B, T], where an episode begins; None: nowhere

    def part(self, start: int, stop: int | None = None) -> Rows:
        rows = slice(start, stop)
        first = None if self.first is None else self.first[:, rows]
        return Rows(each(self.obs, lambda x: x[:, rows]), self.taken[:, rows], self.reward[:, rows], first)

    def select(self, index: Tensor) -> Rows:
        """The rows of these indices into B."""
        first = None if self.first is None else self.first[index.cpu().numpy()]
        return Rows(each(self.obs, lambda x: x[index]), self.taken[index], self.reward[index], first)


class Ahead(NamedTuple):
    """All that the loss of a batch needs beside the trained network."""

    rows: Rows
    state: Tensors  # before the first row
    step: NStep  # [B, length]
    trains: Tensor  # [B, length]
    bootstrap: Tensor  # [B, length], the row where each return is bootstrapped, from the first trained one
    action: Tensor  # [B, length, 1]
    q_target: Tensor  # [B, length + n, actions]


@dataclass(frozen=True)
class R2D2(ActionValues):
    gamma: Annotated[float, between(0, 1)] = 0.997
    """Discount of a reward one step later."""
    n: Annotated[int, above(0)] = 5
    """Steps of reward before the bootstrap."""
    burn_in: Annotated[int, at_least(0)] = 40
    """Steps before a window that only compute its recurrent state; 0: none."""
    length: int = 80
    """Trained steps of a window."""
    stride: int = 40
    """Steps from the start of one window to the next; windows overlap by length - stride."""
    stored_state: bool = True
    """A window starts with the state recorded by its actor; otherwise with zeros."""
    eta: Annotated[float, between(0, 1)] = 0.9
    """Priority of a window: eta * largest error + (1 - eta) * mean error."""
    rescaling: bool = True
    """Values are learned under h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x."""
    h_epsilon: float = 1e-3
    """The epsilon of h."""
    lstm: Annotated[int, at_least(0)] = 512
    """Units of the LSTM; 0: none, a feed-forward network."""
    head: Annotated[int, at_least(0)] = 512
    """Hidden units of the dueling head's two streams; 0: none."""
    hidden: Annotated[tuple[int, ...], above(0)] = (128,)
    """Hidden layers for vector observations, below the LSTM."""
    convnet: Literal["auto", "nature", "minatar", "impala", "mlp"] = "auto"
    """Network for images; auto: nature for uint8 of at least 36 x 36, minatar for small ones with channels, else mlp."""
    network_from: str = ""
    """`module:callable` that makes the network below the LSTM from an EnvSpec: [B, ...] -> [B, features]."""

    @property
    def window(self) -> Window:
        return Window(self.history, self.burn_in, self.length, self.n, self.stride)

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        if not isinstance(env.action_space, spaces.Discrete):
            raise UserError(f"r2d2 needs a Discrete action space, but {env.name} has {env.action_space}; try apex-dpg.")
        if not 1 <= self.stride <= self.length:
            raise UserError(f"r2d2 needs 1 <= stride <= length, not {self.stride} and {self.length}.")
        if not 0 <= self.h_epsilon < 1:
            raise UserError(f"r2d2 needs 0 <= h_epsilon < 1, not {self.h_epsilon}.")

    def state(self, env: EnvSpec) -> Spec:
        if not self.lstm:
            return {}
        widths = {H: self.lstm, C: self.lstm, TAKEN: env.n_actions}
        return {name: spec((width,), np.float32) for name, width in widths.items()}

    def known_state(self, action: Array, state: Spec) -> Tree:
        """The last action, one-hot."""
        return {TAKEN: action[:, None] == np.arange(state[TAKEN].shape[0])} if state else {}

    def network(self, env: EnvSpec) -> nn.Module:
        if not self.network_from:
            torso = torso_for(env, self.history, self.stacked, self.hidden, self.convnet)
            return RecurrentQ(torso, features_of(torso), env.n_actions, self.lstm, self.head)
        torso, features = user_torso(self.network_from, env, self._newest, self.history)
        return RecurrentQ(torso, features, env.n_actions, self.lstm, self.head)

    def _newest(self, rows: Tensors) -> Any:
        return self._contiguous(self.observe(rows, self.history - 1))

    def _contiguous(self, obs: Any) -> Any:
        """Users' networks may call `view`, which needs contiguous tensors."""
        return each(obs, lambda x: x.contiguous()) if self.network_from else obs

    def act(
        self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: np.random.Generator
    ) -> tuple[Tree, Tensors]:
        """Epsilon-greedy. The next state holds the action that is taken, random or not."""
        assert isinstance(net, RecurrentQ)
        obs = each(self._newest(rows), lambda x: x[:, None])  # [n, 1, ...]
        if self.lstm:
            seen = Rows(obs, state[TAKEN][:, None], rows["reward"][:, -1:], None)
        else:
            nothing = torch.zeros(len(explore), 1, device=next(iter(rows.values())).device)
            seen = Rows(obs, nothing, nothing, None)
        q, after = net.step(seen, state)
        out = epsilon_greedy(np.ascontiguousarray(q[:, 0].cpu().numpy()), explore, rng)
        if self.lstm:
            after[TAKEN] = F.one_hot(torch.from_numpy(out["action"]).to(q.device), net.actions).to(q.dtype)
        return out, after

    def h(self, x: Any) -> Any:
        return rescale(x, self.h_epsilon) if self.rescaling else x

    def h_inverse(self, x: Any) -> Any:
        return unrescale(x, self.h_epsilon) if self.rescaling else x

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        """From the values recorded while acting."""
        window = schema.window
        step = self._returns(columns["reward"], columns["discount"], columns["last"])
        rows = np.arange(step.m.shape[-1])
        v_t = np.take_along_axis(columns["v"], rows + step.m, axis=-1)
        with np.errstate(all="ignore"):
            td = np.abs(self.h(step.reward + step.discount * self.h_inverse(v_t)) - columns["q"][..., : len(rows)])
        trains = trainable(columns["valid"], columns["last"], window.lookahead)
        starts = [slice(s, s + window.length) for s in range(window.before, window.before + schema.fresh, window.stride)]
        return np.stack([self._window_priority(td[..., rows], trains[..., rows]) for rows in starts], -1)

    def _window_priority(self, td: Any, trains: Any) -> Any:
        """eta max + (1 - eta) mean over trained steps: [..., T] -> [...]; 0 if there are none."""
        xp = namespace(td)
        td = xp.where(trains, td, xp.zeros_like(td))
        largest = td.max(-1) if xp is np else td.amax(-1)
        return self.eta * largest + (1 - self.eta) * td.sum(-1) / trains.sum(-1).clip(1)

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Windows are [B, history - 1 + burn_in + length + n]."""
        assert isinstance(net, RecurrentQ) and isinstance(target, RecurrentQ)
        ahead: Ahead = batch.ahead or self.ahead(target, batch)
        rows, step, trains = ahead.rows, ahead.step, ahead.trains
        state = net.burn_in(rows.part(0, self.burn_in), ahead.state)
        q = net(rows.part(self.burn_in), state)  # [B, length + n, actions]
        with torch.no_grad():
            v = self.h_inverse(ahead.q_target.gather(2, q.argmax(2, keepdim=True)).squeeze(2))  # [B, length + n]
            y = self.h(step.reward + step.discount * v.gather(1, ahead.bootstrap))
        taken = q[:, : self.length].gather(2, ahead.action).squeeze(2)
        td = torch.where(trains, y - taken, 0.0)  # [B, length]
        loss = torch.dot(batch.weights, 0.5 * td.square().sum(1)) / len(td)
        steps = trains.sum().clamp_min(1)
        metrics = {
            "loss": loss.detach(),
            "q_mean": (self.h_inverse(taken.detach()) * trains).sum() / steps,
            "trained": trains.float().mean(),
        }
        return Loss({"": loss}, self._window_priority(td.detach().abs(), trains), metrics)

    def ahead(self, target: nn.Module, batch: Batch) -> Ahead:
        """All of the loss that needs only the target network."""
        assert isinstance(target, RecurrentQ)
        rows, state = self._rows(batch, target.actions, batch.starts), self._initial_state(batch.starts)
        trained = slice(self.history - 1 + self.burn_in, None)
        host = self._returns(*(batch.host[name][:, trained] for name in ("reward", "discount", "last")))
        trains = trainable(batch.host["valid"], batch.host["last"], self.n)[:, trained]
        step = NStep(*(on_device(x, batch.device) for x in host))
        with torch.no_grad():
            q_target = target(rows.part(self.burn_in), target.burn_in(rows.part(0, self.burn_in), state))
        return Ahead(
            rows=rows,
            state=state,
            step=step,
            trains=on_device(trains, batch.device),
            bootstrap=step.m + torch.arange(self.length, device=batch.device),
            action=batch["action"][:, trained][:, : self.length, None],
            q_target=q_target,
        )

    def _rows(self, batch: Batch, actions: int, starts: Tensors) -> Rows:
        """All rows from row history - 1 on."""
        at = self.history - 1
        obs = self._contiguous(observations(batch, self.history, self.stacked))
        first, reward = batch["first"][:, at:], batch["reward"][:, at:]
        if not self.lstm:
            return Rows(obs, reward, reward, None)
        own = F.one_hot(batch["action"][:, at:-1], actions).to(reward.dtype)  # taken at the row before
        taken = torch.cat((starts[TAKEN][:, None], own), 1) * (~first)[:, :, None]
        return Rows(obs, taken, reward, batch.host["first"][:, at:])

    def _initial_state(self, starts: Tensors) -> Tensors:
        """The state before row history - 1."""
        return {name: x if self.stored_state else torch.zeros_like(x) for name, x in starts.items()}

    @torch.no_grad()
    def diagnose(self, net: nn.Module, blocks: Callable[[], Batch | None], schema: Schema) -> dict[str, float]:
        """Delta-Q at a window's first and last trained step: the distance of its values from those under the true state,
        which these weights reach from the episode's start, in units of the largest true value.

        It is the mean over windows whose episode begins before them in the block, and ends after them.
        """
        if not self.lstm:
            return {}
        assert isinstance(net, RecurrentQ)
        batch, at, span = blocks(), self.history - 1, self.burn_in + self.length
        if batch is None:
            return {}
        starts = batch.starts  # [N, S, ...]
        rows = self._rows(batch, net.actions, {name: x[:, 0] for name, x in starts.items()})
        first, valid = batch.host["first"][:, at:], batch.host["valid"][:, at:]
        true = net(rows, {name: torch.zeros_like(x[:, 0]) for name, x in starts.items()})  # [N, R, actions]
        gaps: list[Tensor] = []
        for s in range(schema.starts):
            o = s * self.stride
            inside = first[:, :o].any(1) & ~first[:, o : o + span].any(1) & valid[:, o : o + span].all(1)
            which = torch.from_numpy(np.flatnonzero(inside)).to(batch.device)
            if not len(which):
                continue
            window = rows.part(o, o + span).select(which)
            state = self._initial_state({name: x[which, s] for name, x in starts.items()})
            q = net(window.part(self.burn_in), net.burn_in(window.part(0, self.burn_in), state))
            expected = true[which, o + self.burn_in : o + span]
            scale = expected.abs().amax((1, 2)).clamp_min(1e-6)
            gaps.append((q - expected).norm(dim=2)[:, [0, -1]] / scale[:, None])
        if not gaps:
            return {}
        gap = torch.cat(gaps).mean(0).tolist()
        return {"delta_q_first": gap[0], "delta_q_last": gap[1]}
