"""Population-based training (Jaderberg et al. 2017): trains many runs, and replaces bad ones by copies of good ones.

Each member is an ordinary run. Each time it is ready, one that is among the worst takes weights, target network and
optimizer of one among the best, and goes on with changed settings. Repeat the command to continue where it stopped, also
after kill -9. On Ctrl-C the members in training go on until they are ready.

Example: veldt pbt examples/populations/cartpole.yaml --at-once 2

  recipe: impala
  env: CartPole-v1
  population: 8
  steps: 100_000            # env steps of each member
  ready: 10_000             # env steps between two times that a member may copy
  tune:
    learner.lr: {loguniform: [1e-5, 1e-1]}
    algorithm.entropy_cost: {loguniform: [1e-4, 1e-1]}

Other keys: name, seed, set, at_once, episodes, timeout_s, warm_up, order, copy_store, exploit (truncation, tournament,
t-test or none), explore (factors, resample): docs/populations.md.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from veldt.cli.sweep import command_of
from veldt.errors import UserError
from veldt.experiment.directory import exclusive
from veldt.experiment.populations.crew import Processes
from veldt.experiment.populations.roster import number
from veldt.experiment.populations.scheduler import FILE, Scheduler, check_same
from veldt.experiment.populations.spec import Spec, read_spec
from veldt.experiment.session import Interrupted
from veldt.experiment.sweep import slug
from veldt.watching.lineage import read_lineage
from veldt.watching.plot_lineage import draw_lineage

IMAGE = "population.png"


@dataclass(frozen=True)
class Flags:
    file: tyro.conf.Positional[Path]
    """The YAML file of the population."""
    dir: Path | None = None
    """Directory for its members, lineage.jsonl and population.png (default: populations/NAME)."""
    at_once: int | None = None
    """Members that are trained at the same time (default: at_once of the file, or 1)."""
    copy_store: bool = False
    """A copy takes the other member's replay too (copy_store: true in the file)."""
    plot: bool = False
    """Train nothing; draw the family tree, the settings and the fitness so far."""
    quiet: bool = False
    """Print nothing but the result."""
    trust: bool = False
    """Import code that the file names (module:callable), and let it open ports and send metrics."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Flags, args=argv, prog="veldt pbt", description=__doc__)
    if args.at_once is not None and args.at_once < 1:
        raise UserError(f"--at-once must be greater than 0, not {args.at_once}.")
    spec = read_spec(args.file, args.trust)
    if args.copy_store:
        spec = replace(spec, copy_store=True, plain={**spec.plain, "copy_store": True})
    spec = replace(spec, at_once=args.at_once or spec.at_once)
    directory = args.dir or Path("populations") / slug(spec.name)
    check_same(spec.plain, directory / FILE)
    if args.plot:
        if not directory.is_dir():
            raise UserError(f"There is no {directory} yet; leave out --plot to train the population.")
        draw_lineage(directory, directory / IMAGE)
        print(f"Drawn in {directory / IMAGE}")
        return 0
    with exclusive(directory, "--dir"):
        scheduler = Scheduler(spec, directory, Processes(directory), args.quiet)
        scheduler.check_memory()
        scheduler.run()
        if scheduler.interrupted:
            done = sum(member.quantum for member in scheduler.population.members)
            again = command_of("pbt", args, "dir", "at_once", "copy_store", "trust")
            print(f"Stopped with {done} of {spec.size * spec.quanta} quanta done. Continue with: {again}")
            raise Interrupted(scheduler.interrupted, directory)
        return report(spec, scheduler, directory)


def report(spec: Spec, scheduler: Scheduler, directory: Path) -> int:
    members, best = scheduler.population.members, scheduler.population.best
    for member in members:
        if member.out:
            print(f"member {member.index} was given up: {member.failed}")
    if best is None:
        print(f"No member has a fitness; see {directory / 'worker-0.log'} and the log.txt of its runs.")
        return 1
    tuned = ", ".join(f"{name} {number(x)}" for name, x in best.tuned.items())
    copies = sum("copied" in line for line in read_lineage(directory))
    print(f"{spec.size} members, {sum(member.env_steps for member in members):,} env steps, {copies} copies.")
    print(
        f"Best: member {best.index}, fitness {best.fitness:.4g} ({spec.base.config.eval.episodes} episodes), with {tuned}."
    )
    draw_lineage(directory, directory / IMAGE)
    run = shlex.quote(str(directory / f"member-{best.index}"))
    print(f"Its history: {directory / IMAGE}. Evaluate it with: veldt eval {run}")
    return 0
