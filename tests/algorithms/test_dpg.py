"""DPG: its targets and gradients from their definitions, how it acts within any bounds, and that it learns."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from oracles import n_step as n_step_by_definition
from test_run import Stop, crash, stopping, whole_state

import veldt
from veldt.acting.actor import Actor
from veldt.acting.policy import LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Batch
from veldt.algorithms.dpg import DPG, ActorCritic
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.experiment import recipes, settings
from veldt.experiment.exploring import GaussianConfig
from veldt.learning.params import LatestParams, Weights
from veldt.nets.networks import Vector
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Uniform

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"critic": (16, 16), "actor": (8, 8)}


class Aim(gym.Env[Array, Array]):
    """See a point, and hit a place that follows from it: reward -|miss|^2. Episodes of 1 to 5 points, every second one
    truncated. Actions have a range of their own in each direction."""

    def __init__(self, shape: tuple[int, ...] = (2,)) -> None:
        self.observation_space = spaces.Box(-1, 1, shape, np.float32)
        low, high = np.full(shape, -3, np.float32), np.full(shape, 5, np.float32)
        low.flat[-1], high.flat[-1] = 10, 10.5
        self.action_space = spaces.Box(low, high)
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.left = int(self.np_random.integers(1, 6))
        return self._see(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        low, high = self.action_space.low, self.action_space.high
        assert action.shape == low.shape and (action >= low).all() and (action <= high).all(), action
        miss = (action - low) / (high - low) - (1 + self.point) / 2
        self.left -= 1
        over, whole = self.left == 0, self.episode % 2 == 0
        return self._see(), -float((miss**2).sum()), over and whole, over and not whole, {}

    def _see(self) -> Array:
        self.point = self.np_random.uniform(-1, 1, self.observation_space.shape).astype(np.float32)
        return self.point


def rig(dpg: DPG, env: Any = Aim, steps: int = 200, sigma: float = 0.5) -> tuple[Any, ActorCritic, Schema]:
    """A store that keeps what an actor with random weights sends it, those weights, and the schema."""
    envs = make_env(env)
    schema = Schema({**envs.spec.step, "action": envs.spec.action, **dpg.extras(envs.spec)}, dpg.window, fresh=8)
    torch.manual_seed(0)
    params = LatestParams()
    policy = LocalPolicy(dpg, envs.spec, params, Counters(), np.full(2, sigma), seed=1)
    with torch.no_grad():
        policy.vector[: sum(p.numel() for p in policy.net.parameters())].normal_(0, 0.4)
    params.publish(Weights(0, policy.vector.numpy()))

    class Taking:
        def __init__(self) -> None:
            self.taken: list[Any] = []

        def insert(self, block: Any, priorities: Any) -> bool:
            self.taken.append((block, priorities))
            return True

    store = Taking()
    actor = Actor(lambda n: make_env(env, n), 2, Recorder(policy, store, dpg, schema), Counters(), seed=3)
    for _ in range(steps):
        actor.step()
    actor.close(), envs.close()
    assert isinstance(policy.net, ActorCritic)
    return store, policy.net.requires_grad_(True), schema


def windows(store: Any, schema: Schema) -> Batch:
    """All items of a store's blocks as one batch."""
    parts: dict[str, list[Any]] = {}
    for block, _ in store.taken:
        rows = np.flatnonzero(block.items)[:, None] + np.arange(schema.window.rows)
        for name, x in block.columns().items():
            parts.setdefault(name, []).append(x[rows])
    host = {name: np.concatenate(x) for name, x in parts.items()}
    return Batch(host, {}, np.linspace(0.2, 1, len(host["reward"]), dtype=np.float32), CPU)


def unit(net: ActorCritic, action: Any) -> torch.Tensor:
    return (torch.from_numpy(np.ascontiguousarray(action)).flatten(1) - net.center) / net.radius


@pytest.mark.parametrize("n", [1, 3])
def test_target_and_priorities_from_their_definition(n: int) -> None:
    """y = r_1 + ... + gamma^m q-(s_m, pi-(s_m)), with the target's networks; the critic's loss is the weighted square."""
    dpg = DPG(n=n, gamma=0.9, **SMALL)
    store, net, schema = rig(dpg)
    target = copy.deepcopy(net)
    with torch.no_grad():
        for p in target.parameters():
            p.add_(0.1)
    batch = windows(store, schema)
    loss = dpg.loss(net, target, batch)
    expected, kinds = [], set()
    c = batch.host
    for i in range(len(c["reward"])):
        total, discount, m = n_step_by_definition(c["reward"][i], c["discount"][i], c["last"][i], 0, n, 0.9)
        x_0, x_m = (torch.from_numpy(c["obs"][i, k : k + 1]) for k in (0, m))
        with torch.no_grad():
            y = total + discount * target.q(x_m, target.pi(x_m)).item()
            expected.append(y - net.q(x_0, unit(net, c["action"][i, :1])).item())
        kinds.add((m, discount == 0))
    assert len(expected) > 100 and kinds >= {(m, over) for m in range(1, n + 1) for over in (False, True)}
    np.testing.assert_allclose(loss.priorities.numpy(), np.abs(expected), atol=1e-5)
    weighted = 0.5 * (batch.weights.numpy() * np.square(expected)).mean()
    assert loss.losses["critic."].item() == pytest.approx(weighted, rel=1e-4)


def test_twin_critics_learn_what_the_more_careful_of_them_expects() -> None:
    """One step of reward: y = r + gamma * the smaller of both values; each critic has its own error, added up."""
    dpg = DPG(gamma=0.9, twin=True, **SMALL)
    store, net, schema = rig(dpg)
    target = copy.deepcopy(net)
    with torch.no_grad():
        for p in target.parameters():
            p.add_(torch.randn_like(p))
        for critic in target.critic:  # type: ignore[union-attr]
            critic.output.bias.zero_()
    batch = windows(store, schema)
    loss = dpg.loss(net, target, batch)
    first, second = net.critic  # type: ignore[misc]
    squares, smaller = [], []
    for reward, discount, obs, action in zip(
        *(batch.host[name] for name in ("reward", "discount", "obs", "action")), strict=True
    ):
        x_0, x_1 = (torch.from_numpy(obs[k : k + 1]) for k in (0, 1))
        with torch.no_grad():
            values = [q(torch.cat((x_1, target.pi(x_1)), 1)).item() for q in target.critic]  # type: ignore[union-attr]
            y = reward[1] + 0.9 * discount[1] * min(values)
            own = torch.cat((x_0, unit(net, action[:1])), 1)
            squares.append((y - first(own).item()) ** 2 + (y - second(own).item()) ** 2)
        smaller.append(values[0] < values[1])
    assert 0.05 < np.mean(smaller) < 0.95, "each is the smaller one somewhere"
    weighted = 0.5 * (batch.weights.numpy() * squares).mean()
    assert loss.losses["critic."].item() == pytest.approx(weighted, rel=1e-4)
    assert all(x.grad is None for x in net.parameters())
    loss.losses["critic."].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for critic in (first, second) for p in critic.parameters())


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_actor_ascends_the_critic_with_each_part_of_its_slope_clipped(clip: float) -> None:
    """By definition: the mean over the batch of clip(dq/da) dpi/dphi, worked out one window and one action at a time."""
    dpg = DPG(clip_dqda=clip, **SMALL)
    store, net, schema = rig(dpg, steps=20)
    batch = windows(store, schema)
    loss = dpg.loss(net, copy.deepcopy(net), batch)
    parameters = list(net.actor.parameters())
    found = torch.autograd.grad(loss.losses["actor."], parameters, retain_graph=True)
    expected = [torch.zeros_like(p) for p in parameters]
    slopes = []
    for obs in torch.from_numpy(batch.host["obs"][:, 0]):
        pi = net.pi(obs[None])
        a = pi.detach().clone().requires_grad_()
        (dqda,) = torch.autograd.grad(net.q(obs[None], a).sum(), a)
        slopes += dqda.abs().flatten().tolist()
        for j in range(pi.shape[1]):
            slope = dqda[0, j].item()
            slope = max(-clip, min(clip, slope)) if clip else slope
            for total, part in zip(expected, torch.autograd.grad(pi[0, j], parameters, retain_graph=True), strict=True):
                total -= slope * part / len(batch.host["obs"])
    assert not clip or min(slopes) < clip < max(slopes), "some are clipped and some are not"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    unused = torch.autograd.grad(loss.losses["actor."], list(net.critic.parameters()), allow_unused=True)
    assert all(x is None for x in unused), "the critic does not learn to please the actor"


def test_with_inverted_gradients_a_saturated_policy_comes_back_from_its_bound() -> None:
    """A step of u, the policy before its tanh, is dq/da (1 - a) upwards and dq/da (1 + a) downwards."""
    dpg = DPG(clip_dqda=0.5, invert_gradients=True, **SMALL)
    store, net, schema = rig(dpg, steps=20)
    with torch.no_grad():
        net.actor.output.bias.copy_(torch.tensor([8.0, -8.0])[: len(net.actor.output.bias)])  # saturated at both bounds
    batch = windows(store, schema)
    loss = dpg.loss(net, copy.deepcopy(net), batch)
    (found,) = torch.autograd.grad(loss.losses["actor."], [net.actor.output.bias], retain_graph=True)
    x = torch.from_numpy(batch.host["obs"][:, 0])
    a = net.pi(x).detach().requires_grad_()
    (dqda,) = torch.autograd.grad(net.q(x, a).sum(), a)
    step, returning = np.zeros(a.shape[1]), 0
    for i in range(len(x)):
        for j in range(a.shape[1]):
            slope, at = max(-0.5, min(0.5, dqda[i, j].item())), a[i, j].item()
            step[j] -= slope * ((1 - at) if slope > 0 else (1 + at)) / len(x)
            returning += slope * at < 0
    assert returning, "the critic wants some actions away from their bound"
    np.testing.assert_allclose(found.numpy(), step, rtol=1e-4, atol=1e-7)
    plain = dataclasses.replace(dpg, invert_gradients=False).loss(net, copy.deepcopy(net), batch)
    (vanished,) = torch.autograd.grad(plain.losses["actor."], [net.actor.output.bias])
    assert vanished.abs().max() < 1e-4 * found.abs().max(), "the tanh alone gives no way back"


def test_initial_priorities_are_the_error_of_the_weights_that_acted() -> None:
    dpg = DPG(n=3, gamma=0.9, **SMALL)
    store, net, schema = rig(dpg)
    told = np.concatenate([priorities[block.items] for block, priorities in store.taken])
    loss = dpg.loss(net, copy.deepcopy(net), windows(store, schema))
    np.testing.assert_allclose(told, loss.priorities.numpy(), atol=2e-5)


@pytest.mark.parametrize("shape", [(2,), (3, 2)])
def test_actions_are_the_policys_with_noise_in_units_of_half_their_range(shape: tuple[int, ...]) -> None:
    envs = make_env(lambda: Aim(shape))
    dpg = DPG(**SMALL)
    torch.manual_seed(0)
    net = dpg.network(envs.spec)
    assert isinstance(net, ActorCritic)
    n, sigma = 4000, 0.2
    obs = torch.zeros(n, 1, *shape)
    explore = np.where(np.arange(n) % 2 == 0, sigma, 0.0)
    with torch.no_grad():
        out, _ = dpg.act(net, {"obs": obs}, {}, explore, np.random.default_rng(0))
        pi = net.pi(obs[:1, 0].flatten(1))
        greedy = (net.center + net.radius * pi).reshape(shape).numpy()
        assert out["action"].shape == (n, *shape) and out["action"].dtype == np.float32
        np.testing.assert_allclose(out["action"][1::2], np.broadcast_to(greedy, (n // 2, *shape)), rtol=1e-6)
        low, high = envs.spec.action_space.low, envs.spec.action_space.high  # type: ignore[attr-defined]
        assert (out["action"] >= low).all() and (out["action"] <= high).all()
        noise = (out["action"][::2] - greedy) / ((high - low) / 2)
        assert noise.std(0) == pytest.approx(sigma, rel=0.1) and abs(noise.mean(0)).max() < 0.03
        x = obs[:, 0].flatten(1)
        np.testing.assert_allclose(out["q"], net.q(x, unit(net, out["action"])).numpy(), atol=1e-5)
        np.testing.assert_allclose(out["v"], net.q(x, net.pi(x)).numpy(), atol=1e-5)
    large, _ = dpg.act(net.requires_grad_(False), {"obs": obs}, {}, np.full(n, 50.0), np.random.default_rng(0))
    assert (large["action"] == low).any() and (large["action"] == high).any(), "what goes beyond is put on the bound"
    envs.close()


def test_an_action_without_a_range_is_always_the_same() -> None:
    space = spaces.Box(np.array([-1, 3], np.float32), np.array([1, 3], np.float32))
    env = EnvSpec("e", {"obs": spec((2,), np.float32)}, spec((2,), np.float32), space)
    net = DPG(**SMALL).network(env).requires_grad_(False)
    out, _ = DPG(**SMALL).act(net, {"obs": torch.ones(50, 1, 2)}, {}, np.full(50, 2.0), np.random.default_rng(0))
    assert (out["action"][:, 1] == 3).all() and (abs(out["action"][:, 0]) <= 1).all() and out["action"][:, 0].std() > 0.3
    assert isinstance(net, ActorCritic)
    assert (net.unit(torch.from_numpy(out["action"]))[:, 1] == 0).all()


def test_observations_of_a_dict_are_read_by_name_in_whatever_order_they_come() -> None:
    one = {"b": torch.ones(2, 1), "a": torch.zeros(2, 3)}
    columns = {"obs/b": spec((1,), np.float32), "obs/a": spec((3,), np.float32)}
    flat = Vector(EnvSpec("d", columns, spec((1,), np.float32), spaces.Box(-1, 1)), 1, ())
    assert flat(one).tolist() == flat(dict(reversed(one.items()))).tolist() == [[0, 0, 0, 1]] * 2
    env = EnvSpec(
        "d", {"obs/a": spec((3,), np.float32), "obs/b": spec((2, 2), np.float32)}, spec((1,), np.float32), spaces.Box(-1, 1)
    )
    dpg = DPG(history=2, stacked=("b",), **SMALL)
    net = dpg.network(env)
    rows = {"obs/b": torch.ones(5, 2, 2, 2), "obs/a": torch.ones(5, 2, 3)}
    rows |= {"first": torch.zeros(5, 2, dtype=torch.bool), "valid": torch.ones(5, 2, dtype=torch.bool)}
    out, _ = dpg.act(net.requires_grad_(False), rows, {}, np.zeros(5), np.random.default_rng(0))
    assert out["action"].shape == (5,) or out["action"].shape == (5, 1)


VECTOR = {"obs": spec((3,), np.float32)}


@pytest.mark.parametrize(
    ("observation", "space", "words"),
    [
        (VECTOR, spaces.Discrete(2), "dpg needs a Box action space of floats, .*Discrete.*apex-dqn takes that"),
        (VECTOR, spaces.Box(0, 9, (2,), np.int64), "dpg needs a Box action space of floats"),
        (VECTOR, spaces.Box(-np.inf, np.inf, (2,)), "dpg needs bounded actions, .*TransformAction"),
        (VECTOR, spaces.Box(-1e300, 1.0, (2,), np.float64), "dpg needs bounded actions, .*TransformAction"),
    ],
)
def test_what_dpg_cannot_take_is_said(observation: Any, space: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        DPG().check(EnvSpec("e", observation, spec(space.shape or (), np.float32), space))


def test_settings_that_cannot_work_are_said() -> None:
    env = EnvSpec("e", VECTOR, spec((2,), np.float32), spaces.Box(-1, 1, (2,)))
    for wrong in ({"n": 0}, {"gamma": 1.5}, {"critic": (0,)}, {"clip_dqda": -1.0}):
        with pytest.raises(UserError):
            DPG(**wrong).check(env)
    with pytest.raises(UserError, match=r"actor\.sigma"):
        settings.check(recipes.make("apex-dpg", "Pendulum-v1", **{"actor.sigma": -0.1}))
    with pytest.raises(UserError, match="apex-dpg"):
        veldt.train("apex-dqn", env="Pendulum-v1", quiet=True)


def test_the_papers_numbers() -> None:
    config = recipes.make("apex-dpg", "Hopper-v5")
    assert config.algorithm == DPG(gamma=0.99, n=5, clip_dqda=1.0, critic=(400, 300), actor=(300, 200))
    learner = config.learner
    assert (learner.batch, learner.lr, learner.optimizer, learner.target_every) == (256, 1e-4, "adam", 100)
    assert (config.store.alpha, config.store.beta, config.store.selector) == (0.6, 0.4, "prioritized")
    assert config.actor == GaussianConfig(sigma=0.3, block=config.actor.block, refresh=config.actor.refresh)


TINY: dict[str, Any] = {
    "steps": 3_000,
    "actors": 1,
    "envs_per_actor": 4,
    "actor.block": 8,
    "algorithm.critic": (16, 16),
    "algorithm.actor": (16, 16),
    "store.capacity": "2_000",
    "store.min_size": 200,
    "store.samples_per_insert": 4.0,
    "learner.batch": 16,
    "eval.every": 1_000,
    "eval.episodes": 2,
    "checkpoint.every": 1_000,
}


def test_resume_is_exact_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TINY | {"runtime": "inline"}
    whole = veldt.train("apex-dpg", env="Pendulum-v1", run=tmp_path / "whole", quiet=True, **settings)
    with stopping(monkeypatch, 500, crash), pytest.raises(Stop):
        veldt.train("apex-dpg", env="Pendulum-v1", run=tmp_path / "cut", quiet=True, **settings)
    again = veldt.resume(tmp_path / "cut", quiet=True)
    assert whole_state(whole) == whole_state(again)


def test_what_is_known_of_the_optimum_is_learned_in_processes(tmp_path: Path) -> None:
    """Aim: the best policy gets 0, one that stays in the center gets about -0.17 a step, that is -0.5 an episode."""
    settings = {
        "steps": 8_000,
        "algorithm.n": 1,
        "store.samples_per_insert": 16.0,
        "learner.batch": 64,
        "learner.lr": 2e-3,
    }
    run = veldt.train("apex-dpg", env=Aim, run=tmp_path / "r", quiet=True, **TINY | settings | {"actor.sigma": 0.5})
    line = [line for line in run.metrics if "sigma" in line][-1]
    assert line["sigma"] == 0.5 and "epsilon" not in line
    assert run.evaluate(50).mean_return > -0.1


def test_a_replay_of_real_transitions_can_be_learned_from() -> None:
    """Actions of several dimensions go through blocks, windows and a store unharmed."""
    dpg = DPG(n=3, **SMALL)
    store, net, schema = rig(dpg)
    replay = Replay(schema, Uniform(1000 * 8), MinSize(1), 8000, 1000)
    for block, priorities in store.taken:
        replay.insert(block, priorities)
    sample = replay.sample(64)
    assert sample is not None
    known = {tuple(a) for block, _ in store.taken for a in block.columns()["action"].tolist()}
    assert {tuple(a) for a in sample.rows["action"][:, 0].tolist()} <= known
    assert dpg.loss(net, net, Batch(sample.rows, {}, sample.weights, CPU)).priorities.shape == (64,)
