"""A3C and the asynchronous value-based methods: whole programs of workers that share their weights."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import veldt
from veldt.acting.actor import evaluate
from veldt.acting.trained import TrainedPolicy
from veldt.errors import UserError
from veldt.experiment import recipes, settings
from veldt.experiment.exploring import DrawnConfig
from veldt.experiment.run import Run
from veldt.learning import params
from veldt.records.tree import Array
from veldt.runtime import Inline
from veldt.runtime.local.local import Local
from veldt.seeds import derive
from veldt.topologies import make_program

SMALL: dict[str, Any] = {
    "algorithm.hidden": (16,),
    "algorithm.unroll": 5,
    "eval.every": 0,
    "runtime": "inline",
    "workers": 1,
}
WEIGHTS = "/arrays/weights"
LITTLE = {"learner.lr": 1e-6}  # for weights that stay nearly what they are


def program(recipe: str, env: str = "CartPole-v1", **changes: Any) -> Any:
    config = recipes.make(recipe, env, **SMALL | changes)
    settings.check(config)
    return config, make_program(config, config.env_spec())


def weights_of(nodes: Any) -> Array:
    return np.concatenate([x.ravel() for name, x in nodes.state()[WEIGHTS].items() if name.endswith(("weight", "bias"))])


# One worker is a synchronous actor-critic


class Definition:
    """The algorithm of the paper for one thread, as its pseudocode has it; a record of a reset takes one of the rows."""

    def __init__(self, config: Any) -> None:
        of = self.of = config.algorithm
        self.config, self.env, self.rng = (
            config,
            gym.make(config.env),
            np.random.default_rng(derive(config.seed, "policy", 0)),
        )
        torch.manual_seed(derive(config.seed, "learner"))
        self.net: Any = of.network(config.env_spec())
        self.theta = torch.cat([p.detach().flatten() for p in self.net.parameters()]).double()
        self.g = torch.zeros_like(self.theta)
        self.obs, _ = self.env.reset(seed=derive(config.seed, "env", "actor/0", 0, 0) % 2**31)
        self.over, self.env_steps = False, 0

    def out(self, obs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.net.head(self.net.torso(torch.from_numpy(np.array(obs))[None]))[0]
        return torch.log_softmax(x[:-1], 0), x[-1]

    def act(self) -> int:
        with torch.no_grad():
            p = self.out(self.obs)[0].exp().double().numpy()
        u = self.rng.random((1, 2))[0, 1]
        return int(np.searchsorted(np.cumsum(p / p.sum()), u, side="right"))

    def update(self) -> Array:
        """One unroll and its update; the weights after it."""
        of, config = self.of, self.config
        at = 0
        for p in self.net.parameters():  # synchronise: theta' = theta
            p.data = self.theta[at : at + p.numel()].float().view(p.shape)
            at += p.numel()
        steps: list[Any] = []  # obs, action, reward, what comes after it
        for _ in range(of.unroll):
            action = self.act()
            if self.over:
                self.obs, _ = self.env.reset()
                self.over = False
                continue
            obs, reward, terminated, truncated, _ = self.env.step(action)
            ends = "terminated" if terminated else "truncated" if truncated else ""
            steps.append((self.obs, action, float(reward), ends, obs))
            self.env_steps += 1
            self.obs, self.over = obs, bool(ends)
        loss, following = torch.zeros(()), 0.0
        for i in reversed(range(len(steps))):
            obs, action, reward, ends, after = steps[i]
            if ends or i == len(steps) - 1:
                following = 0.0 if ends == "terminated" else self.out(after)[1].item()
            following = reward + of.gamma * following
            log_pi, value = self.out(obs)
            entropy = -(log_pi.exp() * log_pi).sum()
            error = following - value
            loss = loss - log_pi[action] * error.item() - of.entropy_cost * entropy + of.value_cost * error**2
        gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(self.net.parameters()))]).double()
        norm = float(gradient.norm())
        if config.learner.clip_norm and norm > config.learner.clip_norm:
            gradient = gradient * config.learner.clip_norm / norm
        rate = config.learner.lr * (1 - self.env_steps / config.steps if config.learner.anneal else 1)
        decay = config.learner.decay
        self.g = decay * self.g + (1 - decay) * gradient**2
        self.theta = self.theta - rate * gradient / (self.g + config.learner.eps).sqrt()
        return self.theta.numpy()


@pytest.mark.parametrize("clip", [0.0, 5.0])
def test_one_worker_is_a_synchronous_actor_critic_update_by_update(clip: float) -> None:
    learner = {"learner.lr": 7e-4, "learner.eps": 0.1, "learner.decay": 0.99, "learner.anneal": True}
    unroll = {"algorithm.unroll": 5, "algorithm.entropy_cost": 0.01, "algorithm.gamma": 0.99}
    config, plan = program("a3c", seed=4, steps=4_000, **learner, **unroll, **{"learner.clip_norm": clip})
    definition = Definition(config)
    with Inline().start(plan) as nodes:
        ended = 0
        for number in range(1, 201):
            while nodes.count("learner_steps") < number:
                nodes.step()
            expected = definition.update()
            found = weights_of(nodes)
            assert nodes.count("env_steps") == definition.env_steps, number
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-6, err_msg=f"update {number}")
            ended = nodes.count("episodes")
    assert ended > 20, "unrolls cross the ends of episodes"


# Whole runs


def test_a_checkpoint_has_the_weights_once_and_all_who_read_them_do(tmp_path: Path) -> None:
    changes = SMALL | {"workers": 2, "eval.every": 300, "eval.episodes": 2, "checkpoint.every": 300}
    run = veldt.train("a3c", env="CartPole-v1", steps=900, run=tmp_path / "r", quiet=True, **changes)
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None and list(checkpoint.manifest["weights"]) == [WEIGHTS]
    weights = checkpoint.weights()
    assert {"torso.layers.0.weight", "head.weight"} <= set(weights)
    assert len(run.evaluations) >= 3, "the evaluator, and one of the last weights"
    assert {"returns", "mean_return"} <= set(dir(run.evaluate(episodes=1)))
    policy = veldt.load(tmp_path / "r")
    np.testing.assert_array_equal(policy.net.head.weight.detach().numpy(), weights["head.weight"])
    best = run.checkpoints().best()
    assert best is not None and best.weights().keys() == weights.keys()
    again = veldt.train(
        "a3c", env="CartPole-v1", steps=20, run=tmp_path / "s", init_from=str(tmp_path / "r"), **changes, **LITTLE
    )
    continued = again.checkpoints().weights()
    assert continued is not None
    for name, x in weights.items():  # four updates later
        np.testing.assert_allclose(continued[name], x, atol=0.02, err_msg=name)
    values = [line["stale_updates"] for line in run.metrics if "stale_updates" in line]
    assert values and max(values) <= 1, "inline, two workers in turn are at most one update behind"


@pytest.mark.parametrize("recipe", ["a3c", "async-q", "async-nstep-q", "async-sarsa"])
def test_every_method_runs_in_processes(recipe: str, tmp_path: Path) -> None:
    changes = SMALL | {"runtime": "local", "workers": 2, "log.every": 0.2}
    run = veldt.train(recipe, env="CartPole-v1", steps=3_000, run=tmp_path / "r", quiet=True, **changes)
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None and list(checkpoint.manifest["weights"]) == [WEIGHTS]
    assert all(np.isfinite(x).all() for x in checkpoint.weights().values())
    line = run.metrics[-1]
    assert line["env_steps"] >= 3_000 and line["learner_steps"] >= 500
    assert "learner_steps" not in checkpoint.manifest["nodes"], "counts are of the run"


def test_a_run_in_processes_is_resumed_with_its_weights(tmp_path: Path) -> None:
    """At a rate of 0 they stay what they were: neither a worker nor its first copy begins again."""
    changes = SMALL | {"runtime": "local", "workers": 2, "statistics": "own"}
    run = veldt.train("a3c", env="CartPole-v1", steps=2_000, run=tmp_path / "r", quiet=True, seed=1, **changes)
    before, updates = run.checkpoints().weights(), run.metrics[-1]["learner_steps"]
    resumed = veldt.resume(tmp_path / "r", steps=3_000, quiet=True, **{"learner.lr": 1e-12})
    after, line = resumed.checkpoints().weights(), resumed.metrics[-1]
    assert before is not None and after is not None and line["env_steps"] >= 3_000 and line["learner_steps"] > updates + 20
    for name, x in before.items():
        np.testing.assert_allclose(after[name], x, atol=1e-6, err_msg=name)


def test_workers_in_turn_are_deterministic_and_differ_from_one(tmp_path: Path) -> None:
    def state(workers: int) -> Array:
        _, plan = program("a3c", workers=workers, seed=1)
        with Inline().start(plan) as nodes:
            while nodes.count("env_steps") < 300:
                nodes.step()
            return weights_of(nodes)

    assert (state(3) == state(3)).all() and (state(3) != state(1)).any()


# Failures


def restart_times(nodes: Any, kills: int, until: Any, rng: np.random.Generator) -> list[float]:
    """Kills workers at random moments until so many were killed and `until()` holds; how long each restart took."""
    children = {name: child for name, child in nodes.supervisor.children.items() if name.startswith("actor/")}
    took: list[float] = []
    deadline, due = time.monotonic() + 600, time.monotonic() + 0.3
    while len(took) < kills or not until():
        assert time.monotonic() < deadline, "it hangs"
        nodes.step()
        if len(took) == kills or time.monotonic() < due:
            continue
        child = children[str(rng.choice(list(children)))]
        if not child.ready or not child.pid:
            continue
        restarts, began = child.restarts, time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        while child.restarts == restarts or not child.ready:
            assert time.monotonic() < deadline, f"{child.name} does not come back"
            nodes.step()
        took.append(time.monotonic() - began)
        due = time.monotonic() + float(rng.uniform(0.1, 0.5))
    return took


def greedy_return(config: Any, nodes: Any) -> float:
    policy = TrainedPolicy(config.algorithm, config.env_spec(), explore=0.0, seed=0)
    params.restore(policy.net, params.under("weights/", nodes.state()[WEIGHTS]))
    envs = config.envs(10)
    found = evaluate(envs, policy, 20, seed=9)
    envs.close()
    assert found is not None
    return found.mean_return


@pytest.mark.parametrize(("kills", "steps", "score"), [(4, 4_000, 0), pytest.param(60, 0, 475, marks=pytest.mark.long)])
def test_killed_workers_come_back_and_the_weights_stay(kills: int, steps: int, score: float) -> None:
    config, plan = program("a3c", runtime="local", workers=2, **({} if score else {"steps": 10**6}))
    if score:
        config = recipes.make("a3c", workers=2, seed=3, **{"eval.every": 0})
        plan = make_program(config, config.env_spec())
    steps = steps or config.steps
    with Local(step_timeout=10).start(plan) as nodes:
        before = nodes.state()[WEIGHTS]
        took = restart_times(nodes, kills, lambda: nodes.count("env_steps") >= steps, np.random.default_rng(kills))
        nodes.cut()
        after, updates = nodes.state()[WEIGHTS], nodes.count("learner_steps")
        assert any((before[name] != x).any() for name, x in after.items())
        assert all(np.isfinite(x).all() for x in after.values())
        assert updates > 0.8 * nodes.count("env_steps") / config.algorithm.unroll - 2 * kills, "updates stay counted"
        assert np.median(took) < 1.0, took
        print(f"restarts: median {np.median(took):.3f} s, longest {max(took):.3f} s")
        if score:
            assert greedy_return(config, nodes) >= score


RESUMED: dict[str, dict[str, Any]] = {
    "a3c": {"algorithm.lstm": 8, "statistics": "own"},
    "async-sarsa": {"target_every": 400},
    "async-nstep-q": {"target_every": 400},
}


def command(recipe: str, path: Path, **changes: Any) -> list[str]:
    values = SMALL | {"workers": 3, "checkpoint.every": 250, "seed": 2} | changes
    flags = [
        str(x) for name, value in values.items() for x in (f"--{name}", *(value if isinstance(value, tuple) else [value]))
    ]
    return [sys.executable, "-m", "veldt", "train", recipe, "--env", "CartPole-v1", "--run", str(path), "--quiet", *flags]


def newest(path: Path) -> int:
    return max((int(p.name) for p in (path / "checkpoints").glob("[0-9]*")), default=0)


def whole_state(path: Path) -> dict[str, Any]:
    """All that the newest checkpoint holds, but for the clock; every array by its hash."""
    checkpoint = Run(path).checkpoints().load()
    assert checkpoint is not None
    return {key: value for key, value in checkpoint.manifest.items() if key != "time_s"}


@pytest.mark.parametrize(
    ("recipe", "kills", "steps"),
    [("a3c", 1, 4_000), *(pytest.param(recipe, 6, 12_000, marks=pytest.mark.long) for recipe in RESUMED)],
)
def test_killed_and_started_again_inline_ends_bit_for_bit_as_if_nothing_had_happened(
    recipe: str, kills: int, steps: int, tmp_path: Path
) -> None:
    changes, rng = {"steps": steps, **RESUMED[recipe]}, np.random.default_rng(kills)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert subprocess.run(command(recipe, straight, **changes), timeout=200, check=False).returncode == 0
    for kill in range(kills):
        aim = newest(killed) + int(rng.integers(1, max(2, (steps // 250 - 6) // kills)))
        with subprocess.Popen(command(recipe, killed, **changes)) as process:
            deadline = time.monotonic() + 120
            while newest(killed) < aim:
                assert process.poll() is None and time.monotonic() < deadline, f"kill {kill}: no checkpoint {aim}"
                time.sleep(0.002)
            process.kill()
        assert process.returncode == -signal.SIGKILL and newest(killed) < steps // 250
    assert subprocess.run(command(recipe, killed, **changes), timeout=200, check=False).returncode == 0
    assert whole_state(killed) == whole_state(straight)
    assert whole_state(killed)["number"] == steps // 250


# Settings


def test_each_worker_draws_its_last_epsilon() -> None:
    actor = DrawnConfig(epsilon_steps=1_000)
    ends = [round(actor.explore(i, 1, 3_000, seed=5)(1_000), 9) for i in range(3_000)]  # type: ignore[operator, arg-type]
    shares = {end: ends.count(end) / len(ends) for end in (0.1, 0.01, 0.5)}
    assert sum(shares.values()) == pytest.approx(1)
    for end, odds in ((0.1, 0.4), (0.01, 0.3), (0.5, 0.3)):
        assert abs(shares[end] - odds) < 4 * math.sqrt(odds * (1 - odds) / len(ends)), shares
    other = [round(actor.explore(i, 1, 20, seed=6)(1_000), 9) for i in range(20)]  # type: ignore[operator, arg-type]
    assert ends[:20] != other
    schedule: Any = actor.explore(2, 1, 3, seed=5)
    assert schedule(0) == 1 and schedule(500) == pytest.approx((1 + schedule(1_000)) / 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learner.optimizer": "adam"}, "a3c has no shared Adam"),
        ({"learner.centered": True}, "a3c shares mean squares, and no means"),
        ({"inference": "central"}, "a3c computes actions in each worker"),
        ({"runtime": "local", "workers": 100_000}, "100000 workers are too many"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        settings.check(recipes.make("a3c", **changes))


def test_odds_must_add_up() -> None:
    with pytest.raises(UserError, match=r"actor\.epsilon_odds needs one probability for each"):
        settings.check(recipes.make("async-q", **{"actor.epsilon_odds": (0.5, 0.4)}))


class Normed(nn.Module):
    def __init__(self, env: Any) -> None:
        super().__init__()
        self.norm, self.features = nn.BatchNorm1d(4), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out


def test_a_network_with_counts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its workers could not share it"):
        veldt.train("a3c", network=Normed, run=tmp_path / "r", **SMALL)
    assert not (tmp_path / "r" / "checkpoints").exists()
