"""Numbers of metrics as text, and the links of the chain at one moment, from a line and the declarations of its metrics.

    environments -> policy -> recorder -> store -> learner -> weights -> (back to policy)

A link that is not in this chain is a row of its own, after the others. A line may lack any number: early in a run, or if an
older version wrote it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from veldt.machine import format_bytes
from veldt.metrics import BUSY, CHAIN, MORE, PACKAGE, RATE, WAITS, Declarations, Metric

Line = Mapping[str, Any]  # of metrics.jsonl
WIDE = re.compile(r"\d{4}")  # a format that would fill the RAM with spaces
LARGEST = 1e300  # a number from here on is as good as infinite
FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")  # {name} or {name:format}
OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


def number(line: Line, key: str) -> float | None:
    """None: it is missing, or not a finite number."""
    x = line.get(key)
    return float(x) if isinstance(x, int | float) and abs(x) < LARGEST else None


def amount(x: float, unit: str = "") -> str:
    """A number with its unit (see `metrics.Metric`)."""
    if unit == "fraction":
        return percent(x)
    if unit.startswith("bytes"):
        return format_bytes(x) + unit.removeprefix("bytes")
    if unit == "s" or unit.endswith("/s"):
        return f"{short(x)} {unit}"
    return f"{plain(x)} {unit[:-1] if x == 1 and unit.endswith('s') else unit}".rstrip()


def plain(x: float) -> str:
    """A count in full, any other number short."""
    return f"{x:,.0f}" if x == int(x) else short(x)


def percent(x: float) -> str:
    return f"{100 * x:,.0f} %"


def short(x: float) -> str:
    """A number of which two or three digits matter."""
    if x == 0 or abs(x) >= 10:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 1 else f"{x:.2g}"


def figure(x: float) -> str:
    """Three significant digits; all digits of a number from 100."""
    if not math.isfinite(x):
        return "-"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def format_seconds(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class LinkRow:
    """One row of the table. `busy` and `waits` are fractions of the time of the process that the link is in."""

    name: str
    rate: str = ""
    busy: float | None = None
    waits: float | None = None
    more: tuple[str, ...] = ()


def links(line: Line, declarations: Declarations = PACKAGE) -> list[LinkRow]:
    """The links that the line has any number of."""
    names = dict.fromkeys((*CHAIN, *(m.link for m in declarations.values() if m.column in (RATE, BUSY, WAITS, MORE))))
    busy, waits = (fractions(line, column, declarations) for column in (BUSY, WAITS))
    found = []
    for name in names:
        rates, more = (texts(line, name, column, declarations) for column in (RATE, MORE))
        link = LinkRow(name, "".join(rates[:1]), busy.get(name), waits.get(name), (*rates[1:], *more))
        if link != LinkRow(name):
            actions = number(line, "env_steps_per_s") if name == "policy" else None  # one action for each env step
            found.append(link if actions is None else replace(link, rate=amount(actions, "actions/s")))
    return found


def fractions(line: Line, column: str, declarations: Declarations = PACKAGE) -> dict[str, float]:
    """By link, the fraction of the time that it is busy, or waits; the largest where a link has several."""
    out: dict[str, float] = {}
    for metric in declarations.values():
        if metric.column == column and (x := number(line, metric.name)) is not None:
            out[metric.link] = max(x, out.get(metric.link, x))
    return out


def texts(line: Line, link: str, column: str, declarations: Declarations = PACKAGE) -> list[str]:
    shown = [metric for metric in declarations.values() if metric.link == link and metric.column == column]
    return [
        value if metric.text or metric.rate else f"{metric.name.replace('_', ' ')} {value}"
        for metric in shown
        if (value := value_of(metric, line, declarations))
    ]


def value_of(metric: Metric, line: Line, declarations: Declarations = PACKAGE) -> str:
    """The value of a metric as text; empty if it is unknown, or if another metric is shown instead."""
    name = metric.rate or metric.name
    x = number(line, name)
    if x is None or any(number(line, other) is not None for other in metric.unless):
        return ""
    return fill(metric.text, line, declarations) if metric.text else amount(x, declarations[name].unit)


def fill(text: str, line: Line, declarations: Declarations = PACKAGE) -> str:
    """The text with metrics in place of their names; see `metrics.Metric`."""

    def value(field: re.Match[str]) -> str:
        name, form = field[1], field[2]
        x = number(line, name)
        if x is None:
            return "-"
        if form == "n":
            return plain(x)
        if form and WIDE.search(form):
            return plain(x)
        try:
            return format(x, form) if form else amount(x, declarations[name].unit)
        except ValueError:  # a format that does not exist
            return plain(x)

    def optional(part: re.Match[str]) -> str:
        return part[1] if all(number(line, name) is not None for name, _ in FIELD.findall(part[1])) else ""

    return FIELD.sub(value, OPTIONAL.sub(optional, text))
