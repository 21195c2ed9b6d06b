"""veldt train: trains a recipe."""

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from veldt.cli import on_ray
from veldt.envs import is_atari
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.experiment.directory import asks, load_config, require_trust
from veldt.experiment.recipes import RECIPES
from veldt.experiment.run import train
from veldt.experiment.settings import SCOPES, Scope, as_plain, check, flat, refuse_without_effect, without_effect
from veldt.foreign import named

EXAMPLE = """

Example: veldt train dqn --env CartPole-v1 --steps 60_000 --seed 1 --run runs/cart --store.capacity 2GB

Training in a directory that has a checkpoint continues from it. Ctrl-C writes a checkpoint and stops.

On a Ray cluster: --runtime ray, with --address HOST:PORT, --site-actors N (at each other host) and --site-seats N (in all).
"""


@dataclass(frozen=True)
class Train:
    config: Annotated[Config, tyro.conf.arg(name="")]
    run: Path | None = None
    """The run's directory (default: a new one in runs/)."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Settings from a YAML file, such as config.yaml of another run; flags override them."""
    until: int | None = None
    """Pause at this number of env steps; veldt resume goes on. Schedules still take --steps."""
    quiet: bool = False
    """Print nothing while training."""
    trust: bool = False
    """Import code that --config names, and let it open ports and send metrics."""


def run(argv: list[str]) -> int:
    recipe, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    flags, cluster = on_ray.split(flags)
    given = [word for word in flags if word not in ("-h", "--help")]
    wants_help = len(given) < len(flags)
    if not recipe:
        if not wants_help:
            raise UserError(
                f"Name the recipe to train: {', '.join(RECIPES)}; for example veldt train dqn --env CartPole-v1"
            )
        recipe = next(iter(RECIPES))
    default = Train(_defaults(recipe, flags))
    prog, description = f"veldt train {recipe}", f"Trains {recipe}: {recipes.find(recipe).__doc__ or ''}{EXAMPLE}"
    args = tyro.cli(Train, args=given, prog=prog, description=description, default=default)
    if wants_help:
        _show_help(args, prog, description)
    check(args.config)
    if args.config_file is not None:
        words = {word.partition("=")[0].replace("_", "-") for word in given}
        require_trust(
            args.config_file,
            args.config,
            args.trust,
            ["recipe", *(name for name in asks(args.config) if _flag(name) in words)],
        )
    refuse_without_effect(args.config, default.config)
    if cluster is not None:
        return on_ray.train(recipe, given, args.run, args.config, cluster)
    train(args.config, run=args.run, quiet=args.quiet, until=args.until)
    return 0


def _defaults(recipe: str, flags: list[str]) -> Config:
    """The recipe's settings for the environment that the flags name, and those of --config."""
    file, env = _peek(flags, "--config"), _peek(flags, "--env")
    values: dict[str, object] = {}
    if file is not None:
        values = as_plain(load_config(named(Path(file)), "--trust" in flags, given={recipe}))
        env = env or str(values["env"])
        values.pop("recipe"), values.pop("env")
        if not is_atari(env):
            values.pop("protocol")
    return recipes.make(recipe, env or "CartPole-v1", **values)


def _peek(flags: list[str], name: str) -> str | None:
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        if word == name and following:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _show_help(args: Train, prog: str, description: str) -> None:
    """Prints the flags that have an effect together with those that were given, and exits."""
    idle = without_effect(args.config)
    absent = "\n".join(f"  {', '.join(map(_flag, scope.names))}: {scope.needs}" for scope in _outermost(idle))
    description = (
        f"{description}\nNot listed, because they have no effect unless the condition after the colon holds:\n{absent}"
    )
    registry = hiding(args.config, idle)
    tyro.cli(Train, args=["--help"], prog=prog, description=description, default=args, registry=registry)


def _outermost(idle: dict[str, str]) -> list[Scope]:
    """The scopes of these settings, without those inside a group that has no effect as a whole."""
    scopes = [scope for scope in SCOPES if scope.needs in idle.values()]
    return [x for x in scopes if not any(x is not other and all(name in other for name in x.names) for other in scopes)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}" + ("*" if name.endswith(".") else "")


def hiding(config: Config, idle: Container[str]) -> ConstructorRegistry:
    """Makes tyro leave out these settings of the config, and groups that have no others."""
    effective = [f"{name}." for name in flat(config) if name not in idle]
    groups = {id(getattr(config, f.name)): f"{f.name}." for f in dataclasses.fields(config)} | {id(config): ""}
    registry, entered = ConstructorRegistry(), [False]

    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if entered[0] or id(info.default) not in groups or not dataclasses.is_dataclass(info.default):
            return None
        entered[0] = True
        spec: Any = ConstructorRegistry.get_struct_spec(info)  # tyro's own
        entered[0] = False
        prefix = groups[id(info.default)]
        shown = [f for f in spec.fields if any(name.startswith(f"{prefix}{f.name}.") for name in effective)]
        return StructConstructorSpec(spec.instantiate, tuple(shown))

    registry.struct_rule(rule)
    return registry
