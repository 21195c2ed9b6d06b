"""Sweeps: one experiment of many runs (settings x grid x seeds), described by a YAML file.

    name: ladder-deepsea          # default: the file's stem
    recipe: apex-dqn
    env: veldt/DeepSea-v0
    seeds: [0, 1, 2]              # or a number n: 0 ... n-1
    at_once: 2                    # runs at the same time; default 1
    episodes: 20                  # greedy episodes of the last evaluation
    reach: 0.9                    # optional: also report when an evaluation first reached this return
    timeout_s: 600                # per run; a run that takes longer is stopped and counts as failed; default: a day
    set: {steps: 30_000, eval.every: 2_000}     # for every run
    settings:                     # by name; each may have its own recipe: and env:
      ladder: {}
      one epsilon 0.1: {actor.alpha: 0, actor.epsilon: 0.1}
    grid:                         # all combinations, for each of the settings if there are any
      learner.lr: [1e-3, 1e-4]    # or drawn: {loguniform: [1e-4, 1e-2], n: 5, seed: 0}

Every run is an ordinary `veldt train` in its own directory, followed by `veldt eval`, in a child process that dies with
the sweep. The same command again skips finished runs and resumes the others.

    sweeps/NAME/sweep.yaml               the file that was run
                table.md, curves.png     the results
                SETTING/seed-0/          the run's directory
                        seed-0.yaml      its config
                        seed-0.log       its output
                        seed-0.json      its last evaluation; the run is finished once this file exists
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from veldt import callables
from veldt.callables import is_code
from veldt.errors import Untrusted, UserError, did_you_mean
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.experiment.directory import MAY_CHANGE, check_same, read_yaml, require_trust
from veldt.experiment.prepare import check_device
from veldt.experiment.settings import check, refuse_without_effect, replays
from veldt.foreign import YamlLoader, named
from veldt.machine import available_memory, format_bytes
from veldt.topologies.stores import store_size

KEYS = ("name", "recipe", "env", "seeds", "at_once", "episodes", "reach", "timeout_s", "set", "settings", "grid")
FILES = ("sweep.yaml", "table.md", "curves.png")  # beside the directories of the settings
MAY_DIFFER = MAY_CHANGE - {"steps", "eval.episodes"}  # settings in which a run may differ from the file
TIMEOUT_S = 86_400.0
LONGEST = 100  # characters of a directory's name

Made = TypeVar("Made")


@dataclass(frozen=True)
class Setting:
    name: str
    config: Config  # without the seed
    nbytes: int  # of its store

    @property
    def slug(self) -> str:
        return slug(self.name)


@dataclass(frozen=True)
class Trial:
    setting: str
    config: Config
    path: Path  # of the run
    nbytes: int  # of its store

    @property
    def name(self) -> str:
        return f"{self.setting} seed {self.config.seed}"

    def beside(self, kind: str) -> Path:
        """The file next to the run's directory: yaml, log or json."""
        return self.path.with_name(f"{self.path.name}.{kind}")

    def check(self) -> None:
        check_same(self.path, self.config, MAY_DIFFER, "delete that directory to start over, or choose another --dir")

    def result(self, episodes: int) -> dict[str, Any] | None:
        """The last evaluation of a finished run."""
        try:
            found: dict[str, Any] = json.loads(self.beside("json").read_text())
            there = (self.path / "config.yaml").exists() and found["asked"] == episodes and bool(found["returns"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if there else None


@dataclass(frozen=True)
class Spec:
    """A sweep's file, checked."""

    name: str
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    at_once: int = 1
    episodes: int = 20
    reach: float | None = None
    timeout_s: float = TIMEOUT_S
    plain: dict[str, Any] = field(default_factory=dict)  # the YAML values, with the name and all seeds filled in

    def trials(self, directory: Path) -> list[Trial]:
        """Every run: the first seed of all settings, then the second, ..."""
        return [
            Trial(s.name, dataclasses.replace(s.config, seed=seed), directory / s.slug / f"seed-{seed}", s.nbytes)
            for seed in self.seeds
            for s in self.settings
        ]


def slug(name: str) -> str:
    """The name as the name of a directory."""
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    if len(short) > LONGEST:
        short = f"{short[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return short


class Loader(YamlLoader):
    """YAML in which a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1 and name != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_keys(path: Path, keys: Sequence[str], needs: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """What `make` makes of a YAML file with some of these keys; without a name it has the file's. Errors name the file."""
    values = read_yaml(named(path), Loader)
    try:
        if not isinstance(values, dict):
            raise UserError(needs)
        for key in values:
            if key not in keys:
                raise UserError(f"There is no key {key!r}.{did_you_mean(str(key), keys, keys)}")
        name = str(values.get("name", path.stem))
        if not slug(name):
            raise UserError(f"name {name!r} must have a letter or a digit.")
        return make({**values, "name": name})
    except UserError as error:
        raise type(error)(f"{path}: {error}") from None


def read_spec(path: Path, trust: bool = False) -> Spec:
    """Reads and checks a sweep's file: builds all configs, and makes and closes their environments.

    `trust`: the environments may be code.
    """
    return read_keys(path, KEYS, "A sweep's file must hold keys, such as recipe, env and seeds.", lambda x: _spec(x, trust))


def _spec(values: dict[str, Any], trust: bool) -> Spec:
    seeds, reach = _read_seeds(values.get("seeds")), values.get("reach")
    return Spec(
        values["name"],
        _read_settings(values, trust),
        seeds,
        at_once=int(read_number("at_once", values.get("at_once", 1), whole=True)),
        episodes=int(read_number("episodes", values.get("episodes", 20), whole=True)),
        reach=None if reach is None else read_number("reach", reach, positive=False),
        timeout_s=read_number("timeout_s", values.get("timeout_s", TIMEOUT_S)),
        plain={**values, "seeds": list(seeds)},
    )


def check_stores(needed: int, n: int, what: str, flag: str = "at_once") -> None:
    """Raises a UserError if the stores of n runs at once do not fit in memory."""
    available = available_memory()
    if needed > 0.9 * available:
        raise UserError(
            f"The stores of {n} {what} at once need {format_bytes(needed)}, but {format_bytes(available)} of memory is "
            f"free; lower {flag} or store.capacity."
        )


def read_number(name: str, value: Any, positive: bool = True, whole: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # YAML reads 1e3 as a string
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} must be a number, not {value!r}.")
    if positive and number <= 0:
        raise UserError(f"{name} must be greater than 0, not {value!r}.")
    if whole and not number.is_integer():
        raise UserError(f"{name} must be an integer, not {value!r}.")
    return number


def _read_seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = list(range(value))
    if not isinstance(value, list) or not value:
        raise UserError("seeds must be a list such as [0, 1, 2], or the number of seeds.")
    for seed in value:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise UserError(f"seeds must be integers that are not negative, not {seed!r}.")
        if value.count(seed) > 1:
            raise UserError(f"seeds: {seed} appears twice.")
    return tuple(value)


def _read_settings(values: dict[str, Any], trust: bool) -> tuple[Setting, ...]:
    base: dict[str, Any] = {key: values[key] for key in ("recipe", "env") if key in values}
    common = overrides("set", values.get("set"))
    for key in ("recipe", "env"):
        if key in common:
            raise UserError(f"set: {key} is a key of its own, outside of set.")
    named = mapping("settings", values.get("settings")) or {"": {}}
    out: list[Setting] = []
    for (name, own), (combination, chosen) in itertools.product(named.items(), _grid(values.get("grid")).items()):
        own = overrides(f"settings: {name}", own)
        for key in own.keys() & chosen.keys():
            raise UserError(f"settings: {name}: {key} is in the grid as well.")
        label = ", ".join(x for x in (name, combination) if x) or str(base.get("recipe", ""))
        out.append(make_setting(label, {**base, **common, **own, **chosen}, trust))
    _check_slugs(out)
    return tuple(out)


def make_setting(name: str, values: dict[str, Any], trust: bool) -> Setting:
    for key in ("recipe", "env"):
        if key not in values:
            raise UserError(f"{name or 'It'}: there is no {key}; set {key}: ... for this setting or for all.")
    recipe, env = str(values.pop("recipe")), callables.absolute(str(values.pop("env")))
    try:
        if is_code(recipe) and not trust:
            raise Untrusted(
                f"it would import and call {recipe} (recipe); allow it with --trust if you trust the file's author."
            )
        config = recipes.make(recipe, env, **values)
        check(config)
        refuse_without_effect(config, recipes.make(recipe, env))
        check_device(config.device)
        require_trust("this run", config, trust)
        spec = config.env_spec()
        config.algorithm.check(spec)
        nbytes = store_size(config, config.schema(spec)).nbytes if replays(config) else 0
        return Setting(name, config, nbytes)
    except UserError as error:
        raise type(error)(f"{name}: {error}") from None


def _check_slugs(settings: list[Setting]) -> None:
    """Two settings cannot have one directory."""
    taken: dict[str, str] = dict.fromkeys(FILES, "a file of the sweep")
    for setting in settings:
        place = setting.slug.casefold()
        if not place:
            raise UserError(f"settings: the name {setting.name!r} must have a letter or a digit.")
        if place in taken:
            raise UserError(f"settings: {setting.name!r} and {taken[place]!r} would share a directory; rename one of them.")
        taken[place] = setting.name


def mapping(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where} must hold names and values, not {value!r}.")
    for name in value:
        if not isinstance(name, str):
            raise UserError(f"{where}: the name {name!r} must be text; put it in quotes.")
    return value


def overrides(where: str, value: Any) -> dict[str, Any]:
    """Nested names as dotted ones."""
    out: dict[str, Any] = {}
    for name, setting in mapping(where, value).items():
        inner = overrides(f"{where}: {name}", setting) if isinstance(setting, dict) else {"": setting}
        for key, x in inner.items():
            dotted = f"{name}.{key}" if key else name
            if dotted in out:
                raise UserError(f"{where}: {dotted} appears twice.")
            out[dotted] = x
    if "seed" in out:
        raise UserError(f"{where}: seed cannot be set here; list the seeds as seeds: [0, 1, 2].")
    return out


def _grid(value: Any) -> dict[str, dict[str, Any]]:
    """The combinations of the grid by name; without a grid, one that changes nothing."""
    axes = overrides("grid", _drawn("grid", value))
    for axis, points in axes.items():
        if not isinstance(points, list) or not points:
            raise UserError(f"grid: {axis} must be a list of values, not {points!r}.")
    tails = Counter(axis.rpartition(".")[2] for axis in axes)
    out: dict[str, dict[str, Any]] = {}
    for combination in itertools.product(*axes.values()):
        labels = []
        for axis, x in zip(axes, combination, strict=True):
            tail = axis.rpartition(".")[2]
            labels.append(str(x) if axis in ("recipe", "env") else f"{tail if tails[tail] == 1 else axis} {_label(x)}")
        name = ", ".join(labels)
        if name in out:
            raise UserError(f"grid: {name} appears twice.")
        out[name] = dict(zip(axes, combination, strict=True))
    return out


def _drawn(where: str, value: Any) -> Any:
    """With numbers in the place of {loguniform: [LEAST, MOST], n: N, seed: SEED}; the seed is 0 unless it is given."""
    if not isinstance(value, dict):
        return value
    if "loguniform" not in value:
        return {name: _drawn(f"{where}: {name}", x) for name, x in value.items()}
    bounds, form = value["loguniform"], f"{where} must be as in {{loguniform: [1e-4, 1e-2], n: 5, seed: 0}}"
    if not isinstance(bounds, list) or len(bounds) != 2 or value.keys() - {"loguniform", "n", "seed"} or "n" not in value:
        raise UserError(f"{form}, not {value!r}.")
    least, most = (read_number(f"{where}: loguniform", x) for x in bounds)
    n, seed = (int(read_number(f"{where}: {name}", value.get(name, 0), name == "n", whole=True)) for name in ("n", "seed"))
    if least >= most or seed < 0:
        raise UserError(f"{form}: {least:g} is not less than {most:g}." if least >= most else f"{where}: seed is negative.")
    drawn = np.random.default_rng(seed).uniform(math.log(least), math.log(most), n)
    return [float(f"{math.exp(x):.6g}") for x in drawn]


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "x".join(map(_label, value))
    if isinstance(value, float) or re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", str(value)):
        return f"{float(value):g}"
    return str(value)
