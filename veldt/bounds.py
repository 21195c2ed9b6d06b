"""Bounds of numbers, declared on the fields of dataclasses and checked in one place. Imports no torch.

@dataclass(frozen=True)
class LearnerConfig:
    lr: Annotated[float, above(0)] = 1e-3

check(config)  # UserError: learner.lr must be greater than 0, not 0.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, get_type_hints

from veldt.errors import UserError


@dataclass(frozen=True)
class Bound:
    """A closed range of finite numbers, unless it says otherwise."""

    low: float
    high: float = math.inf
    includes_low: bool = True
    infinite: bool = False  # infinity is allowed too

    def accepts(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low  # False for NaN
        return above and value <= self.high and (self.infinite or not math.isinf(value))

    def __str__(self) -> str:
        """Completes `learner.lr must ...`."""
        if self.high < math.inf:
            return f"be from {self.low:g} to {self.high:g}, not"
        if not self.includes_low:
            return f"be greater than {self.low:g}, not"
        return "not be negative, but it is" if self.low == 0 else f"be at least {self.low:g}, not"


def above(low: float, infinite: bool = False) -> Bound:
    return Bound(low, includes_low=False, infinite=infinite)


def at_least(low: float, infinite: bool = False) -> Bound:
    return Bound(low, infinite=infinite)


def between(low: float, high: float) -> Bound:
    return Bound(low, high)


def check(config: Any, prefix: str = "") -> None:
    """Raises a UserError for the first field of a (nested) dataclass whose value is out of its bound.

    The bound of a tuple is that of each of its elements.
    """
    kind: Any = type(config)
    bounds = _bounds(kind)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check(value, f"{prefix}{field.name}.")
        elif field.name in bounds:
            check_value(f"{prefix}{field.name}", value, bounds[field.name])


def check_value(name: str, value: Any, bound: Bound) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not bound.accepts(number):
            words = "be finite, not" if number == bound.high == math.inf else str(bound)
            raise UserError(f"{name} must {words} {number}.")


@functools.cache
def _bounds(kind: Any) -> dict[str, Bound]:
    hints = get_type_hints(kind, include_extras=True)
    extras = ((name, extra) for name, hint in hints.items() for extra in getattr(hint, "__metadata__", ()))
    return {name: extra for name, extra in extras if isinstance(extra, Bound)}
