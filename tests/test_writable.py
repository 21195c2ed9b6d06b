"""Without a home that can be written, and without a package that can be, caches are in a private directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from veldt import compiled, writable

CODE = """
from veldt import compiled

compiled.MOMENT_S = 0

@compiled.njit("i8(i8)")
def f(x):
    return x + 1

assert f(1) == 2
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_directory_is_named_where_none_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()  # root can write in any directory
    nowhere = str(tmp_path / "file" / "nowhere")
    for name in writable.USUAL:
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setattr(writable, "USUAL", {name: (nowhere, "~/.cache") for name in writable.USUAL})
    monkeypatch.setenv("HOME", nowhere)
    writable.provide()
    for name in writable.USUAL:
        assert Path(os.environ[name]).parent == writable.private(), name


def test_a_directory_that_can_be_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    writable.provide()
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "new") and "MPLCONFIGDIR" not in os.environ


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="users of Unix")
def test_a_home_that_is_closed_to_the_user_cannot_be_written(tmp_path: Path) -> None:
    """As with `sudo -u` or `docker run --user`, which may keep the HOME of root."""
    home = tmp_path / "home"
    home.mkdir(mode=0)
    code = "import os, sys; from veldt.writable import can_write; os.getuid() or os.setuid(65_534)"
    code += "; print(can_write(sys.argv[1]))"
    try:
        done = subprocess.run([sys.executable, "-c", code, home / ".cache" / "numba"], capture_output=True, text=True)
    finally:
        home.chmod(0o700)
    assert done.stdout == "False\n", done.stderr


def test_the_private_directory_is_the_users_own(tmp_path: Path) -> None:
    first = writable.private()
    assert first == tmp_path / f"veldt-{os.getuid()}" == writable.private()
    assert first.stat().st_mode & 0o777 == 0o700
    first.chmod(0o755)  # others could read it: perhaps they made it
    assert writable.private() != first and writable.private().stat().st_mode & 0o777 == 0o700
    first.rmdir()
    (tmp_path / "mine").mkdir()
    first.symlink_to(tmp_path / "mine")
    assert writable.private() != first and not [*(tmp_path / "mine").iterdir()]


def test_the_first_command_says_that_it_compiles(tmp_path: Path) -> None:
    environment = {name: x for name, x in os.environ.items() if name != compiled.LIGHT} | {"NUMBA_CACHE_DIR": str(tmp_path)}
    (tmp_path / "code.py").write_text(CODE)
    told = [
        subprocess.run(
            [sys.executable, tmp_path / "code.py"], env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stderr
        for _ in range(2)
    ]
    assert told[0].startswith("veldt: compiling functions for this machine (once") and told[1] == ""
