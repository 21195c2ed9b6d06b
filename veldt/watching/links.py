"""The links of the chain at one moment, from a line of metrics and the declarations of its metrics.

    environments -> policy -> recorder -> store -> learner -> weights -> (back to policy)

A link that is not in this chain is a row of its own, after the others. A line may lack any number: early in a run, or if an
older version wrote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from veldt.metrics import BUSY, CHAIN, MORE, PACKAGE, RATE, WAITS, Declarations, Metric
from veldt.watching.text import Line, amount, number, plain

FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")  # {name} or {name:format}
OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
ACTIONS = "env_steps_per_s"  # a policy computes one action for each env step


@dataclass(frozen=True)
class Link:
    """One row of the table. `busy` and `waits` are fractions of the time of the process that the link is in."""

    name: str
    rate: str = ""
    busy: float | None = None
    waits: float | None = None
    more: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        return bool(self.rate or self.more) or self.busy is not None or self.waits is not None


def links(line: Line, declarations: Declarations = PACKAGE) -> list[Link]:
    """The links that the line has any number of."""
    names = dict.fromkeys((*CHAIN, *(m.link for m in declarations.values() if m.column in (RATE, BUSY, WAITS, MORE))))
    busy, waits = (fractions(line, column, declarations) for column in (BUSY, WAITS))
    found = []
    for name in names:
        rates, more = (texts(line, name, column, declarations) for column in (RATE, MORE))
        link = Link(name, rates[0] if rates else "", busy.get(name), waits.get(name), (*rates[1:], *more))
        if name == "policy" and link.known and (actions := number(line, ACTIONS)) is not None:
            link = Link(name, amount(actions, "actions/s"), link.busy, link.waits, link.more)
        if link.known:
            found.append(link)
    return found


def fractions(line: Line, column: str, declarations: Declarations = PACKAGE) -> dict[str, float]:
    """By link, the fraction of the time that it is busy, or waits; the largest where a link has several."""
    out: dict[str, float] = {}
    for metric in declarations.values():
        if metric.column == column and (x := number(line, metric.name)) is not None:
            out[metric.link] = max(x, out.get(metric.link, x))
    return out


def texts(line: Line, link: str, column: str, declarations: Declarations = PACKAGE) -> list[str]:
    """What a link shows in a column."""
    shown = [metric for metric in declarations.values() if metric.link == link and metric.column == column]
    found = [(metric, value_of(metric, line, declarations)) for metric in shown]
    named = [value if metric.text or metric.rate else f"{metric.name.replace('_', ' ')} {value}" for metric, value in found]
    return [text for text, (_, value) in zip(named, found, strict=True) if value]


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
        try:
            return format(x, form) if form else amount(x, declarations[name].unit)
        except ValueError:  # a format that does not exist
            return plain(x)

    def optional(part: re.Match[str]) -> str:
        return part[1] if all(number(line, name) is not None for name, _ in FIELD.findall(part[1])) else ""

    return FIELD.sub(value, OPTIONAL.sub(optional, text))
