"""veldt resume: continues a run from its last checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from veldt.cli.train import hiding
from veldt.experiment.changes import ON_RESUME
from veldt.experiment.config import Config
from veldt.experiment.run import Run, resume
from veldt.experiment.settings import flat, without_effect

DESCRIPTION = """Continues a run from its last checkpoint. The settings below can change; what does is printed, and recorded
in config_history.jsonl.

Example: veldt resume runs/cart --steps 200_000 --learner.lr 1e-4"""


@dataclass(frozen=True)
class Resume:
    run: tyro.conf.Positional[Path]
    """The run's directory."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    until: int | None = None
    """Pause at this number of env steps."""
    quiet: bool = False
    """Print nothing while training."""
    trust: bool = False
    """Import code that the run's config names, and let it open ports and send metrics."""


def run(argv: list[str]) -> int:
    path = next((Path(word) for word in argv if (Path(word) / "config.yaml").is_file()), None)
    config = Config() if path is None else Run(path, "--trust" in argv).config
    default = Resume(Path() if path is None else path, config)
    registry = None
    if {"-h", "--help"} & set(argv):
        names = flat(config).keys() - {"env"}
        registry = hiding(config, {name for name in names if name not in ON_RESUME} | without_effect(config).keys())
    if path is None:  # required then
        default = Resume(tyro.MISSING, config)
    args = tyro.cli(Resume, args=argv, prog="veldt resume", description=DESCRIPTION, default=default, registry=registry)
    before = flat(config)
    changed = {name: value for name, value in flat(args.config).items() if value != before[name]}
    resume(args.run, quiet=args.quiet, trust=args.trust, env=changed.pop("env", None), until=args.until, **changed)
    return 0
