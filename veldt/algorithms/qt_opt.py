"""QT-Opt (Kalashnikov et al., QT-Opt: scalable deep reinforcement learning for vision-based robotic manipulation, 2018):
Q-learning for continuous actions without a policy network. The action is the one that maximises Q, found by sampling.

paper                                          here
cross-entropy method, 2 rounds, N = 64, M = 6  `maximise`: `rounds`, `samples`, `elites`; the best sample of all rounds
Q(s, a; theta)                                 `QNetwork.q`; the state is encoded once for all sampled actions
V(s') = min_i Q(s', argmax_a Q(s', a; th1); thi)  `label`: th1 is an average of theta, th2 the same some updates ago
cross-entropy loss on a sigmoid Q              `objective` cross-entropy, for returns in [0, 1]; `squared` for all others
gripper open or close                          `binary`: elements of the action that are one of their two bounds
Gaussian noise, and random actions             `explore`, in units of half the action's range; `random`

Labels are computed by Bellman updaters (`veldt.learning.bellman`), the averages by `veldt.learning.targets`. A trainer
sees labelled transitions alone (`loss`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.algorithms.base import ActionValues, Batch, Loss, Tensors, require_bounded_box
from veldt.bounds import above, at_least, between
from veldt.errors import UserError
from veldt.nets.networks import Vector
from veldt.nets.normalize import RunningNorm
from veldt.nets.torsos import Torso, rows_of
from veldt.records.block import Schema, Window
from veldt.records.history import observation
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree, spec
from veldt.seeds import Random

LABEL, LABELLED_AT = "label", "labelled_at"  # columns of labelled transitions: the target, and the version that made it
UNLIKELY = -3.0  # what a sigmoid value begins with: a chance of 0.05
LEAST_CHANCE = 0.05  # of each value of a binary element, in any round


class QNetwork(nn.Module):
    """Values of many actions in each state. Actions are scaled to [-1, 1]; the first layer adds what it makes of the state
    and what it makes of the action, so that a state is encoded once. Images are seen through convolutions."""

    center: Tensor  # [A], of the environment's range
    radius: Tensor  # [A], half of that range

    def __init__(
        self,
        vector: Vector,
        inputs: int,  # of the vector
        space: spaces.Box,
        hidden: tuple[int, ...],
        normalize: bool = False,
        sight: Torso | None = None,
        start: float = 0.0,  # of the output
    ) -> None:
        super().__init__()
        self.vector = vector
        self.norm = RunningNorm(inputs) if normalize and inputs else nn.Identity()
        self.sight = sight
        low, high = (np.asarray(x, np.float64).ravel() for x in (space.low, space.high))
        self.shape = space.shape
        self.state = nn.Linear(inputs + (sight.features if sight is not None else 0), hidden[0])
        self.action = nn.Linear(len(low), hidden[0], bias=False)
        self.layer_norm = nn.LayerNorm(hidden[0])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(hidden))
        self.output = nn.Linear(hidden[-1], 1)
        for parameter in self.output.parameters():
            nn.init.uniform_(parameter, -3e-3, 3e-3)
        nn.init.constant_(self.output.bias, start)
        self.register_buffer("center", torch.from_numpy(low / 2 + high / 2).float())
        self.register_buffer("radius", torch.from_numpy(high / 2 - low / 2).float())

    def see(self, obs: Any) -> Tensor:
        """What the first layer makes of states, [B, H]."""
        parts = [self.norm(self.vector(obs))] if self.vector.keys else []
        parts += [self.sight(obs)] if self.sight is not None else []
        x: Tensor = self.state(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        return x

    def q(self, x: Tensor, a: Tensor) -> Tensor:
        """Of N actions in each state that was seen: [B, H], [B, N, A] -> [B, N]. Before any sigmoid."""
        h = F.relu(self.layer_norm(x[:, None] + self.action(a)))
        for layer in self.layers:
            h = F.relu(layer(h))
        out: Tensor = self.output(h)
        return out.squeeze(2)

    def unit(self, action: Tensor) -> Tensor:
        """The environment's actions [B, ...] scaled to [-1, 1]; 0 where the range is empty."""
        return (rows_of(action) - self.center) / torch.where(self.radius > 0, self.radius, 1.0)


def maximise(
    q: Callable[[Tensor], Tensor],  # [B, N, A] -> [B, N]
    like: Tensor,  # [B, ...]: how many states, and on which device
    size: int,  # A
    binary: tuple[int, ...],
    rng: Random,
    rounds: int = 2,
    samples: int = 64,
    elites: int = 6,
    floor: float = 0.05,
) -> tuple[Tensor, Tensor]:
    """The best of all sampled actions in [-1, 1], [B, A], and its value [B] (cross-entropy method).

    A round samples from a Gaussian, clipped to the bounds, and fits the next one to the elites; its deviation does not fall
    below `floor`. A binary element is -1 or 1, with the chance that it has among the elites.
    """
    n, either = len(like), list(binary)
    mean, deviation = like.new_zeros(n, 1, size), like.new_ones(n, 1, size)
    best, most = like.new_zeros(n, 1, size), like.new_full((n, 1), -torch.inf)
    for _ in range(rounds):
        noise = torch.from_numpy(rng.standard_normal((n, samples, size))).to(like)
        a = torch.addcmul(mean, deviation, noise).clamp_(-1, 1)
        if either:
            drawn = torch.from_numpy(rng.random((n, samples, len(either)))).to(like)
            chance = (mean[:, :, either] / 2 + 0.5).clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
            a[:, :, either] = torch.where(drawn < chance, 1.0, -1.0)
        found, index = q(a).topk(elites, 1)  # the best comes first
        chosen = a.gather(1, index[:, :, None].expand(-1, -1, size))
        better = found[:, :1] > most
        best, most = torch.where(better[:, :, None], chosen[:, :1], best), torch.where(better, found[:, :1], most)
        deviation, mean = torch.std_mean(chosen, 1, correction=0, keepdim=True)
        deviation = deviation.clamp_min(floor)
    return best[:, 0], most[:, 0]


@dataclass(frozen=True)
class QTOpt(ActionValues):
    rounds: Annotated[int, above(0)] = 2
    """Rounds of the cross-entropy method, which finds the action with the largest value."""
    samples: Annotated[int, above(0)] = 64
    """Actions that are sampled in each round, for each state."""
    elites: Annotated[int, above(0)] = 6
    """The best of them, to which the next round is fitted."""
    floor: Annotated[float, at_least(0)] = 0.05
    """Least standard deviation of a round's samples, where half of an action's range is 1."""
    binary: Annotated[tuple[int, ...], at_least(0)] = ()
    """Elements of the action that are one of their two bounds, such as a gripper that opens or closes."""
    objective: Literal["cross-entropy", "squared"] = "squared"
    """cross-entropy: of a sigmoid value, for returns in [0, 1]: labels are clipped to that. squared: for all others."""
    random: Annotated[float, between(0, 1)] = 0.1
    """Fraction of the actions that are uniformly random while exploring."""
    hidden: Annotated[tuple[int, ...], above(0)] = (128, 128)
    """Hidden layers, from the one in which state and action meet."""

    uses_target: ClassVar[bool] = False
    exploration: ClassVar[str] = "sigma"

    def check(self, env: EnvSpec) -> None:
        super().check(env)
        require_bounded_box(env, "qt-opt")
        if self.elites > self.samples:
            raise UserError(f"algorithm.elites ({self.elites}) must be at most algorithm.samples ({self.samples}).")
        if not self.hidden:
            raise UserError("algorithm.hidden needs one layer or more.")
        size = int(np.prod(env.action.shape))
        if any(i >= size for i in self.binary):
            raise UserError(f"algorithm.binary names element {max(self.binary)}, but {env.name} has actions of {size}.")

    def extras(self, env: EnvSpec) -> Spec:
        return {}

    def priority(self, columns: Tree, schema: Schema) -> Array | None:
        return None

    def network(self, env: EnvSpec) -> nn.Module:
        assert isinstance(env.action_space, spaces.Box)
        vector, size, sight = self.senses(env)
        # Few episodes succeed at first: a sigmoid that starts at a half would have to fall everywhere, a step at a time.
        start = UNLIKELY if self.objective == "cross-entropy" else 0.0
        return QNetwork(vector, size, env.action_space, self.hidden, self.normalize_obs, sight, start)

    def best(self, net: QNetwork, x: Tensor, rng: Random) -> tuple[Tensor, Tensor]:
        """The maximising actions [B, A] in the states that the network saw, and their values [B] before any sigmoid."""
        how = (self.rounds, self.samples, self.elites, self.floor)
        return maximise(lambda a: net.q(x, a), x, len(net.center), self.binary, rng, *how)

    def act(self, net: nn.Module, rows: Tensors, state: Tensors, explore: Array, rng: Random) -> tuple[Tree, Tensors]:
        """The maximising action; where explore[i] > 0 with Gaussian noise of that deviation, and at times a random one."""
        assert isinstance(net, QNetwork)
        x = net.see(self.observe(rows, self.history - 1))
        a = self.best(net, x, rng)[0]
        if explore.any():
            a = self._noisy(a, torch.from_numpy(explore[:, None]).to(a), rng)
        action = torch.addcmul(net.center, net.radius, a).cpu().numpy()
        return {"action": action.reshape(len(action), *net.shape)}, state

    def _noisy(self, a: Tensor, amount: Tensor, rng: Random) -> Tensor:
        """A binary element is drawn anew with a chance that is the amount of noise."""
        n, either = a.shape, list(self.binary)
        noise, drawn, chance = (torch.from_numpy(x).to(a) for x in (rng.standard_normal(n), rng.random(n), rng.random(n)))
        noisy = (a + amount * noise).clamp_(-1, 1)
        anywhere = 2 * drawn - 1
        if either:
            drawn_anew = torch.where(anywhere >= 0, 1.0, -1.0)[:, either]
            noisy[:, either] = torch.where(chance[:, either] < amount, drawn_anew, a[:, either])
            anywhere[:, either] = drawn_anew
        lost = torch.from_numpy(rng.random((len(a), 1))).to(a) < self.random
        return torch.where(lost & (amount > 0), anywhere, noisy)

    def values(self, net: nn.Module, rows: Tensors, state: Tensors, action: Tensor | None = None) -> Tensors:
        assert isinstance(net, QNetwork)
        x = net.see(self.observe(rows, self.history - 1))
        v = self.value(self.best(net, x, np.random.default_rng(0))[1])
        return {"value": v, "q": v if action is None else self.value(net.q(x, net.unit(action)[:, None])[:, 0])}

    def value(self, q: Tensor) -> Tensor:
        """The return that an output of the network stands for."""
        return q.sigmoid() if self.objective == "cross-entropy" else q

    # Labels, and the loss of labelled transitions.

    def labelled(self, env: EnvSpec) -> Spec:
        """The columns of a labelled transition: stacked observations, the action and the label."""
        seen = {name: spec((self.history, *c.shape), c.dtype) for name, c in env.observation.items()}
        return seen | {"action": env.action, LABEL: spec((), np.float32), LABELLED_AT: spec((), np.int64)}

    def labelled_schema(self, env: EnvSpec, size: int) -> Schema:
        """Of blocks of this many labelled transitions."""
        return Schema(self.labelled(env), Window(), size)

    @torch.no_grad()
    def label(self, net: nn.Module, lagged: nn.Module, batch: Batch, rng: Random) -> Tensor:
        """y = r + gamma min(Q1(s', a*), Q2(s', a*)), a* = argmax Q1(s', a): the targets [B] of windows [B, T, ...]."""
        assert isinstance(net, QNetwork) and isinstance(lagged, QNetwork)
        _, _, r_t, discount_t, s_t = self.transitions(batch)
        a, first = self.best(net, net.see(s_t), rng)
        second = lagged.q(lagged.see(s_t), a[:, None])[:, 0]
        y = torch.addcmul(r_t, discount_t, self.value(torch.minimum(first, second)))
        return y.clamp_(0, 1) if self.objective == "cross-entropy" else y

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Of labelled transitions [B, 1, ...]."""
        assert isinstance(net, QNetwork)
        seen = {name: batch[name][:, 0] for name in batch if name == "obs" or name.startswith("obs/")}
        y, a = batch[LABEL][:, 0], net.unit(batch["action"][:, 0])
        q = net.q(net.see(observation(seen, self.history - 1, self.history, self.stacked, blanked=True)), a[:, None])[:, 0]
        if self.objective == "cross-entropy":
            losses = F.binary_cross_entropy_with_logits(q, y, reduction="none")
        else:
            losses = 0.5 * (q - y).square()
        loss, value = torch.dot(batch.weights, losses) / len(y), self.value(q.detach())
        metrics = {"loss": loss.detach(), "q_mean": value, "label_mean": y}
        return Loss({"": loss}, (y - value).abs(), metrics)
