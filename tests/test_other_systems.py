"""What needs no processes works where there is no Linux: a process without its modules, functions and files (see
other_system.py) trains, resumes, evaluates and plots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from veldt import files, machine
from veldt.errors import UserError
from veldt.experiment.directory import exclusive

SMALL = "--steps 300 --store.min-size 50 --algorithm.hidden 8 --eval.every 0"
COMMANDS = f"""
recipes
train dqn --env CartPole-v1 --run a {SMALL}
resume a --steps 340
eval a --episodes 1
plot a -o a.png
top a --once
train apex-dqn --env CartPole-v1 --run b {SMALL}
train apex-dqn --env CartPole-v1 --run c {SMALL} --runtime local
train dqn --env CartPole-v1 --device mps
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_run_in_one_thread_works_on_other_systems(system: str, tmp_path: Path) -> None:
    code = Path(__file__).with_name("other_system.py")
    done = subprocess.run(
        [sys.executable, str(code), system],
        cwd=tmp_path,
        input=COMMANDS.strip(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    codes = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert codes == ["exit 0"] * 7 + ["exit 2"] * 2, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("runtime: inline, in one thread: the processes of this recipe need Linux") == 1
    assert "The local runtime needs Linux on x86-64 or aarch64; --runtime inline works everywhere." in done.stderr
    assert "has no mps; use --device cpu" in done.stderr
    assert (tmp_path / "a.png").exists() and not (tmp_path / "c").exists()
    assert not [*tmp_path.glob("*/.lock-pid")], "the lock of Windows is given back"


def test_recipes_choose_processes_where_there_are_some() -> None:
    assert machine.runs_processes() == (sys.platform == "linux")


def test_without_fcntl_a_directory_is_held_by_the_process_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    held = tmp_path / ".lock-pid"
    with exclusive(tmp_path):
        assert held.read_text() == str(os.getpid())
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"), exclusive(tmp_path):
            pass
        assert held.exists()
    assert not held.exists()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    held.write_text(str(ended.pid))  # it was killed
    with exclusive(tmp_path):
        assert held.read_text() == str(os.getpid())
    held.write_text(str(os.getpid()))  # a process had our pid before us
    os.utime(held, (0, 0))
    with exclusive(tmp_path):
        assert files._is_held(held)
