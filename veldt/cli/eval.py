"""Plays greedy episodes with the last weights of a run, or with the best ones.

Example: veldt eval runs/cart --episodes 20 --video cart.gif
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from veldt.errors import count
from veldt.experiment.run import Run, Which, check_video, record_video


@dataclass(frozen=True)
class Eval:
    run: tyro.conf.Positional[Path]
    """The run's directory."""
    env: str = ""
    """Another environment with the same observations and actions (default: the run's): a Gymnasium id, module:callable or
    path/file.py:callable."""
    episodes: int = 20
    """Number of episodes."""
    seed: int = 0
    """Seed of the environments."""
    epsilon: float | None = None
    """Fraction of random actions (default: eval.epsilon of the run)."""
    json: bool = False
    """Print one JSON object on the last line: mean_return, returns, mean_length, bad_episodes."""
    best: bool = False
    """The weights with the best evaluation during training, instead of the last ones."""
    video: Path | None = None
    """Record an episode to this file (.gif or .mp4)."""
    trust: bool = False
    """Import the code that the run's config names (module:callable)."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Eval, args=argv, prog="veldt eval", description=__doc__)
    if args.video is not None:
        check_video(args.video)
    which: Which = "best" if args.best else "latest"
    result = Run(args.run, args.trust).evaluate(args.episodes, args.seed, args.epsilon, args.env, which)
    print(
        f"{count(args.episodes, 'episode')}: mean return {result.mean_return:.1f} "
        f"(worst {min(result.returns):.1f}, best {max(result.returns):.1f}, sd {np.std(result.returns):.1f}), "
        f"mean length {result.mean_length:.1f}"
    )
    if result.bad_episodes:
        print(
            f"{result.bad_episodes} of these had observations or rewards that are not finite: the policy got "
            "zeros for such observations, and returns are the sums of the finite rewards"
        )
    if args.video is not None:
        run = Run(args.run, args.trust)
        frames = record_video(run, args.video, args.seed, epsilon=args.epsilon, env=args.env, which=which)
        print(f"{args.video}: {frames} frames")
    if args.json:
        numbers = {"mean_return": result.mean_return, "returns": result.returns, "mean_length": result.mean_length}
        print(json.dumps(numbers | {"bad_episodes": result.bad_episodes}))
    return 0
