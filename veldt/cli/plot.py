"""veldt plot: learning curves of one or several runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from veldt.cli.parse import parse
from veldt.errors import UserError
from veldt.log import read_metrics
from veldt.run import MAY_CHANGE, flat, load_config
from veldt.tree import Array


@dataclass(frozen=True)
class Plot:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; those that differ in their seed alone become one curve, mean and range."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("curves.png")
    """The picture to write."""


def run(argv: list[str]) -> int:
    example = "Draws return against env steps and against time.\n\nExample: veldt plot runs/* -o curves.png"
    args = parse(Plot, argv, prog="veldt plot", description=example)
    if not args.runs:
        raise UserError("Say which runs to plot, for example: veldt plot runs/* -o curves.png")
    groups = group([Curve.read(path) for path in args.runs])
    draw(groups, args.out)
    print(f"{args.out}: {'; '.join(f'{name} (n = {len(curves)})' for name, curves in groups.items())}")
    return 0


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run."""

    settings: dict[str, Any]  # what the run was started with, but for its seed
    env_steps: Array  # [n]
    time_s: Array  # [n]
    returns: Array  # [n]
    greedy: bool

    @classmethod
    def read(cls, path: Path) -> Curve:
        if not (path / "metrics.jsonl").exists():
            raise UserError(f"{path} is not a run directory: it has no metrics.jsonl.")
        config, lines = load_config(path / "config.yaml"), read_metrics(path / "metrics.jsonl")
        for key in ("eval_return", "train_return"):  # greedy evaluations, or what exploring gave if there are none
            points: list[dict[str, Any]] = [line for line in lines if line.get(key) is not None]
            if points:
                steps, seconds, returns = (np.array([p[c] for p in points], float) for c in ("env_steps", "time_s", key))
                settings = {name: x for name, x in flat(config).items() if name not in {"seed", *MAY_CHANGE}}
                return cls(settings, steps, seconds, returns, key == "eval_return")
        raise UserError(f"{path} has no returns yet; train it for longer.")


def group(curves: list[Curve]) -> dict[str, list[Curve]]:
    """Runs that differ in their seed alone, under a name that says how they differ from the others."""
    names = [n for n in curves[0].settings if n in ("recipe", "env") or len({str(c.settings.get(n)) for c in curves}) > 1]
    groups: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        label = (str(curve.settings[n]) if n in ("recipe", "env") else f"{n} {curve.settings.get(n)}" for n in names)
        groups[" ".join(label)].append(curve)
    return groups


def draw(groups: dict[str, list[Curve]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, constrained_layout=True)
    for name, curves in groups.items():
        for axis, x in ((axes[0], "env_steps"), (axes[1], "time_s")):
            grid, low, mean, high = band([getattr(c, x) for c in curves], [c.returns for c in curves])
            (line,) = axis.plot(grid, mean, label=f"{name} (n = {len(curves)})", linewidth=1.8)
            axis.fill_between(grid, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    greedy = all(curve.greedy for curves in groups.values() for curve in curves)
    axes[0].set_ylabel("return, greedy episodes" if greedy else "return")
    axes[0].set_xlabel("env steps")
    axes[1].set_xlabel("time (s)")
    axes[0].legend(loc="best", frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"{out} cannot be written ({error}).") from None
    finally:
        plt.close(figure)


def band(xs: list[Array], ys: list[Array], points: int = 200) -> tuple[Array, Array, Array, Array]:
    """(x, least, mean, largest) of several curves, over the stretch that all of them cover."""
    if len(xs) == 1:
        return xs[0], ys[0], ys[0], ys[0]
    grid = np.linspace(max(x[0] for x in xs), max(max(x[0] for x in xs), min(x[-1] for x in xs)), points)
    curves = np.stack([np.interp(grid, x, y) for x, y in zip(xs, ys, strict=True)])  # [seeds, points]
    return grid, curves.min(0), curves.mean(0), curves.max(0)
