"""A3C's loss and those of the asynchronous value-based methods are their definitions, one step at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import select
from oracles import stack_history as seen_by_definition
from test_vtrace import ACTIONS, KINDS, gradient, moved, rig, rows_by_definition, starts_of
from torch import nn

from veldt.algorithms.a3c import A3C
from veldt.algorithms.actor_critic import PolicyAndValue
from veldt.algorithms.async_q import AsyncQ
from veldt.algorithms.base import Batch
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.learning.returns import forward_view
from veldt.records.tree import Array, spec


def trains_by_definition(rows: Any, t: int) -> bool:
    """A step that took an action, and whose result was recorded."""
    return bool(rows["valid"][t] and rows["valid"][t + 1] and not rows["last"][t])


def return_by_definition(rows: Any, reward: list[float], value: list[float], t: int, gamma: float) -> float:
    """r_t + gamma r_{t+1} + ... up to the end of the episode or of the unroll, where the value bootstraps."""
    total, weight, at = 0.0, 1.0, t
    while at < len(value) - 1 and trains_by_definition(rows, at):
        total += weight * reward[at + 1]
        weight *= gamma * float(rows["discount"][at + 1])
        at += 1
    return total + weight * value[at]


def clipped(x: Any, most: float) -> float:
    return max(-most, min(most, float(x))) if most else float(x)


def loss_by_definition(of: A3C, net: PolicyAndValue, batch: Batch) -> torch.Tensor:
    total, at, distribution = torch.zeros(()), of.history - 1, net.distribution
    for b in range(len(batch.host["first"])):
        whole = {name: x[b] for name, x in batch.host.items()}
        outputs = rows_by_definition(of, net, whole, starts_of(batch, b))  # type: ignore[arg-type]
        rows = {name: x[at:] for name, x in whole.items()}
        value, reward = [row.value.item() for row in outputs], [clipped(r, of.clip_reward) for r in rows["reward"]]
        for t in range(of.unroll):
            if not trains_by_definition(rows, t):
                continue
            error = return_by_definition(rows, reward, value, t, of.gamma) - outputs[t].value
            log_pi = distribution.log_prob(outputs[t].pi, torch.from_numpy(np.array(rows[distribution.taken][t])))
            total = total + of.value_cost * error**2 - error.item() * log_pi
            total = total - of.entropy_cost * distribution.entropy(outputs[t].pi)
    return total


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_their_definition(kind: str, actions: str) -> None:
    """With unrolls that cross the ends of episodes, terminated and truncated, with an LSTM whose state goes on."""
    _, net, batch, _ = rig(kind, actions)
    batch, net = select(batch, np.arange(0, len(batch.host["first"]), 3)), moved(net)
    of = A3C(hidden=(8,), gamma=0.9, entropy_cost=0.05, value_cost=0.3, clip_reward=0.7, **KINDS[kind])
    found, expected = of.loss(net, net, batch), loss_by_definition(of, net, batch)
    assert batch.host["last"].any() and batch.host["first"][:, of.history :].any()
    assert set(found.losses) == {""} and not found.priorities.any()
    torch.testing.assert_close(found.losses[""], expected, rtol=2e-4, atol=2e-5)
    one, other = gradient(found.losses[""], net), gradient(expected, net)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def q_loss_by_definition(of: AsyncQ, net: nn.Module, target: nn.Module, batch: Batch) -> torch.Tensor:
    total, at = torch.zeros(()), of.history - 1

    def values(of_net: nn.Module, whole: Any, t: int) -> torch.Tensor:
        obs = seen_by_definition(whole["obs"], whole["first"], whole["valid"], at + t, of.history)
        out: torch.Tensor = of_net(torch.from_numpy(obs if of.history > 1 else obs[0])[None])[0]
        return out

    for b in range(len(batch.host["first"])):
        whole = {name: x[b] for name, x in batch.host.items()}
        rows = {name: x[at:] for name, x in whole.items()}
        reward = [clipped(r, of.clip_reward) for r in rows["reward"]]
        q_t = [values(target, whole, t).tolist() for t in range(of.unroll + 1)]
        for t in range(of.unroll):
            if not trains_by_definition(rows, t):
                continue
            after = float(q_t[t + 1][int(rows["action"][t + 1])] if of.returns == "sarsa" else max(q_t[t + 1]))
            y = reward[t + 1] + of.gamma * float(rows["discount"][t + 1]) * after
            if of.returns == "n-step":
                y = return_by_definition(rows, reward, [max(x) for x in q_t], t, of.gamma)
            total = total + (y - values(net, whole, t)[int(rows["action"][t])]) ** 2
    return total


@pytest.mark.parametrize("kind", ["feed-forward", "history"])
@pytest.mark.parametrize("returns", ["one-step", "n-step", "sarsa"])
def test_what_action_values_learn_is_its_definition(returns: Any, kind: str) -> None:
    batch = rig(kind, "discrete").batch
    batch = select(batch, np.arange(1, len(batch.host["first"]), 3))
    of = AsyncQ(returns=returns, hidden=(8,), gamma=0.9, clip_reward=0.7, **KINDS[kind])
    env = make_env("veldt/Chain-v0").spec
    seen, actions = batch.host["obs"], ACTIONS["discrete"]
    space = replace(env, observation={"obs": spec(seen.shape[2:], seen.dtype)}, action_space=actions)
    torch.manual_seed(3)
    net, target = of.network(space), of.network(space)
    found, expected = of.loss(net, target, batch).losses[""], q_loss_by_definition(of, net, target, batch)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    parameters = list(net.parameters())
    one, other = (torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)]) for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_a_return_ends_with_its_episode() -> None:
    """Terminated: nothing beyond. Truncated: the value of the last record. The record of a reset has no return."""
    value = np.array([[10, 20, 30, 40, 50, 60]], np.float32)
    reward = np.array([[0, 1, 2, 0, 4, 5]], np.float32)
    trains = np.array([[True, True, False, True, True]])  # the third record is the last of its episode

    def found(discount: list[float]) -> Array:
        return forward_view(value, reward, np.array([discount], np.float32), trains, 0.5)[0]

    assert found([1, 1, 1, 1, 1, 1]).tolist() == [1 + 0.5 * 17, 2 + 0.5 * 30, 30, 4 + 0.5 * 35, 5 + 0.5 * 60]
    assert found([1, 1, 0, 1, 1, 1]).tolist()[:2] == [1 + 0.5 * 2, 2]


@pytest.mark.parametrize("of", [A3C(normalize_obs=True), AsyncQ(normalize_obs=True)], ids=lambda x: type(x).__name__)
def test_running_statistics_are_refused(of: Any) -> None:
    with pytest.raises(UserError, match="its workers would overwrite each other's statistics"):
        of.check(make_env("CartPole-v1").spec)
