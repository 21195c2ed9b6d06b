"""The real program over gRPC: actors of the run's own and such as join, with everything in between killed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest
import torch
from chaos import Checker, Verdict, child, config_of, play, program_of, steps_of, wait
from routing import Routed, expected

from veldt.acting.actor import Actor, send_examples
from veldt.acting.policy import BatchedPolicy
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.experiment.prepare import make_gate
from veldt.experiment.run import Run, train
from veldt.learning.params import LatestParams
from veldt.program import CELL, INCARNATION, ROWS, Program
from veldt.records.block import Window
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import GateSettings

HERE = Path(__file__).parents[1]
RECIPES = ["apex-dqn", "seed-vtrace"]
FEW = [pytest.param("apex-dqn", marks=pytest.mark.long), "seed-vtrace"]


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veldt")


def lives(short: int, long: int) -> Any:
    return [short, pytest.param(long, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


# Routing.


class Counting:
    """An algorithm whose action is a function of the observation that only the asker can check."""

    window = Window()
    exploration = ""

    def network(self, env: Any) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def state(self, env: Any) -> dict[str, Any]:
        return {}

    extras = state

    def act(self, net: Any, rows: Any, state: Any, explore: Any, rng: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"action": expected(rows["obs"][:, 0].numpy())}, {}


def counting_program(actors: int, groups: int, n: int) -> Program:
    env = make_env(Routed).spec
    program = Program()
    counters, params = program.add("counters", Counters, ROWS), program.add("params", LatestParams, CELL)
    total = actors * groups
    settings, batches = (Counting(), env, params, counters, np.zeros(total * n), 0), {"batch": total * n, "wait": 1e-3}
    examples = send_examples(env, n)
    policy = program.add("inference", BatchedPolicy, *settings, groups=total, n=n, **batches, examples=examples)
    for i in range(actors):
        mine = tuple(range(i * groups, (i + 1) * groups))
        envs = functools.partial(make_env, "routing:Routed")
        args = (envs, n, policy, counters, 0, f"actor/{i}", mine, INCARNATION)
        program.add(f"actor/{i}", Actor, *args, light=True, elsewhere=True)
    return program


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("kills", lives(5, 100))
def test_every_action_reaches_the_environment_that_asked(
    kills: int, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While actors, the inference and the gate are killed: no action is lost, late, doubled or another's."""
    program = counting_program(3, 2, 2)
    gate = GateSettings() if transport == "grpc" else None
    rng, took = np.random.default_rng(kills), []

    def scenario(nodes: Any) -> Iterator[None]:
        names = [name for name in nodes.supervisor.children]
        assert ("gate" in names) == (transport == "grpc")
        for kill in range(kills):
            goals = {f"actor/{i}": steps_of(nodes, f"actor/{i}") + 200 for i in range(3)}
            began = time.monotonic()
            yield from wait(lambda: all(steps_of(nodes, x) > y for x, y in goals.items()), 20, "all step")  # noqa: B023
            took.append(time.monotonic() - began)
            name = names[kill % len(names)]
            begins, delay = time.monotonic(), rng.random() * 0.1
            yield from wait(lambda: time.monotonic() > begins + delay, 5, "a random moment")  # noqa: B023
            chaos.kill(nodes, name)
            life = child(nodes, name).incarnation
            yield from wait(lambda: child(nodes, name).incarnation > life, 5, "its end is seen")  # noqa: B023
        goals = {f"actor/{i}": steps_of(nodes, f"actor/{i}") + 200 for i in range(3)}
        yield from wait(lambda: all(steps_of(nodes, x) > y for x, y in goals.items()), 20, "all is well")
        assert sum(one.restarts for one in nodes.supervisor.children.values()) == kills, "no other one has ended"

    play(Local(gate=gate), program, scenario, 60 + 5 * kills)
    print(f"\n{kills} kills over {transport}: 200 steps of each actor after {np.percentile(took, 95):.2f} s (p95)")
    assert "misrouted" not in caplog.text


def test_a_service_that_did_its_work_may_be_killed_any_number_of_times() -> None:
    """It counts no steps of its own; those of its actors show that it was well between two kills."""
    program = counting_program(1, 2, 2)

    def scenario(nodes: Any) -> Iterator[None]:
        for _ in range(7):
            goal = steps_of(nodes, "actor/0") + 150
            yield from wait(lambda: steps_of(nodes, "actor/0") > goal, 20, "it steps")  # noqa: B023
            life = child(nodes, "inference").incarnation
            chaos.kill(nodes, "inference")
            yield from wait(lambda: child(nodes, "inference").incarnation > life, 5, "its end is seen")  # noqa: B023

    play(Local(), program, scenario)


# Whole runs.


def over_grpc(config: Any) -> Local:
    return Local(gate=make_gate(config))


@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("kills", lives(4, 60))
def test_kills_over_grpc_corrupt_nothing(kills: int, recipe: str) -> None:
    """F1 and a server that is restarted: actors, the gate and what is behind it are killed in turn."""
    config = config_of(recipe=recipe, actors=3, transport="grpc")
    rng, took = np.random.default_rng(kills), []
    share = 1.0 if recipe == "apex-dqn" else 1 / 8

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        names = ["actor/0", "gate", "actor/2", "inference" if recipe == "seed-vtrace" else "learner"]
        for kill in range(kills):
            yield from wait(verdict.more(int(share * rng.integers(200, 2_000))), 30, f"before {kill}")
            name = names[kill % len(names)]
            life = child(nodes, name).incarnation
            chaos.kill(nodes, name)
            killed = time.monotonic()
            yield from wait(lambda: child(nodes, name).incarnation > life, 5, "its end is seen")  # noqa: B023
            goals = {f"actor/{i}": steps_of(nodes, f"actor/{i}") for i in range(3)}
            yield from wait(lambda: all(steps_of(nodes, x) > y for x, y in goals.items()), 20, "all step")  # noqa: B023
            took.append(time.monotonic() - killed)
            if name == "learner":
                verdict.seen.clear()
        yield from wait(verdict.more(int(2_000 * share)), 30, "after the last kill")
        chaos.check_blocks(nodes.snapshot())
        counts = nodes.state()["store"]["counts"]
        assert counts["duplicates"] == 0
        print(f"\n{kills} kills, {recipe} over gRPC: all step again after {chaos.percentiles(took)}; 0 corrupt")

    play(over_grpc(config), program_of(config, Checker, 8 if share < 1 else 256), scenario, 60 + 10 * kills)
    assert np.percentile(took, 95) <= 5.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_over_grpc_ends_by_itself_and_leaves_nothing(recipe: str, tmp_path: Path) -> None:
    before = chaos.belongings()
    settings = chaos.settings_of(recipe) | {"steps": 4_000, "transport": "grpc"}
    run = train(recipe, env="veldt/Counter-v0", run=tmp_path / "run", quiet=True, **settings)
    assert run.metrics[-1]["env_steps"] >= 4_000
    assert any(line.get("gate_bytes_in") for line in run.metrics) or run.metrics[-1]["time_s"] < 1
    assert not (tmp_path / "run" / ".gate").exists()
    assert chaos.belongings() == before


# Actors that join.


@contextlib.contextmanager
def joined(*flags: Any) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "veldt", "actor", *map(str, flags)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def listening(caplog: pytest.LogCaptureFixture) -> str:
    found = re.search(r"listening on (\S+:\d+)", caplog.text)
    return found[1] if found else ""


TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("recipe", FEW)
def test_actors_join_die_and_join_again(recipe: str, token: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One is killed with SIGKILL, another takes its place, a third leaves when it is told to; none of it is corrupt."""
    config = config_of(recipe=recipe, actors=1, **{"gate.listen": "127.0.0.1:0", "gate.seats": 2})
    gate = make_gate(config, TOKEN)
    stack = contextlib.ExitStack()

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(lambda: listening(caplog), 20, "it listens")
        flags = ("--connect", listening(caplog), "--token-file", token, "--network", "chaos:Net")
        first, second = stack.enter_context(joined(*flags)), stack.enter_context(joined(*flags))
        seats = ("seat/0", "seat/1")
        yield from wait(lambda: all(steps_of(nodes, seat) > 200 for seat in seats), 30, "both act")
        yield from wait(verdict.more(200), 20, "all is well")
        first.kill()
        local = steps_of(nodes, "actor/0")
        yield from wait(lambda: steps_of(nodes, "actor/0") > local + 200, 10, "the others go on")
        second.send_signal(signal.SIGINT)
        yield from wait(lambda: second.poll() is not None, 10, "it leaves")
        assert second.returncode == 130, second.communicate()[0]
        third = stack.enter_context(joined(*flags))
        before = [steps_of(nodes, seat) for seat in seats]
        yield from wait(
            lambda: any(steps_of(nodes, seat) > n + 200 for seat, n in zip(seats, before, strict=True)),
            30,
            "a new one acts",
        )
        yield from wait(verdict.more(200), 20, "all is well still")
        if recipe == "apex-dqn":
            chaos.check_blocks(nodes.snapshot())
        last.append(third)

    last: list[subprocess.Popen[str]] = []
    with stack:
        play(Local(gate=gate), program_of(config, Checker, 8 if recipe == "seed-vtrace" else 64), scenario, 120)
        output, _ = last[0].communicate(timeout=15)
        assert last[0].returncode == 0 and "The run has ended." in output, output


def test_an_actor_that_joins_needs_no_torch(token: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(recipe="seed-vtrace", actors=1, **{"gate.listen": "127.0.0.1:0"})
    gate = make_gate(config, TOKEN)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: listening(caplog), 20, "it listens")
        with joined("--connect", listening(caplog), "--token-file", token) as actor:
            yield from wait(lambda: steps_of(nodes, "seat/0") > 100, 30, "it acts")
            maps = Path(f"/proc/{actor.pid}/maps").read_text()
            assert "torch" not in maps and "llvmlite" not in maps

    play(Local(gate=gate), program_of(config, Checker, 8), scenario, 60)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"gate.listen": "0.0.0.0:0"}, "without TLS"),
        ({"gate.listen": "nonsense"}, "nonsense"),
        ({"gate.listen": "127.0.0.1:0", "gate.certificate": "/nowhere", "gate.key": "/nowhere"}, "/nowhere cannot be read"),
        ({"gate.certificate": "x", "gate.key": "y"}, "--gate.listen"),
        ({"gate.listen": "127.0.0.1:0", "gate.key": "y"}, "both"),
        ({"transport": "grpc", "runtime": "inline"}, "--runtime local"),
        ({"gate.listen": "127.0.0.1:0", "gate.seats": 0}, "gate.seats"),
        ({"inference": "central", "central.groups": 3}, "groups"),
        ({"inference": "central", "central.wait_ms": -1.0}, "central.wait_ms"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(flags: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        train("seed-vtrace", run=tmp_path / "run", quiet=True, **flags)
    assert not (tmp_path / "run").exists()


def test_the_token_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    settings = chaos.settings_of("seed-vtrace") | {"steps": 500, "gate.listen": "127.0.0.1:0"}
    train("seed-vtrace", env="veldt/Counter-v0", run=tmp_path / "run", quiet=True, **settings)
    file = tmp_path / "run" / "token"
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600 and len(token.strip()) == 64
    assert token.strip() not in (tmp_path / "run" / "log.txt").read_text() + (tmp_path / "run" / "config.yaml").read_text()
    train("seed-vtrace", env="veldt/Counter-v0", run=tmp_path / "run", quiet=True, **settings | {"steps": 800})
    assert file.read_text() == token
    assert Run(tmp_path / "run").metrics[-1]["env_steps"] >= 800


def test_code_is_imported_only_with_permission(token: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(recipe="seed-vtrace", actors=1, **{"gate.listen": "127.0.0.1:0"})
    config = dataclasses.replace(config, env="veldt.envs.small:Counter")
    gate = make_gate(config, TOKEN)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: listening(caplog), 20, "it listens")
        flags = ("--connect", listening(caplog), "--token-file", token)
        with joined(*flags) as refused:
            yield from wait(lambda: refused.poll() is not None, 20, "it refuses")
            assert refused.returncode == 2 and "allow it with --env veldt.envs.small:Counter" in refused.communicate()[0]
        with joined(*flags, "--env", "veldt.envs.small:Counter"):
            yield from wait(lambda: steps_of(nodes, "seat/0") > 100, 30, "it acts")

    play(Local(gate=gate), program_of(config, Checker, 8), scenario, 60)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--connect", "127.0.0.1:1"), 2, "token"),
        (("--connect", "example.org:7777", "--token-file", "TOKEN"), 2, "TLS"),
        (("--connect", "127.0.0.1:1", "--token-file", "TOKEN", "--patience", "0.5"), 1, "127.0.0.1:1"),
        (("--connect", "127.0.0.1:1", "--token-file", "/nowhere"), 2, "/nowhere"),
        ((), 2, "--connect"),
    ],
)
def test_an_actor_that_cannot_join_says_why(flags: tuple[str, ...], code: int, words: str, token: Path) -> None:
    with joined(*(str(token) if word == "TOKEN" else word for word in flags)) as actor:
        output, _ = actor.communicate(timeout=30)
    assert actor.returncode == code and words in output and "Traceback" not in output, output
