"""R2D2 (Kapturowski et al., Recurrent experience replay in distributed reinforcement learning, 2019): Ape-X DQN with an
LSTM, learned from sequences.

paper                                       here                                 equation
sequences of m = 80, overlapping by 40      `length`, `stride`; see `block.Window`
stored state                                `stored_state`: at each window's first row, as it was when acting
burn-in of l = 40                           `burn_in`: rows that only make the state, each network its own
value rescaling h                           `returns.rescale`                    y = h(R + gamma^n h^-1(Q(s', a*; theta-)))
n-step double Q                             `n`                                  a* = argmax_a Q(s', a; theta)
priority of a sequence                      `eta`                                eta max|delta| + (1 - eta) mean|delta|
Delta-Q, the paper's diagnostic             `delta_q`

Where an episode ends inside a window, the next one begins from a state of zero, and no return crosses. A step trains if it
took an action and its return is there; only such steps count in the loss and in priorities, which are both in h's space.
"""

from __future__ import annotations

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
from veldt.nets import LSTM, QHead, each, features_of, flat_rows, made_by, on_device, recurrent_input, torso_for
from veldt.records.block import Schema, Window, observations, trainable
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, namespace, spec

H, C, TAKEN = "state/h", "state/c", "state/taken"  # the LSTM's state, and the last action as the network sees it


class RecurrentQ(nn.Module):
    """A torso, an LSTM if `lstm` > 0, and a dueling head: rows [B, T, ...] -> action values [B, T, actions].

    Without the LSTM it is feed-forward: it sees neither the last action nor the last reward.
    """

    def __init__(self, torso: nn.Module, features: int, actions: int, lstm: int, head: int) -> None:
        super().__init__()
        self.core = LSTM(features + actions + 1, lstm) if lstm else None  # first: cuDNN copies weights that lie elsewhere
        self.torso, self.actions = torso, actions
        self.head = QHead(lstm or features, actions, dueling=True, hidden=head)

    def forward(self, rows: Rows, state: Tensors) -> Tensor:
        x = self._input(rows)
        q: Tensor = self.head(x if self.core is None else self.core.outputs(x, state[H], state[C], rows.first))
        return q

    def step(self, rows: Rows, state: Tensors) -> tuple[Tensor, Tensors]:
        """The same, and the state after the rows."""
        x = self._input(rows)
        if self.core is None:
            return self.head(x), {}
        y, h, c = self.core(x, state[H], state[C], rows.first)
        return self.head(y), {H: h, C: c}

    @torch.no_grad()
    def burn_in(self, rows: Rows, state: Tensors) -> Tensors:
        """The state after the rows; no gradient goes into them."""
        if self.core is None or not rows.reward.shape[1]:
            return state
        h, c = self.core.after(self._input(rows), state[H], state[C], rows.first)
        return {H: h, C: c}

    def _input(self, rows: Rows) -> Tensor:
        """Of the LSTM, or of the head where there is none: [B, T, ...]."""
        features: Tensor = self.torso(flat_rows(rows.obs)).unflatten(0, rows.reward.shape)
        return features if self.core is None else recurrent_input(features, rows.taken, rows.reward)


@dataclass
class Rows:
    """What the network reads of rows [B, T, ...]."""

    obs: Any
    taken: Tensor  # [B, T, actions], the last action; none where an episode begins
    reward: Tensor  # [B, T], on arriving
    first: Array | None  # [B, T], where an episode begins; None: nowhere

    def part(self, start: int, stop: int | None = None) -> Rows:
        rows = slice(start, stop)
        first = None if self.first is None else self.first[:, rows]
        return Rows(each(self.obs, lambda x: x[:, rows]), self.taken[:, rows], self.reward[:, rows], first)

    def select(self, index: Tensor) -> Rows:
        """Some of the B."""
        first = None if self.first is None else self.first[index.cpu().numpy()]
        return Rows(each(self.obs, lambda x: x[index]), self.taken[index], self.reward[index], first)


class Ahead(NamedTuple):
    """What the loss of a batch needs beside the network that it trains."""

    rows: Rows
    state: Tensors  # before the first row
    step: NStep  # [B, length]
    trains: Tensor  # [B, length]
    bootstrap: Tensor  # [B, length], the trained row that each return goes on from
    action: Tensor  # [B, length, 1]
    q_target: Tensor  # [B, length + n, actions]


@dataclass(frozen=True)
class R2D2(ActionValues):
    gamma: Annotated[float, between(0, 1)] = 0.997
    """Discount of a reward one step later."""
    n: Annotated[int, above(0)] = 5
    """Steps of reward before the bootstrap."""
    burn_in: Annotated[int, at_least(0)] = 40
    """Steps before a window that only make its recurrent state; 0: none."""
    length: int = 80
    """Steps of a window that train."""
    stride: int = 40
    """Steps from the start of a window to that of the next; they overlap by length - stride."""
    stored_state: bool = True
    """A window begins with the state that its actor had there; otherwise with zeros."""
    eta: Annotated[float, between(0, 1)] = 0.9
    """Part of the largest error in the priority of a window; the rest is the mean error's."""
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
        """Of the state after a demonstrated step: what follows from its action [n] alone, columns [n, ...]."""
        return {TAKEN: action[:, None] == np.arange(state[TAKEN].shape[0])} if state else {}

    def network(self, env: EnvSpec) -> nn.Module:
        if not self.network_from:
            torso = torso_for(env, self.history, self.stacked, self.hidden, self.convnet)
            return RecurrentQ(torso, features_of(torso), env.n_actions, self.lstm, self.head)
        torso, out = made_by(self.network_from, env, self._see, self.history)
        if out.ndim != 2 or len(out) != 2:
            raise UserError(
                f"The network of {self.network_from} must map [B, ...] observations to [B, features]; "
                f"for B = 2 it gave {list(out.shape)}."
            )
        return RecurrentQ(torso, out.shape[1], env.n_actions, self.lstm, self.head)

    def _see(self, rows: Tensors) -> Any:
        return self._whole(self.observe(rows, self.history - 1))

    def _whole(self, obs: Any) -> Any:
        """Ours take slices as they are; other networks may want to view them in another shape."""
        return each(obs, lambda x: x.contiguous()) if self.network_from else obs

    def act(
        self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: np.random.Generator
    ) -> tuple[Tree, Tensors]:
        """Epsilon-greedy. The state moves on with the action that is taken, random or not."""
        assert isinstance(net, RecurrentQ)
        obs = each(self._see(rows), lambda x: x[:, None])  # [n, 1, ...]
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
        """Of windows, from the values recorded while acting."""
        window = schema.window
        step = self._returns(columns["reward"], columns["discount"], columns["last"])
        rows = np.arange(step.m.shape[-1])
        v_t = np.take_along_axis(columns["v"], rows + step.m, axis=-1)
        with np.errstate(all="ignore"):
            td = np.abs(self.h(step.reward + step.discount * self.h_inverse(v_t)) - columns["q"][..., : len(rows)])
        trains = trainable(columns["valid"], columns["last"], window.lookahead)
        starts = [slice(s, s + window.length) for s in range(window.before, window.before + schema.fresh, window.stride)]
        return np.stack([self._mixed(td[..., rows], trains[..., rows]) for rows in starts], -1)

    def _mixed(self, td: Any, trains: Any) -> Any:
        """eta max + (1 - eta) mean of the steps that train: [..., T] -> [...]; 0 if there are none."""
        xp = namespace(td)
        td = xp.where(trains, td, xp.zeros_like(td))
        largest = td.max(-1) if xp is np else td.amax(-1)
        return self.eta * largest + (1 - self.eta) * td.sum(-1) / trains.sum(-1).clip(1)

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Of windows [B, burn_in + length + n], after the history."""
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
        return Loss({"": loss}, self._mixed(td.detach().abs(), trains), metrics)

    def ahead(self, target: nn.Module, batch: Batch) -> Ahead:
        """All of the loss that needs the target network alone."""
        assert isinstance(target, RecurrentQ)
        rows, state = self._rows(batch, target.actions), self._begin(batch)
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

    def _rows(self, batch: Batch, actions: int) -> Rows:
        """All rows from history - 1 on."""
        at = self.history - 1
        obs = self._whole(observations(batch, self.history, self.stacked))
        first, reward = batch["first"][:, at:], batch["reward"][:, at:]
        if not self.lstm:
            return Rows(obs, reward, reward, None)
        own = F.one_hot(batch["action"][:, at:-1], actions).to(reward.dtype)  # of the row before
        taken = torch.cat((batch.starts[TAKEN][:, None], own), 1) * (~first)[:, :, None]
        return Rows(obs, taken, reward, batch.host["first"][:, at:])

    def _begin(self, batch: Batch) -> Tensors:
        """The state before the first of these rows."""
        return {name: x if self.stored_state else torch.zeros_like(x) for name, x in batch.starts.items()}

    @torch.no_grad()
    def diagnose(self, net: nn.Module, blocks: Batch, schema: Schema) -> dict[str, float]:
        """Delta-Q: how far the values that a window trains are from those under the state that these weights come to when
        they run from the episode's start, in units of the largest value; at the window's first and last trained step.

        Of blocks [N, R, ...] and their starts [N, S, ...]: every window whose episode begins before it in the block, and
        ends after it.
        """
        if not self.lstm:
            return {}
        assert isinstance(net, RecurrentQ)
        at, span = self.history - 1, self.burn_in + self.length
        starts = blocks.starts  # [N, S, ...]
        host = Batch(
            blocks.host, {name: x[:, 0].cpu().numpy() for name, x in starts.items()}, np.ones(1, np.float32), blocks.device
        )
        rows = self._rows(host, net.actions)
        first, valid = blocks.host["first"][:, at:], blocks.host["valid"][:, at:]
        true = net(rows, {name: torch.zeros_like(x[:, 0]) for name, x in starts.items()})  # [N, R, actions]
        told: list[Tensor] = []
        for s in range(schema.starts):
            o = s * self.stride
            sound = first[:, :o].any(1) & ~first[:, o : o + span].any(1) & valid[:, o : o + span].all(1)
            which = torch.from_numpy(np.flatnonzero(sound)).to(blocks.device)
            if not len(which):
                continue
            window = rows.part(o, o + span).select(which)
            state = {
                name: x[which, s] if self.stored_state else torch.zeros_like(x[which, s]) for name, x in starts.items()
            }
            q = net(window.part(self.burn_in), net.burn_in(window.part(0, self.burn_in), state))
            right = true[which, o + self.burn_in : o + span]
            scale = right.abs().amax((1, 2)).clamp_min(1e-6)
            told.append((q - right).norm(dim=2)[:, [0, -1]] / scale[:, None])
        if not told:
            return {}
        gap = torch.cat(told).mean(0).tolist()
        return {"delta_q_first": gap[0], "delta_q_last": gap[1]}
