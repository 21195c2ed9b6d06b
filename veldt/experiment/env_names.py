"""What a user calls an environment, how a config names it, and the commands that use a run's environment again."""

import dataclasses
import os
import shlex
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from veldt import callables
from veldt.callables import LOCAL, is_code, is_file
from veldt.envs import EnvLike
from veldt.errors import UserError
from veldt.experiment.config import Config
from veldt.experiment.directory import asks
from veldt.runtime.local.plan import registered


def name_of(env: EnvLike) -> str:
    """The name for a config: an id, module:callable, /path/file.py:callable, or local:callable."""
    if isinstance(env, str):
        return callables.absolute(env)
    if not callable(env):
        raise UserError(
            f"env must be a name or a function that makes an environment, not a {type(env).__name__}; for example "
            "env=lambda: gym.make('CartPole-v1')."
        )
    return callables.name_of(env)


def with_env(config: Config, env: EnvLike | None) -> Config:
    """The config with another environment, if one is given."""
    return dataclasses.replace(config, env=name_of(env)) if env else config


def shown(name: str) -> str:
    """The name with a short path, as seen from here."""
    path, colon, attribute = name.rpartition(":")
    if not is_file(name):
        return name
    near = Path(path).is_relative_to(Path.cwd())
    return f"{os.path.relpath(path) if near else path}{colon}{attribute}"


def command(verb: str, path: Path, config: Config, **changes: Any) -> str:
    """How to evaluate or resume the run in this directory; in Python where no command can make its environment."""
    asked = asks(config)
    if verb == "eval":
        asked = {name: what for name, what in asked.items() if not name.startswith(("gate.", "log."))}
    env, network = config.env, str(getattr(config.algorithm, "network_from", ""))
    if not is_code(env) and (script := _registering(env)):
        env = f"{script}:{env}"
    if LOCAL in (env.partition(":")[0], network.partition(":")[0]):
        return _in_python(verb, path, config, network, changes)
    flags = [f"--{name} {value}" for name, value in changes.items()]
    flags = ([f"--env {shlex.quote(shown(env))}"] if is_file(env) else []) + flags
    if asked.keys() - ({"env"} if is_file(env) else set()):
        flags.append("--trust")
    return " ".join([f"{_python_path(env, network)}veldt {verb} {shlex.quote(str(path))}", *flags])


def _in_python(verb: str, path: Path, config: Config, network: str, changes: dict[str, Any]) -> str:
    def given(setting: str, name: str) -> list[str]:
        place, _, attribute = name.rpartition(":")
        return [f"{setting}={attribute if attribute.isidentifier() else '...'}"] if place == LOCAL else []

    env, made_by = given("env", config.env), given("network", network)
    trust = ["trust=True"] if asks(config) else []
    if verb == "eval":
        return f"veldt.Run({', '.join([repr(str(path)), *made_by, *trust])}).evaluate({', '.join(env)})"
    values = [f"{name}={value}" for name, value in changes.items()]
    return f"veldt.resume({', '.join([repr(str(path)), *env, *made_by, *values, *trust])})"


def _registering(env: str) -> str:
    """The script that runs, or LOCAL, if it registered this id with Gymnasium; empty: a library did."""
    plugins = {entry.name for entry in entry_points(group="gymnasium.envs")}
    if ":" in env or env not in registered() or env.partition("/")[0] in plugins or "__root__" in plugins:
        return ""
    main = callables.script()
    return main if is_file(f"{main}:") else LOCAL


def _python_path(*names: str) -> str:
    """What to put before a command so that it finds modules which Python found beside the script, or here."""
    main = callables.script()
    roots = {str(Path(main).parent), os.getcwd()} if is_file(f"{main}:") else {os.getcwd()}
    roots -= {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    for name in names:
        module = sys.modules.get(name.rpartition(":")[0].partition(".")[0])
        file = getattr(module, "__file__", None)
        if is_code(name) and not is_file(name) and file:
            above = Path(file).parents[1 if Path(file).name == "__init__.py" else 0]
            if str(above) in roots:
                return f"PYTHONPATH={shlex.quote(os.path.relpath(above))} "
    return ""
