"""Blind Cliffwalk (Schaul et al., Prioritized Experience Replay, 2016, section 3.1): updates until Q is right.

The store holds all that can happen: each of the 2^n action sequences is played through the environment once, until it
ends, so that one transition in 2^(n+1) - 2 is rewarded. Then only the learner works, with a uniform or a prioritized
selector and nothing else changed, until the mean squared error of Q against the known optimum is below 1e-3.

paper                                       here
Q(s, a) a table, theta ~ N(0, 0.1)          one linear layer without bias on the one-hot observation
gamma = 1 - 1/n, step size 1/4              the same; SGD, squared loss, batches of one, the target copied at each update
memory filled in random order               the order of the sequences is drawn for each seed
new transitions: the largest priority       `--initial largest`; `td` is |y - Q| of the weights that acted (Ape-X)
"""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from torch import nn

from veldt.acting.actor import Policy, ask
from veldt.acting.recorder import Recorder
from veldt.algorithms.dqn import DQN
from veldt.counters import Counters
from veldt.envs import Envs, make_env
from veldt.envs.small import BlindCliffwalk
from veldt.learning.learner import Learner, LearnerConfig
from veldt.learning.params import LatestParams
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized, Uniform

COLOURS = {"uniform": "#c2553a", "prioritized": "#1f6f8b"}
FRESH = 16  # steps in a block
NEVER = 1 << 60
Counts = dict[str, dict[int, list[int]]]  # selector -> n -> updates, one for each seed


@dataclass(frozen=True)
class Settings:
    """Settings of both selectors, and the exponents of the prioritized one."""

    alpha: float = 0.6
    """Prioritized: exponent of the priorities."""
    beta: float = 0.4
    """Prioritized: exponent of the importance weights (of no effect in batches of one)."""
    initial: Literal["largest", "td"] = "largest"
    """Priorities before the first replay: the largest for all, or |y - Q| of the weights that acted."""
    batch: int = 1
    """Items in one update."""
    lr: float = 0.25
    """Step size."""
    error: float = 1e-3
    """Mean squared error of Q that counts as learned."""
    limit: int = 5_000_000
    """Updates after which a run stops."""


@dataclass(frozen=True)
class Args:
    """Updates that uniform and prioritized replay need on Blind Cliffwalk."""

    n: tuple[int, ...] = (4, 6, 8, 10, 12, 14)
    """Numbers of states."""
    seeds: int = 5
    """Seeds for each."""
    selectors: tuple[Literal["uniform", "prioritized"], ...] = ("uniform", "prioritized")
    """Both, or one of them to try a setting; the picture is drawn of both."""
    out: Path = Path("docs/results")
    """Where blind_cliffwalk.png goes, and blind_cliffwalk.json: results in it are not computed again."""
    workers: int = 2
    """Processes."""
    settings: tyro.conf.OmitArgPrefixes[Settings] = Settings()


class Job(NamedTuple):
    n: int
    selector: str
    seed: int


class Table(nn.Module):
    """Q(s, a), one weight for each pair."""

    def __init__(self, env: EnvSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(env.observation["obs"].shape[0], env.n_actions, bias=False)
        nn.init.normal_(self.linear.weight, std=0.1)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.linear(obs)  # [B, n] -> [B, 2]


class Tabular(DQN):
    def network(self, env: EnvSpec) -> nn.Module:
        return Table(env)


def transitions(n: int) -> int:
    """Number of steps over all sequences of actions: 2^n steps in state 0, half as many in each next one."""
    return 2 ** (n + 1) - 2


def optimum(n: int, gamma: float) -> Array:
    """Q* [n, 2]: the right action of state s is worth gamma^(n-1-s), the wrong one nothing."""
    q = np.zeros((n, 2), np.float32)
    for s in range(n):
        q[s, BlindCliffwalk(n).right(s)] = gamma ** (n - 1 - s)
    return q


class Script(Policy):
    """A policy that plays given action sequences, one an episode; the values it reports are those of a network."""

    def __init__(self, net: nn.Module, sequences: Array) -> None:
        self.net, self.sequences = net, sequences  # [episodes, n]
        self.episode, self.t, self.last = -1, 0, False

    def send(self, group: int, step: Tree) -> bool:
        self.episode, self.t = (self.episode + 1, 0) if step["first"][0] else (self.episode, self.t + 1)
        self.last = bool(step["last"][0])
        action = 0 if self.last else self.sequences[self.episode, self.t]  # after the last record it is ignored
        with torch.inference_mode():
            q = self.net(torch.from_numpy(step["obs"])).numpy()  # [1, 2]
        self.out = {"action": np.array([action]), "q": q[:, action], "v": q.max(1)}
        return True

    def recv(self, group: int) -> Tree | None:
        return self.out

    @property
    def done(self) -> bool:
        return self.episode + 1 == len(self.sequences) and self.last


def fill(envs: Envs, recorder: Recorder, script: Script, seed: int) -> None:
    """Plays the script to its end."""
    record = envs.reset(seed)
    while True:
        action = ask(recorder, record)["action"]
        if script.done:
            break
        record = envs.step(action)
    assert recorder.flush(0)


def make_learner(job: Job, settings: Settings) -> Learner:
    """A learner with a store that holds every transition as often as random play visits it."""
    n, selector, seed = job
    envs = make_env(lambda: BlindCliffwalk(n))
    env = envs.spec
    dqn = Tabular(gamma=1 - 1 / n, huber=False)
    schema = Schema({**env.step, "action": env.action, **dqn.extras(env)}, dqn.window, FRESH)
    records = transitions(n) + 2**n  # an episode has one record more than transitions
    slots = -(-records // FRESH)
    leaves = slots * schema.starts
    chosen = Prioritized(leaves, settings.alpha, settings.beta) if selector == "prioritized" else Uniform(leaves)
    store = Replay(schema, chosen, MinSize(1), leaves, slots, seed=seed)
    config = LearnerConfig(
        batch=settings.batch,
        optimizer="sgd",
        lr=settings.lr,
        clip_norm=0.0,
        target_every=1,
        publish_every=NEVER,
        trim_every=NEVER,
    )
    learner = Learner(dqn, env, store, LatestParams(), Counters(), config, env_steps=1, seed=seed)
    bits = np.arange(2**n)[:, None] >> np.arange(n) & 1  # every sequence once
    order = np.random.default_rng((seed, n)).permutation(2**n)
    script = Script(learner.net, bits[order])
    first = "acted" if settings.initial == "td" else "largest"
    recorder = Recorder(script, store, dqn, schema, first_priorities=first)
    fill(envs, recorder, script, seed)
    envs.close()
    assert store.size == transitions(n), (store.size, transitions(n))
    reward = schema.layout.columns(store.rows)["reward"].reshape(slots, schema.rows)[:, 1:]  # of the step at each start
    assert reward[store.items].sum() == 1, "one sequence in 2^n is rewarded"
    return learner


def solve(job: Job, settings: Settings) -> int:
    """Updates until Q is right."""
    torch.set_num_threads(1)
    learner = make_learner(job, settings)
    (weight,) = learner.net.parameters()
    q, truth = weight.detach().numpy().T, optimum(job.n, 1 - 1 / job.n)  # views of the weights: [n, 2]
    assert q.shape == truth.shape, (q.shape, truth.shape)
    while learner.steps < settings.limit:
        assert learner.step()
        if float(np.square(q - truth).mean()) < settings.error:
            return learner.steps
    raise RuntimeError(f"{job}: not learned in {settings.limit:,} updates")


def solve_all(args: Args, file: Path) -> Counts:
    """Runs the jobs that are not in the file yet, and adds each result to it at once."""
    sizes, seeds = sorted(args.n), range(args.seeds)
    jobs = [Job(n, s, seed) for n in sizes for s in args.selectors for seed in seeds]
    results = read(file, args.settings)
    left = [job for job in reversed(jobs) if job not in results]  # the longest first
    began = time.monotonic()
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(solve, job, args.settings): job for job in left}
        for future in as_completed(running):
            job = running[future]
            results[job] = future.result()
            write(file, args.settings, results)
            so_far = f"[{sum(job in results for job in jobs)}/{len(jobs)}, {time.monotonic() - began:.0f} s]"
            print(f"n = {job.n:2}  {job.selector:11}  seed {job.seed}  {results[job]:9,} updates  {so_far}", flush=True)
    return {s: {n: [results[Job(n, s, seed)] for seed in seeds] for n in sizes} for s in args.selectors}


def read(file: Path, settings: Settings) -> dict[Job, int]:
    if not file.exists():
        return {}
    saved = json.loads(file.read_text())
    if saved["settings"] != dataclasses.asdict(settings):
        raise SystemExit(f"{file} was made with other settings; remove it, or choose another --out.")
    return {Job(n, selector, seed): updates for n, selector, seed, updates in saved["updates"]}


def write(file: Path, settings: Settings, results: dict[Job, int]) -> None:
    lines = ",\n".join(f"  {json.dumps([*job, results[job]])}" for job in sorted(results))
    file.write_text(f'{{"settings": {json.dumps(dataclasses.asdict(settings))},\n "updates": [\n{lines}\n ]}}\n')


def table(counts: Counts) -> str:
    both = len(counts) == 2
    titles = ["n", "transitions", *(f"{s}: median (range)" for s in counts), *(["ratio of medians"] if both else [])]
    lines = [f"| {' | '.join(titles)} |", "|--:" * len(titles) + "|"]
    for n in next(iter(counts.values())):
        updates = [by_n[n] for by_n in counts.values()]
        cells = [f"{median(c):,.0f} ({min(c):,} to {max(c):,})" for c in updates]
        ratio = [f"{median(updates[0]) / median(updates[1]):.1f}"] if both else []
        lines.append(f"| {' | '.join([f'{n}', f'{transitions(n):,}', *cells, *ratio])} |")
    return "\n".join(lines)


def draw(counts: Counts, error: float, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.2, 4.8), constrained_layout=True)
    for selector, by_n in counts.items():
        sizes, colour = list(by_n), COLOURS[selector]
        middle = [median(c) for c in by_n.values()]
        low, high = [min(c) for c in by_n.values()], [max(c) for c in by_n.values()]
        axis.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.plot(sizes, middle, color=colour, linewidth=2, marker="o", markersize=7, markeredgecolor="white")
        axis.annotate(
            selector,
            (sizes[-1], middle[-1]),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=11,
            fontweight="bold",
        )
    grey = "#666666"
    for n in sizes:
        slow, fast = (median(counts[selector][n]) for selector in ("uniform", "prioritized"))
        axis.plot([n, n], [fast * 1.2, slow / 1.2], color=grey, linewidth=0.7, linestyle=(0, (2, 2)), zorder=0)
        axis.text(n + 0.12, (slow * fast) ** 0.5, f"{slow / fast:.1f} x", va="center", color=grey, fontsize=9)
    seeds = len(counts["uniform"][sizes[0]])
    axis.set_yscale("log")
    axis.set_xticks(sizes, [f"{n}\n{transitions(n):,}" for n in sizes])
    axis.set_xlabel("number of states n, and transitions in the store")
    axis.set_ylabel(f"updates until the mean squared error < {error:g}")
    figure.suptitle("Blind Cliffwalk: updates that each kind of replay needs", x=0.015, ha="left", fontsize=12.5)
    axis.set_title(
        f"median and range of {seeds} seeds; one transition in the store is rewarded", loc="left", fontsize=9.5, color=grey
    )
    axis.grid(axis="y", which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(sizes[0] - 0.5, sizes[-1] + 0.2 * (sizes[-1] - sizes[0]))
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main() -> None:
    args = tyro.cli(Args, prog="blind_cliffwalk.py", description=(__doc__ or "").partition("\n\npaper")[0])
    args.out.mkdir(parents=True, exist_ok=True)
    counts = solve_all(args, args.out / "blind_cliffwalk.json")
    print(table(counts))
    if len(counts) == 2:
        picture = args.out / "blind_cliffwalk.png"
        draw(counts, args.settings.error, picture)
        print(f"{picture} is drawn")


if __name__ == "__main__":
    main()
