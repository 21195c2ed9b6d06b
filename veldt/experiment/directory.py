"""A run directory: whose it is, and its config.yaml. (Checkpoints are in `experiment.checkpoint`.)"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import yaml

from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.experiment.settings import as_plain, flat, override

MAY_CHANGE = {  # on resume
    "steps",
    "queue",
    "transport",
    "gate.listen",
    "gate.token_file",
    "gate.certificate",
    "gate.key",
    "gate.compress",
    "log.every",
    "log.wandb",
    "checkpoint.keep",
    "threads",
    "device",
    "eval.episodes",
    "step_timeout",
}
RETIRED = {"dqn": {("actor", "refresh"): 1}}  # settings without effect in config.yaml of older runs, by recipe


def default_directory(config: Config) -> Path:
    """A new one in runs/."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.env)
    stem = f"{config.recipe}-{name}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def load_config(path: Path) -> Config:
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"There is no {path}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings by name, as config.yaml of a run does.")
    recipe = str(values.get("recipe", "dqn"))
    base = recipes.make(recipe, str(values.get("env", "CartPole-v1")))
    config: Config = override(base, _without_retired(values, RETIRED.get(recipe, {})))
    return config


def _without_retired(values: dict[str, Any], retired: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The settings without those that are gone, where they have the value that everybody had."""
    out = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}
    for (group, name), value in retired.items():
        if isinstance(out.get(group), dict) and out[group].get(name) == value:
            del out[group][name]
    return out


def claim(path: Path, config: Config) -> None:
    """Makes the directory, or checks that it belongs to this config."""
    file = path / "config.yaml"
    if file.exists():
        theirs, ours = flat(load_config(file)), flat(config)
        different = [name for name in ours if theirs.get(name) != ours[name] and name not in MAY_CHANGE]
        if different:
            name = different[0]
            raise UserError(
                f"{path} belongs to another config: {name} is {theirs.get(name)} there and {ours[name]} here; "
                "choose another --run, or give the settings it was started with."
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
    except OSError as error:
        raise _not_writable(path, error) from None


def write_config(path: Path, config: Config) -> None:
    aside = path / ".aside-config.yaml"
    try:
        aside.write_text(yaml.safe_dump(as_plain(config), sort_keys=False))
        os.replace(aside, path / "config.yaml")
    except OSError as error:
        raise _not_writable(path, error) from None


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror}); choose another --run.")
