"""Gorila: bundles and parameter servers in one thread, bit for bit; and in processes that are killed."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import child, family, kill, play, wait
from safetensors.numpy import load_file

import veldt
from veldt.errors import Diverged, UserError
from veldt.experiment import recipes, settings
from veldt.experiment.prepare import count_stores, plan_ram, prepare
from veldt.experiment.run import Run
from veldt.learning.activations import activation_bytes
from veldt.learning.learner import Learner
from veldt.learning.shards import DROPPED, VERSION
from veldt.program import Program
from veldt.records.tree import Tree
from veldt.runtime import Inline
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import make_plan
from veldt.topologies import make_program

OFF: dict[str, Any] = {"guard.deviations": 0.0, "guard.max_age": 0}
SMALL: dict[str, Any] = {
    "runtime": "inline",
    "steps": 100_000,
    "envs_per_actor": 2,
    "eval.every": 0,
    "store.capacity": "400",
    "store.min_size": 50,
    "algorithm.hidden": (37, 20),
    "learner.target_every": 50,
    "learner.batch": 16,
    "learner.prefetch": 2,
}


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


def config_of(recipe: str = "gorila", **changes: Any) -> Any:
    return recipes.make(recipe, "CartPole-v1", seed=3, **SMALL | changes)


def program_of(recipe: str = "gorila", **changes: Any) -> Program:
    config = config_of(recipe, **changes)
    return make_program(config, config.env_spec())


def inline(recipe: str = "gorila", steps: int = 800, **changes: Any) -> tuple[Tree, Any]:
    """The weights by name after so many steps, and the nodes."""
    with Inline().start(program_of(recipe, **changes)) as nodes:
        while nodes.count("env_steps") < steps:
            nodes.step()
        state = nodes.state()
        (weights,) = [part for part in state.values() if any(name.startswith("weights/") for name in part)]
        return {name: x.copy() for name, x in weights.items() if name.startswith("weights/")}, nodes


def equal(one: Tree, other: Tree) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_one_bundle_and_one_shard_are_dqn(optimizer: str) -> None:
    how = {"learner.optimizer": optimizer, "learner.lr": 1e-2, "learner.anneal": True, "learner.clip_norm": 0.5}
    dqn, _ = inline("dqn", **how, **{"learner.publish_every": 1})
    one, nodes = inline(bundles=1, shards=1, **how, **OFF)
    assert nodes.count("learner_steps") > 200, "the target was copied, the ring has wrapped"
    assert equal(one, dqn)
    if optimizer == "adagrad":  # with SGD all errors are still so large that Huber's loss does not see the target
        assert not equal(inline("dqn", **how, **{"learner.publish_every": 1, "learner.target_every": 51})[0], dqn)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_many_shards_are_one(optimizer: str) -> None:
    """With the guards, whose answers have to be the same too."""
    one, _ = inline(shards=1, steps=500, **{"learner.optimizer": optimizer})
    many, nodes = inline(shards=5, steps=500, **{"learner.optimizer": optimizer})
    assert equal(one, many)
    assert {int(nodes.objects[f"shard/{k}"].version) for k in range(5)} == {nodes.count("learner_steps")}


@pytest.mark.parametrize("replay", ["local", "global"])
def test_every_gradient_that_no_guard_drops_is_an_update(replay: str) -> None:
    _, nodes = inline(bundles=3, replay=replay, **{"guard.warm_up": 20, "guard.deviations": 1.0})
    line = nodes.metrics()
    learners = [x for x in nodes.objects.values() if isinstance(x, Learner)]
    assert len(learners) == 3 and all(one.steps > 20 for one in learners)
    assert line["gradients_dropped_loss"] > 0 and line["gradients_dropped_age"] == 0
    assert line["gradients_pushed"] == sum(one.steps for one in learners) - line["gradients_dropped_loss"]
    assert line["gradients_pushed"] == line["gradients_applied"] == nodes.count("learner_steps")
    assert line["staleness"] == 0, "in one thread a gradient is applied before the next is made"
    stores = {id(one.store) for one in learners}
    assert len(stores) == (3 if replay == "local" else 1)
    assert nodes.metrics()["store_items"] > (400 if replay == "local" else 0)


def test_bundles_differ_in_what_they_see() -> None:
    _, nodes = inline(bundles=2, steps=400)
    first, second = (nodes.objects[f"store/{i}"] for i in range(2))
    assert not any((x == y).all() for x, y in zip(_obs(first), _obs(second), strict=True))
    seeds = [nodes.objects[f"store/{i}"].rng.bit_generator.state["state"]["state"] for i in range(2)]
    assert seeds[0] != seeds[1]


def _obs(store: Any) -> list[Any]:
    return [store.spread_blocks(4).rows["obs"]]


# What a run leaves behind.

TINY: dict[str, Any] = SMALL | {"eval.every": 500, "eval.episodes": 2, "checkpoint.every": 500, "steps": 1_000}
TINY |= {"store.samples_per_insert": 4.0}


def check_checkpoint(run: Run) -> None:
    """The weights have one place, and are those of the shards (in processes a few gradients arrive in between)."""
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None and list(checkpoint.manifest["weights"]) == ["weights"]
    state = load_file(checkpoint.path / "state.safetensors")
    slices = [state[name] for name in sorted(state) if name.endswith("/vector")]
    numbers, whole = np.concatenate([x.ravel() for x in checkpoint.weights().values()]), np.concatenate(slices)
    assert len(slices) == run.config.shards and len(whole) >= len(numbers)
    exact = run.config.runtime == "inline"
    assert np.isin(numbers, whole).all() if exact else np.isin(numbers.round(1), whole.round(1)).mean() > 0.9
    assert sorted(name for name in checkpoint.manifest["blocks"]) == sorted(
        ["store"] if run.config.replay == "global" else [f"store/{i}" for i in range(run.config.bundles)]
    )


def test_a_run_in_one_thread_can_be_loaded_evaluated_and_started_from(tmp_path: Path) -> None:
    run = veldt.train("gorila", run=tmp_path / "a", quiet=True, **TINY)
    check_checkpoint(run)
    result = run.evaluate(episodes=3)
    assert len(result.returns) == 3 and run.checkpoints().best() is not None
    assert [point.env_steps for point in run.evaluations][-1] >= 1_000
    assert int(run.policy()(np.zeros(4, np.float32))[0]) in (0, 1)
    again = veldt.train("gorila", run=tmp_path / "b", quiet=True, init_from=str(tmp_path / "a"), **TINY | {"steps": 40})
    assert again.weights_hash() == run.weights_hash(), "it had no time to learn"


@pytest.mark.parametrize("replay", ["local", "global"])
def test_a_run_in_processes(tmp_path: Path, replay: str) -> None:
    how = TINY | {"runtime": "local", "steps": 4_000, "replay": replay, "log.every": 0.2, "checkpoint.every": 2_000}
    run = veldt.train("gorila", run=tmp_path, quiet=True, **how)
    check_checkpoint(run)
    line = run.metrics[-1]
    names = ["gradients_pushed", "gradients_applied", "gradients_dropped_age", "gradients_dropped_loss", "staleness"]
    assert set(names) <= line.keys() and {"busy/shard", "wait/shard", "gradient_bytes", "cpu/shard"} <= line.keys()
    state = load_file(run.checkpoints().load().path / "state.safetensors")  # type: ignore[union-attr]
    pushed = sum(int(x[0]) for name, x in state.items() if name.endswith(":optimizer/counts"))
    counts = next(x for name, x in state.items() if name.endswith("shard/0/counts"))
    missing = pushed - int(counts[VERSION]) - int(counts[DROPPED])
    assert abs(missing) < 200, (missing, "those in the streams; learners and servers are not read at the same moment")
    floats = sum(x.size for x in run.checkpoints().load().weights().values())  # type: ignore[union-attr]
    assert line["gradient_bytes"] > 4 * 0.9 * floats * line["gradients_applied"]
    assert any("servers" in x.get("bottleneck", "") or "undles" in x.get("bottleneck", "") for x in run.metrics)
    resumed = veldt.resume(tmp_path, quiet=True, steps=5_000)
    assert resumed.metrics[-1]["learner_steps"] > line["learner_steps"], "it goes on where it was"
    check_checkpoint(resumed)


@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_a_run_that_diverges_ends_soon_and_leaves_weights_that_are_finite(tmp_path: Path, runtime: str) -> None:
    how = {"learner.optimizer": "sgd", "learner.lr": 1e38, "learner.clip_norm": 0.0, "algorithm.huber": False, **OFF}
    began = time.monotonic()
    with pytest.raises(Diverged):
        veldt.train("gorila", run=tmp_path, quiet=True, **TINY | how | {"runtime": runtime, "steps": 50_000})
    assert time.monotonic() - began < 120, "it is restarted a few times, with delays"
    checkpoint = Run(tmp_path).checkpoints().load()
    assert checkpoint is not None and checkpoint.weights(), "which checks that they are finite"


# Processes.


def test_a_bundle_is_a_process_and_so_is_a_shard() -> None:
    local = make_plan(program_of(bundles=3, shards=2, **{"eval.every": 100}))
    assert list(local.processes) == ["shard/0", "shard/1", "learner/0", "learner/1", "learner/2", "evaluator"]
    assert local.processes["learner/1"] == [
        f"{x}/1" for x in ("store", "updater", "learner", "params", "policy", "recorder", "actor")
    ]
    assert not any(channel.node.startswith("store") for channel in local.channels), "blocks stay in their bundle"
    shared = make_plan(program_of(bundles=2, replay="global"))
    assert list(shared.processes) == ["shard/0", "shard/1", "store", "learner/0", "learner/1"]
    assert shared.callers("store") == ["learner/0", "learner/1"]


def weights_of(nodes: Any) -> Any:
    arrays = nodes.supervisor.arrays
    return np.concatenate([arrays[name] for name in arrays if name.endswith("/vector")])


def versions(nodes: Any) -> list[int]:
    return [int(nodes.supervisor.arrays[f"shard/{k}/counts"][VERSION]) for k in range(2)]


def inserted(nodes: Any, i: int) -> int:
    return int(nodes.state()[f"store/{i}"]["counts"]["inserted"])


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_killed_bundles_and_shards_come_back_with_what_they_had(kills: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veldt")
    rng, back = np.random.default_rng(kills), []
    names = ["shard/0", "learner/0", "shard/1", "learner/1"]

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: min(versions(nodes)) > 100, 60, "the first updates")
        for number in range(kills):
            name, others = names[number % 4], [x for x in names if x != names[number % 4]]
            moment = time.monotonic() + 0.3 * rng.random()
            yield from wait(lambda until=moment: time.monotonic() > until, 5, "the moment of the kill")
            before, items = versions(nodes), inserted(nodes, number % 2)
            lives = {other: child(nodes, other).restarts for other in others}
            kill(nodes, name)
            began = time.monotonic()
            restarts = child(nodes, name).restarts
            yield from wait(lambda n=name, r=restarts: child(nodes, n).restarts > r and child(nodes, n).ready, 30, name)
            back.append(time.monotonic() - began)
            yield from wait(lambda b=before: min(np.subtract(versions(nodes), b)) > 20, 30, f"updates after {name}")
            assert lives == {other: child(nodes, other).restarts for other in others}, "all others go on"
            assert np.isfinite(weights_of(nodes)).all()
            if name.startswith("learner"):
                assert inserted(nodes, number % 2) >= items > 0, "a bundle keeps its replay"
        assert nodes.count("learner_steps") == versions(nodes)[0], "counts and weights do not go back"

    play(Local(), program_of(runtime="local", steps=10**9), scenario, seconds=30 + 12 * kills)
    print(f"{kills} kills: back after {np.median(back):.2f} s, p95 {np.percentile(back, 95):.2f} s")
    assert np.median(back) < 1.0
    assert not family()


def test_bundles_go_on_while_a_shard_is_away() -> None:
    """Until the stream of that shard is full; then learners wait for room in it, and nothing is lost."""

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: min(versions(nodes)) > 100, 60, "the first updates")
        pid = child(nodes, "shard/1").pid
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped = versions(nodes)
            yield from wait(lambda: versions(nodes)[0] > stopped[0] + 10, 20, "shard 0 goes on")
            yield from wait(_still(lambda: versions(nodes)[0]), 20, "learners wait for room")
            assert versions(nodes)[1] <= stopped[1] + 1
            yield from wait(lambda: nodes.metrics().get("wait/shards", 0) > 0.9, 20, "they say so")
        finally:
            os.kill(pid, signal.SIGCONT)
        ahead = versions(nodes)[0]
        yield from wait(lambda: versions(nodes)[1] > ahead + 50, 30, "it catches up")
        assert child(nodes, "shard/1").restarts == 0

    play(Local(step_timeout=60.0), program_of(runtime="local", steps=10**9, **OFF), scenario)


def _still(count: Callable[[], int], seconds: float = 1.0) -> Callable[[], bool]:
    """Whether a count has not changed for this long."""
    seen: list[tuple[int, float]] = []

    def settled() -> bool:
        now = count()
        if not seen or seen[-1][0] != now:
            seen.append((now, time.monotonic()))
        return time.monotonic() - seen[-1][1] > seconds

    return settled


# What is said before a run.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inference": "central"}, "has no central inference"),
        ({"runtime": "local", "transport": "grpc"}, "no gRPC"),
        ({"runtime": "local", "gate.listen": "127.0.0.1:0"}, "no actors that join"),
        ({"bundles": 0}, "bundles must be greater than 0"),
        ({"shards": 0}, "shards must be greater than 0"),
        ({"guard.deviations": -1.0}, "guard.deviations must not be negative"),
    ],
)
def test_what_gorila_cannot_do_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        settings.check(config_of(**changes))


def test_settings_without_effect_are_known() -> None:
    idle = settings.without_effect(config_of())
    assert {"actors", "transport", "learner.publish_every", "learner.graph"} <= idle.keys()
    assert (
        not {"queue", "guard.against", "learner.square_start", "learner.target_every"}
        & settings.without_effect(config_of(runtime="local", **{"learner.optimizer": "adagrad"})).keys()
    )
    assert "guard.against" in settings.without_effect(config_of(**{"guard.deviations": 0.0}))


def test_the_plan_of_memory_counts_stores_and_servers() -> None:
    def planned(**changes: Any) -> tuple[int, int]:
        config = config_of(**{"store.capacity": "100MB"} | changes)
        env, program = config.env_spec(), make_program(config, config.env_spec())
        net = config.algorithm.network(env)
        size = sum(p.numel() for p in net.parameters())
        store, ram = plan_ram(config, env, program, size, activation_bytes(config.algorithm, net, config.schema(env), 16))
        return store.nbytes, ram

    one, two, shared = (planned(**x) for x in ({"bundles": 1}, {"bundles": 2}, {"bundles": 2, "replay": "global"}))
    assert two[0] == 2 * one[0] and shared[0] == one[0]
    assert two[1] - one[1] >= one[0] and shared[1] < two[1]
    few, many = (planned(runtime="local", shards=k, **{"algorithm.hidden": (2_000, 2_000)})[1] for k in (1, 8))
    assert many > few + 7 * 30_000_000, "a server is a process"
    prepared = prepare(config_of(bundles=3))
    assert count_stores(prepared.program) == 3 and prepared.store.capacity == 3 * 400


def test_the_live_table_knows_gradients(tmp_path: Path) -> None:
    from veldt.watching.links import links

    line = {
        "learner_steps_per_s": 500.0,
        "pushed_per_s": 510.0,
        "gradients_pushed": 9_000.0,
        "gradients_dropped_loss": 12.0,
    }
    line |= {"gradients_applied": 8_900.0, "applied_per_s": 500.0, "gradients_dropped_age": 3.0, "staleness": 1.5}
    line |= {"staleness_max": 7.0, "busy/shard": 0.25, "gradient_bytes": 1e9, "gradient_bytes_per_s": 2e7}
    rows = {row.name: row for row in links(line)}
    assert rows["shard"].rate == "500 gradients/s" and rows["shard"].busy == 0.25
    assert rows["shard"].more == ("gradients 1.5 updates, at most 7 updates, old", "3 dropped (age)", "20.0 MB/s")
    assert "510 gradients/s pushed" in rows["learner"].more and "12 dropped (loss)" in rows["learner"].more
    assert json.dumps(line)
