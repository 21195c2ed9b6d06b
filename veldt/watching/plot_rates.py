"""Plots of the rates of runs, and of all else that says where their time goes, against time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.records.tree import Array
from veldt.watching import plot
from veldt.watching.links import number
from veldt.watching.plot import read_lines, tidy


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn together, each with its label; `limit` is drawn dotted."""

    title: str
    series: dict[str, str]
    limit: tuple[str, str] | None = None
    unit: str = ""  # "fraction" or "bytes"


PANELS = (
    Panel("env steps/s", {"env_steps_per_s": ""}),
    Panel("updates/s", {"learner_steps_per_s": ""}),
    Panel("items drawn/s", {"sampled_per_s": ""}),
    Panel("waiting, fraction of the time", {"wait/actor": "actors", "wait/learner": "learner"}, unit="fraction"),
    Panel("queue to the store", {"queue_fill": "full", "refusing": "blocks refused"}, unit="fraction"),
    Panel("lag of the weights, updates", {"lag_updates": ""}),
    Panel("replay ratio", {"replay_ratio": ""}, ("samples_per_insert", "asked for")),
    Panel("CPU, cores", {"cpu/all": ""}, ("cores", "available")),
    Panel("memory", {"memory_bytes": ""}, ("memory_planned", "planned"), unit="bytes"),
)
STYLES = ("-", (0, (4, 2)))  # of the first and the second series of a panel


@dataclass(frozen=True)
class Rates:
    path: Path
    time_s: Array  # [n]
    values: dict[str, Array]  # [n] each, NaN where a line lacks it; without those that no line has

    @classmethod
    def read(cls, path: Path) -> Self:
        keys = [key for panel in PANELS for key in (*panel.series, *(panel.limit or ())[:1])]
        lines = read_lines(path, keys)
        values = {key: _column(lines, key) for key in keys}
        known = {key: x for key, x in values.items() if np.isfinite(x).any()}
        if not any(key in known for panel in PANELS for key in panel.series):
            raise UserError(f"{path} has no rates yet; train it for longer.")
        return cls(path, _column(lines, "time_s"), known)


def _column(lines: list[dict[str, Any]], key: str) -> Array:
    """[n]; NaN where a line has no number of this name."""
    found = (number(line, key) for line in lines)
    return np.array([np.nan if x is None else x for x in found])


def draw_rates(runs: list[Rates], out: Path) -> None:
    """Small plots against time, a colour for each run; without metrics that no run has."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = [panel for panel in PANELS if any(key in run.values for run in runs for key in panel.series)]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure((3.7 * columns, 2.3 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    seconds, unit = _clock(max(float(np.nanmax(run.time_s)) for run in runs))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, runs, seconds)
    for axis in axes.flat[max(0, len(panels) - columns) : len(panels)]:  # the lowest of each column
        axis.set_xlabel(f"time ({unit})")
    lines = [Line2D([], [], color=f"C{i}", linewidth=1.8) for i in range(len(runs))]
    figure.legend(lines, _names(runs), loc="outside upper left", ncols=min(4, len(runs)), frameon=False)
    plot.save(figure, out)


def _draw_panel(axis: Any, panel: Panel, runs: list[Rates], seconds: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

    for i, run in enumerate(runs):
        for style, key in zip(STYLES, panel.series, strict=False):
            if key in run.values:
                x, y = thin(run.time_s / seconds, run.values[key])
                axis.plot(x, y, color=f"C{i}", linestyle=style, linewidth=1.4, marker="." if len(x) == 1 else None)
        if panel.limit is not None and np.nanmax(run.values.get(panel.limit[0], np.zeros(1))) > 0:
            x, y = thin(run.time_s / seconds, run.values[panel.limit[0]])
            axis.plot(x, y, color=f"C{i}", linestyle=":", linewidth=1.2)
    _explain(axis, panel, runs)
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.tick_params(labelsize=8)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    if panel.unit == "fraction":
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axis.set_ylim(0, 1.08 * axis.dataLim.ymax if axis.dataLim.ymax > 0 else 1.0)
        form = format_bytes if panel.unit == "bytes" else "{:,g}".format
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: form(y)))
    tidy(axis)


def _explain(axis: Any, panel: Panel, runs: list[Rates]) -> None:
    """A legend of the line styles if there are several, and the runs that lack these metrics."""
    styles = [(name, style) for style, (key, name) in zip(STYLES, panel.series.items(), strict=False) if name]
    if panel.limit is not None and any(panel.limit[0] in run.values for run in runs):
        styles.append((panel.limit[1], ":"))
    for name, style in styles:
        axis.plot([], [], color="0.4", linestyle=style, linewidth=1.2, label=name)
    if styles:
        axis.legend(loc="best", frameon=False, fontsize=8)
    without = [name for name, run in zip(_names(runs), runs, strict=True) if not set(panel.series) & set(run.values)]
    if without:
        more = f" and {len(without) - 2} more" if len(without) > 2 else ""
        axis.set_title(f"missing in {', '.join(without[:2])}{more}", fontsize=7, loc="right", color="0.5")


def _names(runs: list[Rates]) -> list[str]:
    """The names of the runs' directories, with the parent directory where two are the same."""
    paths = [run.path.resolve() for run in runs]
    names = [path.name for path in paths]
    return [path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in paths]


def _clock(longest: float) -> tuple[float, str]:
    """The unit of time for a run of `longest` seconds: its length and its name."""
    return next((n, unit) for n, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")) if longest >= 3 * n or n == 1.0)


def thin(x: Array, y: Array, points: int = 300) -> tuple[Array, Array]:
    """The finite points; if there are more than `points`, the means over that many equal intervals of x."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= points or x[0] == x[-1]:
        return x, y
    interval = np.clip(((x - x[0]) / (x[-1] - x[0]) * points).astype(int), 0, points - 1)
    n = np.bincount(interval, minlength=points)
    x, y = (np.bincount(interval, values, points)[n > 0] / n[n > 0] for values in (x, y))
    return x, y
