"""The spec of a run's environment, saved with the run as env_spec.json: its policy can act without the environment.

saved_spec.write(directory, spec)
spec = saved_spec.read(directory)      # None: an older run, which has none

Whoever sends a run directory can write anything in the file. A wrong type or an impossible number is a UserError that names
the field.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from veldt.demos.set import DTYPES
from veldt.errors import UserError
from veldt.files import replace_text
from veldt.foreign import plain, read_text
from veldt.records.adapter import Adapter
from veldt.records.masks import MASK
from veldt.records.step import EnvSpec
from veldt.records.tree import Array

FILE = "env_spec.json"
FORMAT, VERSION = "veldt-env-spec", 1
LARGEST = 2**24  # elements of an observation, or of an action
COLUMNS = 1_000
LARGEST_SIDE = 1_024  # pixels
LONGEST = 1_000  # characters of a name


class Invalid(Exception):
    """Names the field."""


def write(directory: Path, env: EnvSpec) -> None:
    assert env.adapter is not None, env
    adapter = env.adapter
    spaces_of = {"observation_space": _space(adapter.observation_space), "action_space": _space(adapter.taken)}
    saved = {"format": FORMAT, "version": VERSION, "name": env.name, **spaces_of, "settings": adapter.settings}
    replace_text(directory / FILE, json.dumps(saved, indent=1, allow_nan=False) + "\n")


def read(directory: Path) -> EnvSpec | None:
    """None: the run is older than this file."""
    path = directory / FILE
    try:
        return _env(plain(json.loads(read_text(path))))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except Invalid as error:
        raise UserError(f"{path} has an invalid {error}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON.") from None


def difference(saved: EnvSpec, other: EnvSpec) -> str:
    """In what another environment differs from the saved one; empty: a policy for one can act in the other."""
    for name in {**saved.observation, **other.observation}:
        there, here = saved.observation.get(name), other.observation.get(name)
        if there != here:
            return f"its observation {name} is {here or 'absent'}, but that of the run is {there or 'absent'}"
    if saved.mask != other.mask:
        ours, theirs = (f"action masks of {env.mask} elements" if env.mask else "no action masks" for env in (saved, other))
        return f"it has {theirs}, but the run has {ours}"
    if saved.categories != other.categories:
        return f"its observations have {other.categories} choices, but those of the run {saved.categories}"
    if saved.action_space != other.action_space or saved.action != other.action:
        return f"its actions are {other.action_space}, but those of the run are {saved.action_space}"
    return ""


def check_fits(saved: EnvSpec, other: EnvSpec, run: Path) -> None:
    """Raises a UserError if a policy of the run cannot act in the other environment."""
    if why := difference(saved, other):
        raise UserError(f"{other.name} does not fit {run}: {why}.")


def _space(space: spaces.Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {key: _space(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [_space(part) for part in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": str(space.dtype), "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        arrays = {"nvec": _numbers(space.nvec), "start": _numbers(space.start)}
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), "shape": list(space.nvec.shape), **arrays}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
    if not isinstance(space, spaces.Box):
        return {"type": "Text"}  # which no network reads
    wide = space.dtype.kind == "f" and space.dtype.itemsize > 8  # longer than any other library knows
    low, high = (np.asarray(x, np.float64) if wide else x for x in (space.low, space.high))
    arrays = {"low": _numbers(low), "high": _numbers(high)}
    return {"type": "Box", "dtype": str(low.dtype), "shape": list(space.shape), **arrays}


def _numbers(x: Array) -> list[Any]:
    """All elements, or one if they are equal. JSON has no infinity: it is a string."""
    flat: list[Any] = x.ravel().tolist()
    flat = flat[:1] if flat and all(each == flat[0] for each in flat) else flat
    return [each if math.isfinite(each) else str(each) for each in flat]


# Reading.


def _env(saved: Any) -> EnvSpec:
    saved = saved if isinstance(saved, dict) else {}
    _require(saved.get("format") == FORMAT, "format")
    _require(saved.get("version") == VERSION, f"version (this Veldt reads version {VERSION})")
    name, settings = saved.get("name"), saved.get("settings")
    _require(isinstance(name, str) and len(name) <= LONGEST, "name")
    settings = {"masks": ""} | settings if isinstance(settings, dict) else settings  # older runs have none
    fits = isinstance(settings, dict) and settings.keys() == {"image_size", "grayscale", "combine", "masks"}
    fits = fits and _is_integer(settings["image_size"], 0, LARGEST_SIDE)
    fits = fits and all(type(settings[key]) is bool for key in ("grayscale", "combine"))
    _require(fits and settings["masks"] in ("", "info", "observation"), "settings")
    for key in ("observation_space", "action_space"):
        _require(_elements(saved.get(key)) <= LARGEST, f"{key}: it has more than {LARGEST:,} elements in all")
    observation, action = (_read_space(saved.get(key), key) for key in ("observation_space", "action_space"))
    masked = settings["masks"] != "observation" or (isinstance(observation, spaces.Dict) and MASK in observation.spaces)
    _require(masked, "settings.masks")
    return EnvSpec.of(name, Adapter(observation, action, name, **settings))


def _elements(saved: Any) -> int:
    """Of a space, before it is made: a short text may describe one that is larger than memory."""
    saved = saved if isinstance(saved, dict) else {}
    parts, shape = saved.get("spaces"), saved.get("shape")
    within = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else ()
    return (math.prod(shape) if _is_shape(shape) else 0) + sum(map(_elements, within))


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and len(x) <= 8 and all(_is_integer(each, 0, LARGEST) for each in x)


def _read_shape(owner: dict[str, Any], where: str) -> tuple[int, ...]:
    shape: Any = owner.get("shape")
    _require(_is_shape(shape) and math.prod(shape) <= LARGEST, f"{where}.shape")
    return tuple(shape)


def _read_dtype(owner: dict[str, Any], where: str) -> Any:
    name = owner.get("dtype")
    _require(isinstance(name, str) and name in DTYPES, f"{where}.dtype")
    return np.dtype(name)


def _read_space(saved: Any, where: str) -> spaces.Space[Any]:
    saved = saved if isinstance(saved, dict) else {}
    kind, parts = saved.get("type"), saved.get("spaces")
    if kind == "Dict":
        fits = isinstance(parts, dict) and 0 < len(parts) <= COLUMNS and all(len(key) <= LONGEST for key in parts)
        _require(fits, f"{where}.spaces")
        return spaces.Dict(OrderedDict((key, _read_space(part, f"{where}.{key[:100]}")) for key, part in parts.items()))
    if kind == "Tuple":
        _require(isinstance(parts, list) and 0 < len(parts) <= COLUMNS, f"{where}.spaces")
        return spaces.Tuple([_read_space(part, f"{where}.{i}") for i, part in enumerate(parts)])
    if kind == "Text":
        return spaces.Text(1)
    if kind == "MultiBinary":
        return _made(f"{where}.shape", spaces.MultiBinary, _read_shape(saved, where))
    _require(kind in ("Discrete", "MultiDiscrete", "Box"), f"{where}.type")
    dtype = _read_dtype(saved, where)
    if kind == "Discrete":
        n, start = saved.get("n"), saved.get("start")
        _require(dtype.kind in "iu" and _is_integer(n, 1, 2**31), f"{where}.n")
        _require(_is_integer(start, np.iinfo(dtype).min, np.iinfo(dtype).max), f"{where}.start")
        return _made(f"{where}.n", spaces.Discrete, n, start=start, dtype=dtype.type)
    shape = _read_shape(saved, where)
    names = ("nvec", "start") if kind == "MultiDiscrete" else ("low", "high")
    one, two = (_read_numbers(saved.get(name), shape, dtype, f"{where}.{name}") for name in names)
    if kind == "MultiDiscrete":
        _require(dtype.kind in "iu" and bool(((one >= 1) & (one <= 2**31)).all()), f"{where}.nvec")
        return _made(f"{where}.nvec", spaces.MultiDiscrete, one, dtype=dtype.type, start=two)
    _require(dtype.kind in "iufb" and bool((one <= two).all()), f"{where}.high")
    return _made(f"{where}.low", spaces.Box, one, two, dtype=dtype.type)


def _made(where: str, kind: Callable[..., spaces.Space[Any]], *args: Any, **kwargs: Any) -> spaces.Space[Any]:
    """What Gymnasium itself refuses is invalid too."""
    try:
        return kind(*args, **kwargs)
    except (AssertionError, ValueError, TypeError, OverflowError):
        raise Invalid(where) from None


def _read_numbers(values: Any, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> Array:
    fits = isinstance(values, list) and len(values) in (math.prod(shape), min(1, math.prod(shape)))
    if dtype.kind == "f":
        fits = fits and all(type(x) in (int, float) or x in ("inf", "-inf") for x in values)
        fits = fits and not any(x != x for x in values)
    else:
        fits = fits and dtype.kind in "iub"
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        fits = fits and all(_is_integer(int(x) if type(x) is bool and dtype.kind == "b" else x, low, high) for x in values)
    _require(fits, where)
    try:
        found = np.array([float(x) if dtype.kind == "f" else x for x in values], np.float64 if dtype.kind == "f" else dtype)
        with np.errstate(over="raise"):
            found = found.astype(dtype)
    except (OverflowError, FloatingPointError):
        raise Invalid(where) from None
    return np.broadcast_to(found.reshape(shape if found.size == math.prod(shape) else (1,) * len(shape)), shape).copy()


def _is_integer(x: Any, low: float, high: float) -> bool:
    return type(x) is int and low <= x <= high


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise Invalid(otherwise)
