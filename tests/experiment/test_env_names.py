"""A run on an environment of a script or a notebook can be evaluated and resumed by any other process."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from test_run import tiny

import veldt
from veldt import callables
from veldt.__main__ import main
from veldt.envs.small import Chain
from veldt.errors import UserError
from veldt.experiment import saved_spec
from veldt.experiment.env_names import command, shown
from veldt.experiment.run import Run

SCRIPT = """
import gymnasium as gym
import veldt
from beside import Chain
from gymnasium.wrappers import TimeLimit

class Mine(Chain):
    def __init__(self, render_mode=None):
        super().__init__(5)

gym.register("Mine-v0", entry_point=Mine, max_episode_steps=20)

def limited():
    return TimeLimit(Mine(), 20)

tiny = {"algorithm.hidden": (8,), "store.min_size": 50, "eval.every": 0}
for name, env in (("limited", limited), ("id", "Mine-v0"), ("lambda", lambda: limited())):
    veldt.train("dqn", env=env, steps=200, run=f"runs/{name}", **tiny)
later = 1
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory with an unguarded script and the runs that it made, and the commands that it printed."""
    here = tmp_path_factory.mktemp("made")
    (here / "lab").mkdir()
    (here / "lab" / "mine.py").write_text(SCRIPT)
    (here / "lab" / "beside.py").write_text("from veldt.envs.small import Chain\n")
    command = [sys.executable, "-W", "error", "lab/mine.py"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return here, [line.split("with: ")[1] for line in done.stdout.splitlines() if line.startswith("Done")]


@pytest.fixture
def elsewhere(made: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which this process is; nothing of the script is known."""
    here = tmp_path / "there"
    shutil.copytree(made[0], here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name == "beside" or name.endswith("mine.py")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(gym.registry, "Mine-v0", raising=False)
    return here


def test_the_commands_that_a_run_prints_work_in_another_process(
    made: tuple[Path, list[str]], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limited, registered, unnamed = made[1]
    assert limited == "veldt eval runs/limited --env lab/mine.py:limited"
    assert registered == "veldt eval runs/id --env lab/mine.py:Mine-v0"
    assert unnamed == "veldt.Run('runs/lambda').evaluate(env=...)"
    for line in (limited, registered):
        assert main([*shlex.split(line)[1:], "--episodes", "2"]) == 0, capsys.readouterr().err
        assert "2 episodes" in capsys.readouterr().out
    assert not (elsewhere / "runs" / "limited").samefile(made[0] / "runs" / "limited")


def test_resume_takes_a_file_too_and_keeps_its_full_path(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "runs/limited", "--env", "lab/mine.py:limited", "--steps", "240"]) == 0
    run = Run("runs/limited")
    assert run.config.env == f"{elsewhere / 'lab' / 'mine.py'}:limited" and run.metrics[-1]["env_steps"] >= 240
    assert capsys.readouterr().out.splitlines()[-1].endswith("veldt eval runs/limited --env lab/mine.py:limited")


def test_a_file_that_a_directory_names_needs_trust(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/limited"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not any(name.endswith("mine.py") for name in sys.modules)
    assert main(["train", "dqn", "--config", "runs/limited/config.yaml", "--steps", "10"]) == 2
    assert "would import and call" in capsys.readouterr().err
    assert main(["eval", "runs/limited", "--trust", "--episodes", "1"]) == 0


def test_a_policy_needs_no_environment(elsewhere: Path) -> None:
    for name in ("limited", "id", "lambda"):
        assert Run(f"runs/{name}").policy().net is not None
    assert not any(name.endswith("mine.py") for name in sys.modules)


def test_a_video_and_demonstrations_of_a_given_environment(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--env", "lab/mine.py:Mine-v0", "--episodes", "1"]
    assert main(["record", "--policy", "runs/lambda", *given, "-o", "demos", "--max-length", "20"]) == 0
    assert main(["eval", "runs/lambda", *given, "--video", "x.gif"]) == 2
    assert "cannot be rendered" in capsys.readouterr().err


def test_what_a_file_does_not_have_is_said(elsewhere: Path) -> None:
    for name, why in {
        "lab/mine.py:later": r"mine.py stops before it defines later .*it starts a run.* below `if __name__ ==",
        "lab/beside.py:nothing": "has no class or function 'nothing', and registers no environment",
        "lab/nowhere.py:x": "There is no file .*nowhere.py",
        "lab/broken.py:x": r"broken.py cannot be imported \(ZeroDivisionError",
        "lab/leaves.py:x": r"leaves.py stops before it defines x .*\(SystemExit: 3\)",
    }.items():
        (elsewhere / "lab" / "broken.py").write_text("x = int\n1 / 0\n")
        (elsewhere / "lab" / "leaves.py").write_text("raise SystemExit(3)\n")
        with pytest.raises(UserError, match=why):
            callables.find(name)
    assert not any(name.endswith(".py") and "lab" in name for name in sys.modules if "beside" not in name)


# Given in Python.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("trained") / "r", env=lambda: TimeLimit(Chain(5), 50), steps=300).path


@pytest.fixture
def forgotten(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, in a process that no longer knows its environment."""
    monkeypatch.setattr(callables, "_local", {})
    return Path(shutil.copytree(trained, tmp_path / "r", symlinks=True))


def test_a_class_is_given_again_after_a_restart(forgotten: Path) -> None:
    with pytest.raises(UserError, match="cannot be imported; pass it again"):
        Run(forgotten).evaluate(1)
    again = lambda: TimeLimit(Chain(5), 50)  # noqa: E731
    assert Run(forgotten).evaluate(2, env=again).mean_length > 0
    assert Run(forgotten).policy(env=again).env.n_actions == 2
    resumed = veldt.resume(forgotten, quiet=True, env=again, steps=340)
    assert resumed.metrics[-1]["env_steps"] >= 340
    assert tiny(forgotten, env=lambda: TimeLimit(Chain(5), 50), steps=380).metrics[-1]["env_steps"] >= 380


def test_a_given_environment_that_differs_is_refused(forgotten: Path) -> None:
    class Wider(Chain):
        def __init__(self) -> None:
            super().__init__(5)
            self.action_space = spaces.Discrete(4)

    why = r"Wider.* does not fit .*: its actions are Discrete\(4\), but those of the run are Discrete\(2\)"
    before = (forgotten / "config.yaml").read_text()
    for call in (
        lambda: Run(forgotten).evaluate(1, env=Wider),
        lambda: Run(forgotten).policy(env=Wider),
        lambda: veldt.resume(forgotten, quiet=True, env=Wider, steps=340),
        lambda: tiny(forgotten, env=Wider, steps=340),
    ):
        with pytest.raises(UserError, match=why):
            call()
    assert (forgotten / "config.yaml").read_text() == before


def test_a_run_of_an_older_veldt_takes_the_given_environment(forgotten: Path) -> None:
    (forgotten / saved_spec.FILE).unlink()
    with pytest.raises(UserError, match="cannot be imported; pass it again"):
        Run(forgotten).policy()
    again = lambda: TimeLimit(Chain(5), 50)  # noqa: E731
    assert Run(forgotten).evaluate(1, env=again).returns == Run(forgotten).evaluate(1, env=again).returns
    with pytest.raises(UserError, match="belong to a different network"):
        Run(forgotten).evaluate(1, env="CartPole-v1")


def test_a_network_is_given_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def net(env: veldt.EnvSpec) -> Any:
        return torch.nn.Linear(4, env.n_actions)

    path = tiny(tmp_path / "r", steps=300, network=net).path
    expected = Run(path).evaluate(2).returns
    monkeypatch.setattr(callables, "_local", {})
    with pytest.raises(UserError, match=r"network=\.\.\."):
        Run(path).policy()
    assert Run(path, network=net).evaluate(2).returns == expected
    resumed = veldt.resume(path, quiet=True, network=net, steps=320)
    assert command("eval", path, resumed.config) == f"veldt.Run({str(path)!r}, network=...).evaluate()"


def test_a_plain_id_must_be_the_one_the_run_was_started_with(tmp_path: Path) -> None:
    path = tiny(tmp_path / "cart", steps=300).path
    with pytest.raises(UserError, match="env is CartPole-v1 there and veldt/TMazeFixed-v0 here"):
        tiny(path, env="veldt/TMazeFixed-v0", steps=320)
    resumed = veldt.resume(path, env="veldt/TMazeFixed-v0", quiet=True, steps=320)  # asked for
    assert resumed.config.env == "veldt/TMazeFixed-v0"


def test_an_id_that_a_script_registered_is_asked_for_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gym.register("mine/Registered-v0", entry_point="veldt.envs.small:Chain")
    run = tiny(tmp_path / "run", "mine/Registered-v0")
    del gym.registry["mine/Registered-v0"]
    assert main(["eval", str(run.path)]) == 2
    assert "run was trained on it: if a script registered it, give --env script.py:Class" in capsys.readouterr().err
    assert main(["eval", str(run.path), "--env", "veldt.envs.small:Chain", "--episodes", "1"]) == 0


def test_a_short_path_is_shown_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(f"{tmp_path}/lab/x.py:Y") == "lab/x.py:Y"
    assert shown("/far/x.py:Y") == "/far/x.py:Y" and shown("my.module:Y") == "my.module:Y" and shown("A-v1") == "A-v1"
    assert callables.absolute("lab/x.py:Y") == f"{tmp_path}/lab/x.py:Y" and callables.absolute("m:Y") == "m:Y"
    assert all(callables.is_code(name) for name in ("/far/x.py:Y", "x.py:Y", "m:Y"))
