"""The file of a population: which runs it has, what is tuned, and the rules.

name: cartpole                # default: the file's stem
recipe: impala
env: CartPole-v1
population: 8
seed: 0
steps: 200_000                # env steps of each member; schedules take this length
ready: 20_000                 # env steps after which a member may copy another one, again and again
warm_up: 0                    # env steps before the first copy
at_once: 2                    # members that are trained at the same time; default 1
episodes: 10                  # greedy episodes that say how good a member is, each time it is ready
timeout_s: 3600               # for a member, from one time that it is ready to the next; default: a day
order: turns                  # members decide in turn, whoever is trained first; or: arrival
set: {eval.epsilon: 0.0}      # for every member
tune:                         # settings that a resume may change (veldt resume RUN --help)
  learner.lr: {loguniform: [1e-5, 1e-1]}
  algorithm.entropy_cost: {uniform: [0, 0.1]}
  learner.batch: {choices: [16, 32, 64]}      # neighbours should be alike
  learner.eps: {loguniform: [1e-5, 1e-1], first: [1e-3, 1e-2]}    # of the first members; the others are drawn
exploit: {rule: truncation, fraction: 0.2}    # or tournament, or {rule: t-test, level: 0.05}, or none
explore: {factors: [0.8, 1.2], resample: 0}   # resample: the probability that a value is drawn anew instead
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from veldt.errors import UserError, did_you_mean
from veldt.experiment.changes import WHAT_IT_LEARNS
from veldt.experiment.config import Config
from veldt.experiment.populations.rules import RULES, Exploit, Explore, Range
from veldt.experiment.settings import flat, override
from veldt.experiment.sweep import Setting, make_setting, mapping, overrides, read_keys, read_number
from veldt.seeds import derive

KEYS = (
    *("name", "recipe", "env", "population", "seed", "steps", "ready", "warm_up", "at_once", "episodes", "timeout_s"),
    *("order", "copy_store", "set", "tune", "exploit", "explore"),
)
NOT_SET = {  # names that cannot be under `set`, and why
    **{name: "it is a key of its own, outside of set" for name in ("recipe", "env", "seed", "steps")},
    "eval.episodes": "episodes is a key of its own, outside of set",
    "checkpoint.every": "a member has a checkpoint each time it is ready",
    "checkpoint.keep": "a member keeps two checkpoints",
    "stop_return": "a member takes all its steps",
    "stop_after": "a member takes all its steps",
}
NOT_TUNED = ("eval.", "checkpoint.")
ORDERS = ("rounds", "arrival")
TIMEOUT_S = 86_400.0
MOST = 1_000  # members


@dataclass(frozen=True)
class Spec:
    """The file, checked."""

    name: str
    base: Setting  # of a member, but for its seed and what is tuned
    size: int
    ready: int
    ranges: dict[str, Range]
    first: dict[str, list[Any]]
    seed: int = 0
    warm_up: int = 0
    at_once: int = 1
    timeout_s: float = TIMEOUT_S
    order: str = "rounds"
    copy_store: bool = False
    exploit: Exploit = field(default_factory=Exploit)
    explore: Explore = field(default_factory=Explore)
    plain: dict[str, Any] = field(default_factory=dict)  # the YAML values, with the name filled in

    @property
    def steps(self) -> int:
        return self.base.config.steps

    @property
    def quanta(self) -> int:
        """Stretches of training of a member, from one time that it is ready to the next."""
        return math.ceil(self.steps / self.ready)

    def until(self, quantum: int) -> int:
        """Env steps at which this quantum ends; the first is 1."""
        return min(self.steps, quantum * self.ready)

    def born(self, member: int) -> dict[str, Any]:
        """What a member begins with, of the settings that are tuned."""
        rng = np.random.default_rng(derive(self.seed, "born", member))
        drawn = {name: tuned.draw(rng) for name, tuned in self.ranges.items()}
        return drawn | {name: given[member] for name, given in self.first.items() if member < len(given)}

    def config(self, member: int, tuned: Mapping[str, Any]) -> Config:
        config: Config = override(self.base.config, dict(tuned))
        return replace(config, seed=derive(self.seed, "member", member) % 10**6)


def read_spec(path: Path, trust: bool = False) -> Spec:
    """Reads and checks the file: makes the config, and makes and closes its environment. `trust`: it may name code."""
    needs = "The file of a population must hold keys, such as recipe, env, population and tune."
    return read_keys(path, KEYS, needs, lambda values: _spec(values, trust))


def _spec(values: dict[str, Any], trust: bool) -> Spec:
    size, ready = (natural(values, key, required=True) for key in ("population", "ready"))
    if size > MOST:
        raise UserError(f"population must be at most {MOST:,}, not {size:,}.")
    base = _base(values, trust)
    ranges, first = _read_tuned(values.get("tune"), base.config)
    order, copy_store = values.get("order", "rounds"), values.get("copy_store", False)
    if not isinstance(copy_store, bool):
        raise UserError(f"copy_store must be true or false, not {copy_store!r}.")
    _one_of("order", order, ORDERS)
    return Spec(
        values["name"],
        base,
        size,
        ready,
        ranges,
        first,
        seed=natural(values, "seed", 0, least=0),
        warm_up=natural(values, "warm_up", 0, least=0),
        at_once=natural(values, "at_once", 1),
        timeout_s=read_number("timeout_s", values.get("timeout_s", TIMEOUT_S)),
        order=order,
        copy_store=copy_store,
        exploit=_read_exploit(values.get("exploit", {})),
        explore=_read_explore(values.get("explore", {})),
        plain=values,
    )


def _base(values: dict[str, Any], trust: bool) -> Setting:
    for key in ("recipe", "env", "steps"):
        if key not in values:
            raise UserError(f"There is no {key}; add {key}: ...")
    own = mapping("set", values.get("set"))
    if "seed" in own:
        raise UserError("set: seed cannot be set here: it is a key of its own, outside of set.")
    common = overrides("set", own)
    for name, why in NOT_SET.items():
        if name in common:
            raise UserError(f"set: {name} cannot be set here: {why}.")
    steps, episodes = natural(values, "steps", required=True), natural(values, "episodes", 10)
    fixed = {"steps": steps, "eval.episodes": episodes, "checkpoint.every": 0, "checkpoint.keep": 2}
    fixed |= {} if "eval.every" in common else {"eval.every": 2 * steps}  # only those that fitness needs
    return make_setting(str(values["recipe"]), {"recipe": values["recipe"], "env": values["env"], **common, **fixed}, trust)


def natural(values: dict[str, Any], key: str, default: int = 0, required: bool = False, least: int = 1) -> int:
    if required and key not in values:
        raise UserError(f"There is no {key}; add {key}: NUMBER.")
    found = read_number(key, values.get(key, default), positive=least > 0, whole=True)
    if found < least:
        raise UserError(f"{key} must not be negative, but it is {found:g}.")
    return int(found)


def _one_of(where: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{where} must be one of {', '.join(allowed)}, not {value!r}.")


# What is tuned.

FORM = "{loguniform: [1e-5, 1e-2]}, {uniform: [0, 1]} or {choices: [16, 32]}"


def _read_tuned(value: Any, config: Config) -> tuple[dict[str, Range], dict[str, list[Any]]]:
    tuned = mapping("tune", value)
    if not tuned:
        raise UserError(f"tune must name a setting and its range, as in learner.lr: {FORM}.")
    ranges, first, known = {}, {}, flat(config)
    for name, form in tuned.items():
        override(config, {name: known.get(name, 0)})  # there is such a setting
        can = [x for x in WHAT_IT_LEARNS if x in known and not x.startswith(NOT_TUNED)]
        if name not in can:
            raise UserError(f"tune: {name} cannot change during a run; these can: {', '.join(can)}.")
        ranges[name] = read_range(f"tune: {name}", form, known[name], extra=("first",))
        given = form.get("first", [])
        if not isinstance(given, list):
            raise UserError(f"tune: {name}: first must be a list of values, not {given!r}.")
        first[name] = [_value(f"tune: {name}: first", x, ranges[name]) for x in given]
    return ranges, first


def read_range(where: str, form: Any, like: Any, extra: tuple[str, ...] = ()) -> Range:
    """The range of a setting whose present value is `like`."""
    kinds = [key for key in form if key not in extra] if isinstance(form, dict) else []
    if len(kinds) != 1 or kinds[0] not in ("loguniform", "uniform", "choices"):
        raise UserError(f"{where} must be as in {FORM}, not {form!r}.")
    kind, value = kinds[0], form[kinds[0]]
    whole = isinstance(like, int) and not isinstance(like, bool)
    if kind == "choices":
        if not isinstance(value, list) or not value or any(value.count(x) > 1 for x in value):
            raise UserError(f"{where}: choices must be a list of different values, not {value!r}.")
        if isinstance(like, float):
            value = [read_number(where, x, positive=False) for x in value]
        return Range("choices", choices=tuple(value))
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"{where} must be as in {FORM}, not {form!r}.")
    if not isinstance(like, int | float) or isinstance(like, bool):
        raise UserError(f"{where}: it is no number; give its values as {{choices: [...]}}.")
    low, high = (read_number(f"{where}: {kind}", x, positive=kind == "loguniform", whole=whole) for x in value)
    if low >= high:
        raise UserError(f"{where}: {low:g} is not less than {high:g}.")
    return Range("loguniform" if kind == "loguniform" else "uniform", low, high, whole=whole)


def _value(where: str, value: Any, tuned: Range) -> Any:
    if tuned.kind == "choices":
        if value not in tuned.choices:
            raise UserError(f"{where}: {value!r} is not one of the choices.")
        return value
    found = read_number(where, value, positive=False, whole=tuned.whole)
    if not tuned.low <= found <= tuned.high:
        raise UserError(f"{where}: {found:g} is not from {tuned.low:g} to {tuned.high:g}.")
    return int(found) if tuned.whole else found


# The rules.


def _read_exploit(value: Any) -> Exploit:
    given = {"rule": value} if isinstance(value, str) else mapping("exploit", value)
    rule: Any = given.get("rule", "truncation")
    _one_of("exploit: rule", rule, RULES)
    needs = {"truncation": "fraction", "t-test": "level"}.get(rule)
    for key in given.keys() - {"rule"}:
        if key != needs:
            raise UserError(f"exploit: {rule} has no {key!r}; {needs or 'it takes nothing else'}.")
    how = Exploit(rule, **{key: read_number(f"exploit: {key}", x) for key, x in given.items() if key != "rule"})
    if how.fraction > 0.5:
        raise UserError(f"exploit: fraction must be at most 0.5, not {how.fraction:g}: the best would copy too.")
    if how.level >= 1:
        raise UserError(f"exploit: level must be less than 1, not {how.level:g}.")
    return how


def _read_explore(value: Any) -> Explore:
    given = mapping("explore", value)
    for key in given.keys() - {"factors", "resample"}:
        raise UserError(
            f"explore: there is no {key!r}.{did_you_mean(key, ('factors', 'resample'), ('factors', 'resample'))}"
        )
    factors = given.get("factors", list(Explore().factors))
    if not isinstance(factors, list) or not factors:
        raise UserError(f"explore: factors must be a list such as [0.8, 1.2], not {factors!r}.")
    resample = read_number("explore: resample", given.get("resample", 0), positive=False)
    if not 0 <= resample <= 1:
        raise UserError(f"explore: resample must be a probability, not {resample:g}.")
    return Explore(tuple(read_number("explore: factors", x) for x in factors), resample)
