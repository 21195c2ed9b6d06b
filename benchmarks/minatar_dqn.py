"""DQN on MinAtar: our recipe, the published DQN's settings in our code, and a random policy, at equal frames.

    python benchmarks/minatar_dqn.py --runs runs/minatar -o docs/results/minatar

trains what is not yet trained in the directory (on two cores about 15 minutes a run of the recipe, 20 of the published
settings), then writes a picture, and the table as Markdown and JSON.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import veldt
from veldt.envs import make_env

GAMES = ("Breakout", "SpaceInvaders")
# Young and Tian 2019, examples/dqn.py; 8 environments in lockstep instead of one.
PUBLISHED = {
    "algorithm.n": 1,
    "algorithm.double": False,
    "algorithm.dueling": False,
    "actor.epsilon_end": 0.1,
    "actor.epsilon_steps": 100_000,
    "store.selector": "uniform",
    "store.samples_per_insert": 32.0,
    "learner.optimizer": "rmsprop",
    "learner.lr": 2.5e-4,
    "learner.eps": 0.01,
    "learner.decay": 0.95,
    "learner.clip_norm": 0.0,
    "learner.target_every": 1_000,
    "learner.publish_every": 8,
    "learner.anneal": False,
    "learner.prefetch": 1,
    "eval.every": 50_000,
    "checkpoint.every": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {"recipe": {}, "published": PUBLISHED}


def train(directory: Path, game: str, setting: str, seed: int) -> None:
    """Trains the run, or resumes it; does nothing if it is finished."""
    veldt.train("dqn", env=f"MinAtar/{game}-v0", run=directory, seed=seed, quiet=True, **SETTINGS[setting])


def random_return(game: str, episodes: int = 1_000) -> float:
    """The mean return of uniformly random actions."""
    envs, rng = make_env(f"MinAtar/{game}-v0", 20), np.random.default_rng(0)
    envs.reset(0)
    returns, total = [], np.zeros(20)
    while len(returns) < episodes:
        record = envs.step(rng.integers(0, envs.spec.n_actions, 20))
        total += record["reward"]
        returns += total[record["last"]].tolist()
        total[record["last"]] = 0
    return float(np.mean(returns))


def summary(directory: Path) -> dict[str, Any]:
    """The curves of a run, and the mean return of its last weights if they exist."""
    run = veldt.Run(directory)
    lines = run.metrics
    out: dict[str, Any] = {
        "env_steps": lines[-1]["env_steps"],
        "hours": lines[-1]["time_s"] / 3600,
        "training": [(x["env_steps"], x["train_return"]) for x in lines if "train_return" in x],
        "greedy": [(x.env_steps, x.mean_return) for x in run.evaluations],
    }
    if (directory / "checkpoints").exists():
        out["last_greedy"] = run.evaluate(100, seed=1).mean_return
        out["last_epsilon_0.1"] = run.evaluate(100, seed=1, epsilon=0.1).mean_return
    return out


def mean(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(results: dict[str, Any]) -> str:
    lines = [
        "| game | settings | frames | training return | greedy, last weights | epsilon 0.1, last weights |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for game, result in results.items():
        lines.append(f"| {game} | random policy | | {result['random']:.2f} | | |")
        for setting in SETTINGS:
            runs = result[setting]
            last = [run["training"][-1][1] for run in runs]
            greedy, epsilon = ([r[k] for r in runs if k in r] for k in ("last_greedy", "last_epsilon_0.1"))
            frames = sorted(round(run["env_steps"], -3) for run in runs)
            span = f"{frames[0]:,}" if frames[0] == frames[-1] else f"{frames[0]:,} to {frames[-1]:,}"
            lines.append(f"| {game} | {setting} | {span} | {mean(last)} | {mean(greedy)} | {mean(epsilon)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, len(results), figsize=(11, 4.2))
    for axis, (game, result) in zip(axes, results.items(), strict=True):
        for setting, colour in (("recipe", "tab:blue"), ("published", "tab:orange")):
            for kind, style in (("greedy", "-"), ("training", ":")):
                for number, run in enumerate(result[setting]):
                    x, y = np.array(run[kind]).T
                    label = None if number else f"{setting}, {kind}"
                    axis.plot(x, y, style, color=colour, linewidth=1.2, alpha=0.8, label=label)
        axis.axhline(result["random"], color="grey", linewidth=1, label="random policy")
        axis.set(title=f"MinAtar {game}", xlabel="frames (env steps)", ylabel="return")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/minatar"))
    parser.add_argument("-o", "--out", type=Path, default=Path("minatar"), help="stem of the .png, .md and .json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--no-train", action="store_true", help="only sum up what is there")
    args = parser.parse_args()
    jobs = [(game, setting, seed) for seed in range(args.seeds) for game in GAMES for setting in SETTINGS]
    paths = {job: args.runs / f"{job[0]}-{job[1]}-s{job[2]}" for job in jobs}
    if not args.no_train:
        with ProcessPoolExecutor(args.at_once) as pool:
            for future in [pool.submit(train, paths[job], *job) for job in jobs]:
                future.result()
    results: dict[str, Any] = {}
    for game in GAMES:
        results[game] = {"random": random_return(game)}
        for setting in SETTINGS:
            results[game][setting] = [summary(paths[game, setting, seed]) for seed in range(args.seeds)]
    args.out.with_suffix(".json").write_text(json.dumps(results))
    args.out.with_suffix(".md").write_text(table(results) + "\n")
    draw(results, args.out.with_suffix(".png"))
    print(table(results))


if __name__ == "__main__":
    main()
