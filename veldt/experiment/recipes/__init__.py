"""Recipes: named settings that are known to work.

    config = recipes.make("dqn", env="CartPole-v1", seed=3)

    common.py              what recipes share
    q_learning.py          dqn, apex-dqn, apex-dqn-paper
    continuous.py          apex-dpg
    recurrent.py           r2d2, r2d3
    actor_critic.py        impala, seed-vtrace
    parameter_servers.py   gorila
    bellman.py             qt-opt
    asynchronous.py        a3c, async-q, async-nstep-q, async-sarsa
    evolution.py           es

Numbers for Atari are the papers'; those for small tasks were tuned here. A recipe whose topology has settings of its own
returns a subclass of Config, whose fields are flags.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from veldt import callables
from veldt.errors import UserError, did_you_mean
from veldt.experiment.config import Config
from veldt.experiment.recipes.actor_critic import impala, seed_vtrace
from veldt.experiment.recipes.asynchronous import a3c, async_nstep_q, async_q, async_sarsa
from veldt.experiment.recipes.bellman import qt_opt
from veldt.experiment.recipes.continuous import apex_dpg
from veldt.experiment.recipes.evolution import es
from veldt.experiment.recipes.parameter_servers import gorila
from veldt.experiment.recipes.q_learning import apex_dqn, apex_dqn_paper, dqn
from veldt.experiment.recipes.recurrent import r2d2, r2d3
from veldt.experiment.settings import override

GROUP = "veldt.recipes"  # of entry points
FUNCTIONS: tuple[Any, ...] = (
    *(dqn, apex_dqn, apex_dqn_paper, apex_dpg, impala, seed_vtrace, r2d2, r2d3),
    *(gorila, a3c, async_q, async_nstep_q, async_sarsa, es, qt_opt),
)
RECIPES: dict[str, Callable[[str], Config]] = {recipe.__name__.replace("_", "-"): recipe for recipe in FUNCTIONS}


def installed() -> dict[str, EntryPoint]:
    """The recipes of other installed packages, by name: entry points of the group `veldt.recipes`. Nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in RECIPES}


def names() -> list[str]:
    return [*RECIPES, *installed()]


def find(recipe: str) -> Callable[[str], Config]:
    """The function of a recipe: of a name, or `module:function`, which is imported."""
    if recipe in RECIPES:
        return RECIPES[recipe]
    name = recipe if ":" in recipe else getattr(installed().get(recipe), "value", "")
    if not name:
        known = ", ".join(names())
        raise UserError(f"There is no recipe {recipe!r}.{did_you_mean(recipe, names()) or f' There are: {known}.'}")
    function = callables.find(name)
    if function is None:
        raise UserError(f"{recipe!r} is not a recipe: {name} is not a function from an environment to a Config.")
    return function


def make(recipe: str, env: str = "CartPole-v1", **overrides: Any) -> Config:
    """The config of a recipe, with overrides by dotted name: `make("dqn", "CartPole-v1", **{"learner.lr": 1e-4})`.

    `recipe` may be `module:function`, of a function as those of this module.
    """
    found = find(recipe)(env)
    if not isinstance(found, Config):
        raise UserError(f"The recipe {recipe!r} must return a Config, not a {type(found).__name__}.")
    if recipe not in RECIPES:
        found = replace(found, recipe=recipe, env=env)  # it is found again by this name
    config: Config = override(found, overrides)
    return config
