"""Arguments of environments as texts `key=value`, which flags, files and messages carry. Imports no environment, so that an
actor that joins can check them before it decides whether its process needs numba and torch."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from veldt import callables
from veldt.errors import UserError
from veldt.foreign import YamlLoader


def read_kwargs(kwargs: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Arguments from texts `key=value`; values are typed as YAML's: size=8, flat=true, name=text, shape=[2, 3]."""
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    found: dict[str, Any] = {}
    for word in kwargs:
        key, equals, value = str(word).partition("=")
        if not (equals and key.isidentifier()):
            raise UserError(f"env_kwargs: {str(word)[:100]!r} must be key=value, as in size=8.")
        if key in found:
            raise UserError(f"env_kwargs: {key} is given twice.")
        try:
            found[key] = YamlLoader(value).get_single_data() if value and not _has_alias(value) else value
        except (yaml.YAMLError, ValueError, RecursionError):
            found[key] = value
        if isinstance(found[key], str):  # YAML 1.1 reads 1e-3 as text
            with contextlib.suppress(ValueError):
                found[key] = float(value) if re.match("[-+.0-9]", value) else found[key]
    return found


def _has_alias(value: str) -> bool:
    """Aliases can be larger than memory."""
    return ("&" in value or "*" in value) and any(
        isinstance(token, yaml.AliasToken | yaml.AnchorToken) for token in yaml.scan(value, yaml.SafeLoader)
    )


def words_of_text(words: Sequence[str]) -> list[str]:
    """Those that hold more than numbers and booleans: a text may name a file or code."""
    return [
        word for word in words if not all(x is None or isinstance(x, int | float) for x in read_kwargs([word]).values())
    ]


def as_words(kwargs: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """The texts that `read_kwargs` reads as these arguments."""
    if not isinstance(kwargs, Mapping):
        return tuple(kwargs)
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in kwargs.items()}
    try:
        words = tuple(f"{key}={_word(value)}" for key, value in plain.items())
    except yaml.YAMLError:
        words = ()
    if read_kwargs(words) != plain:
        raise UserError(
            "env_kwargs must be numbers, booleans, texts, or lists and dicts of them; for others use a function."
        )
    return words


def as_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose env_kwargs may be a dict, and wrappers functions, as a config has them: as texts."""
    found = dict(settings)
    if "env_kwargs" in found:
        found["env_kwargs"] = as_words(found["env_kwargs"])
    if "wrappers" in found:
        found["wrappers"] = tuple(x if isinstance(x, str) else callables.name_of(x) for x in found["wrappers"])
    return found


def _word(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
    if isinstance(value, str) and read_kwargs([f"value={text}"])["value"] != value:  # as a number
        return yaml.safe_dump(value, default_style='"', width=10**6).strip()
    return text
