"""RAM that runs out: the process that grows is named and restarted, or the run saves and ends, before the kernel kills."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import chaos
import pytest
from chaos import Checker, Moody, Verdict, child, config_of, play, program_of, steps_of, wait
from test_ends import saved
from test_faults import command

from veldt import machine
from veldt.__main__ import main
from veldt.machine import Ram, anonymous_memory, used_memory
from veldt.runtime.local import pressure, zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.pressure import MemoryConfig, OutOfMemory, Pressure

MORE = 400_000_000  # bytes that a run of these tests may take beyond what it has


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veldt")


def limit(nodes: Any) -> None:
    """From now on the run may take a little more than it has."""
    nodes.supervisor.pressure.config = MemoryConfig(limit=(used_memory(*nodes.resources()) + MORE) / 1e9)


@pytest.mark.parametrize("inference", ["local", "central"])
def test_an_actor_whose_environment_leaks_is_named_and_restarted(
    tmp_path: Path, inference: str, caplog: pytest.LogCaptureFixture
) -> None:
    largest = [0]

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(verdict.more(300), 30, "it runs")
        limit(nodes)
        pids = {name: child(nodes, name).pid for name in nodes.supervisor.children}
        (tmp_path / "leak").touch()

        def restarted() -> bool:
            limited = int(1e9 * nodes.supervisor.pressure.config.limit)
            largest[0] = max(largest[0], limited - int(verdict.seen.get("memory_left", limited)))
            return verdict.look().get("memory_restarts", 0.0) > 0

        yield from wait(restarted, 30, "it is restarted")
        pid = int(next(tmp_path.glob("leak-*")).name.partition("-")[2])
        (leaking,) = (name for name in pids if pids[name] == pid)
        yield from wait(lambda: child(nodes, leaking).pid not in (0, pid), 10, "its next life")
        assert f"{leaking} has grown by " in caplog.text and "of RAM are left; restarting it" in caplog.text
        assert {name for name in pids if child(nodes, name).pid != pids[name]} == {leaking}, "no other is restarted"
        steps = steps_of(nodes, leaking)
        yield from wait(lambda: steps_of(nodes, leaking) > steps + 100, 20, "it acts again")
        yield from wait(verdict.more(300), 20, "all is well")
        yield from wait(lambda: verdict.look()["memory_left"] > 0, 10, "RAM is free again")
        limited = 1e9 * nodes.supervisor.pressure.config.limit
        print(f"\nat most {largest[0] / limited:.2f} of the limit were used")
        assert largest[0] < 1.1 * limited

    env = partial(Moody, str(tmp_path), 0.002)
    play(Local(), program_of(config_of(env, inference=inference), Checker), scenario)


def test_what_an_environment_started_counts_with_its_actor() -> None:
    code = "x = b'x' * 50_000_000; print(len(x), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        here, there = os.getpid(), process.pid
        sizes = pressure._sizes([here, there])
        process.communicate("\n", timeout=10)
    assert sizes[there] > 50_000_000 and sizes[here] > anonymous_memory(here) + 45_000_000
    assert pressure._sizes([there]) == {there: 0}, "it has ended"


def test_a_learner_that_grows_ends_the_run_with_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = {"algorithm.network_from": "chaos:Hoarding", "checkpoint.every": 0, "store.samples_per_insert": 8.0}
    more |= {"memory.limit": (used_memory() + 1.2e9) / 1e9, "learner.batch": 64}
    assert main(command(tmp_path / "r", **more)) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.match(r"veldt: learner has grown by .* of RAM are left; give it more RAM, or lower learner\.batch", last), (
        last
    )
    assert "continue with: veldt resume" in last
    manifest = saved(tmp_path / "r")
    assert manifest["env_steps"] >= 100 and manifest["nodes"]["learner"]["steps"] > 0 and manifest["blocks"]["store"]


def test_an_actor_that_may_have_no_more_memory_is_restarted_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The limit is the kernel's own, of one process."""

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(lambda: child(nodes, "actor/0").restarts >= 1, 30, "it ran out of memory")
        yield from wait(verdict.more(500), 20, "the run goes on")
        assert {x.name for x in nodes.supervisor.children.values() if x.restarts} == {"actor/0"}

    play(Local(), program_of(config_of(chaos.Confined), Checker), scenario)
    assert re.search(r"actor/0 ended \(EnvError: .*MemoryError", caplog.text)


class Grown:
    """Bytes that each process has, in place of the kernel's word: who is blamed, for any numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes, self.shared, self.ended, self.now = {1: 0, 2: 0, 3: 0, os.getpid(): 0}, 0, [], 0.0
        monkeypatch.setattr(pressure, "anonymous_memory", self.sizes.__getitem__)
        monkeypatch.setattr(pressure, "families", lambda pids: {pid: [pid] for pid in pids})
        monkeypatch.setattr(pressure, "ram", lambda: Ram(10_000_000_000, 400_000_000))  # 500 MB are to be free
        monkeypatch.setattr(pressure.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Pressure, "_shared_bytes", lambda _: self.shared)
        children: dict[str, Any] = {}
        for pid, name in enumerate(("actor/0", "actor/1", "learner"), 1):
            children[name] = type("Child", (), {"name": name, "pid": pid, "ready": True, "end": self.ended.append})()
        self.pressure = Pressure(MemoryConfig(), children, (), ["learner"])
        self.pressure._note_first()

    def look(self, shared: int = 0, **sizes: int) -> list[str]:
        self.now += 10.0
        self.shared = shared
        self.sizes |= {1: sizes.get("first", 0), 2: sizes.get("second", 0), 3: sizes.get("learner", 0)}
        self.pressure.check(())
        return self.ended


def test_who_is_blamed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    grown = Grown(monkeypatch)
    assert not grown.look(first=50_000_000) and "another program has taken it" in caplog.text
    told = caplog.text
    assert not grown.look() and caplog.text == told, "it is not said again at once"
    assert len(grown.look(first=200_000_000, second=300_000_000, learner=250_000_000)) == 1
    assert "actor/1 has grown by 300.0 MB and 400.0 MB of 10.0 GB of RAM are left; restarting it" in caplog.text
    assert len(grown.look(first=80_000_000, second=70_000_000, shared=10**9)) == 2, "together they have taken enough"
    with pytest.raises(OutOfMemory, match=r"learner has grown by 2\.0 GB"):
        grown.look(first=300_000_000, learner=2_000_000_000)
    with pytest.raises(OutOfMemory, match=r"the store has grown by 1\.0 GB; lower store\.capacity"):
        grown.look(first=50_000_000, shared=10**9)
    grown.pressure.config = MemoryConfig(reserve=0.0)
    assert len(grown.look(learner=2_000_000_000)) == 2, "as asked"


GROUPS = {
    "v2": ("0::/a/b\n", "a", {"memory.max": "1000", "memory.current": "700", "memory.stat": "active_file 100\nanon 5\n"}),
    "v1": (
        "4:cpu,memory:/a\n0::/\n",
        "memory",
        {
            "memory.limit_in_bytes": "1000",
            "memory.usage_in_bytes": "700",
            "memory.stat": "total_inactive_file 100\n",
        },
    ),
}


@pytest.mark.parametrize("version", GROUPS)
def test_the_smallest_of_all_limits_counts(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group above this process's own has the limit, and one has none."""
    listed, folder, files = GROUPS[version]
    (tmp_path / folder).mkdir()
    (tmp_path / "self").write_text(listed)
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    real = machine.Path

    def path(name: str) -> Path:
        return real(name.replace("/proc/self/cgroup", f"{tmp_path}/self").replace("/sys/fs/cgroup", str(tmp_path)))

    monkeypatch.setattr(machine, "Path", path)
    assert machine.ram() == Ram(1000, 400)
    (tmp_path / folder / next(iter(files))).write_text("max" if version == "v2" else str(1 << 62))
    monkeypatch.undo()
    assert machine.ram().total > 10**8
