"""Watches a run from another terminal: each link of the chain, each process, the bottleneck.

Example: veldt top runs/my-run
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from veldt.errors import UserError
from veldt.watching.top import Watched, show_running, watch


@dataclass(frozen=True)
class Top:
    run: tyro.conf.Positional[Path | None] = None
    """The run's directory. Without one, lists the runs in runs/ that are running."""
    every: float = 1.0
    """Seconds between two updates."""
    once: bool = False
    """Print the state once and exit."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Top, args=argv, prog="veldt top", description=__doc__)
    if not 0.05 <= args.every <= 3_600:
        raise UserError(f"every must be from 0.05 to 3600 seconds, not {args.every:g}.")
    console = Console()
    if args.run is None:
        show_running(Path("runs"), console)
    else:
        watch(Watched(args.run), console, args.every, args.once or not console.is_terminal)
    return 0
