"""Plots returns against env steps and against time or, with --rates, the rates of each part of the run.

Runs that differ only in their seed become one curve. Of a population (veldt pbt): its family tree, what was tuned, and the
fitness. Example: veldt plot runs/* -o curves.png
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from veldt.bounds import above, check
from veldt.envs.atari import frame_skip
from veldt.errors import UserError, count
from veldt.experiment.directory import MAY_CHANGE, read_settings
from veldt.foreign import printable
from veldt.watching.lineage import FILE
from veldt.watching.plot import Curve, Look, check_image, draw, group
from veldt.watching.plot_lineage import draw_lineage
from veldt.watching.plot_rates import Rates, draw_rates

Read = TypeVar("Read", Curve, Rates)


@dataclass(frozen=True)
class Plot:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories. The seeds of one setting become their mean, with their range, or from five seeds on with its 95 %
    bootstrap interval."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The image to write: .png, .svg or .pdf (default: curves.png, or rates.png)."""
    x: Literal["steps", "frames", "hours", "updates"] | None = None
    """Draw against this alone. Frames: of Atari, where an env step has several."""
    log: Literal["x", "y", "xy"] | None = None
    """Make these axes logarithmic."""
    smooth: Annotated[int, above(0)] = 1
    """Replace each point by the mean of this many neighbours."""
    iqm: bool = False
    """Draw the interquartile mean of the seeds instead of their mean."""
    rates: bool = False
    """Draw the rates of the links, waiting times, lag, replay ratio, CPU and RAM against time."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Plot, args=argv, prog="veldt plot", description=__doc__)
    if not args.runs:
        raise UserError("Name the runs to plot, for example: veldt plot runs/* -o curves.png")
    check(args)
    populations = [path for path in args.runs if (path / FILE).exists()]
    out = args.out or Path("rates.png" if args.rates else "population.png" if populations else "curves.png")
    check_image(out)
    if populations:
        if len(args.runs) > 1:
            raise UserError(f"{populations[0]} is a population: draw it alone, or name runs in it, such as member-0.")
        draw_lineage(populations[0], out)
        print(f"{out}: the population {populations[0]}")
        return 0
    if args.rates:
        rates = read_all(args.runs, Rates.read)
        draw_rates(rates, out)
        print(f"{out}: {', '.join(str(one.path) for one in rates)}")
        return 0
    groups = group(read_all(args.runs, read_curve))
    draw(groups, out, Look(args.x or "", log=args.log or "", smooth=args.smooth, iqm=args.iqm))
    drawn = (f"{name} ({count(len(curves), 'run')})" for name, curves in groups.items())
    print(f"{out}: {'; '.join(drawn)}")
    return 0


def read_all(paths: tuple[Path, ...], read: Callable[[Path], Read]) -> list[Read]:
    """Those that can be drawn; the others are named on stderr. Raises a UserError if there is none."""
    found, errors = [], []
    for path in paths:
        try:
            found.append(read(path))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for why in errors:
        print(f"veldt: left out: {printable(str(why))}", file=sys.stderr)
    return found


def read_curve(path: Path) -> Curve:
    """The learning curve of a run, with the settings that distinguish it from other runs."""
    curve, settings = Curve.read(path), read_settings(path / "config.yaml")
    skip = frame_skip(str(settings.get("env", "")), str(settings.get("protocol", "")))
    settings = {name: x for name, x in settings.items() if name not in {"seed", *MAY_CHANGE}}
    return replace(curve, settings=settings, frame_skip=skip)
