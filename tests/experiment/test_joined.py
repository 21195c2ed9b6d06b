"""An actor that joins a run which lies: nothing is executed but what its user allowed, and it ends with a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chaos import config_of
from liars import FLOATS, INTEGERS, NUMBERS, Caller, House, house_of

from veldt import callables
from veldt.errors import UserError
from veldt.experiment import joined
from veldt.experiment.settings import as_plain
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import Door, LinkLost
from veldt.runtime.grpc.gate import Gate
from veldt.runtime.grpc.session import Session
from veldt.runtime.grpc.wire import Refused, frame
from veldt.runtime.local.board import ROW
from veldt.runtime.shm.memory import EventBell, Format

HERE = Path(__file__).parents[1]
RECIPES = ["apex-dqn", "seed-vtrace"]


def small(recipe: str) -> Any:
    return config_of("CartPole-v1", recipe=recipe, actors=1, **{"gate.listen": "127.0.0.1:0", "algorithm.network_from": ""})


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a mark when it is imported."""
    mark = tmp_path / "mark"
    (tmp_path / "canary.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef make(*_): raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield mark
    sys.modules.pop("canary", None)


@pytest.mark.parametrize(("where", "flag"), [("env", "--env"), ("network", "--network")])
def test_a_run_executes_nothing_that_was_not_allowed(where: str, flag: str, canary: Path, tmp_path: Path) -> None:
    """A real actor, and a run that shows it a harmless environment, and names another in the settings."""
    config = small("apex-dqn")
    plain = as_plain(config) | {"stop_return": 0.0}  # JSON has no infinity
    if where == "env":
        plain["env"] = "canary:make"
    else:
        plain["algorithm"]["network_from"] = "canary:make"
    told = joined.assign(config, 1) | {"env": "CartPole-v1", "config": plain}
    told["settings"] = {**told.get("settings", {}), **{name: plain[name] for name in ("env", "algorithm")}}
    with house_of(config) as house:
        for seat in house.seats:
            seat.assignment = told
        address = f"unix:{tmp_path}/run/gate.sock"
        gate = Gate(house.seats, [Door(address)], house.board, EventBell(house.board.memory, ROW, house.fds["gate bell"]))
        gate.start()
        command = [sys.executable, "-m", "veldt", "actor", "--connect", address]
        paths = os.pathsep.join([str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")])
        with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True) as actor:
            while actor.poll() is None:
                gate.step()
            assert actor.stderr is not None
            said = actor.stderr.read()
        gate.close()
    assert not canary.exists()
    assert actor.returncode == 2 and f"allow it with {flag} canary:make" in said, said


def test_what_is_imported_is_what_was_allowed(canary: Path) -> None:
    with callables.only({"os:getcwd"}):
        assert callables.find("os:getcwd") is os.getcwd
        for name in ("canary:make", "os:mkdir", "local:make", ""):
            with pytest.raises(UserError, match="not allowed"):
                callables.find(name)
    assert not canary.exists() and callables.find("os:mkdir") is os.mkdir


def test_what_was_not_allowed_is_not_imported_even_if_it_was_not_refused(canary: Path) -> None:
    """Two locks: what is built from an assignment imports only what its user allowed."""
    options = {"protocol": "", "clip": False, "grayscale": False, "combine": False}
    assignment = joined.Assignment(0, "canary:make", frozenset(), None, options, 1, (0,))
    with pytest.raises(UserError, match="'canary:make' is code, and importing it was not allowed here"):
        joined.live(Listener().link, assignment, lambda: True)
    assert not canary.exists()


class Listener:
    """An actor that gets the frames that are handed to it."""

    def __init__(self) -> None:
        link = SimpleNamespace(wake=lambda: None, keep_alive=lambda: None)
        self.session = link.session = Session(link, "", False)  # type: ignore[arg-type]
        self.link: Any = link

    def hear(self, welcome: bytes) -> Any:
        self.session.accept(wire.parse(welcome))
        assert self.session.welcome is not None
        return joined.build(self.link, joined.parse(self.session.seats[0].assignment))


def welcome_of(house: House) -> dict[str, Any]:
    caller = Caller(house, Random(0))
    welcome: dict[str, Any] = json.loads(bytes(wire.parse(caller.stream.first).payload))
    caller.seat.release()
    return welcome


def falsify(rng: Random, value: Any) -> Any:
    """JSON with one part of it changed or missing."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.05:
            del value[key]
        else:
            value[key] = falsify(rng, value[key])
        return value
    return rng.choice((*NUMBERS, "canary:make", "canary:make-v0", ":x", "\x1b[2J", "ALE/x", "x" * 300, 10**400, -7))


def weights_frame(tree: Tree, tag: int, rng: Random | None = None) -> bytes:
    format_ = Format.of(tree)
    _, _, parts = wire.Formats([format_]).pack(tree)
    value = wire.pack_value(format_, np.frombuffer(b"".join(parts), np.uint8))
    total = len(value) if rng is None else rng.choice((len(value), len(value), len(value) + 8, 1 << 62, 0))
    return frame(wire.VALUE, wire.PART.pack(0, total), value, number=tag)


def lie_later(rng: Random, actor: Listener, host: Any) -> bytes:
    """A frame that comes after the welcome."""
    counts = [rng.choice((0, 0, 5, rng.choice(INTEGERS))) for _ in range(2 * 6)]
    kind = rng.random()
    if kind < 0.3:
        return frame(wire.HEARTBEAT, wire.STATUS.pack(rng.choice((0, 0, 0, 255)), *counts))
    if kind < 0.4:
        return frame(rng.choice(wire.KINDS), b"{}", number=rng.choice(INTEGERS), channel=rng.choice((0, 0, 1, 255)))
    if actor.session.cells:
        (policy,) = (thing for name, thing in host.objects.items() if name.startswith("policy/"))
        size = policy.vector.numel()
        tree: Tree = {"vector": np.zeros(size + rng.choice((0, 0, 0, 1)), np.float32), "when": np.zeros(2)}
        tree[rng.choice(("vector", "when", "other"))] = np.full(
            rng.choice((2, size)), rng.choice((*FLOATS, 3.0)), np.float32
        )
        return weights_frame(tree, rng.choice(INTEGERS), rng)
    box = actor.session.mailboxes["recorder calls"]
    answer = {"@reply": np.array([rng.choice((0, 1, 2, rng.choice(INTEGERS)))]), "action": np.zeros(1, np.int64)}
    answer["action"][0] = rng.choice((0, 1, rng.choice(INTEGERS)))
    if rng.random() < 0.2:
        answer = {"@reply": answer["@reply"], "@result": np.array(True)}
    which, _, parts = box.answer_formats.pack(answer)
    return frame(
        wire.DATA, *parts, format_=which, number=rng.choice((box._next, rng.choice(INTEGERS))), ack=rng.choice((0, 1, -1))
    )


def fuzz(recipe: str, messages: int, canary: Path) -> None:
    rng, ends = Random(f"{recipe} {messages}"), dict[str, int]()
    with house_of(small(recipe)) as house:
        true = welcome_of(house)
        heard = acted = 0
        while heard < messages:
            actor, host, heard = Listener(), None, heard + 1
            welcome = true if rng.random() < 0.2 else falsify(rng, true)
            try:
                with callables.only(()):
                    host = actor.hear(frame(wire.WELCOME, json.dumps(welcome).encode()))
                    for _ in range(rng.randrange(30)):
                        heard += 1
                        actor.session.take(wire.parse(lie_later(rng, actor, host)))
                        acted += host.step()
                        actor.session.report(host.metrics())
                        while actor.session.next_frame(leaving=False) is not None:
                            pass
            except (Refused, UserError, LinkLost) as error:
                ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1
            finally:
                if host is not None:
                    host.close()
    assert acted and {"Refused", "UserError"} <= ends.keys(), ends
    assert not canary.exists() and "canary" not in sys.modules
    print(f"\n{recipe}: {heard} messages to an actor, {acted} steps, {ends}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_lie_of_a_run_harms_an_actor(recipe: str, canary: Path) -> None:
    fuzz(recipe, 300, canary)


@pytest.mark.parametrize("number", [-1, 1 << 62, 10**30])
def test_numbers_of_a_welcome_that_cannot_be_are_refused(number: int) -> None:
    """They would overflow where numbers of messages are counted on, or in the processes of a site."""
    with house_of(small(RECIPES[0])) as house:
        true = welcome_of(house)
    for name in ("incarnation", "written", "tail"):
        welcome = json.loads(json.dumps(true))
        (seat,) = welcome["seats"]
        (seat if name == "incarnation" else seat["ports"][0])[name] = number
        with pytest.raises(Refused, match="invalid"):
            Listener().session.accept(wire.parse(frame(wire.WELCOME, json.dumps(welcome).encode())))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_lie_of_many_of_a_run_harms_an_actor(recipe: str, canary: Path) -> None:
    fuzz(recipe, 10_000, canary)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(n=1 << 40),
        lambda told: told.update(n=True),
        lambda told: told.update(groups=[0, 0]),
        lambda told: told.update(groups=list(range(100_000))),
        lambda told: told.update(env="\x1b[2J"),
        lambda told: told.update(seed=0.5),
        lambda told: told.update(inference="other"),
        lambda told: told.clear(),
    ],
)
def test_an_assignment_that_cannot_be_is_refused(change: Callable[[Any], None]) -> None:
    told = joined.assign(small("seed-vtrace"), 1)
    assert joined.parse(told).n > 0
    change(told)
    with pytest.raises(UserError, match="invalid"):
        joined.parse(told)
