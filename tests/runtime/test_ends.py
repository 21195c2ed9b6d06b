"""How runs end: whatever is killed, stuck or raises, what was learned is saved, and the end comes soon."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import psutil
import pytest
from chaos import child, config_of, play, program_of, steps_of, wait
from test_faults import HERE, command, env_steps, processes_of, started

import veldt
from veldt import signals
from veldt.__main__ import main
from veldt.counters import Counters
from veldt.envs.small import Chain
from veldt.errors import EnvError
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import exclusive
from veldt.experiment.run import Run
from veldt.experiment.session import Interrupted
from veldt.program import ROWS, Program
from veldt.runtime.local import supervisor, zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.watchdog import Restarts

SOON = 5.0  # seconds from a signal to the end


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


def saved(path: Path) -> dict[str, Any]:
    """The manifest of the last checkpoint, which has the learner's weights."""
    checkpoint = Run(path).checkpoints().load()
    assert checkpoint is not None and checkpoint.weights()
    return checkpoint.manifest


# Lost processes.


def test_a_run_goes_on_whatever_happens_to_its_evaluator_and_its_zygote(caplog: pytest.LogCaptureFixture) -> None:
    """The limit of one failure would end it, if these counted as failures."""
    config = config_of(**{"eval.every": 10**8})

    def scenario(nodes: Any) -> Iterator[None]:
        for _ in range(3):
            yield from wait(lambda: child(nodes, "evaluator").pid, 20, "it is there")
            life = child(nodes, "evaluator").incarnation
            chaos.kill(nodes, "evaluator")
            yield from wait(lambda: child(nodes, "evaluator").incarnation > life, 20, "its end is seen")  # noqa: B023
        yield from wait(lambda: all(x.ready for x in nodes.supervisor.children.values()), 20, "all are there")
        os.kill(nodes.supervisor.zygotes[False].pid, signal.SIGKILL)
        yield from wait(lambda: child(nodes, "learner").incarnation > 0, 20, "its end is seen")
        yield from wait(lambda: all(x.ready for x in nodes.supervisor.children.values()), 20, "all are back")
        steps = nodes.count("env_steps")
        yield from wait(lambda: nodes.count("env_steps") > steps + 200, 20, "it goes on")

    play(Local(restarts=Restarts(limit=1, delay=0.1)), program_of(config), scenario)
    assert caplog.text.count("evaluator ended (killed by SIGKILL") == 3


def test_a_stopped_zygote_is_named_and_replaced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ZYGOTE_S", 1.0)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 100, 20, "it runs")
        stopped = nodes.supervisor.zygotes[False].pid
        os.kill(stopped, signal.SIGSTOP)
        chaos.kill(nodes, "actor/0")  # which nothing notices
        yield from wait(lambda: nodes.supervisor.zygotes[False].pid not in (0, stopped), 20, "another zygote")
        steps = steps_of(nodes, "actor/0")
        yield from wait(lambda: steps_of(nodes, "actor/0") > steps + 100, 20, "it goes on")
        assert not psutil.pid_exists(stopped)

    play(Local(step_timeout=1.0), program_of(config_of()), scenario)
    assert re.search(r"the zygote has not answered for 1\.\d s; restarting all processes", caplog.text)


def test_a_run_is_resumed_without_an_evaluator_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run starts without it too."""
    config, fork = config_of(**{"eval.every": 10**8}), zygote.Zygote.fork

    def fork_others(self: Any, name: str, order: dict[str, Any], fds: list[int]) -> None:
        if name != "evaluator" or not order["incarnation"]:
            fork(self, name, order, fds)

    monkeypatch.setattr(zygote.Zygote, "fork", fork_others)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 30, 30, "it learns")
        saved = nodes.state()
        nodes.cut()
        chaos.kill(nodes, "evaluator")
        began = time.monotonic()
        nodes.load_state(saved)
        assert time.monotonic() - began < 10
        nodes.resume(1)
        yield from wait(lambda: nodes.count("learner_steps") > saved["learner"]["steps"] + 30, 20, "it goes on")

    play(Local(), program_of(config), scenario)


def test_a_zygote_that_cannot_fork_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take all processes with it."""

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given, kept = os.pipe()
    server = object.__new__(zygote.Server)  # one that was made would take this process's signals
    server.socket, server.descriptors = theirs, {}
    monkeypatch.setattr(os, "fork", fork)
    with ours, theirs:
        server._handle({"fork": "actor/0", "order": {}}, [given])
        told = json.loads(ours.recv(1000))
        assert told == {"failed": "actor/0", "why": "[Errno 11] Resource temporarily unavailable"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(given)
    os.close(kept)


def test_a_process_that_cannot_be_forked_is_tried_again_and_no_other_is_restarted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[dict[str, Any]] = []
    fork, events = zygote.Zygote.fork, zygote.Zygote.events

    def fork_but_once(self: Any, name: str, order: dict[str, Any], fds: list[int]) -> None:
        if name == "actor/0" and order["incarnation"] == 1:
            lost.append({"failed": name, "why": "Resource temporarily unavailable"})
        else:
            fork(self, name, order, fds)

    def events_and_lost(self: Any) -> list[dict[str, Any]]:
        found = [*events(self), *lost]
        lost.clear()
        return found

    monkeypatch.setattr(zygote.Zygote, "fork", fork_but_once)
    monkeypatch.setattr(zygote.Zygote, "events", events_and_lost)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 100, 30, "it runs")
        chaos.kill(nodes, "actor/0")
        yield from wait(
            lambda: child(nodes, "actor/0").incarnation == 2 and child(nodes, "actor/0").ready, 20, "it is back"
        )
        steps = steps_of(nodes, "actor/0")
        yield from wait(lambda: steps_of(nodes, "actor/0") > steps + 100, 20, "it goes on")
        assert [x.name for x in nodes.supervisor.children.values() if x.restarts] == ["actor/0"]

    play(Local(), program_of(config_of()), scenario)
    assert "actor/0 ended (it could not be forked: Resource temporarily unavailable); restarting" in caplog.text


def test_what_an_environment_started_goes_with_its_actor_and_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it has a session of its own. The directory is free at once."""
    path, pids = tmp_path / "r", tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("PIDS", str(pids))

    def started_by(actor: int) -> list[psutil.Process]:
        found = [int(file.name.partition("-")[2]) for file in pids.glob(f"{actor}-*")]
        return [psutil.Process(pid) for pid in found]

    with started(path, env="chaos:Parent", **{"log.every": 0.05}) as process:
        chaos.wait_until(lambda: env_steps(path) > 0, 60, "it runs")
        actors = [processes_of(path)[f"actor/{i}"]["pid"] for i in range(2)]
        first, second = map(started_by, actors)
        try:
            assert len(first) == len(second) == 4 and all(map(chaos.alive, first + second)), "two for each environment"
            os.kill(actors[0], signal.SIGKILL)
            chaos.wait_until(lambda: not any(map(chaos.alive, first)), 5, "those of the killed actor are gone")
            assert all(map(chaos.alive, second))
            os.kill(process.pid, signal.SIGKILL)
            chaos.wait_until(lambda: not any(map(chaos.alive, second)), 5, "all are gone")
        finally:
            for each in filter(chaos.alive, first + second):
                each.kill()
    with exclusive(path):
        pass


class Talkative(chaos.Ticker):
    """Reports more metrics than one message to the supervisor holds."""

    def metrics(self) -> dict[str, float]:
        return {f"{i:04}{'x' * 120}": float(i) for i in range(1_500)}


def test_a_process_that_reports_more_metrics_than_a_message_holds_is_named_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program()
    program.add("ticker", Talkative, program.add("counters", Counters, ROWS), 10**9)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: "ticker: it reports more metrics than fit" in caplog.text, 20, "it is named")
        steps = nodes.count("env_steps")
        yield from wait(lambda: nodes.count("env_steps") > steps + 100, 20, "it goes on")
        assert not nodes.metrics().keys() - {"restarts", "memory_left", "memory_restarts"}

    play(Local(), program, scenario)
    assert caplog.text.count("reports more metrics than fit") == 1


def test_the_waits_between_restarts_grow_to_the_longest() -> None:
    waits = [Restarts(delay=1.0).wait(failures) for failures in (1, 2, 3, 4, 6, 10_000)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 1.0, 1.0]


# Errors.


def test_an_error_in_the_learner_ends_the_run_with_a_checkpoint_of_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"algorithm.network_from": "chaos:Breaking", "checkpoint.every": 0}
    assert main(command(tmp_path / "r", **changes)) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("veldt: learner failed with ZeroDivisionError") and "continue with: veldt resume" in last
    manifest = saved(tmp_path / "r")
    assert manifest["env_steps"] >= 100 and manifest["blocks"]["store"]


TINY = {"envs_per_actor": 4, "algorithm.hidden": (16,), "store.capacity": "400", "store.min_size": 100, "eval.every": 0}
TINY |= {"learner.batch": 16, "checkpoint.every": 0, "steps": 1_500}


class Fragile(Chain):
    """The step with number `ends` of all environments together raises, or does not end."""

    taken = 0
    ends = 600
    hangs = False

    def step(self, action: Any) -> Any:
        Fragile.taken += 1
        if Fragile.taken == Fragile.ends:
            for _ in range(60 if self.hangs else 0):
                time.sleep(1)  # a signal that comes just before a sleep does not wake it
            raise ZeroDivisionError("the bridge is out")
        return super().step(action)


@pytest.fixture
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fragile, "taken", 0)


@pytest.mark.usefixtures("_whole")
def test_an_inline_run_whose_environment_raises_is_saved_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="the bridge is out") as caught:
        veldt.train("dqn", env=Fragile, run=tmp_path / "r", quiet=True, **TINY)
    manifest = saved(tmp_path / "r")
    assert 590 <= manifest["env_steps"] < 600 and manifest["blocks"]["store"] and manifest["nodes"]["learner"]["steps"] > 0
    assert f"Saved at {manifest['env_steps']} env steps" in caught.value.__notes__[-1]
    run = veldt.train("dqn", env=Fragile, run=tmp_path / "r", quiet=True, **TINY)
    assert run.metrics[-1]["env_steps"] >= 1_500


def test_an_inline_run_whose_environment_raises_says_so_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dqn", "--quiet", "--env", "chaos:always_raises", "--run", str(tmp_path / "r")]) == 1
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and told.startswith("veldt: ") and "a bad step" in told and "log.txt" in told
    assert "in _perhaps" in (tmp_path / "r" / "log.txt").read_text(), "the environment's own traceback"


# Signals.


@pytest.mark.usefixtures("_whole")
def test_ctrl_c_ends_an_inline_run_whose_environment_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fragile, "hangs", True)
    sent: list[float] = []

    def interrupt() -> None:
        chaos.wait_until(lambda: Fragile.taken == Fragile.ends, 60, "it hangs")
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        veldt.train("dqn", env=Fragile, run=tmp_path / "r", quiet=True, **TINY)
    assert time.monotonic() - sent[0] < SOON
    thread.join(10)
    assert saved(tmp_path / "r")["env_steps"] >= 590


@pytest.mark.usefixtures("_whole")
def test_ctrl_c_during_a_checkpoint_ends_a_run_whose_environment_hangs_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "hangs", True)
    monkeypatch.setattr(Fragile, "ends", 0)
    save, sent = Checkpoints.save, list[float]()

    def save_slowly(self: Checkpoints, *what: Any) -> bool:
        if not sent:
            Fragile.ends = Fragile.taken + 1
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(time.monotonic())
            chaos.wait_until(lambda: time.monotonic() > sent[0] + 1.5 * signals.LATE_S, 10, "the disk is slow")
        return save(self, *what)

    monkeypatch.setattr(Checkpoints, "save", save_slowly)
    with pytest.raises(Interrupted):
        veldt.train("dqn", env=Fragile, run=tmp_path / "r", quiet=True, **TINY | {"checkpoint.every": 300})
    assert time.monotonic() - sent[0] < SOON and Fragile.taken == Fragile.ends, "it hung"
    assert saved(tmp_path / "r")["env_steps"] >= 300


def test_ctrl_c_ends_a_run_whose_learner_is_stuck(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with started(path, **{"checkpoint.every": 300, "log.every": 0.05}) as process:
        chaos.wait_until(lambda: env_steps(path) > 600 and (path / "checkpoints" / "latest").exists(), 60, "it runs")
        before = saved(path)["env_steps"]
        os.kill(processes_of(path)["learner"]["pid"], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        sent = time.monotonic()
        output, _ = process.communicate(timeout=60)
        took = time.monotonic() - sent
    assert process.returncode == 130 and "Traceback" not in output, output
    assert took < SOON
    assert saved(path)["env_steps"] > before


def test_ctrl_c_ends_a_run_that_does_not_come_to_its_start(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with started(path, env="chaos:HangsInActors") as process:
        chaos.wait_until(lambda: processes_of(path).get("actor/0", {}).get("pid"), 60, "its processes are there")
        os.kill(process.pid, signal.SIGINT)
        sent = time.monotonic()
        output, _ = process.communicate(timeout=60)
        took = time.monotonic() - sent
    assert process.returncode == 130 and "Traceback" not in output, output
    assert took < SOON and not (path / "processes.json").exists()


def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    """With a live table, whose output then fails."""
    path = tmp_path / "r"
    words = [word for word in command(path, **{"checkpoint.every": 0, "log.every": 0.05}) if word != "--quiet"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "veldt", *words])

    def runs() -> bool:
        if select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 1 << 16)
        return env_steps(path) > 600

    try:
        chaos.wait_until(runs, 60, "it runs")
        os.close(terminal)  # the kernel sends SIGHUP
        chaos.wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0], 2 * SOON, "its end")
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert saved(path)["env_steps"] > 600
