"""Recipes: named settings that are known to work, one file a family.

    config = recipes.make("dqn", env="CartPole-v1", seed=3)

Numbers for Atari are the papers'; those for small tasks were tuned here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veldt.errors import UserError, did_you_mean
from veldt.experiment.config import Config
from veldt.experiment.recipes.apex import apex_dpg, apex_dqn
from veldt.experiment.recipes.dqn import dqn
from veldt.experiment.recipes.impala import impala, seed_vtrace
from veldt.experiment.recipes.r2d2 import r2d2, r2d3
from veldt.experiment.settings import override

RECIPES: dict[str, Callable[[str], Config]] = {
    "dqn": dqn,
    "apex-dqn": apex_dqn,
    "apex-dpg": apex_dpg,
    "impala": impala,
    "seed-vtrace": seed_vtrace,
    "r2d2": r2d2,
    "r2d3": r2d3,
}


def make(recipe: str, env: str = "CartPole-v1", **overrides: Any) -> Config:
    """The config of a recipe, with overrides by dotted name: `make("dqn", "CartPole-v1", **{"learner.lr": 1e-4})`."""
    if recipe not in RECIPES:
        known = ", ".join(RECIPES)
        raise UserError(f"There is no recipe {recipe!r}.{did_you_mean(recipe, RECIPES) or f' There are: {known}.'}")
    config: Config = override(RECIPES[recipe](env), overrides)
    return config
