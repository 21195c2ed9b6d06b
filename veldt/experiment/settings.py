"""Settings by name: reading, changing and writing the fields of nested dataclasses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from veldt.errors import UserError, did_you_mean


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config as dotted names and values."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out |= flat(value, f"{prefix}{field.name}.")
        else:
            out[f"{prefix}{field.name}"] = value
    return out


def as_plain(config: Any) -> dict[str, Any]:
    """A config as nested dicts of numbers, strings and lists, for YAML and JSON."""
    plain: dict[str, Any] = dataclasses.asdict(config, dict_factory=_plain_dict)
    return plain


def _plain_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def override(config: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """A copy of a (nested) dataclass with some fields replaced; names may be dotted, or values nested dicts."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    fields = {f.name: f for f in dataclasses.fields(config)}
    hints = get_type_hints(type(config))
    for name, value in values.items():
        head, _, tail = str(name).partition(".")
        if head not in fields:
            raise UserError(f"There is no setting {prefix}{head!r}.{did_you_mean(head, fields)}")
        if dataclasses.is_dataclass(getattr(config, head)):
            if not tail and not isinstance(value, dict):
                raise UserError(f"{prefix}{head} is a group of settings; name one of them, as in {prefix}{head}.x.")
            nested.setdefault(head, {}).update({tail: value} if tail else value)
        elif tail:
            raise UserError(f"{prefix}{head} is one setting; there is no {prefix}{name}.")
        else:
            flat[head] = _typed(f"{prefix}{head}", value, getattr(config, head))
            choices = get_args(hints[head]) if get_origin(hints[head]) is Literal else None
            if choices and flat[head] not in choices:
                raise UserError(f"{prefix}{head} must be one of {', '.join(choices)}, not {value!r}.")
    for head, part in nested.items():
        flat[head] = override(getattr(config, head), part, f"{prefix}{head}.")
    return dataclasses.replace(config, **flat)


def _typed(name: str, value: Any, like: Any) -> Any:
    """The value converted to the type of the field's present one, if that loses nothing."""
    if isinstance(like, bool) or isinstance(value, bool):
        if isinstance(value, bool) and isinstance(like, bool):
            return value
    elif isinstance(like, float) and (isinstance(value, int | float) or _is_number(value)):
        return float(value)
    elif isinstance(like, int) and isinstance(value, int | float) and math.isfinite(value) and int(value) == value:
        return int(value)
    elif isinstance(like, tuple) and isinstance(value, list | tuple):
        if not like or all(type(part) is type(like[0]) for part in value):
            return tuple(value)
    elif isinstance(like, str) and isinstance(value, str | int):
        return str(value)
    raise UserError(f"{name} must be a {type(like).__name__}, not {value!r}.")


def _is_number(value: Any) -> bool:
    """YAML reads 5e-4 as a string."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
