"""Predicts what a run would do with other numbers of actors, from the metrics of one that was run on this kind of machine.

With --cores, everything shares one machine with so many cores. Without, each process has a core, and actors are on other
hosts. See docs/many_machines.md for what it knows and what it does not.

Example: veldt plan runs/pong --actors 10 100 1000 --per-host 32
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from veldt.bounds import above, at_least, check
from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.watching.planner import SERVICES, Costs, Forecast, calibrate, forecast
from veldt.watching.plot import read_lines


@dataclass(frozen=True)
class Plan:
    run: tyro.conf.Positional[Path]
    """The directory of a finished run, in processes."""
    actors: Annotated[tuple[int, ...], above(0)] = (1, 2, 4, 8, 16)
    """Numbers of actors."""
    cores: Annotated[float, at_least(0)] = 0.0
    """Cores of the one machine that the run has; 0: each process has a core of its own."""
    per_host: Annotated[int, at_least(0)] = 0
    """Actors of a site (veldt actor --actors); 0: each actor joins by itself."""
    price: Annotated[float, at_least(0)] = 0.0
    """USD for an hour of a core; 0: costs are not shown."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Plan, args=argv, prog="veldt plan", description=__doc__)
    check(args)
    from veldt.cli.on_ray import JOINABLE
    from veldt.experiment.run import Run  # here: they import torch

    config = Run(args.run).config
    if config.topology not in JOINABLE:
        raise UserError(
            f"{config.recipe} has other processes than the planner knows: it plans from Ape-X, R2D2, IMPALA and SEED."
        )
    looks = config.refresh * config.envs_per_actor if config.inference == "local" else 0.0
    weights = args.run / "checkpoints" / "latest" / "weights.safetensors"
    size = os.stat(weights).st_size if weights.exists() else 0
    costs = calibrate(read_lines(args.run), size, looks)
    print(introduction(costs))
    for line in table([forecast(costs, n, args.cores, args.per_host) for n in args.actors], args.price):
        print(line)
    if "gate" not in costs.cpu:
        print("The gate was not measured: calibrate with a run that some actors have joined.")
    return 0


def introduction(costs: Costs) -> str:
    """CPU of an env step."""
    kinds = [kind for kind in ("actor", *SERVICES) if kind in costs.cpu]
    parts = ", ".join(f"{kind} {1e6 * costs.cpu[kind]:.0f} us" for kind in kinds)
    return (
        f"CPU of an env step: {parts}; {costs.updates:.3g} updates (replay ratio {costs.ratio:.3g}); {costs.sent:.0f} "
        f"bytes sent; weights {format_bytes(costs.weights)}"
    )


def table(rows: list[Forecast], price: float) -> list[str]:
    names = ["actors", "env steps/s", "updates/s", "cores", "sent/s", "weights/s", "age s"]
    names += ["USD/1e9"] if price else []
    widths = (7, 12, 10, 8, 11, 11, 7, 10)
    lines = ["".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=False)) + "  limit"]
    for row in rows:
        shown = [f"{row.actors:,}", f"{row.env_steps:,.0f}", f"{row.updates:,.1f}", f"{row.cores:,.1f}"]
        shown += [format_bytes(row.sent), format_bytes(row.weights), f"{row.age:.2g}"]
        shown += [f"{price * row.cores / 3600 * 1e9 / row.env_steps:.2f}"] if price else []
        cells = "".join(f"{text:>{width}}" for text, width in zip(shown, widths, strict=False))
        lines.append(f"{cells}  {row.limit}")
    return lines
