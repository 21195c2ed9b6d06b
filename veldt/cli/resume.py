"""veldt resume: continues a run from its last checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from veldt.experiment.run import resume


@dataclass(frozen=True)
class Resume:
    run: tyro.conf.Positional[Path]
    """The run's directory."""
    steps: int | None = None
    """Total env steps, if more than the run was started with."""
    env: str = ""
    """The run's environment, if its name is another here, or one with the same observations and actions: a Gymnasium id,
    module:callable or path/file.py:callable."""
    quiet: bool = False
    """Print nothing while training."""
    trust: bool = False
    """Import code that the run's config names, and let it open ports and send metrics."""


def run(argv: list[str]) -> int:
    example = "Continues a run from its last checkpoint.\n\nExample: veldt resume runs/cart"
    args = tyro.cli(Resume, args=argv, prog="veldt resume", description=example)
    changes: dict[str, Any] = {} if args.steps is None else {"steps": args.steps}
    resume(args.run, quiet=args.quiet, trust=args.trust, env=args.env, **changes)
    return 0
