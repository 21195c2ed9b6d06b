"""A run directory that somebody sent: it writes nowhere else, never hangs, and what is wrong in it is named."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_run import tiny

import veldt
from veldt.__main__ import main
from veldt.env_kwargs import read_kwargs
from veldt.errors import UserError
from veldt.experiment.run import Run
from veldt.runtime.local.local import Local

ESCAPE = "\x1b]0;mine\x07"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("good") / "r", steps=300, **{"checkpoint.keep": 1}).path


@pytest.fixture
def sent(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "sent", symlinks=True))


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / os.readlink(run / "checkpoints" / "latest")


def rewrite(run: Path, change: Callable[[dict[str, Any]], None], which: str = "latest") -> None:
    """Changes the manifest of the last checkpoint, or of the best one, and signs it."""
    path = run / "checkpoints" / os.readlink(run / "checkpoints" / which)
    file = path / "manifest.json"
    manifest = json.loads(file.read_text().split("\n")[0])
    change(manifest)
    for name in manifest["files"] if isinstance(manifest["files"], dict) else ():
        data = (path / name).read_bytes()
        if isinstance(manifest["files"][name], dict):
            manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    body = json.dumps(manifest)
    file.write_text(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")


# Links and pipes.


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "log.txt"])
def test_a_link_in_place_of_a_file_that_is_written_is_refused(sent: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (sent / name).unlink()
    (sent / name).symlink_to(precious)
    with pytest.raises(UserError, match=r"it is a symbolic link"):
        veldt.resume(sent, quiet=True, steps=340)
    assert precious.read_text() == "mine"


def test_a_link_in_place_of_the_history_is_refused(sent: Path, tmp_path: Path) -> None:
    (sent / "config_history.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"config_history.jsonl cannot be written \(it is a symbolic link\)"):
        veldt.resume(sent, quiet=True, steps=340)
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", [".aside-config.yaml", "metrics.json", ".aside-metrics.json", "checkpoints/.aside-000002"])
def test_a_link_in_place_of_a_file_that_is_replaced_is_replaced(sent: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (sent / name).symlink_to(precious)
    veldt.resume(sent, quiet=True, steps=340)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/blocks"])
def test_a_directory_that_is_a_link_is_refused(sent: Path, tmp_path: Path, name: str) -> None:
    (sent / name).rename(tmp_path / "elsewhere")
    (sent / name).symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(UserError, match=f"{name} is a symbolic link"):
        veldt.resume(sent, quiet=True, steps=340)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_what_is_no_regular_file_is_not_read(sent: Path, name: str, kind: str) -> None:
    file = checkpoint(sent) / name
    file.rename(sent / "real")
    if kind == "pipe":
        os.mkfifo(file)  # to open it would wait for a writer
    else:
        file.symlink_to("/dev/zero" if kind == "device" else sent / "real")
    with pytest.raises(UserError, match="No checkpoint in"):
        Run(sent).evaluate(1)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "metrics.json", ".lock", "processes.json"])
def test_a_pipe_hangs_neither_plot_nor_top(sent: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (sent / name).unlink(missing_ok=True)
    os.mkfifo(sent / name)
    assert main(["plot", str(sent), "-o", str(sent / "curves.png")]) in (0, 2)
    assert main(["top", str(sent), "--once"]) in (0, 2)
    assert main(["eval", str(sent), "--episodes", "1"]) == (2 if name == "config.yaml" else 0)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_in_place_of_the_folder_of_the_gate_is_removed(tmp_path: Path, kind: str) -> None:
    """And nothing elsewhere is touched."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    place = tmp_path / "run" / ".gate"
    place.parent.mkdir()
    if kind == "file":
        place.write_text("")
    elif kind == "link":
        place.symlink_to(tmp_path / "precious")
    else:
        os.mkfifo(place)
    with Local(place.parent)._folder() as folder:
        assert folder.is_dir() and not folder.is_symlink() and folder.stat().st_mode & 0o777 == 0o700
    assert not place.exists() and (tmp_path / "precious" / "file").read_text() == "mine"


# Numbers and types.


def setting(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        value: Any = manifest
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (setting("number", to="1"), "invalid number"),
        (setting("number", to=10**30), "invalid number"),
        (setting("env_steps", to=None), "invalid env_steps"),
        (setting("time_s", to=float("nan")), "invalid time_s"),
        (setting("nodes", "learner", to=[]), "invalid nodes.learner"),
        (setting("weights", "learner", to=3), "invalid weights.learner"),
        (setting("files", "state.safetensors", to=7), "invalid files.state.safetensors"),
        (setting("blocks", "store", to={}), "invalid blocks.store"),
        (setting("blocks", "store", 0, "first", to=-1), r"invalid blocks.store\[0\].first"),
        (setting("blocks", "store", 0, "file", to=None), r"invalid blocks.store\[0\].file"),
    ],
)
def test_a_manifest_with_a_wrong_type_is_refused_by_name(sent: Path, change: Any, told: str) -> None:
    rewrite(sent, change)
    for use in (lambda: Run(sent).evaluate(1), lambda: veldt.resume(sent, quiet=True, steps=340)):
        with pytest.raises(UserError, match=f"No checkpoint in .*000001: its manifest has an {told}"):
            use()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (setting("nodes", "store", "counts", "next", to=10**13), "invalid nodes.store.counts.next"),
        (setting("nodes", "store", "counts", "oldest", to="0"), "invalid store.counts.oldest"),
        (setting("nodes", "learner", "steps", to=[]), "invalid learner.steps"),
        (setting("nodes", "counters", "counts", to=3), "invalid counters.counts"),
        (setting("nodes", "store", "rng", to={}), "it does not fit this run"),
        (setting("blocks", to={}), "it does not fit this run"),
    ],
)
def test_a_state_that_no_run_could_have_is_refused_by_name(sent: Path, change: Any, told: str) -> None:
    rewrite(sent, change)
    with pytest.raises(UserError, match=f"000001 cannot be restored: .*{told}"):
        veldt.resume(sent, quiet=True, steps=340)


@pytest.mark.parametrize("name", ["time_s", "env_steps"])
def test_a_manifest_without_its_clocks_is_refused_by_name(sent: Path, name: str) -> None:
    rewrite(sent, lambda manifest: manifest.pop(name))
    with pytest.raises(UserError, match=f"000001 cannot be restored: its manifest has an invalid {name}"):
        veldt.resume(sent, quiet=True, steps=340)


@pytest.mark.parametrize("change", [setting("mean_return", to="high"), setting("mean_return", to=None), dict.clear])
def test_best_weights_that_say_nothing_of_their_return_are_not_the_best(sent: Path, change: Any) -> None:
    def changed(manifest: dict[str, Any]) -> None:
        kept = dict(manifest)
        change(manifest)
        if not manifest:
            manifest |= {name: x for name, x in kept.items() if name not in ("mean_return", "env_steps")}

    rewrite(sent, changed, "best")
    assert veldt.resume(sent, quiet=True, steps=340).metrics[-1]["env_steps"] >= 340
    assert "checkpoint best-" in (sent / "log.txt").read_text()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(sent: Path, value: float) -> None:
    file = checkpoint(sent) / "weights.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    weights[name].flat[0] = value
    save_file(weights, file)
    rewrite(sent, lambda manifest: None)
    for use in (lambda: Run(sent).evaluate(1), lambda: veldt.resume(sent, quiet=True, steps=340)):
        with pytest.raises(UserError, match=rf"weights.safetensors has weights that are not finite \({name}\)"):
            use()


ALIASES = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps: [1]", r"config.yaml: steps must be a int, not \[1\]"),
        ("steps: -3", r"config.yaml: steps must be greater than 0"),
        ("steps: 1e400", r"config.yaml: steps must be"),
        ("algorithm: {hidden: [[1]]}", r"config.yaml: algorithm.hidden must be a tuple"),
        ("learner: 3", r"config.yaml: learner is a group of settings"),
        ("recipe: nothing", r"config.yaml: There is no recipe"),
        (ALIASES, "it has an alias"),
        ("env: !!timestamp foo", "cannot be read as YAML: this is no timestamp"),
        ("seed: !!int ''", "cannot be read as YAML: this is no int"),
        ("[" * 100_000, "cannot be read as YAML"),
        (f"steps: {'1' * 5_000_000}", "it has more than 4,194,304 bytes"),
    ],
    ids=["type", "bound", "infinite", "nested", "group", "recipe", "aliases", "tag", "empty", "deep", "large"],
)
def test_a_config_that_is_wrong_is_refused_by_file_and_field(sent: Path, text: str, told: str) -> None:
    (sent / "config.yaml").write_text(text)
    for use in (lambda: Run(sent).evaluate(1), lambda: veldt.resume(sent, quiet=True)):
        with pytest.raises(UserError, match=told):
            use()
    assert main(["top", str(sent), "--once"]) == 0


@pytest.mark.parametrize("word", ["x=!!bool perhaps", "x=!!int", "x=!!timestamp y"])
def test_an_argument_that_its_tag_does_not_fit_is_a_text(word: str) -> None:
    assert read_kwargs([word]) == {"x": word.partition("=")[2]}


def test_top_does_not_unfold_aliases(sent: Path) -> None:
    """A billion times x, in a few lines: this would not end."""
    names = "abcdefghijklmnopqrstuvwxyzABCDE"
    pairs = itertools.pairwise(names)
    text = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairs)
    (sent / "config.yaml").write_text(text)
    assert main(["top", str(sent), "--once"]) == 0


# What is shown.


def test_lines_of_metrics_may_hold_anything(sent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "[" * 100_000,
        '{"env_steps": "many", "time_s": 0, "eval_return": 1}',
        '{"eval_return": 1}',
        '{"env_steps": 1, "time_s": 1, "eval_return": "high", "eval_env_steps": []}',
        f'{{"env_steps": {"9" * 400}, "time_s": 1, "train_return": 1}}',
        '{"env_steps": 1000000, "time_s": 1, "resumed_from": null, "train_return": {}}',
    ]
    with open(sent / "metrics.jsonl", "a") as file:
        file.write("\n".join(lines) + "\n")
    assert main(["plot", str(sent), "-o", str(sent / "curves.png")]) == 0
    assert main(["top", str(sent), "--once"]) == 0
    (sent / "metrics.jsonl").write_text('{"env_steps": 1, "time_s": 1, "train_return": 1, "learner_steps": "x"}\n')
    assert main(["plot", str(sent), "-o", str(sent / "curves.png")]) == 0
    assert capsys.readouterr().err == ""


def test_no_escape_code_reaches_the_terminal(sent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (sent / "config.yaml").read_text()
    (sent / "config.yaml").write_text(config.replace("env: CartPole-v1", f"env: {json.dumps(ESCAPE)}"))
    with open(sent / "metrics.jsonl", "a") as file:
        line = {"env_steps": 300, "time_s": 9, "eval_return": 1, "bottleneck": ESCAPE, f"cpu/{ESCAPE}": 1, "own": 3}
        file.write(json.dumps(line) + "\n")
    (sent / "metrics.json").write_text(json.dumps([{"name": "own", "link": ESCAPE, "text": ESCAPE}]))
    for command in (["plot", str(sent), "-o", str(sent / "c.png")], ["top", str(sent), "--once"], ["eval", str(sent)]):
        main(command)
    shown = "".join(capsys.readouterr())
    assert "]0;mine" in shown and "\x1b" not in shown and "\x07" not in shown


# Code.


@pytest.fixture
def coded(sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose environment is a module that leaves a mark when it is imported."""
    mark = tmp_path / "mark"
    (tmp_path / "hostile.py").write_text(
        f"import pathlib\nimport gymnasium\npathlib.Path({str(mark)!r}).touch()\n"
        "make = lambda: gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    config = (sent / "config.yaml").read_text()
    (sent / "config.yaml").write_text(config.replace("env: CartPole-v1", "env: hostile:make"))
    return sent


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "{run}", "--episodes", "1"],
        ["resume", "{run}", "--steps", "340", "--quiet"],
        ["record", "--policy", "{run}", "--episodes", "1", "-o", "{run}-demos"],
        ["train", "dqn", "--config", "{run}/config.yaml", "--run", "{run}", "--quiet"],
    ],
    ids=lambda words: words[0],
)
def test_code_is_imported_only_if_the_user_says_so(
    coded: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    command = [word.replace("{run}", str(coded)) for word in words]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "would import and call hostile:make (env)" in told and not (coded.parent / "mark").exists()
    shown = told.splitlines()[-1].partition("veldt: the command is then: veldt ")[2]
    assert main(shlex.split(shown)) == 0
    assert (coded.parent / "mark").exists()


def test_plot_and_top_import_nothing(coded: Path) -> None:
    assert main(["report", str(coded), "-o", str(coded / "page")]) == 0
    assert main(["plot", str(coded), "-o", str(coded / "curves.png")]) == 0
    assert main(["top", str(coded), "--once"]) == 0
    assert not (coded.parent / "mark").exists()
    (coded / "config.yaml").write_text("recipe: hostile:make\nenv: ALE/Pong-v5\n")  # without a protocol
    assert main(["plot", str(coded), "-o", str(coded / "curves.png")]) == 0
    assert not (coded.parent / "mark").exists()


def test_code_is_imported_only_if_the_caller_says_so(coded: Path) -> None:
    assert Run(coded).policy() is not None  # it needs no environment
    for use in (lambda: Run(coded).evaluate(1), lambda: Run(coded).envs(), lambda: veldt.resume(coded, quiet=True)):
        with pytest.raises(UserError, match=r"hostile:make \(env\); allow it with --trust \(trust=True\)"):
            use()
    assert not (coded.parent / "mark").exists()
    assert Run(coded, trust=True).evaluate(1).returns
    assert veldt.resume(coded, quiet=True, trust=True, steps=340).evaluate(1).returns


def test_a_run_that_was_just_trained_is_trusted(coded: Path, tmp_path: Path) -> None:
    assert tiny(tmp_path / "own", env="hostile:make", steps=60).evaluate(1).returns


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("network_from: ''", "network_from: hostile:make", r"import and call hostile:make \(algorithm.network_from\)"),
        ("wandb: false", "wandb: true", r"send metrics to Weights & Biases \(log.wandb\)"),
        ("mlflow: false", "mlflow: true", r"send metrics to MLflow \(log.mlflow\)"),
        ("listen: ''", "listen: 127.0.0.1:7", r"listen on 127.0.0.1:7 \(gate.listen\)"),
    ],
    ids=["network", "wandb", "mlflow", "gate"],
)
def test_what_else_a_resume_must_be_allowed(sent: Path, old: str, new: str, told: str) -> None:
    config = (sent / "config.yaml").read_text()
    assert old in config
    (sent / "config.yaml").write_text(config.replace(old, new))
    with pytest.raises(UserError, match=told):
        veldt.resume(sent, quiet=True, steps=340)


def test_code_in_the_file_of_a_sweep_is_imported_only_if_the_user_says_so(
    coded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = coded.parent / "sweep.yaml"
    file.write_text("recipe: dqn\nenv: hostile:make\nseeds: [0]\n")
    assert main(["sweep", str(file), "--dir", str(coded.parent / "runs"), "--table"]) == 2
    assert "hostile:make (env)" in capsys.readouterr().err and not (coded.parent / "mark").exists()
    assert main(["sweep", str(file), "--dir", str(coded.parent / "runs"), "--table", "--trust"]) == 2  # nothing to show yet
    assert "There is no" in capsys.readouterr().err and (coded.parent / "mark").exists()
