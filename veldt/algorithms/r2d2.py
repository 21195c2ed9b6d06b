"""R2D2 (Kapturowski et al., Recurrent experience replay in distributed reinforcement learning, 2019): Ape-X DQN with an
LSTM, trained on sequences.

paper                                       here                                 equation
sequences of m = 80, overlapping by 40      `length`, `stride`; see `block.Window`
stored state                                `stored_state`: at each window's first row, as it was when acting
last action and reward as inputs            the reward raw, as in SEED RL; `clip_last_reward`
burn-in of l = 40                           `burn_in`: rows that only compute the state, for each network
value rescaling h                           `returns.rescale`                    y = h(R + gamma^n h^-1(Q(s', a*; theta-)))
n-step double Q                             `n`                                  a* = argmax_a Q(s', a; theta)
priority of a sequence                      `eta`                                eta max|delta| + (1 - eta) mean|delta|
Delta-Q                                     `diagnose`                           |q - q*| / max|q*|, q*: the true state's

The paper's sequences never cross the end of an episode; windows here do, as SEED RL's. Where an episode ends inside a
window, the next starts from a state of zero, and no return crosses the end. A step is trained if it took an action and its
n-step return is complete; only such steps count in the loss and in priorities, which are both under h.

R2D3 (Gulcehre et al., Making efficient use of demonstrations to solve hard exploration problems, 2020) is the same loss.
Demonstrations have no recorded state, so its windows start from zeros (`stored_state` off); of the 80 steps of a sequence
the first 40 are the burn-in (`burn_in` 40, `length` 40, `stride` 40).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.algorithms.base import ActionValues, Batch, Loss, Tensors, among_legal, require_one_choice
from veldt.algorithms.dqn import epsilon_greedy
from veldt.bounds import above, at_least, between
from veldt.errors import UserError
from veldt.learning.returns import NStep, rescale, unrescale
from veldt.nets.networks import LSTM, TAKEN, QHead, Recurrent, state_spec
from veldt.nets.torsos import on_device
from veldt.records.block import Schema, Window, trainable
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, namespace
from veldt.seeds import Random


class RecurrentQ(Recurrent):
    """A torso, an LSTM if `lstm` > 0, and a dueling head: rows [B, T, ...] -> action values [B, T, actions].

    Without the LSTM it is feed-forward, and neither the last action nor the last reward is an input.
    """

    taken = "action"

    def __init__(self, torso: nn.Module, features: int, actions: int, lstm: int, head: int) -> None:
        super().__init__()
        # First in the vector: elsewhere cuDNN would copy its weights.
        self.core = LSTM(features + actions + 1, lstm) if lstm else None
        self.torso, self.actions = torso, actions
        self.head = QHead(lstm or features, actions, dueling=True, hidden=head)

    def encode(self, taken: Tensor) -> Tensor:
        return F.one_hot(taken, self.actions).float()


@dataclass(frozen=True)
class R2D2(ActionValues):
    gamma: Annotated[float, between(0, 1)] = 0.997
    """Discount of a reward one step later."""
    n: Annotated[int, above(0)] = 5
    """Number of reward steps before the bootstrap (n-step return)."""
    burn_in: Annotated[int, at_least(0)] = 40
    """Steps before the window that are only used to compute its recurrent state; 0: none."""
    length: int = 80
    """Steps of a window that are trained on."""
    stride: int = 40
    """Steps from the start of one window to the next; windows overlap by length - stride."""
    stored_state: bool = True
    """Start a window with the recurrent state that the actor recorded, instead of zeros (R2D3)."""
    clip_last_reward: Annotated[float, at_least(0)] = 0.0
    """Clip the last reward, an input of the LSTM, to [-x, x]; 0: no clipping, as in SEED RL's R2D2."""
    eta: Annotated[float, between(0, 1)] = 0.9
    """Priority of a window: eta * largest error + (1 - eta) * mean error."""
    rescaling: bool = True
    """Learn values rescaled by h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x."""
    h_epsilon: float = 1e-3
    """The epsilon in h(x)."""
    lstm: Annotated[int, at_least(0)] = 512
    """Units of the LSTM; 0: none, a feed-forward network."""
    head: Annotated[int, at_least(0)] = 512
    """Hidden units of the dueling head's two streams; 0: none."""
    hidden: Annotated[tuple[int, ...], above(0)] = (128,)
    """Hidden layers for vector observations, below the LSTM."""
    convnet: Literal["auto", "nature", "minatar", "impala", "mlp"] = "auto"
    """Network for images; auto: nature for uint8 of at least 36 x 36, minatar for small ones with channels, else mlp."""
    network_from: str = ""
    """`module:callable` that builds the network below the LSTM from an EnvSpec: [B, ...] -> [B, features]."""

    masks: ClassVar = True
    one_choice: ClassVar = True

    @property
    def window(self) -> Window:
        return Window(self.history, self.burn_in, self.length, self.n, self.stride)

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        require_one_choice(env, "r2d2")
        if not 1 <= self.stride <= self.length:
            raise UserError(f"r2d2 needs 1 <= stride <= length, not {self.stride} and {self.length}.")
        if not 0 <= self.h_epsilon < 1:
            raise UserError(f"r2d2 needs 0 <= h_epsilon < 1, not {self.h_epsilon}.")

    def last_reward(self, reward: Tensor) -> Tensor:
        return reward.clamp(-self.clip_last_reward, self.clip_last_reward) if self.clip_last_reward else reward

    def state(self, env: EnvSpec) -> Spec:
        return state_spec(self.lstm, env.n_actions)

    def known_state(self, action: Array, state: Spec) -> Tree:
        """The last action, one-hot."""
        return {TAKEN: action[:, None] == np.arange(state[TAKEN].shape[0])} if state else {}

    def network(self, env: EnvSpec) -> nn.Module:
        torso, features = self.torso(env, self.hidden, self.convnet, self.network_from)
        return RecurrentQ(torso, features, env.n_actions, self.lstm, self.head)

    def forward(self, net: nn.Module, rows: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        assert isinstance(net, RecurrentQ)
        at = self.history - 1
        if not self.lstm:
            return {"q": among_legal(net.head(net.torso(self.observe(rows, at))), self.legal(rows, at))}, {}
        q, after = net.step(self.newest(rows, state), state)
        return {"q": among_legal(q[:, 0], self.legal(rows, at))}, after

    def decide(self, net: nn.Module, out: Tree, explore: Array, rng: Random) -> Tree:
        return epsilon_greedy(out["q"], explore, rng)

    def taken(self, net: nn.Module, columns: Tree) -> Tensors:
        """The next state holds the action that is taken, random or not."""
        assert isinstance(net, RecurrentQ)
        return {TAKEN: net.encode(on_device(columns["action"], net.device))}

    def h(self, x: Any) -> Any:
        return rescale(x, self.h_epsilon) if self.rescaling else x

    def h_inverse(self, x: Any) -> Any:
        return unrescale(x, self.h_epsilon) if self.rescaling else x

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        window, td = schema.window, self.first_errors(columns)
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
        rows, state = self.sequence(net, batch, batch.starts), self._initial_state(batch.starts)
        earlier, later = rows[:, : self.burn_in], rows[:, self.burn_in :]
        trained = slice(self.history - 1 + self.burn_in, None)
        host = self.returns(*(batch.host[name][:, trained] for name in ("reward", "discount", "last")))
        step = NStep(*(on_device(x, batch.device) for x in host))  # [B, length]
        bootstrap = step.m + torch.arange(self.length, device=batch.device)  # the row of each return, of the later ones
        trains = on_device(trainable(batch.host["valid"], batch.host["last"], self.n)[:, trained], batch.device)
        with torch.no_grad():
            q_target = target(later, target.burn_in(earlier, state))  # [B, length + n, actions]
        q = net(later, net.burn_in(earlier, state))
        with torch.no_grad():
            best = among_legal(q, self.legal(batch, trained)).argmax(2, keepdim=True)
            v = self.h_inverse(q_target.gather(2, best).squeeze(2))  # [B, length + n]
            y = self.h(step.reward + step.discount * v.gather(1, bootstrap))
        action = batch["action"][:, trained][:, : self.length, None]
        taken = q[:, : self.length].gather(2, action).squeeze(2)
        td = torch.where(trains, y - taken, 0.0)  # [B, length]
        loss = torch.dot(batch.weights, 0.5 * td.square().sum(1)) / len(td)
        steps = trains.sum().clamp_min(1)
        metrics = {
            "loss": loss.detach(),
            "q_mean": (self.h_inverse(taken.detach()) * trains).sum() / steps,
            "trained": trains.float().mean(),
        }
        return Loss({"": loss}, self._window_priority(td.detach().abs(), trains), metrics)

    def _initial_state(self, starts: Tensors) -> Tensors:
        """The state before row history - 1."""
        return {name: x if self.stored_state else torch.zeros_like(x) for name, x in starts.items()}

    @torch.no_grad()
    def diagnose(self, net: nn.Module, blocks: Callable[[], Batch | None], schema: Schema) -> dict[str, float]:
        """Delta-Q at a window's first and last trained step: the distance of its values from those under the true state,
        which these weights reach from the episode's start, in units of the largest true value.

        It is the mean over windows whose episode begins before them in the block, and ends after them.
        """
        assert isinstance(net, RecurrentQ)
        batch = blocks() if self.lstm else None
        if batch is None:
            return {}
        starts, at, span = batch.starts, self.history - 1, self.burn_in + self.length  # starts are [N, S, ...]
        rows = self.sequence(net, batch, {name: x[:, 0] for name, x in starts.items()})
        first, valid = batch.host["first"][:, at:], batch.host["valid"][:, at:]
        true = net(rows, {name: torch.zeros_like(x[:, 0]) for name, x in starts.items()})  # [N, R, actions]
        gaps: list[Tensor] = []
        for s in range(schema.starts):
            o = s * self.stride
            inside = first[:, :o].any(1) & ~first[:, o : o + span].any(1) & valid[:, o : o + span].all(1)
            which = np.flatnonzero(inside)
            if not len(which):
                continue
            window = rows[which, o : o + span]
            state = self._initial_state({name: x[which, s] for name, x in starts.items()})
            q = net(window[:, self.burn_in :], net.burn_in(window[:, : self.burn_in], state))
            expected = true[which, o + self.burn_in : o + span]
            scale = expected.abs().amax((1, 2)).clamp_min(1e-6)
            gaps.append((q - expected).norm(dim=2)[:, [0, -1]] / scale[:, None])
        if not gaps:
            return {}
        gap = torch.cat(gaps).mean(0).tolist()
        return {"delta_q_first": gap[0], "delta_q_last": gap[1]}
