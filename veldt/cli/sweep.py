"""Trains all settings and seeds of a file, several runs at a time, and writes one table and one plot.

Repeat the command to continue where it stopped; finished runs are skipped. On Ctrl-C each run writes a checkpoint.

Example: veldt sweep examples/sweeps/catch.yaml --at-once 2

  recipe: dqn
  env: veldt/Catch-v0
  seeds: [0, 1, 2]
  set: {steps: 4_000, eval.every: 250}
  settings:
    one step: {algorithm.n: 1}
    three steps: {algorithm.n: 3}

Other keys: name, at_once, episodes (of the last evaluation), reach (a return: report when it was reached), timeout_s (per
run), grid (all combinations, as in grid: {learner.lr: [1e-3, 1e-4]}).
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml

from veldt.cli.plot import read_curve
from veldt.errors import UserError, did_you_mean
from veldt.experiment.directory import exclusive
from veldt.experiment.session import Interrupted
from veldt.experiment.sweep import Spec, Trial, read_spec, slug
from veldt.experiment.trials import Sweep, scores, table
from veldt.files import replace_text
from veldt.watching.plot import Curve, draw

WHOLE = ("dir", "at_once", "trust")  # flags of the whole sweep


@dataclass(frozen=True)
class Flags:
    file: tyro.conf.Positional[Path]
    """The YAML file of the sweep."""
    dir: Path | None = None
    """Directory for the runs, table.md and curves.png (default: sweeps/NAME)."""
    at_once: int | None = None
    """Runs at a time (default: at_once of the file, or 1)."""
    only: tuple[str, ...] = ()
    """Run only these settings."""
    table: bool = False
    """Run nothing; make the table and the plot of the finished runs."""
    trust: bool = False
    """Import code that the file names (module:callable), and let it open ports and send metrics."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Flags, args=argv, prog="veldt sweep", description=__doc__)
    if args.at_once is not None and args.at_once < 1:
        raise UserError(f"--at-once must be greater than 0, not {args.at_once}.")
    spec = read_spec(args.file, args.trust)
    directory = args.dir or Path("sweeps") / slug(spec.name)
    trials = spec.trials(directory)
    chosen = _chosen(spec, args.only)
    whole, again = command_of("sweep", args, *WHOLE), command_of("sweep", args, *WHOLE, "only")
    for trial in trials:
        trial.check()
    if args.table:
        if not directory.is_dir():
            raise UserError(f"There is no {directory} yet; leave out --table to start the runs.")
        report(spec, trials, directory, whole)
        return 0
    sweep = Sweep(spec, [trial for trial in trials if trial.setting in chosen], args.at_once or spec.at_once)
    sweep.check_memory()
    with exclusive(directory, "--dir"):
        replace_text(directory / "sweep.yaml", yaml.safe_dump({**spec.plain, "at_once": sweep.at_once}, sort_keys=False))
        sweep.run()
        if sweep.interrupted:
            print(f"Stopped with {sweep.done} of {sweep.total} runs finished. Resume with: {again}")
            raise Interrupted(sweep.interrupted, directory)
        report(spec, trials, directory, whole)
    for failed in sweep.failed:
        print(f"\n{failed}")
    if sweep.failed:
        print(f"\n{len(sweep.failed)} of {sweep.total} runs failed. Retry with: {again}")
    return 1 if sweep.failed else 0


def report(spec: Spec, trials: list[Trial], directory: Path, command: str) -> None:
    text = table(spec, scores(spec, trials), command)
    replace_text(directory / "table.md", text)
    groups: dict[str, list[Curve]] = {setting.name: [] for setting in spec.settings}
    for trial in trials:
        if trial.result(spec.episodes) is not None:
            try:
                groups[trial.setting].append(read_curve(trial.path))
            except UserError:  # it has no returns: there was no evaluation, and no episode ended
                continue
    groups = {name: curves for name, curves in groups.items() if curves}
    print(f"\n{text}\nWritten to {directory / 'table.md'}", flush=True)
    if groups:
        draw(groups, directory / "curves.png")
        print(f"Curves in {directory / 'curves.png'}", flush=True)


def _chosen(spec: Spec, only: tuple[str, ...]) -> set[str]:
    """The names of the settings to run; `only` may have directories too."""
    names = {setting.name: setting.name for setting in spec.settings}
    known = names | {setting.slug: setting.name for setting in spec.settings}
    for name in only:
        if name not in known:
            raise UserError(f"There is no setting {name!r}.{did_you_mean(name, known, names)}")
    return {known[name] for name in only or names}


def command_of(verb: str, args: Any, *flags: str) -> str:
    """The command that goes on with this file and these flags, as far as they were given."""
    words = ["veldt", verb, str(args.file)]
    for name in flags:
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words += [flag, *map(str, values)] if value else []
    return shlex.join(words)
