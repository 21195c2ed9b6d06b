"""Makes a results page of runs: scores with intervals, learning curves, and what each run took. Markdown, HTML and PNG.

Example: veldt report runs/* -o results/pong
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from veldt.envs import is_atari
from veldt.envs.atari import frame_skip
from veldt.errors import UserError, count
from veldt.experiment.directory import MAY_CHANGE, config_of, read_settings, read_yaml
from veldt.watching import page, scores
from veldt.watching.links import number
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
    if out.name in ("", ".."):
        raise UserError(f"{args.out} is a directory; name the page, for example: -o results")
    if not out.parent.is_dir():
        raise UserError(f"The directory of {args.out} does not exist.")
    sections = report(entries, reference, args.published or args.reference is not None, out)
    files = page.write("Results", sections, shlex.join(["veldt", "report", *argv]), out)
    print(f"{', '.join(map(str, files))}: {count(len(entries), 'run')}")
    for entry in entries:
        if not entry.points:
            print(f"{entry.path} has no evaluation: it is listed, without a score.")
    return 0


def read_entry(path: Path) -> Entry:
    values = read_settings(config_of(path))
    env = str(values.get("env", ""))
    protocol = str(values.get("protocol") or "dqn") if is_atari(env) else ""
    seed, steps, batch = (_count(path, values, name) for name in ("seed", "steps", "learner.batch"))
    settings = {name: x for name, x in values.items() if name not in {"seed", "env", *MAY_CHANGE}}
    return Entry(path, settings, env, seed, max(1, steps), frame_skip(env, protocol), batch, protocol)


def _count(path: Path, values: dict[str, Any], name: str) -> int:
    if (x := number(values, name)) is None or x < 0:
        raise UserError(f"{path / 'config.yaml'}: {name} is missing, or not a number from 0.")
    return int(x)
