"""A run directory: whose it is, and its config.yaml. (Checkpoints are in `experiment.checkpoint`.)"""

import contextlib
import logging
import os
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import yaml

from veldt import bounds
from veldt.callables import is_code, is_unstable
from veldt.env_kwargs import words_of_text
from veldt.errors import Untrusted, UserError
from veldt.experiment import recipes
from veldt.experiment.changes import HOW_IT_RUNS
from veldt.experiment.config import Config
from veldt.experiment.settings import flat, override
from veldt.files import locked
from veldt.foreign import ConfigLoader, plain, read_text, regular
from veldt.watching.sinks import flat_dict

log = logging.getLogger("veldt")

_locks: set[TextIO] = set()  # held by this process, and by none that it forks
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _locks])

MAY_CHANGE = set(HOW_IT_RUNS)  # if the command that started a run is repeated
CODE = ("env", "algorithm.network_from")  # settings that may name code


def default_directory(config: Config) -> Path:
    env = config.env.rpartition(":")[2] if is_unstable(config.env) else config.env
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in f"{config.recipe}-{env}")
    stem = f"{name}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = ConfigLoader) -> Any:
    try:
        return plain(loader(read_text(path)).get_single_data())
    except FileNotFoundError:
        raise UserError(f"There is no {path}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from None


def config_of(run: Path) -> Path:
    """The file with the settings of a run."""
    if not (run / "config.yaml").exists():
        raise UserError(f"{run} is not a run directory: it has no config.yaml.")
    return run / "config.yaml"


def load_config(path: Path, trust: bool = False, given: Container[str] = ()) -> Config:
    """Raises Untrusted for a recipe that is code (module:function), unless its user trusts the file or has `given` it."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings by name, as config.yaml of a run does.")
    if is_code(name := str(values.get("recipe", ""))) and not trust and name not in given:
        raise Untrusted(_refusal(path, [f"import and call {name} (recipe)"]))
    recipe, actor, learner = str(values.get("recipe", "dqn")), values.get("actor"), values.get("learner")
    if recipe == "dqn" and isinstance(actor, dict) and actor.get("refresh") == 1:
        del actor["refresh"]  # older runs have this setting, without effect
    if isinstance(learner, dict) and learner.pop("momentum", 0):  # of older runs
        log.warning("%s: learner.momentum is ignored; RMSProp no longer has a velocity, as in the papers", path)
    try:
        config: Config = override(recipes.make(recipe, str(values.get("env", "CartPole-v1"))), values)
        bounds.check(config)
    except (UserError, OverflowError) as error:  # a float that no int can hold
        raise UserError(f"{path}: {error}") from None
    return config


def read_settings(path: Path) -> dict[str, Any]:
    """Settings by dotted name, for plots and reports: those of a recipe that is code as the file has them, unchecked."""
    try:
        return flat(load_config(path))
    except Untrusted:
        return flat_dict(read_yaml(path))


def asks(config: Config) -> dict[str, str]:
    """What a config does beside computing, reading files and writing to the run's own directory, by setting."""
    around = ", ".join(name for name in config.wrappers if is_code(name))
    texts = ", ".join(words_of_text(config.env_kwargs))
    network = str(getattr(config.algorithm, "network_from", ""))
    wanted = {
        "recipe": f"import and call {config.recipe}" if is_code(config.recipe) else "",
        "env": f"import and call {config.env}" if is_code(config.env) else "",
        "env_kwargs": f"give the environment {texts}" if texts else "",
        "wrappers": f"import and call {around}" if around else "",
        "algorithm.network_from": f"import and call {network}" if is_code(network) else "",
        "gate.listen": f"listen on {config.gate.listen}" if config.gate.listen else "",
        "log.wandb": "send metrics to Weights & Biases" if config.log.wandb else "",
        "log.mlflow": "send metrics to MLflow" if config.log.mlflow else "",
    }
    return {name: what for name, what in wanted.items() if what}


def require_trust(path: Path | str, config: Config, trust: bool, given: Container[str] = ()) -> None:
    """Raises Untrusted if the config asks for more than its user has `given` or trusts (see docs/security.md)."""
    wanted = [f"{what} ({name})" for name, what in asks(config).items() if name not in given]
    if wanted and not trust:
        raise Untrusted(_refusal(path, wanted))


def _refusal(path: Path | str, wanted: list[str]) -> str:
    return f"{path} would {', '.join(wanted)}; allow it with --trust (trust=True) if you trust its author."


def check_same(path: Path, config: Config, may_differ: Container[str], advice: str) -> None:
    """Raises a UserError if the directory holds a run of another config.

    The same class of a script or a notebook may have another name: what it makes is compared when the run is restored.
    """
    file = path / "config.yaml"
    ours = flat(config)
    theirs = flat(load_config(file, given={config.recipe})) if file.exists() else {}
    for name in ours:
        if theirs and theirs.get(name) != ours[name] and name not in may_differ:
            if name in CODE and any(is_unstable(str(x)) for x in (theirs.get(name), ours[name])):
                continue
            there = f"{name} is {theirs.get(name)} there and {ours[name]} here"
            raise UserError(f"{path} was started with a different config: {there}; {advice}.")


@contextmanager
def exclusive(directory: Path, flag: str = "--run") -> Iterator[None]:
    """Makes and holds a directory, which `flag` named. A second process that wants it gets a clear error. The lock dies
    with its holder."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "a+", opener=regular)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}); choose another {flag}.") from None
    with file, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(file))
        except OSError:
            file.seek(0)
            raise UserError(
                f"{directory} is in use by process {file.read().strip() or '?'}; stop it, or choose another directory."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        _locks.add(file)
        try:
            yield
        finally:
            _locks.remove(file)
