"""What is known of GPUs: their memory from torch, their names and how busy they are from nvidia-smi."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_inference import batched
from test_run import tiny

from veldt import gpus, machine, metrics
from veldt.algorithms.dqn import DQN
from veldt.counters import Counters
from veldt.experiment import progress
from veldt.gpus import Gpus, memory_of, read_answer
from veldt.learning.learner import Learner, LearnerConfig
from veldt.learning.params import LatestParams
from veldt.watching.view import View

TWO = "NVIDIA H200, 95\nNVIDIA H200, 7\nNVIDIA A40, [N/A]\n"


def program(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An nvidia-smi that notes its arguments; returns the file with them."""
    file, notes = directory / "nvidia-smi", directory / "asked"
    file.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n{script}\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    return notes


def wait_for(found: Gpus, done: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while not done(x := found.look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return x


def test_the_names_and_the_use_of_the_gpus_of_a_run_are_read_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = program(tmp_path, monkeypatch, f"sleep 0.2; printf '{TWO}'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    found, began = Gpus(["cuda", "cpu", "cuda:0"]), time.monotonic()
    assert found.look() == {} and time.monotonic() - began < 0.2
    assert wait_for(found, bool) == {"gpu_busy": 0.95, "gpus": "NVIDIA H200"}
    assert "--id=4,5,6" in notes.read_text()
    for _ in range(3):
        found.look()
    assert len(notes.read_text().splitlines()) == 1, "it is not asked again so soon"
    found.close()


def test_answers_are_read_as_far_as_they_make_sense() -> None:
    assert read_answer(TWO, [0, 1]) == {"gpu_busy": 0.95, "gpus": "2 x NVIDIA H200"}
    assert read_answer(TWO, [1, 2]) == {"gpu_busy": 0.07, "gpus": "NVIDIA H200, NVIDIA A40"}
    assert read_answer(TWO, [2]) == {"gpus": "NVIDIA A40"}
    assert read_answer("Failed to initialize NVML: no driver\n", [0]) == read_answer(TWO, [7]) == read_answer("", [0]) == {}


def test_a_program_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = program(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(gpus, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(gpus, "EVERY_S", 0.0)
    found = Gpus(["cuda"])
    found.look()
    question = found._question
    assert question is not None
    assert wait_for(found, lambda _: found._question is None) == {}
    assert question.poll() is not None, "it is gone"
    assert found.look() == {} and found._question is None and len(notes.read_text().splitlines()) == 1


def test_nothing_is_asked_for_a_run_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = program(tmp_path, monkeypatch, f"printf '{TWO}'")
    assert Gpus(["cpu"]).look() == {} == memory_of("learner", "cpu")
    assert not notes.exists()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert Gpus(["cuda"]).look() == {}, "it has a GPU, but there is no nvidia-smi"


def test_a_run_logs_the_processor_and_what_is_known_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Known(Gpus):
        def __init__(self, devices: Iterable[str]) -> None:
            super().__init__(["cuda" for _ in devices])

        def look(self) -> dict[str, Any]:
            return wait_for(super(), bool)

    program(tmp_path, monkeypatch, f"printf '{TWO}'")
    monkeypatch.setattr(progress, "Gpus", Known)
    run = tiny(tmp_path / "run", steps=50)
    last = run.metrics[-1]
    assert last["processor"] == machine.processor_name() != ""
    assert (last["gpus"], last["gpu_busy"]) == ("NVIDIA H200", 0.95)
    assert "gpu_planned" not in last, "it runs on the CPU"


def test_gpu_memory_of_a_learner_reaches_the_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from veldt.envs import make_env

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 10**9, 140 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * 10**9)
    env, algorithm, store = make_env("CartPole-v1", 1).spec, DQN(), type("Store", (), {"schema": None})()
    learner = Learner(algorithm, env, store, LatestParams(), Counters(), LearnerConfig(), 10, 0)
    assert not any("gpu" in name for name in learner.metrics()), "it is on the CPU"
    learner.device = torch.device("cuda:1")
    reported = {name: x for name, x in learner.metrics().items() if "gpu" in name}
    assert reported == {"gpu_held/learner": 9e9, "gpu_memory": 110e9, "gpu_total": 140e9}
    policy = batched()
    policy.device = "cuda:1"
    inference = {name: x for name, x in policy.metrics().items() if "gpu" in name}
    assert inference["gpu_held/inference"] == 9e9 and inference["gpu_memory"] == 110e9
    line = metrics.merge([reported, inference]) | {"gpu_planned": 120 * 10**9, "gpu_busy": 0.95}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(View("run", {"time_s": 1.0, "env_steps": 10, "learner_steps": 1} | line))
    text = console.export_text()
    assert "110.0 GB of 140.0 GB, 120.0 GB planned" in text and "95 %" in text
    assert text.count("9.0 GB of GPU memory") == 2, "the learner's, and that of inference"
