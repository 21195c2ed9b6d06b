"""Processes that are stopped, forked beside threads, or cannot have the memory of their device."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest
import torch
from chaos import Checker, Verdict, child, config_of, play, program_of, wait
from test_ends import saved
from test_faults import command

from veldt.__main__ import main
from veldt.experiment.prepare import make_gate
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local

STEP_S = 1.5  # that a step may take


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veldt")


@pytest.mark.parametrize("victim", ["learner", "inference", "gate", "evaluator"])
def test_whoever_is_stopped_is_named_and_replaced(victim: str, caplog: pytest.LogCaptureFixture) -> None:
    recipe = "apex-dqn" if victim == "evaluator" else "seed-vtrace"
    config = config_of(recipe=recipe, transport="grpc", **{"eval.every": 10**8 if victim == "evaluator" else 0})

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(verdict.more(50), 30, "it runs")
        life = child(nodes, victim).incarnation
        stopped = child(nodes, victim).pid
        os.kill(stopped, signal.SIGSTOP)
        at = time.monotonic()
        yield from wait(lambda: child(nodes, victim).incarnation > life, 10, "its end is seen")
        took = time.monotonic() - at
        print(f"\nthe stopped {victim} was replaced after {took:.1f} s")
        assert took < STEP_S + 2.5  # a second for a stack that does not come
        yield from wait(lambda: child(nodes, victim).ready, 20, "another one")
        steps, restarts = nodes.count("env_steps"), verdict.look()["restarts"]
        yield from wait(lambda: nodes.count("env_steps") > steps + 200, 20, "it goes on")
        verdict.seen.clear()  # a new Checker counts anew
        yield from wait(verdict.more(50), 20, "all is well")
        assert restarts == 1, "no other is replaced"

    play(Local(step_timeout=STEP_S, gate=make_gate(config)), program_of(config, Checker, 8), scenario)
    assert re.search(rf"{victim} has made no progress for [\d.]+ s, .*; killing it", caplog.text)


def test_processes_are_forked_from_one_that_has_no_threads() -> None:
    """Though the run is started from a thread, beside others. Python 3.12 warns of a fork with threads; here warnings are
    errors."""
    failed: list[BaseException] = []
    release = threading.Event()

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 100, 30, "it runs")
        for each in nodes.supervisor.zygotes.values():
            assert len(os.listdir(f"/proc/{each.pid}/task")) == 1

    def run() -> None:
        try:
            play(Local(), program_of(config_of(), Checker), scenario)
        except BaseException as error:
            failed.append(error)
        finally:
            zygote.discard()  # it would die with the thread that started it
            release.set()

    threads = [threading.Thread(target=release.wait, args=(120,)), threading.Thread(target=run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(130)
    assert not failed, failed


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_a_learner_without_memory_on_its_device_saves_and_ends(
    device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"algorithm.network_from": "chaos:TooLarge", "checkpoint.every": 0, "device": device}
    assert main(command(tmp_path / "r", **changes)) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.match(r"veldt: learner failed with (RuntimeError|OutOfMemoryError): .*(allocate|memory)", last), last
    assert "continue with: veldt resume" in last
    manifest = saved(tmp_path / "r")
    assert manifest["env_steps"] >= 100 and manifest["blocks"]["store"], "and the learner as it was kept last"
    assert not chaos.family()


def test_the_table_of_processes_is_written_when_it_can_be_again(tmp_path: Path) -> None:
    """The directory is away for a while, as if its disk were full."""
    path = tmp_path / "r"
    path.mkdir()

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 100, 30, "it runs")
        path.rename(tmp_path / "away")
        killed = chaos.kill(nodes, "actor/0")
        yield from wait(lambda: child(nodes, "actor/0").restarts and child(nodes, "actor/0").ready, 20, "its next life")
        (tmp_path / "away").rename(path)
        told = json.loads((path / "processes.json").read_text())
        assert told["actor/0"]["pid"] == killed, "as it was"

        def is_new() -> bool:
            return bool(json.loads((path / "processes.json").read_text())["actor/0"]["pid"] == child(nodes, "actor/0").pid)

        yield from wait(is_new, 10, "the table is new")

    play(Local(path), program_of(config_of(), Checker), scenario)
