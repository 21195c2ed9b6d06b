"""Light processes: those of nodes that need no torch. They come from a zygote of their own, and stay small."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import psutil
import pytest
import torch
from chaos import child, play, steps_of, wait

from veldt import callables
from veldt.acting.actor import Actor, Policy, _account
from veldt.compiled import LIGHT
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.envs.small import Chain
from veldt.envs.vector import _flags, _inside
from veldt.errors import ProcessFailed
from veldt.program import ROWS, Program
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import make_plan


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


class Asked(Policy):
    """A policy that others ask: every action is 0. Whoever unpickles it imports this file, and so torch."""

    due = math.inf

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}

    def send(self, group: int, step: Any) -> bool:
        self.steps[group] = step
        return True

    def recv(self, group: int) -> Any:
        return {"action": np.zeros(len(self.steps.pop(group)["reward"]), np.int64)}

    def record(self) -> None:
        pass

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self.steps.pop(group, None)


def teller() -> Callable[..., Any]:
    """A worker's class that goes by value: nobody has to import this file for it."""

    class Teller:
        """Writes down what its process has imported, and which random number it draws."""

        def __init__(self, path: Path, counters: Any) -> None:
            told = {"heavy": sorted({"torch", "numba"} & sys.modules.keys()), "drawn": np.random.rand()}
            path.write_text(json.dumps(told))
            self.counters = counters

        def step(self) -> bool:
            self.counters.add("env_steps", 1)
            time.sleep(0.001)
            return True

    return Teller


def tellers(path: Path, **light: bool) -> Program:
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    for name, x in light.items():
        program.add(name, teller(), path / name, counters, light=x)
    return program


def told(path: Path, name: str) -> Any:
    return json.loads((path / name).read_text())


def actors(env: Any = "CartPole-v1") -> Program:
    """A policy in a process with torch, and two actors that ask it."""
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    policy = program.add("policy", Asked)
    for i in range(2):
        envs = functools.partial(make_env, env)
        program.add(f"actor/{i}", Actor, envs, 8, policy, counters, 1, f"actor/{i}", (i,), light=True)
    return program


def loaded(pid: int) -> set[str]:
    """Which heavy libraries are in the memory of a process, as the kernel tells."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in ("torch", "numba", "llvmlite") if f"/{name}/" in maps}


def ready(nodes: Any) -> bool:
    return all(x.ready for x in nodes.supervisor.children.values())


def lives(nodes: Any) -> dict[str, tuple[int, int]]:
    return {x.name: (x.pid, x.restarts) for x in nodes.supervisor.children.values()}


def moves_on(nodes: Any, *names: str) -> Iterator[None]:
    """Each of these steps its environments."""
    since = {name: steps_of(nodes, name) for name in names}
    yield from wait(lambda: all(steps_of(nodes, name) > since[name] + 100 for name in names), 30, f"{names} go on")


def test_a_process_is_light_if_all_of_its_nodes_are() -> None:
    program = Program()
    first = program.add("a", Asked, light=True)
    program.add("b", Asked, on=first, light=True)
    second = program.add("c", Asked, light=True)
    program.add("d", Asked, on=second)
    program.add("e", Asked)
    assert make_plan(program).light == ["a"]


def test_a_light_process_imports_neither_torch_nor_numba(tmp_path: Path) -> None:
    callables.name_of(lambda: torch.zeros(1))  # a network, as it were: nobody here asks for it

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: ready(nodes), 60, "both are there")
        light, full = told(tmp_path, "light"), told(tmp_path, "full")
        assert light["heavy"] == [] and full["heavy"] == ["numba", "torch"]
        assert loaded(child(nodes, "light").pid) == set() and "torch" in loaded(child(nodes, "full").pid)
        assert light["drawn"] != full["drawn"]
        chaos.kill(nodes, "light")
        yield from wait(lambda: child(nodes, "light").restarts and ready(nodes), 20, "it is back")
        again = told(tmp_path, "light")
        assert again["heavy"] == [] and again["drawn"] != light["drawn"], "a new life draws other numbers"

    before = chaos.belongings()
    play(Local(), tellers(tmp_path, light=True, full=False), scenario)
    assert chaos.belongings() == before


def test_each_comes_from_the_zygote_of_its_kind(tmp_path: Path) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 0 and ready(nodes), 60, "a step")
        table = json.loads((tmp_path / "processes.json").read_text())
        pids = {name: entry["pid"] for name, entry in table.items()}
        assert list(pids) == ["supervisor", "zygote", "light zygote", "light", "full"]
        assert psutil.Process(pids["light"]).ppid() == pids["light zygote"]
        assert psutil.Process(pids["full"]).ppid() == pids["zygote"]
        assert sorted(nodes.resources()[0]) == sorted(pid for name, pid in pids.items() if name != "supervisor")
        for name in ("zygote", "light zygote"):
            assert Path(f"/proc/{pids[name]}/cmdline").read_bytes().startswith(f"veldt {name}".encode())

    play(Local(tmp_path), tellers(tmp_path, light=True, full=False), scenario)


@pytest.mark.parametrize(("light", "name"), [(True, "light zygote"), (False, "zygote")])
def test_only_a_zygote_that_is_needed_is_started(light: bool, name: str, tmp_path: Path) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        assert [each.name for each in nodes.supervisor.zygotes.values()] == [name]
        yield from wait(lambda: nodes.count("env_steps") > 0, 20, "a step")

    play(Local(), tellers(tmp_path, one=light), scenario)


def test_those_that_were_started_early_are_taken(tmp_path: Path) -> None:
    zygote.discard()
    zygote.start_early()
    zygote.start_early(light=True)
    early = sorted(x.pid for x in psutil.Process().children())

    def scenario(nodes: Any) -> Iterator[None]:
        assert sorted(x.process.pid for x in nodes.supervisor.zygotes.values()) == early
        yield from wait(lambda: nodes.count("env_steps") > 0, 20, "a step")

    play(Local(), tellers(tmp_path, light=True, full=False), scenario)
    zygote.start_early(light=True)
    zygote.discard()
    assert not psutil.Process().children()


def test_a_full_zygote_is_full_whoever_starts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment of a light process may start a run of its own."""
    zygote.discard()
    monkeypatch.setenv(LIGHT, "1")

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: ready(nodes), 60, "it is there")
        assert "torch" in loaded(nodes.supervisor.zygotes[False].pid)

    play(Local(), tellers(tmp_path, full=False), scenario)
    zygote.discard()


def test_light_actors_are_small_and_come_back_when_killed() -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        yield from moves_on(nodes, "actor/0", "actor/1")
        for name in ("actor/0", "actor/1"):
            process = psutil.Process(child(nodes, name).pid)
            memory = process.memory_full_info()
            print(f"\n{name}: {memory.pss / 1e6:.1f} MB, of which {memory.uss / 1e6:.1f} its own")
            assert memory.pss < 80e6 and memory.rss < 80e6
            assert loaded(process.pid) == set()
        old, other = child(nodes, "actor/0").pid, child(nodes, "actor/1").pid
        os.kill(old, signal.SIGKILL)
        began = time.monotonic()
        yield from wait(lambda: child(nodes, "actor/0").restarts and ready(nodes), 20, "it is back")
        print(f"ready again {time.monotonic() - began:.3f} s after its death")
        yield from moves_on(nodes, "actor/0", "actor/1")
        assert child(nodes, "actor/0").pid not in (0, old) and child(nodes, "actor/1").pid == other
        assert loaded(child(nodes, "actor/0").pid) == set()

    before = chaos.belongings()
    play(Local(), actors(), scenario)
    assert chaos.belongings() == before


@pytest.mark.parametrize("light", [True, False])
def test_with_a_killed_zygote_go_its_own_processes_alone(light: bool, caplog: pytest.LogCaptureFixture) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        yield from moves_on(nodes, "actor/0", "actor/1")
        pids = {kind: each.pid for kind, each in nodes.supervisor.zygotes.items()}
        own = {"actor/0", "actor/1"} if light else {"policy"}
        old, members = lives(nodes), [psutil.Process(child(nodes, name).pid) for name in own]
        os.kill(pids[light], signal.SIGKILL)
        began = time.monotonic()
        yield from wait(lambda: all(child(nodes, name).restarts for name in own), 20, "its end is seen")
        yield from wait(lambda: ready(nodes), 60, "all are back")
        print(f"\nall are back after {time.monotonic() - began:.3f} s")
        new = lives(nodes)
        for name in old:
            assert new[name] == old[name] if name not in own else new[name][0] not in (0, old[name][0]), name
        zygotes = {kind: each.pid for kind, each in nodes.supervisor.zygotes.items()}
        assert {kind for kind in pids if zygotes[kind] != pids[kind]} == {light}
        assert not any(map(chaos.alive, members))
        yield from moves_on(nodes, "actor/0", "actor/1")

    before = chaos.belongings()
    play(Local(), actors(), scenario)
    assert chaos.belongings() == before
    name = "light zygote" if light else "zygote"
    assert f"the {name} died with exit status -9; restarting its processes" in caplog.text


@pytest.mark.parametrize("light", [True, False])
def test_a_run_ends_in_good_order_when_a_zygote_dies_just_then(light: bool) -> None:
    seen: list[psutil.Process] = []
    began = [0.0]

    def scenario(nodes: Any) -> Iterator[None]:
        yield from moves_on(nodes, "actor/0", "actor/1")
        seen.extend(chaos.family())
        dead = nodes.supervisor.zygotes[light].process
        dead.kill()
        dead.wait(5)
        began[0] = time.monotonic()

    before = chaos.belongings()
    play(Local(), actors(), scenario)
    assert time.monotonic() - began[0] < 1.5, "nobody is waited for in vain"
    assert len(seen) == 7, "with two keepers; one of them was killed here"
    chaos.wait_until(lambda: not any(map(chaos.alive, seen)), 1, "all are gone")
    assert chaos.belongings() == before


def test_a_light_zygote_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zygote.discard()
    (tmp_path / "psutil.py").write_text("raise SystemExit(3)")  # in place of what all processes import
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProcessFailed, match="the light zygote failed 5 times before any process was ready"):
        play(Local(), tellers(tmp_path, light=True), lambda nodes: iter(()))
    zygote.discard()


def test_a_light_actor_steps_the_users_own_environment() -> None:
    """It is known to the user's process alone, as the network is, which refers to torch."""
    env, network = callables.name_of(lambda: Chain()), callables.name_of(lambda: torch.nn.Linear(1, 1))
    assert env.startswith("local:") and network.startswith("local:")

    def scenario(nodes: Any) -> Iterator[None]:
        yield from moves_on(nodes, "actor/0", "actor/1")
        assert loaded(child(nodes, "actor/0").pid) == set()

    play(Local(), actors(env), scenario)


def test_functions_of_the_parent_are_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def load(name: str) -> Any:
        loads.append(name)
        return lambda: name

    monkeypatch.setattr(callables, "_local", {})
    monkeypatch.setattr(callables, "_unloaded", {})
    callables.install({name: functools.partial(load, name) for name in ("local:a", "local:b")})
    assert loads == []
    found = callables.find("local:a")
    assert found is not None and found() == "local:a" and callables.find("local:a") is found and loads == ["local:a"]
    assert callables.name_of(found).startswith("local:") and loads == ["local:a"]
    assert set(callables.local()) >= {"local:a", "local:b"} and loads == ["local:a", "local:b"]


def test_what_numba_compiles_does_the_same_in_plain_numpy() -> None:
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, np.inf, -np.inf, 5.0, -5.0, 5.1, -5.1], np.float32)
    for i in range(300):
        n = int(rng.integers(1, 9))
        reward = rng.normal(size=n).astype(np.float32)
        x = rng.normal(size=(n, 3)).astype([np.float32, np.float64][i % 2])
        if i % 3 == 0:
            reward[rng.integers(n)] = rng.choice(odd)
            x[rng.integers(n), rng.integers(3)] = rng.choice(odd)
        one, two, three = rng.random((3, n)) < 0.3
        low = np.array([-5.0, -np.inf, -5.0], x.dtype)
        results: list[Any] = []
        for plain in (False, True):
            account, flags, inside = (f.py_func if plain else f for f in (_account, _flags, _inside))
            discount, columns = np.full(n, 7, np.float32), np.zeros((3, n), np.bool_)
            sums = np.arange(n) / 7, np.arange(n), np.ones(n, np.bool_)
            told = [flags(reward, one, two, three, discount, columns), inside(x, low, -low)]
            told += account(reward, one, two, three, *sums)
            results.append([*map(int, told), *(a.tobytes() for a in (discount, columns, *sums))])
        assert results[0] == results[1]
        well = np.isfinite(x) & (x >= low) & (x <= -low)
        assert results[0][:2] == [np.isfinite(reward).all(), well.all()]
        assert (discount == np.where(one, 0, 1)).all() and (columns == [three, one | two, np.ones(n)]).all()
        assert results[0][2:4] == [n - one.sum(), three.any()]
        assert (sums[0].astype(np.float32) == (np.arange(n) / 7 + reward).astype(np.float32))[np.isfinite(reward)].all()
        assert (sums[1] == np.arange(n) + ~one).all() and (sums[2] == two).all()
