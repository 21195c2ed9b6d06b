"""Records a demonstration set: whole episodes of an expert, or of the policy that a run learned.

An expert is a function that takes the environment at the start of an episode and returns a function from an observation
to an action. Ctrl-C stops and keeps the whole episodes so far.

Example: veldt record --policy my_experts:balance --env CartPole-v1 --episodes 20 -o demos/cart
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from veldt import bounds, callables
from veldt.acting.actor import Policy
from veldt.bounds import above, at_least, between
from veldt.demos.recording import MAX_LENGTH, Recording, Scripted, make_played, record
from veldt.envs import Envs, is_atari
from veldt.errors import UserError, count
from veldt.experiment.run import Run
from veldt.experiment.session import Interrupted
from veldt.seeds import derive
from veldt.signals import interruptible
from veldt.watching.view import PLAIN_EVERY


@dataclass(frozen=True)
class Record:
    policy: str
    """An expert as module:callable or path/file.py:callable; or the directory of a run, whose last weights act greedily."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The directory to create."""
    env: str = ""
    """A Gymnasium id, module:id, module:callable or path/file.py:callable (default: that of the run)."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment, key=value (default: those of the run, if its environment is played)."""
    wrappers: tuple[str, ...] = ()
    """Wrappers, module:callable, applied to the environment in this order (default: those of the run)."""
    image_size: Annotated[int, between(0, 1024)] = 0
    """Resize large images, as in veldt train (default: as in the run)."""
    grayscale: bool = False
    """Make large images grey (default: as in the run)."""
    action_masks: bool = True
    """Read which actions are legal, as in veldt train (default: as in the run)."""
    episodes: Annotated[int, above(0)] = 20
    """Number of episodes to record."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of the environment and of random actions."""
    epsilon: float | None = None
    """Policy of a run: fraction of random actions (default: eval.epsilon of the run)."""
    min_return: float | None = None
    """Keep only episodes with at least this return."""
    max_length: Annotated[int, above(0)] = MAX_LENGTH
    """Steps after which an episode that does not end is truncated."""
    protocol: str = ""
    """Atari: protocol, as in veldt train (default: that of the run, or dqn)."""
    quiet: bool = False
    """Print nothing."""
    trust: bool = False
    """Policy of a run: import the code that its config names (module:callable)."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Record, args=argv, prog="veldt record", description=__doc__)
    bounds.check(args)
    if args.epsilon is not None and not 0 <= args.epsilon <= 1:
        raise UserError(f"epsilon is a probability, from 0 to 1, not {args.epsilon}.")
    least = -math.inf if args.min_return is None else args.min_return
    if math.isnan(least):
        raise UserError("min_return must be a number.")
    envs, policy = _make_player(args)
    signals: list[int] = []
    limits = (args.episodes, args.seed, least, args.max_length)
    with closing(envs), _progress(args) as show, interruptible(signals.append, "" if args.quiet else "Stopping"):
        demos = record(args.out, envs, policy, *limits, args.policy, show, lambda: bool(signals))
    if not args.quiet:
        if demos is None:
            print("Stopped before an episode ended; nothing was recorded.")
        else:
            stopped = (
                f"Stopped at {len(demos)} of {count(args.episodes, 'episode')}" if signals else count(len(demos), "episode")
            )
            discarded = f", {demos.discarded} discarded" if demos.discarded else ""
            print(f"{args.out}: {stopped}, {demos.steps:,} steps, mean return {demos.returns.mean():.1f}{discarded}")
    if signals:
        raise Interrupted(signals[0], args.out)
    return 0


def _make_player(args: Record) -> tuple[Envs, Policy]:
    path = Path(args.policy)
    if path.is_dir():
        return _greedy(args, path)
    if ":" not in args.policy:
        raise UserError(f"{args.policy!r} is neither the directory of a run nor module:callable.")
    make = callables.find(args.policy)
    if make is None:
        raise UserError(f"{args.policy!r} is not callable.")
    if args.epsilon is not None:
        raise UserError("--epsilon is for the policy of a run; an expert chooses all of its actions.")
    if not args.env:
        raise UserError("Give the environment to play, for example --env CartPole-v1")
    _check_protocol(args.env, args.protocol)
    how: dict[str, Any] = {"kwargs": args.env_kwargs, "wrappers": args.wrappers, "image_size": args.image_size}
    how |= {"grayscale": args.grayscale, "action_masks": args.action_masks}
    # The algorithms that learn from demonstrations of choices take a single one.
    envs, game = make_played(callables.absolute(args.env), args.protocol, combine=True, **how)
    return envs, Scripted(make, game, envs.spec, args.policy)


def _greedy(args: Record, path: Path) -> tuple[Envs, Policy]:
    run = Run(path, args.trust)
    config = run.config
    env = args.env or config.env
    protocol = args.protocol or (config.protocol if is_atari(env) else "")
    _check_protocol(env, protocol)
    given: dict[str, Any] = {
        "protocol": protocol,
        "kwargs": args.env_kwargs,
        "wrappers": args.wrappers,
        "image_size": args.image_size,
        "grayscale": args.grayscale,
    }
    how = {name: value for name, value in given.items() if value} | ({} if args.action_masks else {"action_masks": False})
    envs = run.envs(1, env=args.env, **how)
    try:
        policy = run.policy(args.epsilon, envs.spec)
    except UserError:
        envs.close()
        raise
    policy.rng = np.random.default_rng(derive(args.seed, "demonstrator"))
    return envs, policy


def _check_protocol(env: str, protocol: str) -> None:
    if protocol and not is_atari(env):
        raise UserError(f"protocol {protocol!r} is for Atari (ALE/...), not for {env}.")


@contextmanager
def _progress(args: Record) -> Iterator[Callable[[Recording], None]]:
    console, printed = Console(), time.monotonic()
    bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=True)
    task = bar.add_task("", total=args.episodes)

    def show(recording: Recording) -> None:
        nonlocal printed
        kept = len(recording.returns)
        text = f"{kept} of {count(args.episodes, 'episode')}, {recording.steps:,} steps"
        text += f", mean return {np.mean(recording.returns):.1f}" if kept else f", best return {recording.best:.1f}"
        text += f", {recording.discarded} discarded" if recording.discarded else ""
        if console.is_terminal:
            bar.update(task, completed=kept, description=text)
        elif not args.quiet and time.monotonic() - printed >= PLAIN_EVERY:
            printed = time.monotonic()
            print(text, flush=True)

    with bar if console.is_terminal and not args.quiet else nullcontext():
        yield show
