"""Evaluations during a run: each is played by one version of the weights, and reported with the numbers of that version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from chaos import play, wait
from gymnasium.wrappers import TimeLimit
from test_run import tiny

from veldt.acting.actor import Evaluator
from veldt.acting.policy import LocalPolicy
from veldt.algorithms.dqn import DQN
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.envs.small import Chain
from veldt.learning.params import LatestParams, Publisher, Weights
from veldt.metrics import TOTAL, Metric
from veldt.program import CELL, ROWS, Program
from veldt.records.tree import Tree
from veldt.runtime.local.local import Local

LENGTH, PER_UPDATE = 25, 10  # steps of an episode; env steps of the run for one update


def short_chain() -> Any:
    return TimeLimit(Chain(), LENGTH)


CHAINS = partial(make_env, short_chain)
SPEC = make_env(short_chain).spec


class Told(LocalPolicy):
    """A policy that reports with which versions of the weights it acted."""

    METRICS: ClassVar = (Metric("steps_played", over_nodes=TOTAL), Metric("mixed", over_nodes=TOTAL))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.versions: list[int] = []
        self.evaluations: list[list[int]] = []

    def send(self, group: int, step: Tree) -> bool:
        done = super().send(group, step)
        self.versions.append(self.version)
        return done

    def reset(self, group: int) -> None:
        super().reset(group)
        self.versions = []
        self.evaluations.append(self.versions)

    def metrics(self) -> dict[str, float]:
        mixed = sum(len(set(versions)) > 1 for versions in self.evaluations)
        return {"steps_played": float(sum(map(len, self.evaluations))), "mixed": float(mixed)}


class Teacher:
    """A worker that publishes at every step; update k is made at PER_UPDATE x k env steps."""

    def __init__(self, params: LatestParams, counters: Counters, size: int) -> None:
        import torch

        self.counters, self.steps = counters, 0
        self.publisher = Publisher(params, torch.zeros(size))

    def step(self) -> bool:
        self.steps += 1
        self.counters.add("env_steps", PER_UPDATE)
        self.publisher.publish(self.steps, self.counters.get("env_steps"))
        return True


def told(params: LatestParams, counters: Counters) -> Told:
    return Told(DQN(hidden=(4,)), SPEC, params, counters, 0.0, seed=1)


def size_of_network() -> int:
    return len(told(LatestParams(), Counters()).vector)


def test_an_evaluation_is_played_by_one_version_and_reports_its_numbers() -> None:
    """The weights change at every step of the environments, also at those that reset them."""
    params, counters = LatestParams(), Counters()
    policy, teacher = told(params, counters), Teacher(params, counters, size_of_network())
    who = Evaluator(CHAINS, policy, counters, every=PER_UPDATE, episodes=3, max_length=99, seed=0)
    step, reset = who.envs.step, who.envs.reset
    who.envs.step = lambda action: teacher.step() and step(action)  # type: ignore[method-assign, assignment, return-value]
    who.envs.reset = lambda seed: teacher.step() and reset(seed)  # type: ignore[method-assign, assignment, return-value]
    assert not who.step(), "it waits for the first env steps"
    for evaluation in range(3):
        before = time.monotonic()
        teacher.step()
        version, after = teacher.steps, time.monotonic()
        assert who.step()
        assert len(policy.evaluations[evaluation]) >= LENGTH and set(policy.evaluations[evaluation]) == {version}
        assert teacher.steps > version + LENGTH
        found = who.metrics()
        assert found["eval_learner_steps"] == version and found["eval_env_steps"] == PER_UPDATE * version
        assert before <= found["eval_published_at"] <= after
        assert who.metrics() == {}
    who.close()


def test_weights_that_do_not_say_when_they_were_published_can_be_evaluated() -> None:
    params, counters = LatestParams(), Counters()
    params.publish(Weights(3, np.zeros(size_of_network(), np.float32)))
    who = Evaluator(CHAINS, told(params, counters), counters, every=10, episodes=1, max_length=99, seed=0)
    assert not who.step()
    counters.add("env_steps", 10)
    assert who.step() and set(who.metrics()) == {"eval_return", "eval_length", "eval_bad_episodes"}
    who.close()


def test_beside_a_learner_in_another_process_too() -> None:
    program = Program()
    counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
    program.add("teacher", Teacher, params, counters, size_of_network())
    policy = program.add("policy/greedy", Told, DQN(hidden=(4,)), SPEC, params, counters, 0.0, 1)
    program.add("evaluator", Evaluator, CHAINS, policy, counters, PER_UPDATE, 3, 99, 0, on=policy)
    lines: list[dict[str, float]] = []

    def evaluated(nodes: Any) -> bool:
        line = nodes.metrics()
        lines.extend([line] if "eval_return" in line else [])
        return len(lines) >= 3

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: evaluated(nodes), 60, "three evaluations")

    began = time.monotonic()
    play(Local(), program, scenario)
    for line in lines:
        assert line["eval_env_steps"] == PER_UPDATE * line["eval_learner_steps"] > 0
        assert began < line["eval_published_at"] < time.monotonic()
        assert line["steps_played"] >= LENGTH and line["mixed"] == 0, "weights changed during an evaluation"
    updates = [line["eval_learner_steps"] for line in lines]
    assert updates == sorted(updates) and updates[-1] > updates[0] + LENGTH, "the learner published meanwhile"


def test_a_run_logs_evaluations_with_the_counts_and_the_time_of_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, add = LatestParams.publish, Counters.add
    published: dict[int, int] = {}  # version -> env steps
    env_steps: dict[str, int] = {}

    def count(self: Counters, name: str, n: int) -> None:
        add(self, name, n)
        env_steps[name] = self.get(name)

    def watch(self: LatestParams, weights: Any) -> None:
        published.setdefault(weights.version, env_steps.get("env_steps", 0))
        publish(self, weights)

    monkeypatch.setattr(Counters, "add", count)
    monkeypatch.setattr(LatestParams, "publish", watch)
    run = tiny(tmp_path / "r", **{"learner.publish_every": 50, "checkpoint.every": 0})
    lines = [line for line in run.metrics if "eval_return" in line]
    assert len(lines) == 3 + 1 and all("eval_published_at" not in line for line in run.metrics)
    for line in lines:
        assert line["eval_env_steps"] == published[line["eval_learner_steps"]] <= line["env_steps"]
        assert 0 <= line["eval_time_s"] <= line["time_s"]
    assert any(line["eval_env_steps"] < line["env_steps"] for line in lines)
    names = ("eval_env_steps", "eval_time_s", "eval_return", "eval_learner_steps")
    points = [tuple(line[name] for name in names) for line in lines]
    assert run.evaluations == points
