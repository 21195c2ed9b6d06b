"""Random schedules of faults against whole runs: `make chaos` is the same for any recipe and any time."""

from __future__ import annotations

from typing import Any

import chaos_schedule
import numpy as np
import pytest
from orders import broken_pole

from veldt.envs import make_env

GRPC = ["--transport", "grpc"]
LONG = {"apex-dqn": [], "impala": [], "seed-vtrace": GRPC, "r2d2": []}
SHORT = [pytest.param("apex-dqn", [], 11, id="apex-dqn"), pytest.param("seed-vtrace", GRPC, 12, id="seed-vtrace")]


def windows() -> dict[str, Any]:
    """Of four rows, from a CartPole whose episodes fall soon, and which is truncated now and then."""
    envs = make_env("CartPole-v1", 1)
    record, rows, rng = envs.reset(0), [], np.random.default_rng(0)
    for i in range(600):
        action = rng.integers(2, size=1)
        rows.append({name: x[0] for name, x in record.items()} | {"action": action[0], "valid": True})
        record = envs.step(action) if i % 97 else envs.reset(i)
        if not (i % 97 or rows[-1]["last"]):
            rows[-1]["valid"] = False  # a reset within an episode is no step
    envs.close()
    return {name: np.array([[rows[i + k][name] for k in range(4)] for i in range(590)]) for name in rows[0]}


def test_the_oracle_finds_every_number_that_physics_does_not_make() -> None:
    good = windows()
    assert not broken_pole(good).any() and good["last"].any()
    trains = good["valid"].all(1) & ~good["last"].any(1) & ~good["first"].any(1)
    assert trains.sum() > 200
    for name in ("obs", "reward", "discount", "first", "last", "action"):
        for k in range(4):
            changed = {key: x.copy() for key, x in good.items()}
            at = changed[name][:, k]
            changed[name][:, k] = ~at if at.dtype == bool else 1 - at if name in ("action", "discount") else at + 0.01
            told = broken_pole(changed)[trains]
            # The action and the end of a window's last row show in the row after it.
            assert told.all() if k < 3 or name not in ("action", "last") else not told.any(), (name, k)


@pytest.mark.parametrize(("recipe", "flags", "seed"), SHORT)
def test_a_schedule_of_faults_breaks_no_promise(recipe: str, flags: list[str], seed: int) -> None:
    report = chaos_schedule.chaos(recipe, 0.6, seed, flags, pause=1.0)
    print(report)
    assert not report["problems"], report
    assert sum(times for times, *_ in report["faults"].values()) >= 3 and report["checked"] > 1_000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", LONG)
def test_a_long_schedule_of_faults_breaks_no_promise_and_the_run_learns(recipe: str) -> None:
    report = chaos_schedule.chaos(recipe, 20, 1, LONG[recipe], score=475)
    print(report)
    assert not report["problems"], report
