"""Plots returns against env steps and against time or, with --rates, the rates of each part of the run.

Example: veldt plot runs/* -o curves.png
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from veldt.errors import Untrusted, UserError
from veldt.experiment.directory import MAY_CHANGE, load_config, read_yaml
from veldt.experiment.settings import flat, flat_dict
from veldt.watching.plot import Curve, Rates, draw, draw_rates, group


@dataclass(frozen=True)
class Plot:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; runs that differ only in their seed become one curve with mean and range."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The image to write (default: curves.png, or rates.png)."""
    rates: bool = False
    """Draw the rates of the links, waiting times, lag, replay ratio, CPU and RAM against time."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Plot, args=argv, prog="veldt plot", description=__doc__)
    if not args.runs:
        raise UserError("Name the runs to plot, for example: veldt plot runs/* -o curves.png")
    if args.rates:
        out = args.out or Path("rates.png")
        draw_rates([Rates.read(path) for path in args.runs], out)
        print(f"{out}: {', '.join(str(path) for path in args.runs)}")
        return 0
    out, groups = args.out or Path("curves.png"), group([read_curve(path) for path in args.runs])
    draw(groups, out)
    print(f"{out}: {'; '.join(f'{name} (n = {len(curves)})' for name, curves in groups.items())}")
    return 0


def read_curve(path: Path) -> Curve:
    """The learning curve of a run, with the settings that distinguish it from other runs."""
    curve, file = Curve.read(path), path / "config.yaml"
    try:
        settings = flat(load_config(file))
    except Untrusted:  # its recipe is code, which a plot needs not
        settings = flat_dict(read_yaml(file))
    return replace(curve, settings={name: x for name, x in settings.items() if name not in {"seed", *MAY_CHANGE}})
