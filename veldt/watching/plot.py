"""Learning curves of runs. (Rates over time are in `watching.plot_rates`.)"""

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from veldt.errors import UserError
from veldt.records.tree import Array
from veldt.watching.links import number
from veldt.watching.sinks import EVALUATION, Point, evaluations, read_metrics


def read_lines(run: Path, names: Collection[str] | None = None, having: str = "") -> list[dict[str, Any]]:
    """As `read_metrics`."""
    if not (run / "metrics.jsonl").exists():
        raise UserError(f"{run} is not a run directory: it has no metrics.jsonl.")
    return read_metrics(run / "metrics.jsonl", names, having)


@dataclass(frozen=True)
class Curve:
    settings: dict[str, Any]  # of the run, without its seed
    env_steps: Array  # [n]
    time_s: Array  # [n]
    updates: Array  # [n], NaN where unknown
    returns: Array  # [n]
    greedy: bool
    frame_skip: int = 1  # frames in an env step
    path: Path = Path()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Without its settings."""
        lines = read_lines(path, EVALUATION, having="eval_return")
        return cls.of(lines if evaluations(lines) else read_lines(path, ("train_return", "learner_steps")), path)

    @classmethod
    def of(cls, lines: list[dict[str, Any]], path: Path = Path()) -> Self:
        greedy, explored = evaluations(lines), [line for line in lines if number(line, "train_return") is not None]
        # Exploring episodes if there are no evaluations.
        points = greedy or [
            Point(line["env_steps"], line["time_s"], line["train_return"], math.nan if updates is None else updates)
            for line in explored
            for updates in [number(line, "learner_steps")]
        ]
        if not points:
            raise UserError(f"{path} has no returns yet; train it for longer.")
        steps, seconds, returns, updates = np.array(points, float).T
        return cls({}, steps, seconds, updates, returns, bool(greedy), path=path)

    def x(self, axis: str) -> Array:
        """[n]; `axis` is one of AXES."""
        return {
            "steps": self.env_steps,
            "frames": self.env_steps * self.frame_skip,
            "seconds": self.time_s,
            "hours": self.time_s / 3600,
            "updates": self.updates,
        }[axis]


AXES = {"steps": "env steps", "frames": "frames", "seconds": "time (s)", "hours": "time (h)", "updates": "updates"}


# Names.

LONGEST = 48  # characters of a label


def group(curves: list[Curve]) -> dict[str, list[Curve]]:
    """Runs that differ only in their seed, by a label that says how they differ from the others.

    Recipes and environments differ in many settings, so other settings are named only where they differ within one recipe
    on one environment.
    """
    groups: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        groups[repr(sorted(curve.settings.items()))].append(curve)
    firsts = [alike[0] for alike in groups.values()]
    labels = [_label(curve, firsts) for curve in firsts]
    if any(len(label) > LONGEST for label in labels):
        labels = [_directory(curve) for curve in firsts]
    unique = [x if labels.count(x) == 1 else str(curve.path) for x, curve in zip(labels, firsts, strict=True)]
    return dict(zip(unique, groups.values(), strict=True))


def common(groups: dict[str, list[Curve]]) -> str:
    """The recipe and the environment, as far as all curves have the same."""
    curves = [curve for alike in groups.values() for curve in alike]
    both = [{_named(curve.settings.get(name, "")) for curve in curves} for name in KIND]
    return " on ".join(values.pop() for values in both if len(values) == 1 and "" not in values)


KIND = ("recipe", "env")


def _label(curve: Curve, others: list[Curve]) -> str:
    kind = {name: _named(curve.settings[name]) for name in KIND if name in curve.settings}
    parts = [" ".join(text for name, text in kind.items() if name in _differing(others))]
    alike = [other for other in others if all(other.settings.get(n) == curve.settings.get(n) for n in KIND)]
    names = [name for name in _differing(alike) if name not in KIND]
    tails = [name.rpartition(".")[2] for name in names]
    for name, tail in zip(names, tails, strict=True):
        parts.append(f"{tail if tails.count(tail) == 1 else name} {_text(curve.settings.get(name))}")
    return ", ".join(filter(None, parts)) or " ".join(kind.values())


def _named(kind: Any) -> str:
    """A recipe or environment; one of a file without its folders."""
    return str(kind).rpartition("/")[2] if ".py:" in str(kind) else str(kind)


def _differing(curves: list[Curve]) -> list[str]:
    names = dict.fromkeys(name for curve in curves for name in curve.settings)
    return [name for name in names if len({repr(curve.settings.get(name)) for curve in curves}) > 1]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return "x".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _directory(curve: Curve) -> str:
    """Of the run; of the runs with other seeds, if it is one of a sweep."""
    path = curve.path.resolve()
    return path.parent.name if path.name.startswith("seed-") else path.name


# Curves.

MANY = 5  # curves in one image from which their ranges would hide them
COLOURS = 10  # that matplotlib has
DASHES = ("-", (0, (4, 2)), (0, (1, 1)))  # of each ten curves
INTERVAL_FROM = 5  # seeds; an interval of fewer would be too narrow
RESAMPLES = 1_000


@dataclass(frozen=True)
class Look:
    x: str = ""  # one of AXES; empty: `steps`, and time beside it
    steps: str = "steps"  # or "frames"
    log: str = ""  # axes that are logarithmic: "x", "y" or "xy"
    smooth: int = 1  # points of which each point is the mean
    iqm: bool = False  # the interquartile mean instead of the mean


def draw(groups: dict[str, list[Curve]], out: Path, look: Look | None = None) -> None:
    """Learning curves, with the range or an interval of each group's seeds."""
    from matplotlib.figure import Figure  # without pyplot: it needs no display, and keeps no figure

    look = look or Look()
    curves = [curve for alike in groups.values() for curve in alike]
    longest = max(float(curve.time_s[-1]) for curve in curves)
    kinds = [look.x] if look.x else [look.steps, "hours" if longest >= 3600 else "seconds"]
    many = len(groups) > MANY
    figure = Figure((5.5 * len(kinds) + (1.5 if len(kinds) == 1 else 0), 5.0 if many else 4.2), layout="constrained")
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        for i, (name, alike) in enumerate(groups.items()):
            _draw_curve(axis, kind, i, name, alike, look, many)
        axis.set_xlabel(AXES[kind])
        _scale(axis, look)
        tidy(axis)
    greedy = all(curve.greedy for curve in curves)
    axes[0].set_ylabel("return, greedy episodes" if greedy else "return")
    axes[0].set_title(common(groups), loc="left", fontsize=11)
    axes[-1].set_title(_explanation([len(alike) for alike in groups.values()], look), loc="right", fontsize=8, color="0.4")
    if many:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    elif len(groups) > 1:
        axes[0].legend(loc="best", frameon=False)
    save(figure, out)


def _draw_curve(axis: Any, kind: str, i: int, name: str, curves: list[Curve], look: Look, many: bool) -> None:
    xs, ys = [], []
    for curve in curves:
        x, y = curve.x(kind), smooth(curve.returns, look.smooth)
        known = np.isfinite(x) & ((x > 0) | ("x" not in look.log))
        if known.any():
            xs.append(x[known])
            ys.append(y[known])
    if not xs:
        raise UserError(f"{curves[0].path} has no returns that can be drawn over {AXES[kind]}.")
    x, low, middle, high = band(xs, ys, log="x" in look.log, iqm=look.iqm)
    label = f"{name} ({len(curves)} seeds)" if len(curves) > 1 else name
    colour, dash = f"C{i % COLOURS}", DASHES[i // COLOURS % len(DASHES)]
    axis.plot(
        x,
        middle,
        label=label,
        linewidth=1.3 if many else 1.8,
        color=colour,
        linestyle=dash,
        marker="o" if len(x) == 1 else None,
    )
    if len(xs) > 1:
        axis.fill_between(x, low, high, alpha=0.06 if many else 0.2, color=colour, linewidth=0)


def _scale(axis: Any, look: Look) -> None:
    from matplotlib.ticker import FuncFormatter

    if "x" in look.log:
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _count(x)))
    if "y" in look.log:
        axis.set_yscale("log" if axis.dataLim.ymin > 0 else "symlog")  # returns may be negative


def _count(x: float) -> str:
    """20k, 1.5M."""
    size, unit = next(((n, unit) for n, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(x) >= n), (1.0, ""))
    return f"{x / size:.4g}{unit}"


def _explanation(seeds: list[int], look: Look) -> str:
    """What the lines and the bands are."""
    parts = [f"each point is the mean of {look.smooth}"] if look.smooth > 1 else []
    if max(seeds) > 1:
        kinds = {"range" if n < INTERVAL_FROM else "95 % bootstrap interval" for n in seeds if n > 1}
        of = f"{seeds[0]} seeds" if len(seeds) == 1 else "the seeds"
        parts.append(
            f"{'interquartile mean' if look.iqm else 'mean'} and {' or '.join(sorted(kinds, reverse=True))} of {of}"
        )
    return "; ".join(parts)


def smooth(y: Array, points: int) -> Array:
    """The mean of `points` neighbours around each point; of fewer at the ends."""
    sums, i = np.concatenate(([0.0], np.cumsum(y))), np.arange(len(y))
    first, after = np.maximum(0, i - points // 2), np.minimum(len(y), i + (points + 1) // 2)
    means: Array = (sums[after] - sums[first]) / (after - first)
    return means


def tidy(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


FORMATS = (".png", ".svg", ".pdf")


def check_image(out: Path) -> None:
    if out.suffix.lower() not in FORMATS:
        raise UserError(f"{out} cannot be written: its name must end in .png, .svg or .pdf.")


def save(figure: Any, out: Path) -> None:
    check_image(out)
    try:
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"{out} cannot be written ({error}).") from None


def band(
    xs: list[Array], ys: list[Array], points: int = 200, log: bool = False, iqm: bool = False
) -> tuple[Array, Array, Array, Array]:
    """(x, low, middle, high) of several curves, over the range of x that all of them cover; `log`: at equal ratios of x.

    The middle is the mean, or the interquartile mean; low and high are the range, or from INTERVAL_FROM curves on the 95 %
    bootstrap interval of the middle.
    """
    if len(xs) == 1:
        return xs[0], ys[0], ys[0], ys[0]
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    grid = (np.geomspace if log else np.linspace)(first, max(first, last), points)
    curves = np.stack([np.interp(grid, x, y) for x, y in zip(xs, ys, strict=True)])  # [seeds, points]
    middle = trimmed_mean(curves, 0.25 if iqm else 0.0)
    if len(xs) < INTERVAL_FROM:
        return grid, curves.min(0), middle, curves.max(0)
    chosen = np.random.default_rng(0).integers(0, len(xs), (RESAMPLES, len(xs)))
    means = np.stack([trimmed_mean(curves[i], 0.25 if iqm else 0.0) for i in chosen])
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return grid, low, middle, high


def trimmed_mean(values: Array, fraction: float) -> Array:
    """The mean over the first axis, without this fraction of the smallest and of the largest values (rounded down)."""
    cut = int(fraction * len(values))
    mean: Array = np.sort(values, 0)[cut : len(values) - cut].mean(0)
    return mean
