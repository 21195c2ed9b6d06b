"""Scores over games: human-normalised, and their median, mean and interquartile mean with bootstrap intervals.

As Agarwal et al. 2021 (Deep reinforcement learning at the edge of the statistical precipice): the median and the mean are
those of the games' means over runs; the interquartile mean (IQM) is that of all runs of all games, without the lowest and
the highest quarter. The bootstrap is stratified: it draws runs again within each game, and never games.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from veldt.errors import UserError
from veldt.records.tree import Array
from veldt.watching.links import number
from veldt.watching.plot import trimmed_mean

RESAMPLES = 2_000
LEVEL = 0.95
RANDOM, HUMAN = "random", "human"
STATISTICS = ("median", "mean", "IQM")


def game_of(env: str) -> str:
    """The name by which reference scores are found: `Pong` for ALE/Pong-v5, any other environment's own."""
    return env.removeprefix("ALE/").rpartition("-v")[0] if env.startswith("ALE/") else env


class Published(NamedTuple):
    frames: int  # that the scores took; 0: unknown
    protocol: str  # of training and evaluation
    source: str


@dataclass(frozen=True)
class Reference:
    """Scores of others by game (or environment) and name. Those named `random` and `human` are 0 and 1 when normalised."""

    games: Mapping[str, Mapping[str, float]]
    published: Mapping[str, Published]
    source: str = ""

    def normalised(self, game: str, score: float) -> float | None:
        low, high = (self.games.get(game, {}).get(name) for name in (RANDOM, HUMAN))
        return None if low is None or high is None else (score - low) / (high - low)

    def names(self, games: Sequence[str]) -> list[str]:
        """Of those who have a score in one of these games, in the order of `published`."""
        there = {name: None for game in games for name in self.games.get(game, ())}
        order = dict.fromkeys((*self.published, *there))
        return [name for name in order if name in there and name not in (RANDOM, HUMAN)]


def atari57() -> Reference:
    """The 57 Atari games: random play, a human, and published scores. The file says where they come from."""
    data = json.loads((resources.files("veldt.watching") / "atari57.json").read_text())
    return Reference(data["games"], {name: Published(**x) for name, x in data["published"].items()}, data["source"])


def add(reference: Reference, values: Any, file: object) -> Reference:
    """With the scores of a user's file: {environment: {random: 22, human: 500, any other name: 475}}."""
    games = {game: dict(scores) for game, scores in reference.games.items()}
    for env, scores in values.items() if isinstance(values, dict) and values else [(None, None)]:
        if not isinstance(scores, dict) or any(number(scores, name) is None for name in scores):
            raise UserError(f"{file} must hold scores by environment and name: CartPole-v1: {{random: 22, human: 500}}.")
        game = game_of(str(env))
        there = games.setdefault(game, {})
        there |= {str(name): float(x) for name, x in scores.items()}
        if there.get(RANDOM) == there.get(HUMAN, np.nan):
            raise UserError(f"{file}: random and human of {game} are both {there[RANDOM]:g}; they must differ.")
    return Reference(games, reference.published, reference.source)


class Estimate(NamedTuple):
    value: float
    low: float | None  # None: no game has a second run
    high: float | None


def estimates(games: Sequence[Sequence[float]], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """The statistics over games, each the scores of its runs; with percentiles of the stratified bootstrap."""
    scores = [np.asarray(runs, float)[None] for runs in games]  # [1, runs] each
    values = _statistics(scores)
    if all(x.shape[1] < 2 for x in scores):
        return {name: Estimate(float(values[name][0]), None, None) for name in STATISTICS}
    rng = np.random.default_rng(seed)
    drawn = _statistics([x[0][rng.integers(0, x.shape[1], (resamples, x.shape[1]))] for x in scores])
    ends = {name: np.quantile(drawn[name], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) for name in STATISTICS}
    return {name: Estimate(float(values[name][0]), *map(float, ends[name])) for name in STATISTICS}


def _statistics(games: list[Array]) -> dict[str, Array]:
    """[n] of [n, runs] for each game."""
    means = np.stack([x.mean(1) for x in games], 1)  # [n, games]
    return {"median": np.median(means, 1), "mean": means.mean(1), "IQM": interquartile_mean(np.concatenate(games, 1))}


def interquartile_mean(x: Array) -> Array:
    """[n] of [n, scores]: the mean without the lowest and the highest quarter, rounded down."""
    return trimmed_mean(x.T, 0.25)
