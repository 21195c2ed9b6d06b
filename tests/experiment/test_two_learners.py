"""Two learners with stores of their own in one program: both are saved, both resume exactly, their metrics add up."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from veldt.experiment import recipes
from veldt.experiment.checkpoint import Checkpoints
from veldt.program import Program
from veldt.runtime import Inline
from veldt.runtime.local.local import Local
from veldt.topologies import apex, single

SCOPES = ("a", "b")
SETTINGS = {"envs_per_actor": 2, "eval.every": 0, "store.capacity": "400", "store.min_size": 50, "algorithm.hidden": (8,)}


def program(topology: Any = single, **changes: Any) -> Program:
    """Two runs side by side: the same recipe, with seeds and learning rates of their own."""
    out = Program()
    for seed, name in enumerate(SCOPES):
        recipe = "dqn" if topology is single else "apex-dqn"
        config = recipes.make(recipe, "CartPole-v1", seed=seed, **{"learner.lr": 1e-3 * (1 + seed), **SETTINGS, **changes})
        with_envs = config.envs()
        with_envs.close()
        topology(out.scope(name), config, with_envs.spec)
    return out


def run(nodes: Any, steps: int) -> None:
    while nodes.count("env_steps") < steps:
        nodes.step()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(one == other)


def copied(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return copy.deepcopy(state)


def test_both_are_saved_and_resume_exactly(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with Inline().start(program()) as nodes:
        run(nodes, 600)
        nodes.cut()
        assert checkpoints.save(1, nodes, {})
        saved = copied(nodes.state())
        nodes.resume(1)
        run(nodes, 1_500)
        nodes.cut()
        straight = copied(nodes.state())
    found = Checkpoints(tmp_path).load()
    assert found is not None and set(found.manifest["weights"]) == {"a/learner", "b/learner"}
    weights = [found.weights(node) for node in found.manifest["weights"]]
    assert not equal(*weights), "two learners, not one twice"
    with Inline().start(program()) as nodes:
        Checkpoints(tmp_path).restore(found, nodes)
        assert equal(copied(nodes.state()), saved)
        nodes.resume(1)
        run(nodes, 1_500)
        nodes.cut()
        assert equal(copied(nodes.state()), straight)


def test_each_learns_as_it_would_alone() -> None:
    """What one counts, stores and publishes is nothing to the other."""
    with Inline().start(program()) as nodes:
        for _ in range(400):
            nodes.step()
        together = copied(nodes.state())
    alone = Program()
    config = recipes.make("dqn", "CartPole-v1", seed=1, **{"learner.lr": 2e-3, **SETTINGS})
    envs = config.envs()
    envs.close()
    single(alone.scope("b"), config, envs.spec)
    with Inline().start(alone) as nodes:
        for _ in range(400):
            nodes.step()
        assert int(nodes.state()["b/counters"]["counts"]["learner_steps"]) > 10
        for name, part in nodes.state().items():
            assert equal(part, together[name]), name


def test_metrics_of_both_add_up() -> None:
    with Inline().start(program()) as nodes:
        run(nodes, 900)
        line, objects = nodes.metrics(), nodes.objects
        stores, learners = ([objects[f"{scope}/{kind}"] for scope in SCOPES] for kind in ("store", "learner"))
        assert line["store_items"] == sum(store.size for store in stores) > max(store.size for store in stores)
        assert line["store_sampled"] == sum(store.sampled for store in stores)
        assert line["published"] == sum(learner.publisher.published for learner in learners)
        assert nodes.count("learner_steps") == sum(learner.steps for learner in learners)
        assert 0 < line["busy/learner"] < 1


@pytest.mark.parametrize("victim", ["", "a/learner"])
def test_in_processes(victim: str, tmp_path: Path) -> None:
    """Both are saved while they run, and resume from what was saved; a killed one takes nothing from the other."""
    checkpoints = Checkpoints(tmp_path)
    with Local().start(program(apex, actors=1)) as nodes:
        deadline = time.monotonic() + 60
        while min(steps(nodes)) < 30 and time.monotonic() < deadline:
            nodes.step()
        if victim:
            before, child = steps(nodes), nodes.supervisor.children[victim]
            nodes.supervisor.recover.clear()
            os.kill(child.pid, signal.SIGKILL)
            while (child.restarts == 0 or min(steps(nodes)) < 30) and time.monotonic() < deadline:
                nodes.step()
            assert steps(nodes)[1] >= before[1], "the other goes on"
        line = nodes.metrics()
        while line.get("store_items", 0) <= 600 and time.monotonic() < deadline:  # processes report four times a second
            nodes.step()
            line |= nodes.metrics()
        assert line["store_items"] > 600, "no store has room for as many: these are the items of both"
        nodes.cut()
        snapshot = nodes.snapshot()  # stores go on to insert what is in their rings
        assert checkpoints.save(1, snapshot, {})
        saved = copied(snapshot.state())
        assert nodes.count("learner_steps") == sum(steps(nodes)) > max(steps(nodes))
    found = checkpoints.load()
    assert found is not None
    with Local().start(program(apex, actors=1)) as nodes:
        checkpoints.restore(found, nodes)
        again = nodes.state()
        for scope in SCOPES:
            for name in (f"{scope}/learner", f"{scope}/counters", f"{scope}/store"):
                assert equal(again[name], saved[name]), name


def steps(nodes: Any) -> list[int]:
    return [nodes.supervisor.counters[f"{scope}/counters"].get("learner_steps") for scope in SCOPES]
