"""The rules of population-based training (Jaderberg et al. 2017, section 4.1.1): whom a member copies, and what it tries.

    paper                     here                     default
    exploit                   exploit                  truncation
    truncation selection      truncation, `fraction`   0.2
    binary tournament         tournament
    t-test selection          t-test, `level`          0.05 (Welch's, two-sided)
    explore: perturb          explore, `factors`       0.8 or 1.2, each with probability 1/2
    explore: resample         explore, `resample`      probability 0

All are functions of their arguments and a generator. A member copies only one that is strictly better, so never itself.
"""

import math
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Returns = Sequence[float]  # of the episodes since the last copy
Rule = Literal["truncation", "tournament", "t-test", "none"]
RULES: tuple[Rule, ...] = get_args(Rule)
DIGITS = 6  # of a number that is drawn or perturbed


@dataclass(frozen=True)
class Exploit:
    rule: Rule = "truncation"
    fraction: float = 0.2  # truncation: of the population at either end, rounded up
    level: float = 0.05  # t-test


@dataclass(frozen=True)
class Explore:
    factors: tuple[float, ...] = (0.8, 1.2)
    resample: float = 0.0  # probability that a value is drawn anew instead


def exploit(
    how: Exploit,
    member: int,
    found: Mapping[int, Returns],
    rng: np.random.Generator,
    donors: Container[int] | None = None,  # who can be copied; None: all
) -> int | None:
    """The member whose weights and settings this one takes; None: it keeps its own.

    `found` has the returns of each member that has some. One that has none (it failed) is neither ranked nor copied; if the
    member itself has none, it takes those of any that it could be compared with.
    """
    mean = {i: statistics.fmean(returns) for i, returns in found.items()}
    others = [i for i in sorted(found) if i != member and (donors is None or i in donors)]
    if how.rule == "none" or not others:
        return None
    if how.rule == "truncation":
        ranked = sorted(found, key=lambda i: (mean[i], i))
        n = math.ceil(how.fraction * len(ranked) - 1e-9)
        if member in mean and member not in ranked[:n]:
            return None
        pool = [i for i in ranked[-n:] if i in others]
    else:
        pool = [others[rng.integers(len(others))]]
    if member in mean:
        pool = [i for i in pool if mean[i] > mean[member]]
        if how.rule == "t-test":
            pool = [i for i in pool if p_value(found[i], found[member]) < how.level]
    return pool[rng.integers(len(pool))] if pool else None


def p_value(a: Returns, b: Returns) -> float:
    """Of Welch's t-test, two-sided: that means so far apart come from distributions of equal mean."""
    if min(len(a), len(b)) < 2:
        return 1.0
    parts = [statistics.variance(x) / len(x) for x in (a, b)]
    apart, squared = abs(statistics.fmean(a) - statistics.fmean(b)), sum(parts)
    if squared == 0:
        return 0.0 if apart else 1.0
    freedom = squared**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    # Student's density is cos^(freedom - 1) of the angle whose tangent is t / sqrt(freedom).
    angle = math.atan(apart / math.sqrt(squared * freedom))
    within, whole = (_integral(freedom - 1, end) for end in (angle, math.pi / 2))
    return max(0.0, 1 - within / whole)


def _integral(power: float, end: float) -> float:
    """Of cos(x)^power from 0 to `end`."""
    x = np.linspace(0.0, end, 4_001)
    return float(np.trapezoid(np.cos(x).clip(0) ** power, x))


@dataclass(frozen=True)
class Range:
    """The values that a setting may take."""

    kind: Literal["loguniform", "uniform", "choices"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()
    whole: bool = False  # an integer

    def draw(self, rng: np.random.Generator) -> Any:
        if self.kind == "choices":
            return self.choices[rng.integers(len(self.choices))]
        if self.kind == "uniform":
            return self._clip(rng.uniform(self.low, self.high))
        return self._clip(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

    def perturb(self, value: Any, factors: Sequence[float], rng: np.random.Generator) -> Any:
        """The value times one of the factors, within the range. An integer moves by 1 at least, a choice to its neighbour:
        up if the factor is above 1."""
        factor = factors[int(rng.integers(len(factors)))]
        step = 1 if factor > 1 else -1
        if self.kind == "choices":
            at = self.choices.index(value) + step
            return self.choices[min(max(at, 0), len(self.choices) - 1)]
        changed = factor * value
        if self.whole and round(changed) == value:
            changed = value + step
        return self._clip(changed)

    def holds(self, value: Any) -> bool:
        return value in self.choices if self.kind == "choices" else self.low <= value <= self.high

    def _clip(self, value: float) -> int | float:
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else float(f"{value:.{DIGITS}g}")


def explore(
    how: Explore, values: Mapping[str, Any], ranges: Mapping[str, Range], rng: np.random.Generator
) -> dict[str, Any]:
    """The values that a member goes on with, from those of the member that it copied."""
    out = {}
    for name, tuned in ranges.items():
        anew = rng.random() < how.resample
        out[name] = tuned.draw(rng) if anew else tuned.perturb(values[name], how.factors, rng)
    return out
