"""Makes a results page of runs: scores with intervals, learning curves, and what each run took. Markdown, HTML and PNG.

Example: veldt report runs/* -o results/pong
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from veldt.envs import is_atari
from veldt.envs.atari import find_protocol
from veldt.errors import UserError
from veldt.experiment.directory import MAY_CHANGE, load_config, read_yaml
from veldt.experiment.settings import flat
from veldt.watching import page, scores
from veldt.watching.report import Entry, report


@dataclass(frozen=True)
class Report:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories. All of them are in the report, also those that failed, were stopped or are running."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report")
    """The page: OUT.md, OUT.html, and its images OUT.png or OUT-GAME.png."""
    published: bool = False
    """Show published scores of DQN, Rainbow, Ape-X, IMPALA and PPO beside those of Atari games."""
    reference: Path | None = None
    """A YAML file of scores to compare with, as in {CartPole-v1: {random: 22, human: 500, another: 475}}: returns are
    normalised by `random` and `human`, other names are shown beside them."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Report, args=argv, prog="veldt report", description=__doc__)
    if not args.runs:
        raise UserError("Name the runs to report, for example: veldt report runs/* -o results")
    entries = [read_entry(path) for path in dict.fromkeys(args.runs)]
    reference = scores.atari57()
    if args.reference is not None:
        reference = scores.add(reference, read_yaml(args.reference), args.reference)
    out = args.out.with_suffix("") if args.out.suffix in (".md", ".html", ".png") else args.out
    if not out.parent.is_dir():
        raise UserError(f"The directory of {args.out} does not exist.")
    sections = report(entries, reference, args.published or args.reference is not None, out)
    files = page.write("Results", sections, shlex.join(["veldt", "report", *argv]), out)
    print(f"{', '.join(map(str, files))}: {len(entries)} run{'s' if len(entries) > 1 else ''}")
    for entry in entries:
        if not entry.points:
            print(f"{entry.path} has no evaluation: it is listed, without a score.")
    return 0


def read_entry(path: Path) -> Entry:
    if not (path / "config.yaml").exists():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    config = load_config(path / "config.yaml")
    settings = {name: x for name, x in flat(config).items() if name not in {"seed", "env", *MAY_CHANGE}}
    skip, protocol = 1, ""
    if is_atari(config.env):
        skip, protocol = find_protocol(config.protocol).frame_skip, config.protocol or "dqn"
    return Entry(path, settings, config.env, config.seed, config.steps, skip, config.learner.batch, protocol)
