"""Nothing that is read can be executed, and no deadline hangs on a clock that can jump."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from test_run import tiny

import veldt
from veldt.errors import UserError
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import load_config
from veldt.experiment.run import Run

SOURCE = Path(veldt.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "full_load"),
    ("yaml", "unsafe_load"),
    ("os", "system"),
    ("os", "popen"),
}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text())


def violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"from {node.module} import"
            for alias in node.names:
                if (node.module.split(".")[0], alias.name) in FORBIDDEN_CALLS:
                    yield node.lineno, f"from {node.module} import {alias.name}"
                if node.module == "multiprocessing.connection" and alias.name == "Listener":
                    yield node.lineno, "multiprocessing.connection.Listener"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in FORBIDDEN_NAMES:
        yield node.lineno, f"{function.id}()"
    if isinstance(function, ast.Attribute):
        name = function.value.id if isinstance(function.value, ast.Name) else ""
        if (name, function.attr) in FORBIDDEN_CALLS:
            yield node.lineno, f"{name}.{function.attr}()"
    for keyword in node.keywords:
        trusted = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ("allow_pickle", "shell") and not trusted:
            yield node.lineno, f"{keyword.arg}="
        if keyword.arg == "weights_only":
            yield node.lineno, "weights_only="


def test_nothing_in_the_package_can_execute_what_it_reads() -> None:
    found = [f"{path} {what}" for path, tree in trees() for _, what in violations(tree)]
    # The plan of a run goes from the user's own process to the processes that it starts itself.
    assert found == ["runtime/local/plan.py import cloudpickle"]
    assert len(list(trees())) > 30


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as x",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "np.load('x', allow_pickle=flag)",
        "import yaml\nyaml.load(text)",
        "eval('1')",
        "exec(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_gate_finds_what_it_looks_for(code: str) -> None:
    assert list(violations(ast.parse(code)))


def test_the_gate_lets_good_code_pass() -> None:
    code = "import yaml\nyaml.safe_load(t)\nnp.load('x', allow_pickle=False)\nself.eval\nnet.eval()\nmodel.load(x)\n"
    assert not list(violations(ast.parse(code)))


def wall_clocks(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in (("time", "time"), ("time", "time_ns"), ("datetime", "now")):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for alias in node.names if alias.name in ("time", "time_ns"))


def test_the_wall_clock_is_for_timestamps_of_events_alone() -> None:
    # When something happened; how old a file is; how old a process is where there is no boot clock.
    allowed = ("watching/events.py", "watching/trackers.py", "watching/top.py", "machine.py")
    found = [f"{path}:{line}" for path, tree in trees() for line in wall_clocks(tree) if str(path) not in allowed]
    assert not found
    assert list(wall_clocks(ast.parse("import time\ntime.time()"))) and list(
        wall_clocks(ast.parse("from time import time"))
    )


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    straight = tiny(tmp_path / "a", steps=400)
    jumps = iter(range(10**9))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * (-1) ** next(jumps))
    jumped = tiny(tmp_path / "b", steps=400)
    assert jumped.weights_hash() == straight.weights_hash()
    times = [line["time_s"] for line in jumped.metrics]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 3_600


class Canary:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def canary(mark: Path) -> bytes:
    data = pickle.dumps(Canary(mark))
    pickle.loads(data)
    assert mark.exists(), "the canary is alive"
    mark.rmdir()
    return data


def names(path: Path) -> list[Path]:
    """Every file of the newest checkpoint of a run, and what lies beside it."""
    checkpoint = Run(path).checkpoints().load()
    assert checkpoint is not None
    found = [checkpoint.path / name for name in ("manifest.json", "weights.safetensors", "state.safetensors")]
    blocks = [path / "checkpoints" / "blocks" / file["file"] for file in checkpoint.manifest["blocks"]["store"]]
    return [file.relative_to(path) for file in (*found, *blocks, path / "config.yaml", path / "metrics.jsonl")]


def sign(checkpoint: Path) -> None:
    """Makes the manifest agree with the files, as an attacker would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text().split("\n")[0])

    def fingerprint(path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    manifest["files"] = {name: fingerprint(checkpoint / name) for name in manifest["files"]}
    for files in manifest["blocks"].values():
        for file in files:
            file |= fingerprint(checkpoint.parent / "blocks" / file["file"])
    body = json.dumps(manifest)
    (checkpoint / "manifest.json").write_text(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")


def test_a_pickle_in_place_of_any_file_executes_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = canary(mark)
    run = tiny(tmp_path / "good", steps=300, **{"checkpoint.keep": 1})
    for signed in (False, True):
        for name in names(run.path):
            if signed and name.name == "manifest.json":
                continue
            path = tmp_path / "copy"
            shutil.copytree(run.path, path, symlinks=True)
            (path / name).write_bytes(data)
            if signed:
                for checkpoint in (path / "checkpoints").glob("[0-9]*"):
                    sign(checkpoint)
            for attempt in (
                lambda path=path: Run(path).evaluate(1),
                lambda path=path: veldt.resume(path, quiet=True, steps=340),
                lambda path=path: Run(path).metrics,
            ):
                try:
                    attempt()
                except (UserError, SafetensorError, UnicodeDecodeError):
                    pass
                assert not mark.exists(), f"{name} was executed"
            shutil.rmtree(path)


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "manifest.json"])
def test_a_pickle_in_place_of_a_file_is_told_in_one_sentence(tmp_path: Path, name: str) -> None:
    run = tiny(tmp_path / "r", steps=300, **{"checkpoint.keep": 1})
    (run.path / "checkpoints" / "latest" / name).write_bytes(canary(tmp_path / "mark"))
    with pytest.raises(UserError, match="No checkpoint in"):
        run.checkpoints().load()
    assert not (tmp_path / "mark").exists()


def test_a_config_cannot_call_anything(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "config.yaml").write_text(f"steps: !!python/object/apply:os.mkdir [{mark}]\n")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        load_config(tmp_path / "config.yaml")
    assert not mark.exists()


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """Block files are deleted when no checkpoint needs them: never outside of their directory."""
    run = tiny(tmp_path / "r", steps=300, **{"checkpoint.keep": 1})
    outside = tmp_path / "precious.safetensors"
    outside.write_bytes(b"mine")
    checkpoints = Checkpoints(run.path / "checkpoints", 1)
    checkpoint = checkpoints.load()
    assert checkpoint is not None
    manifest = checkpoint.manifest
    manifest["blocks"]["store"][0]["file"] = "../../../precious.safetensors"
    body = json.dumps(manifest)
    (checkpoint.path / "manifest.json").write_text(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")
    veldt.resume(run.path, quiet=True, steps=700)
    assert outside.read_bytes() == b"mine"
