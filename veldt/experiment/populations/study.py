"""The file of a search for settings (veldt tune), checked.

name: acrobot                 # default: the file's stem
recipe: dqn
env: Acrobot-v1
steps: 60_000                 # env steps of each trial
trials: 20                    # all together, with those that were pruned
at_once: 1                    # trials at the same time
seed: 0
episodes: 20                  # greedy episodes of the last weights, whose mean return is the score of a trial
timeout_s: 3600               # of a trial; default: a day
set: {eval.every: 5_000}      # for every trial
prune: {after: 10_000, factor: 3}    # of the trials that get to 10,000 env steps the best third goes on, then of those
                                     # that get to 30,000, ...; or: none
tune:                         # any settings
  learner.lr: {loguniform: [1e-5, 1e-2]}
  learner.target_every: {loguniform: [10, 1000]}
  algorithm.hidden: {choices: [[64], [128, 128]]}
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.experiment.config import Config
from veldt.experiment.populations.rules import Range
from veldt.experiment.populations.spec import TIMEOUT_S, natural, read_range
from veldt.experiment.settings import check, flat, override
from veldt.experiment.sweep import Setting, make_setting, mapping, overrides, read_keys, read_number
from veldt.seeds import derive

KEYS = ("name", "recipe", "env", "steps", "trials", "at_once", "seed", "episodes", "timeout_s", "set", "prune", "tune")
NOT_SET = ("recipe", "env", "seed", "steps")


@dataclass(frozen=True)
class Prune:
    after: int  # env steps
    factor: int = 3


@dataclass(frozen=True)
class StudySpec:
    name: str
    base: Setting
    ranges: dict[str, Range]
    given: dict[str, Any]  # what the file sets for every trial
    trials: int = 20
    at_once: int = 1
    seed: int = 0
    episodes: int = 20
    timeout_s: float = TIMEOUT_S
    prune: Prune | None = None
    plain: dict[str, Any] = field(default_factory=dict)

    def config(self, trial: int, tuned: dict[str, Any]) -> Config:
        config: Config = override(self.base.config, tuned)
        check(config)
        return replace(config, seed=derive(self.seed, "trial", trial) % 10**6)

    @property
    def usual(self) -> dict[str, Any]:
        """The recipe's own values of what is tuned, as far as they are in the ranges."""
        known = flat(self.base.config)
        found = {name: list(known[name]) if isinstance(known[name], tuple) else known[name] for name in self.ranges}
        return {name: x for name, x in found.items() if self.ranges[name].holds(x)}


def read_study(path: Path, trust: bool = False) -> StudySpec:
    """`trust`: it may name code."""
    needs = "The file of a search must hold keys, such as recipe, env, trials and tune."
    return read_keys(path, KEYS, needs, lambda values: _study(values, trust))


def _study(values: dict[str, Any], trust: bool) -> StudySpec:
    for key in ("recipe", "env"):
        if key not in values:
            raise UserError(f"There is no {key}; add {key}: ...")
    own = mapping("set", values.get("set"))
    for key in NOT_SET:
        if key in own:
            raise UserError(f"set: {key} cannot be set here: it is a key of its own, outside of set.")
    given = overrides("set", own) | ({"steps": natural(values, "steps")} if "steps" in values else {})
    base = make_setting(str(values["recipe"]), {"recipe": values["recipe"], "env": values["env"], **given}, trust)
    prune = _read_prune(values.get("prune", {"after": max(1, base.config.steps // 9)}))
    if prune is not None and not base.config.eval.every:
        raise UserError("prune needs evaluations, but eval.every is 0; set it, or give prune: none.")
    return StudySpec(
        values["name"],
        base,
        _read_tuned(values.get("tune"), base.config, given),
        given,
        trials=natural(values, "trials", 20),
        at_once=natural(values, "at_once", 1),
        seed=natural(values, "seed", 0, least=0),
        episodes=natural(values, "episodes", 20),
        timeout_s=read_number("timeout_s", values.get("timeout_s", TIMEOUT_S)),
        prune=prune,
        plain=values,
    )


def _read_prune(value: Any) -> Prune | None:
    if value in ("none", None, False):
        return None
    found = mapping("prune", value)
    for key in found.keys() - {"after", "factor"}:
        raise UserError(f"prune: there is no {key!r}; it has after (env steps) and factor.")
    factor = natural(found, "factor", 3)
    if factor < 2:
        raise UserError(f"prune: factor must be at least 2, not {factor}.")
    return Prune(natural(found, "after"), factor)


def _read_tuned(value: Any, config: Config, given: dict[str, Any]) -> dict[str, Range]:
    ranges, known = {}, flat(config)
    for name, form in mapping("tune", value).items():
        override(config, {name: known.get(name, 0)})  # there is such a setting
        if name in NOT_SET or name in given:
            raise UserError(f"tune: {name} cannot be tuned: it is set for every trial.")
        like = known[name]
        ranges[name] = read_range(f"tune: {name}", form, like)
        for choice in ranges[name].choices:
            check(override(config, {name: choice}))
    if not ranges:
        raise UserError("tune must name a setting and its range, as in learner.lr: {loguniform: [1e-5, 1e-2]}.")
    return ranges
