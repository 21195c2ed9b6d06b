"""The commands of README.md and docs/*.md: those that train are accepted, the quick ones run here as they stand, the
others by benchmarks/docs_commands.py."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_run import tiny

from veldt.__main__ import COMMANDS, main
from veldt.cli import train

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("docs_commands", ROOT / "benchmarks" / "docs_commands.py")
assert SPEC is not None and SPEC.loader is not None
docs_commands = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_commands)

ALL = [shlex.split(found.text) for path in docs_commands.documents() for found in docs_commands.commands(path)]
QUICK = ("recipes", "record", "demos", "resume", "eval", "plot", "metrics", "top")
TRAINED = {tuple(words[1:]): None for words in ALL if words[:2] == ["veldt", "train"]}


def test_the_documents_have_commands_of_every_kind() -> None:
    missing = set(COMMANDS) - {words[1] for words in ALL if words[0] == "veldt"}
    assert not missing and len(TRAINED) > 15


@pytest.mark.parametrize("words", TRAINED, ids=" ".join)
def test_a_training_of_the_documents_is_one_that_veldt_accepts(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, function = words[1].partition(":")
    if function:  # the user's own
        (tmp_path / f"{module}.py").write_text(f"from veldt.experiment.recipes import dqn as {function}")
        monkeypatch.syspath_prepend(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(train, "train", lambda config, **_: asked.append(config))
    monkeypatch.setattr(train.on_ray, "train", lambda recipe, given, run, config, cluster: asked.append(config) or 0)
    assert train.run(list(words[1:])) == 0
    assert asked[0].recipe == words[1]


def test_the_quick_commands_of_the_documents_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cart", "chain"):  # which earlier commands of the documents train
        tiny(tmp_path / "runs" / name, steps=700, **{"eval.every": 300})
    ran = []
    for path in docs_commands.documents():
        for command in docs_commands.commands(path):
            words = shlex.split(command.text)
            if words[0] == "veldt" and words[1] in QUICK and not command.reason:
                argv = [
                    match
                    for word in words[1:]
                    for match in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
                ]
                assert main(argv) == 0, command
                ran.append(words[1])
    assert set(ran) == set(QUICK)
    assert {"cart.gif", "cart.csv", "curve.png", "curves.svg", "rates.png"} <= set(os.listdir())


def test_what_is_a_command_and_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "Text, veldt train.\n\n    veldt train dqn --env A \\\n        --steps 7   # a comment\n    [ Actor ]\n\n"
        "```python\n    veldt no\n```\n\n<!-- not run: needs a GPU -->\n\n    veldt a\n    other$ veldt b\n\n"
        "Text.\n\n    make c\n"
    )
    found = docs_commands.commands(tmp_path / "README.md", tmp_path)
    assert [(x.line, x.text, x.reason) for x in found] == [
        (3, "veldt train dqn --env A --steps 7", ""),
        (13, "veldt a", "needs a GPU"),
        (14, "veldt b", "needs a GPU"),
        (18, "make c", ""),
    ]
