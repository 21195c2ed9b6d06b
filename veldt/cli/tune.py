"""Searches for settings of a recipe with Optuna: trains one run after the other, and stops those that are worse early.

Any settings can be tuned. The first trial has the recipe's own. Repeat the command to continue where it stopped, also after
kill -9; more trials: raise trials in the file. Needs pip install 'veldt[tune]'.

Example: veldt tune examples/studies/acrobot.yaml

  recipe: dqn
  env: Acrobot-v1
  steps: 60_000
  trials: 20
  prune: {after: 10_000, factor: 3}
  tune:
    learner.lr: {loguniform: [1e-4, 1e-2]}
    learner.target_every: {loguniform: [10, 1000]}

Other keys: name, seed, set, at_once, episodes, timeout_s: docs/populations.md.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro
import yaml

from veldt.cli.sweep import command_of
from veldt.errors import UserError
from veldt.experiment.directory import exclusive
from veldt.experiment.populations.scheduler import check_same
from veldt.experiment.populations.study import read_study
from veldt.experiment.populations.tuning import Tuner, best_command, optuna
from veldt.experiment.session import Interrupted
from veldt.experiment.sweep import slug
from veldt.files import replace_text
from veldt.watching.links import figure

FILE = "study.yaml"
MAY_DIFFER = ("name", "at_once", "timeout_s", "trials")


@dataclass(frozen=True)
class Flags:
    file: tyro.conf.Positional[Path]
    """The YAML file of the search."""
    dir: Path | None = None
    """Directory for the runs and study.db (default: studies/NAME)."""
    at_once: int | None = None
    """Trials at a time (default: at_once of the file, or 1)."""
    trials: int | None = None
    """Trials in all (default: trials of the file, or 20)."""
    trust: bool = False
    """Import code that the file names (module:callable), and let it open ports and send metrics."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Flags, args=argv, prog="veldt tune", description=__doc__)
    for name in ("at_once", "trials"):
        if (given := getattr(args, name)) is not None and given < 1:
            raise UserError(f"--{name.replace('_', '-')} must be greater than 0, not {given}.")
    optuna()
    spec = read_study(args.file, args.trust)
    spec = replace(spec, at_once=args.at_once or spec.at_once, trials=args.trials or spec.trials)
    directory = args.dir or Path("studies") / slug(spec.name)
    check_same(spec.plain, directory / FILE, MAY_DIFFER)
    with exclusive(directory, "--dir"):
        replace_text(directory / FILE, yaml.safe_dump(spec.plain, sort_keys=False))
        tuner = Tuner(spec, directory)
        tuner.check_memory()
        tuner.run()
        if tuner.interrupted:
            again = command_of("tune", args, "dir", "at_once", "trials", "trust")
            print(f"Stopped with {tuner.done} of {spec.trials} trials done. Continue with: {again}")
            raise Interrupted(tuner.interrupted, directory)
    for failed in tuner.failed:
        print(f"\n{failed}")
    if (best := tuner.best()) is None:
        print("No trial was completed.")
        return 1
    trial, score, tuned = best
    print(f"Best: trial {trial}, return {figure(score)} ({spec.episodes} episodes). Try other seeds before you quote it:")
    print(best_command(spec, tuned))
    return 0
