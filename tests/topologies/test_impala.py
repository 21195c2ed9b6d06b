"""IMPALA: its queue, its lag, its recipes, its runs in processes, and that it learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from running import run_until
from test_run import Stop, crash, stopping, whole_state

import veldt
from veldt.algorithms.actor_critic import PolicyAndValue
from veldt.algorithms.base import Batch
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.envs.small import Chain
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.run import Run
from veldt.learning.learner import Learner
from veldt.nets.networks import Rows
from veldt.program import Program
from veldt.runtime import Inline
from veldt.storing.limiters import Queue
from veldt.storing.ring import UnrollQueue
from veldt.storing.store import Sample
from veldt.topologies import apex
from veldt.topologies.stores import store_builder

TINY: dict[str, Any] = {
    "steps": 6_000,
    "envs_per_actor": 4,
    "algorithm.hidden": (16,),
    "algorithm.unroll": 8,
    "store.capacity": "160",
    "learner.batch": 4,
    "eval.every": 2_000,
    "eval.episodes": 2,
    "checkpoint.every": 2_000,
    "log.every": 0.1,
}


def tiny(path: Path, env: Any = "CartPole-v1", **changes: Any) -> Run:
    return veldt.train("impala", env=env, run=path, quiet=True, **TINY | changes)


def inline(config: Any, rounds: int) -> dict[str, Any]:
    """The program's nodes after so many rounds in one thread."""
    program, found = Program(), {}
    envs = config.envs()
    apex(program, config, envs.spec)

    def until(nodes: Any) -> bool:
        found.update(nodes.objects)
        found["rounds"] = found.get("rounds", -1) + 1
        return bool(found["rounds"] == rounds)

    run_until(Inline(), program, until)
    return found


def test_the_papers_numbers_for_atari() -> None:
    config = recipes.make("impala", "ALE/Pong-v5")
    algorithm, learner = config.algorithm, config.learner
    assert (algorithm.unroll, learner.batch, algorithm.gamma, algorithm.entropy_cost) == (20, 32, 0.99, 0.01)
    assert (algorithm.baseline_cost, algorithm.clip_reward, algorithm.history, algorithm.sum_losses) == (0.5, 1.0, 4, True)
    assert (learner.optimizer, learner.lr, learner.eps, learner.decay) == ("rmsprop", 6e-4, 0.01, 0.99)
    assert (
        learner.anneal
        and not learner.centered
        and learner.square_start == 1
        and learner.clip_norm == 40
        and algorithm.lstm == 0
    )
    envs = config.envs()
    envs.close()
    network = algorithm.network(envs.spec)
    assert type(network.torso).__name__ == "ImpalaCNN"


def test_the_store_is_a_queue_of_unrolls() -> None:
    config = recipes.make("impala", **TINY)
    schema = config.schema(config.envs().spec)
    store = store_builder(config)(config, schema)
    assert isinstance(store, UnrollQueue) and store.limiter == Queue(20)
    assert schema.fresh == 8 and schema.rows == 9 and schema.starts == 1, "an unroll, and the row that bootstraps it"
    assert config.refresh == 8, "weights are looked for at the start of each unroll"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store.capacity": "16"}, "never holds the 4 of one batch"),
        ({"store.samples_per_insert": 2.0}, "store.samples_per_insert 1"),
        ({"store.slack": 0.1}, "store.slack 0"),
        ({"learner.prefetch": 2}, "learner.prefetch 1"),
        ({"store.selector": "prioritized"}, "impala has no priorities"),
        ({"learner.publish_lag": -1}, "learner.publish_lag must not be negative"),
    ],
)
def test_a_queue_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(tmp_path / "r", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm.unroll": 0}, r"algorithm\.unroll must be greater than 0, not 0"),
        ({"algorithm.gamma": 1.5}, "algorithm.gamma must be from 0 to 1"),
        ({"algorithm.trace": -0.1}, "algorithm.trace must be from 0 to 1"),
        ({"algorithm.entropy_cost": -1.0}, "entropy_cost must not be negative"),
        ({"algorithm.clip_rho": 0.5}, "clip_c"),
        ({"algorithm.clip_reward": float("inf")}, "clip_reward must be finite"),
        ({"algorithm.stacked": ("picture",)}, "no observation .picture. to stack"),
        ({"algorithm.correction": "two-step"}, "must be one of vtrace, one-step, none"),
        ({"algorithm.network_from": "nowhere:nothing"}, "nowhere cannot be imported"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(tmp_path / "r", **changes)


def test_a_network_of_the_users_own_feeds_the_heads(tmp_path: Path) -> None:
    run = veldt.train("impala", run=tmp_path / "r", quiet=True, network=small_torso, **TINY | {"runtime": "inline"})
    weights = run.checkpoints().weights()
    assert weights is not None and weights["torso.1.weight"].shape == (7, 4)
    with pytest.raises(UserError, match=r"must map \[B, ...\] observations to \[B, features\]; for B = 2 it gave \[2\]"):
        veldt.train("impala", run=tmp_path / "s", quiet=True, network=no_torso, **TINY)


def small_torso(env: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 7), torch.nn.Tanh())


def no_torso(env: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))


def test_every_unroll_is_learned_from_once_and_in_order() -> None:
    """A Counter says in its observation which step of which episode it is: all trained steps follow one another."""
    config = recipes.make(
        "impala", "veldt/Counter-v0", **TINY | {"runtime": "inline", "eval.every": 0, "algorithm.network_from": "chaos:Net"}
    )
    seen: list[tuple[int, ...]] = []

    class Watched(Learner):
        def _update(self, loss: Any) -> bool:
            return True

        def _measure_lag(self, sample: Sample) -> None:
            rows = sample.rows
            for lane in range(len(rows["obs"])):
                trains = rows["valid"][lane, :-1] & ~rows["last"][lane, :-1] & rows["valid"][lane, 1:]
                seen.extend(tuple(x[:3].tolist()) for x in rows["obs"][lane, :-1][trains])

    program, done = Program(), [0]
    envs = config.envs()
    apex(program, config, envs.spec)
    program.nodes["learner"] = dataclasses.replace(program.nodes["learner"], build=Watched)
    counts: dict[str, int] = {}

    def until(nodes: Any) -> bool:
        done[0] += 1
        if done[0] == 400:
            nodes.cut()
            store = nodes.objects["store"]
            ring = store
            counts.update(steps=nodes.count("env_steps"), left=ring.size, inserted=ring.inserted, sampled=ring.sampled)
            return True
        return False

    run_until(Inline(), program, until)
    assert counts["inserted"] == counts["sampled"] + counts["left"]
    assert len(seen) == len(set(seen)), "a step was learned from twice"
    # Steps that are not there yet are in the queue, or were acted but never ended (a cut ends them).
    assert counts["steps"] - 8 * counts["left"] - 8 <= len(seen) <= counts["steps"]
    by_env: dict[int, list[tuple[int, int]]] = {}
    for env, episode, t in seen:
        by_env.setdefault(env, []).append((episode, t))
    assert len(by_env) == 8
    for steps in by_env.values():
        assert steps == sorted(steps), "unrolls of one environment come in order"


def test_actors_wait_while_the_queue_is_full() -> None:
    config = recipes.make("impala", **TINY | {"runtime": "inline", "eval.every": 0})
    program = Program()
    apex(program, config, config.envs().spec)
    del program.nodes["learner"]  # nobody takes anything out
    counts: list[int] = []

    def until(nodes: Any) -> bool:
        counts.append(nodes.count("env_steps"))
        return len(counts) > 200

    with pytest.raises(Exception, match="cannot do any work"):
        run_until(Inline(), program, until)
    # 20 unrolls of 8 are in the queue; each environment has one more that waits, and the row after it.
    assert counts[-1] <= 8 * 20 + 8 * (8 + 2) + 8


@pytest.mark.parametrize("lag", [0, 5])
def test_the_lag_that_is_logged_is_the_lag(lag: int) -> None:
    changes = {"runtime": "inline", "eval.every": 0, "learner.publish_lag": lag, "actors": 1, "learner.batch": 4}
    nodes = inline(recipes.make("impala", **TINY | changes), 600)
    told = nodes["learner"].metrics()["policy_lag"]
    # One actor with four environments makes one batch in an unroll: acting is one update behind, and what is asked for.
    assert lag <= told <= lag + 2
    assert nodes["learner"].steps > 30


def test_values_are_learned_in_units_of_the_returns() -> None:
    """Rewards a hundred times as large give the same updates, once returns are larger than 1."""
    env = veldt.make_env("CartPole-v1").spec
    algorithm = VTraceActorCritic(unroll=4, hidden=(8,), normalize=True)
    rng = np.random.default_rng(0)
    shape = (6, 5)
    rows = {
        "obs": rng.normal(size=(*shape, 4)).astype(np.float32),
        "reward": rng.uniform(5, 10, shape).astype(np.float32),
        "discount": np.ones(shape, np.float32),
        "first": np.zeros(shape, np.bool_),
        "last": np.zeros(shape, np.bool_),
        "valid": np.ones(shape, np.bool_),
        "action": rng.integers(0, 2, shape),
        "logits": np.log(np.full((*shape, 2), 0.5, np.float32)),
    }
    gradients = []
    for factor in (1.0, 100.0):
        torch.manual_seed(0)
        net = algorithm.network(env)
        assert isinstance(net, PolicyAndValue)
        with torch.no_grad():
            net.head.weight[-1].zero_()
        batch = Batch(
            rows | {"reward": rows["reward"] * np.float32(factor)}, {}, np.ones(6, np.float32), torch.device("cpu")
        )
        first = algorithm.loss(net, net, batch)
        assert first.after is not None
        first.after()  # the first batch tells the scale
        assert 5 * factor < float(net.scale) < 40 * factor
        net.zero_grad()
        loss = algorithm.loss(net, net, batch)
        loss.losses[""].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_the_scale_follows_the_returns_and_values_do_not_follow_the_scale() -> None:
    """Otherwise values that are bootstrapped from would grow with the scale, and the scale with them."""
    net = VTraceActorCritic().network(veldt.make_env("CartPole-v1").spec)
    assert isinstance(net, PolicyAndValue)
    obs = torch.randn(5, 1, 4)
    rows = Rows(obs, obs, obs[:, :, 0], None)
    before = net(rows, {})[1].detach()
    net.rescale(torch.tensor(0.01))
    assert float(net.scale) == 1.0, "small returns are not made larger"
    for i in range(1_000):
        net.rescale(torch.tensor(400.0))
        if i == 0:
            torch.testing.assert_close(net.square, torch.tensor(200.005)), "the mean of the first two"
    assert abs(float(net.scale) - 20) < 0.1
    torch.testing.assert_close(net(rows, {})[1].detach(), before)


def test_without_normalizing_there_is_no_scale(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", runtime="inline", **{"algorithm.normalize": False, "steps": 2_000})
    weights = run.checkpoints().weights()
    assert weights is not None and weights["square"] == 0 and weights["batches"] == 0


def test_resume_is_exact_in_one_thread_with_an_lstm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"runtime": "inline", "steps": 1_500, "checkpoint.every": 400, "eval.every": 500, "algorithm.lstm": 8}
    expected = whole_state(tiny(tmp_path / "a", **changes))
    with stopping(monkeypatch, 120, crash), pytest.raises(Stop):
        tiny(tmp_path / "b", **changes)
    assert (tmp_path / "b" / "checkpoints" / "latest").exists()
    assert whole_state(tiny(tmp_path / "b", **changes)) == expected


@pytest.mark.parametrize("lstm", [0, 8])
def test_a_run_in_processes_ends_by_itself_and_is_resumed(tmp_path: Path, lstm: int) -> None:
    run = tiny(tmp_path / "r", **{"algorithm.lstm": lstm})
    assert not psutil.Process().children(recursive=True)
    first = run.metrics
    assert first[-1]["env_steps"] >= 6_000 and first[-1]["learner_steps"] > 0 and first[-1]["restarts"] == 0
    assert any("policy_lag" in line for line in first) and any("entropy" in line for line in first)
    manifest = json.loads((run.path / "checkpoints" / "latest" / "manifest.json").read_text().splitlines()[0])
    counts = manifest["nodes"]["store"]["counts"]
    assert counts["inserted"] == counts["sampled"] + counts["size"], "each unroll once, none forgotten"
    again = veldt.resume(run.path, quiet=True, steps=9_000)
    assert again.metrics[-1]["env_steps"] >= 9_000
    assert run.evaluate(2).lengths


@pytest.mark.parametrize("env", ["Pendulum-v1", "test_impala:Choices", "test_impala:Mixed"])
@pytest.mark.parametrize("lstm", [0, 8])
def test_continuous_and_many_discrete_actions_and_dict_observations(tmp_path: Path, env: str, lstm: int) -> None:
    changes = {"runtime": "inline", "steps": 1_000, "algorithm.lstm": lstm, "eval.every": 0, "checkpoint.every": 0}
    run = tiny(tmp_path / "r", env, **changes)
    assert run.metrics[-1]["learner_steps"] > 10 and run.metrics[-1]["skipped_updates"] == 0


@pytest.mark.long
def test_it_learns_pendulum_with_default_flags(tmp_path: Path) -> None:
    """The same as a coin between full torque left and right, with actions that are clipped: below -800."""
    run = veldt.train("impala", env="Pendulum-v1", run=tmp_path / "r", quiet=True, runtime="inline", seed=1)
    assert run.evaluate(20).mean_return > -250


class Choices(Chain):
    """A Chain that is walked by the second of two choices."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.MultiDiscrete([3, 2])

    def step(self, action: Any) -> Any:
        obs, reward, done, _, info = super().step(action[1])
        self.t = getattr(self, "t", 0) + 1
        return obs, reward, done, self.t % 20 == 0, info


class Mixed(Choices):
    """Its observation is a picture and a vector."""

    def __init__(self) -> None:
        super().__init__()
        vector = self.observation_space
        picture = spaces.Box(0, 255, (40, 40), np.uint8)
        self.observation_space = spaces.Dict({"picture": picture, "vector": vector})

    def _observe(self) -> Any:
        return {"picture": np.full((40, 40), self.state, np.uint8), "vector": super()._observe()}


@pytest.mark.learning
def test_cartpole_is_solved_in_processes(tmp_path: Path) -> None:
    run = veldt.train("impala", run=tmp_path / "r", quiet=True, steps=200_000)
    assert run.evaluate(20).mean_return >= 475
    manifest = json.loads((run.path / "checkpoints" / "latest" / "manifest.json").read_text().splitlines()[0])
    counts = manifest["nodes"]["store"]["counts"]
    assert counts["sampled"] >= 0.99 * counts["inserted"], "all that was acted was learned from"


@pytest.mark.learning
def test_catch_is_solved(tmp_path: Path) -> None:
    settings = {"runtime": "inline", "steps": 150_000, "learner.lr": 3e-3}
    run = veldt.train("impala", "veldt/Catch-v0", run=tmp_path / "r", quiet=True, **settings)
    assert run.evaluate(50).mean_return == 1.0


@pytest.mark.learning
@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_velocities_only_who_remembers_balances(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"quiet": True, "runtime": "inline", "steps": 400_000, "eval.every": 0}
    env = "veldt/MaskedCartPole-v0"
    lstm = veldt.train("impala", env, run=tmp_path / "lstm", **settings | {"algorithm.lstm": 64, "algorithm.hidden": (64,)})
    plain = veldt.train("impala", env, run=tmp_path / "plain", **settings)
    assert lstm.evaluate(20).mean_return >= 400 and plain.evaluate(20).mean_return <= 150


@pytest.mark.learning
@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_updates_behind_only_a_correction_learns(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"quiet": True, "runtime": "inline", "learner.publish_lag": 50, "eval.every": 0}
    corrected = veldt.train("impala", run=tmp_path / "a", **settings)
    plain = veldt.train("impala", run=tmp_path / "b", **settings | {"algorithm.correction": "none"})
    assert corrected.evaluate(20).mean_return >= 400 and plain.evaluate(20).mean_return <= 150
