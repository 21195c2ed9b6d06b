"""QT-Opt: its maximiser against brute force, its labels and losses from their definitions."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from veldt.algorithms.base import Batch
from veldt.algorithms.qt_opt import QNetwork, QTOpt, maximise
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"hidden": (16, 16)}


class Bumps:
    """Random functions of actions [n, N, A]: in each state a few Gaussian bumps of different heights."""

    def __init__(self, n: int, size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.at = torch.from_numpy(rng.uniform(-1, 1, (n, 1, 4, size))).float()
        self.height = torch.from_numpy(rng.uniform(0.5, 1, (n, 1, 4))).float()
        self.calls: list[Tensor] = []

    def __call__(self, a: Tensor) -> Tensor:
        self.calls.append(a.clone())
        away = (a[:, :, None] - self.at).square().sum(3)
        return (self.height * torch.exp(-away / 0.18)).sum(2)

    def largest(self, binary: tuple[int, ...] = ()) -> Tensor:
        """By brute force, over a grid."""
        n, _, _, size = self.at.shape
        line = torch.linspace(-1, 1, 81)
        grid = torch.stack(torch.meshgrid(*[torch.tensor([-1.0, 1.0]) if i in binary else line for i in range(size)]), -1)
        return self(grid.reshape(1, -1, size).expand(n, -1, -1)).amax(1)


@pytest.mark.parametrize(("size", "binary"), [(1, ()), (2, ()), (2, (1,)), (3, (0, 2))])
@pytest.mark.filterwarnings("ignore:torch.meshgrid")
def test_the_maximiser_finds_what_brute_force_finds(size: int, binary: tuple[int, ...]) -> None:
    n, q = 40, Bumps(40, size, seed=size)
    most, like = q.largest(binary), torch.zeros(n, 3)
    rng = np.random.default_rng(0)
    a, value = maximise(q, like, size, binary, rng, rounds=4, samples=512, elites=16, floor=0.02)
    assert a.shape == (n, size) and a.abs().max() <= 1
    assert torch.isin(a[:, list(binary)], torch.tensor([-1.0, 1.0])).all()
    torch.testing.assert_close(q(a[:, None])[:, 0], value)
    assert (value > 0.97 * most).float().mean() > 0.9 and (value > 0.8 * most).all(), (value / most).min()
    _, few = maximise(q, like, size, binary, rng)
    assert (few / most).mean() > 0.9, "the paper's 2 rounds of 64"
    _, one = maximise(q, like, size, binary, rng, rounds=1)
    assert few.mean() > one.mean(), "the second round finds better ones"


def test_the_second_round_is_fitted_to_the_elites_and_not_narrower_than_the_floor() -> None:
    q = Bumps(1, 2, seed=9)
    q.at[:] = torch.tensor([0.3, -0.2])  # far from the bounds
    maximise(q, torch.zeros(1, 3), 2, (), np.random.default_rng(0), rounds=2, samples=2_000, elites=50, floor=0.0)
    first, second = q.calls
    elites = first[0][q(first)[0].argsort(descending=True)[:50]]
    inside = (second.abs() < 1).all(2)[0]
    torch.testing.assert_close(second[0][inside].mean(0), elites.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(second[0][inside].std(0), elites.std(0), atol=0.03, rtol=0.1)
    q.calls.clear()
    maximise(q, torch.zeros(1, 3), 2, (), np.random.default_rng(0), rounds=3, samples=2_000, elites=1, floor=0.1)
    assert all(abs(float(x) - 0.1) < 0.02 for x in q.calls[2].std(1)[0]), "one elite has no spread of its own"


def test_the_best_of_all_rounds_is_returned() -> None:
    values: list[Tensor] = []

    def q(a: Tensor) -> Tensor:
        """Every round is worth less than the one before."""
        values.append(torch.rand(a.shape[:2], generator=torch.Generator().manual_seed(len(values))) - len(values))
        return values[-1]

    _, found = maximise(q, torch.zeros(6, 1), 2, (), np.random.default_rng(0), rounds=3)
    assert len(values) == 3 and (found == values[0].amax(1)).all()


def test_states_are_searched_each_by_itself() -> None:
    """One state's samples do not depend on the values of another."""
    q = Bumps(5, 2, seed=3)
    together = maximise(q, torch.zeros(5, 1), 2, (), np.random.default_rng(1))[0]

    def changed(a: Tensor) -> Tensor:
        out = q(a)
        out[0] = -out[0]
        return out

    other = maximise(changed, torch.zeros(5, 1), 2, (), np.random.default_rng(1))[0]
    assert (together[1:] == other[1:]).all() and (together[0] != other[0]).any()
    assert len(q.calls) == 4 and all(a.shape == (5, 64, 2) for a in q.calls), "one forward pass a round for all states"


def env_of(low: Any = (-3.0, 10.0), high: Any = (5.0, 10.5)) -> EnvSpec:
    box = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    return EnvSpec("test", {"obs": spec((3,), np.float32)}, spec((2,), np.float32), box)


def windows(n: int, algorithm: QTOpt, seed: int = 0) -> Batch:
    """Windows [n, 2, ...]: the second row ends an episode in a third of them, by truncation in half of those."""
    rng, t = np.random.default_rng(seed), algorithm.window.rows
    last, terminal = rng.random((n, t)) < 0.33, rng.random((n, t)) < 0.5
    last[:, : algorithm.history] = False
    rows: dict[str, Array] = {
        "obs": rng.normal(size=(n, t, 3)).astype(np.float32),
        "action": np.stack([rng.uniform(-3, 5, (n, t)), rng.uniform(10, 10.5, (n, t))], 2).astype(np.float32),
        "reward": rng.normal(size=(n, t)).astype(np.float32),
        "discount": (~(last & terminal)).astype(np.float32),
        "first": np.zeros((n, t), np.bool_),
        "last": last,
        "valid": np.ones((n, t), np.bool_),
    }
    return Batch(rows, {}, np.ones(n, np.float32), CPU)


def networks(algorithm: QTOpt, env: EnvSpec) -> tuple[QNetwork, QNetwork]:
    """Two that disagree, with values of ordinary size."""
    out = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = algorithm.network(env)
        assert isinstance(net, QNetwork)
        with torch.no_grad():
            net.output.weight.mul_(300)
        out.append(net.eval())
    return out[0], out[1]


@pytest.mark.parametrize("objective", ["squared", "cross-entropy"])
def test_labels_are_the_smaller_value_of_both_networks_at_the_action_that_the_first_prefers(objective: Any) -> None:
    algorithm, n = QTOpt(gamma=0.9, objective=objective, **SMALL), 50
    env, batch = env_of(), windows(50, algorithm)
    net, lagged = networks(algorithm, env)
    labels = algorithm.label(net, lagged, batch, np.random.default_rng(5))
    rows: Any = batch.host
    s_t = torch.from_numpy(rows["obs"][:, 1])
    with torch.no_grad():
        best = algorithm.best(net, net.see(s_t), np.random.default_rng(5))[0]
        theirs = algorithm.best(lagged, lagged.see(s_t), np.random.default_rng(5))[0]
        smaller = other = 0
        for i in range(n):
            both = [float(x.q(x.see(s_t[i : i + 1]), best[i].reshape(1, 1, 2))) for x in (net, lagged)]
            values = both if objective == "squared" else [1 / (1 + math.exp(-x)) for x in both]
            y = float(rows["reward"][i, 1]) + 0.9 * float(rows["discount"][i, 1]) * min(values)
            y = y if objective == "squared" else min(max(y, 0.0), 1.0)
            assert labels[i].item() == pytest.approx(y, abs=1e-5)
            smaller += both[1] < both[0]
            other += bool((best[i] - theirs[i]).abs().max() > 0.1)
    assert 5 < smaller < 45 and other > 10, "it matters which network is taken for what"
    assert (rows["last"][:, 1] & (rows["discount"][:, 1] == 1)).any(), "some were truncated, and bootstrap"


def test_acting_and_labelling_maximise_in_the_same_way() -> None:
    algorithm, env = QTOpt(random=0.0, **SMALL), env_of()
    net, _ = networks(algorithm, env)
    obs = torch.randn(7, 1, 3)
    with torch.no_grad():
        out, _ = algorithm.act(net, {"obs": obs}, {}, np.zeros(7), np.random.default_rng(4))
        best, _ = algorithm.best(net, net.see(obs[:, 0]), np.random.default_rng(4))
    np.testing.assert_allclose(out["action"], net.center + net.radius * best, rtol=1e-5)
    low, high = np.array([-3, 10]), np.array([5, 10.5])
    assert (out["action"] >= low).all() and (out["action"] <= high).all()


def test_exploration_adds_noise_draws_binary_elements_anew_and_is_random_at_times() -> None:
    algorithm, env, n = QTOpt(binary=(1,), random=0.0, **SMALL), env_of(), 4_000
    net, _ = networks(algorithm, env)
    rows = {"obs": torch.ones(n, 1, 3)}

    def act(explore: float, rng: int = 4, **changes: Any) -> Array:
        how = copy.replace(algorithm, **changes) if hasattr(copy, "replace") else QTOpt(**(vars(algorithm) | changes))
        with torch.no_grad():
            out = how.act(net, rows, {}, np.full(n, explore), np.random.default_rng(rng))[0]["action"]
        return (out - net.center.numpy()) / net.radius.numpy()

    greedy, noisy = act(0.0), act(0.2)
    assert np.isin(noisy[:, 1].round(4), [-1, 1]).all()
    inside = (np.abs(noisy[:, 0]) < 1) & (np.abs(greedy[:, 0]) < 0.5)
    assert inside.sum() > 500 or np.abs(greedy[:, 0]).mean() > 0.5
    assert (noisy[:, 1].round(4) != greedy[:, 1].round(4)).mean() == pytest.approx(0.1, abs=0.03), (
        "0.2 of them, half change"
    )
    spread = act(0.2, random=1.0)
    assert np.abs(spread[:, 0]).mean() == pytest.approx(0.5, abs=0.03), "uniform"
    assert (act(0.0, random=1.0) == greedy).all(), "an evaluation is greedy"


def labelled(algorithm: QTOpt, batch: Batch, y: Array) -> Batch:
    rows: Any = batch.host
    h = algorithm.history
    columns = {"obs": rows["obs"][:, None, :h], "action": rows["action"][:, None, h - 1], "label": y[:, None]}
    return Batch(columns, {}, np.linspace(0.5, 1, len(y)).astype(np.float32), CPU)


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("objective", ["squared", "cross-entropy"])
def test_the_loss_is_its_definition(objective: Any, history: int) -> None:
    algorithm = QTOpt(objective=objective, history=history, **SMALL)
    env, n = env_of(), 6
    net, _ = networks(algorithm, env)
    windows_ = windows(n, algorithm)
    y = np.random.default_rng(0).random(n).astype(np.float32)
    batch = labelled(algorithm, windows_, y)
    loss = algorithm.loss(net, net, batch)
    total, rows = 0.0, dict(windows_.host)
    for i in range(n):
        seen = torch.from_numpy(rows["obs"][i : i + 1, :history] if history > 1 else rows["obs"][i : i + 1, 0])
        action = (rows["action"][i, history - 1] - np.array([1, 10.25])) / np.array([4, 0.25])
        q = net.q(net.see(seen), torch.from_numpy(action).float().reshape(1, 1, 2)).item()
        p = 1 / (1 + math.exp(-q))
        entropy = -(y[i] * math.log(p) + (1 - y[i]) * math.log(1 - p))
        total += float(batch.weights[i]) * (entropy if objective == "cross-entropy" else 0.5 * (q - y[i]) ** 2)
    assert loss.losses[""].item() == pytest.approx(total / n, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "env", "said"),
    [
        ({"elites": 65}, "Pendulum-v1", "elites"),
        ({"binary": (1,)}, "Pendulum-v1", "element 1"),
        ({"hidden": ()}, "Pendulum-v1", "one layer"),
        ({}, "CartPole-v1", "apex-dqn"),
    ],
)
def test_what_cannot_work_is_said(changes: dict[str, Any], env: str, said: str) -> None:
    envs = make_env(env)
    with pytest.raises(UserError, match=said):
        QTOpt(**changes).check(envs.spec)
    envs.close()
