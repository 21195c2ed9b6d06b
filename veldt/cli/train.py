"""veldt train: trains a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from veldt.cli.parse import parse
from veldt.envs import is_atari
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.config import Config, override
from veldt.experiment.recipes import RECIPES
from veldt.experiment.run import as_plain, load_config, train

EXAMPLE = """

Example: veldt train dqn --env CartPole-v1 --steps 60_000 --seed 1 --run runs/cart --store.capacity 2GB

Training in a directory that has a checkpoint goes on from it. Ctrl-C writes one and stops.
"""


@dataclass(frozen=True)
class Train:
    config: Annotated[Config, tyro.conf.arg(name="")]
    run: Path | None = None
    """The run's directory (default: a new one in runs/)."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Settings from a YAML file, such as config.yaml of another run; flags override them."""
    quiet: bool = False
    """Print nothing while training."""


def run(argv: list[str]) -> int:
    recipe, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    if not recipe:
        if "-h" in flags or "--help" in flags:
            recipe = next(iter(RECIPES))
        else:
            raise UserError(
                f"Say which recipe to train: {', '.join(RECIPES)}; for example veldt train dqn --env CartPole-v1"
            )
    args = parse(
        Train,
        flags,
        prog=f"veldt train {recipe}",
        description=f"Trains {recipe}: {RECIPES[recipe].__doc__}{EXAMPLE}" if recipe in RECIPES else "",
        default=Train(_defaults(recipe, flags)),
    )
    train(args.config, run=args.run, quiet=args.quiet)
    return 0


def _defaults(recipe: str, flags: list[str]) -> Config:
    """The recipe's settings for the environment that the flags name, and those of --config."""
    file, env = _peek(flags, "--config"), _peek(flags, "--env")
    values: dict[str, object] = {}
    if file is not None:
        values = as_plain(load_config(Path(file)))
        env = env or str(values["env"])
        values.pop("recipe"), values.pop("env")
        if not is_atari(env):
            values.pop("protocol")
    config: Config = override(recipes.make(recipe, env or "CartPole-v1"), values)
    return config


def _peek(flags: list[str], name: str) -> str | None:
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        if word == name and following:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
