"""A results page of many runs: scores with intervals, learning curves, and beside every score what it took.

Every run that was given is in it. A run that failed or was stopped counts with its last evaluation.
"""

import re
import statistics
import string
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from veldt.foreign import LARGE, plain, read_text
from veldt.machine import format_bytes
from veldt.watching.links import figure, format_seconds, number, percent
from veldt.watching.page import Section, Table
from veldt.watching.plot import Curve, Look, draw
from veldt.watching.scores import LEVEL, RESAMPLES, STATISTICS, Estimate, Reference, estimates, game_of
from veldt.watching.sinks import EVALUATION, Point, evaluations, parse, read_metrics
from veldt.watching.top import holder

EARLY = 0.9  # of its steps: a run that ended before has a curve of its own
READ = {*EVALUATION, "cores", "processor", "gpus", "gpu_total"}  # of the metrics of a run
READ |= {"lag_updates", "replay_ratio", "store_bytes", "store_items"}
LONGEST, LONGEST_LABEL = 120, 60  # characters of an error, and of a method in an image


@dataclass(frozen=True)
class Entry:
    """A run. `settings`: those that distinguish it from other runs, without its seed and its environment."""

    path: Path
    settings: dict[str, Any]
    env: str
    seed: int
    steps: int  # env steps that it was to take
    frames_per_step: int
    batch: int
    protocol: str = ""  # of Atari

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        return read_metrics(file, READ) if file.exists() else []

    @cached_property
    def points(self) -> list[Point]:
        return evaluations(self.lines)

    @property
    def atari(self) -> bool:
        return self.env.startswith("ALE/")

    @property
    def score(self) -> float:
        """Of the last evaluation."""
        return self.points[-1].mean_return

    @property
    def done(self) -> float:
        return self.last("env_steps") or 0.0

    @property
    def finished(self) -> bool:
        return self.done >= self.steps

    def last(self, name: str) -> float | None:
        """The newest value."""
        return next((x for line in reversed(self.lines) if (x := number(line, name)) is not None), None)

    def state(self) -> str:
        changes = [f"changed {', '.join(names)} at {count(steps)} env steps" for steps, names in self.changes()]
        return "; ".join([self._state(), *changes])

    def changes(self) -> list[tuple[float, list[str]]]:
        """Settings of the method that a resume changed, and the env steps at which it did: the page has the last values."""
        try:
            lines = list(parse(read_text(self.path / "config_history.jsonl").encode().split(b"\n")))
        except (OSError, ValueError):
            return []
        told = [(number(line, "env_steps"), line.get("changed")) for line in lines]
        known = [(at, [x for x in names if x in self.settings]) for at, names in told if at and isinstance(names, dict)]
        return [(at, names) for at, names in known if names]

    def _state(self) -> str:
        if holder(self.path):
            return f"running, {percent(self.done / self.steps)}"
        if self.finished:
            return "finished"
        text = f"at {count(self.done)} of {count(self.steps)} env steps"
        error = last_error(self.path / "log.txt")
        return f"failed {text}: {error}" if error else f"stopped {text}"

    def machine(self) -> str:
        """The hardware, as far as it was logged; several if the run was resumed elsewhere."""
        logged = [line for line in self.lines if number(line, "cores") is not None]
        names = ((str(line.get("processor") or "processor not logged")[:LONGEST], line["cores"]) for line in logged)
        processors = (f"{name}, {n:.0f} core{'' if n == 1 else 's'}" for name, n in names)
        gpus = dict.fromkeys(str(line["gpus"])[:LONGEST] for line in logged if line.get("gpus"))
        if not gpus and (total := self.last("gpu_total")):
            gpus = {f"a GPU of {format_bytes(total)}": None}
        unknown = "no GPU" if any("processor" in line for line in logged) else "GPU not logged"
        return f"{', then '.join(dict.fromkeys(processors)) or 'processor not logged'}; {', then '.join(gpus) or unknown}"


def last_error(log: Path) -> str:
    """The error that a run ended with, if its last start did; empty if not."""
    try:
        _, found, after = plain(read_text(log, LARGE)).rpartition("stopped by an error")
    except (OSError, ValueError):
        return ""
    if not found or re.search(r"^[\d-]+ [\d:,]+ INFO .*, seed \d+, store ", after, re.MULTILINE):  # it was started again
        return ""
    named = re.findall(r"^[A-Za-z_][\w.]*: .*", after, re.MULTILINE)
    return (named[-1] if named else "see its log.txt")[:LONGEST]


# Methods: runs that differ only in their seed and their environment.


def methods(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """By recipe, and by the settings that not all runs of a recipe share: all Atari games together, other environments
    each for itself, because a recipe has settings for each of them."""
    families: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        families[str(entry.settings.get("recipe")), "ALE/" if entry.atari else entry.env].append(entry)
    out: dict[str, list[Entry]] = defaultdict(list)
    for (recipe, _), family in families.items():
        names = dict.fromkeys(name for entry in family for name in entry.settings)
        differ = [name for name in names if len({str(entry.settings.get(name)) for entry in family}) > 1]
        for entry in family:
            out[" ".join([recipe, *(f"{name} {entry.settings.get(name)}" for name in differ)])].append(entry)
    return out


def report(entries: Sequence[Entry], reference: Reference, published: bool, out: Path) -> list[Section]:
    """The sections of the page. Draws the curves in files beside `out`."""
    found, played = methods(entries), [entry for entry in entries if entry.points]
    ended = sum(entry.finished for entry in entries)
    notes = [f"{len(entries)} run{'s' if len(entries) > 1 else ''}, all that were given; {ended} finished."]
    if silent := [str(entry.path) for entry in entries if not entry.points]:
        notes.append(f"Without an evaluation, and so without a score: {', '.join(silent)}.")
    others = reference.names([game_of(e.env) for e in played]) if published else []
    sections = [_scores(found, reference, others, notes)]
    if over := _over_games(found, reference, others):
        sections.append(over)
    if played:
        caption = "Lines are means over runs, bands reach from the lowest to the highest; runs that ended early are apart."
        sections.append(Section("Learning curves", images=curves(found, out), notes=[caption]))
    sections.append(_runs(found, reference))
    named = [f"{x}: {_described(reference, x)}" for x in others]
    if reference.games.keys() & {game_of(e.env) for e in entries}:
        source = f" {reference.source}" if any(entry.atari for entry in entries) else ""
        text = f"Normalised scores: random play is 0 %, human play 100 %.{source}"
        sections.append(Section("Reference scores", notes=[text], items=named))
    return sections


def _described(reference: Reference, name: str) -> str:
    if name not in reference.published:
        return "of the reference file."
    x = reference.published[name]
    return f"{count(x.frames)} frames; {x.protocol}. {x.source}."


def _scores(found: dict[str, list[Entry]], reference: Reference, others: list[str], notes: list[str]) -> Section:
    head = ["environment", "method", "runs", "frames", "return [95 %]", "lowest to highest", "normalised", *others]
    rows = []
    for env in dict.fromkeys(entry.env for entries in found.values() for entry in entries):
        for label, entries in found.items():
            if there := [entry for entry in entries if entry.env == env]:
                protocols = " or ".join(dict.fromkeys(entry.protocol for entry in there))
                name = f"{env} {protocols}".strip()
                rows.append([name, label, *_score_cells(there, reference), *_published(reference, env, others)])
    rows.sort(key=lambda row: row[0])
    seeds = (
        f"Return: mean over runs of the last evaluation (greedy episodes of fixed weights), with the {percent(LEVEL)} "
        f"percentile bootstrap interval over runs ({RESAMPLES:,} resamples). With few runs it is too narrow: with 3 it "
        "covers the true mean about 3 times in 4. Frames: of the weights that played. Atari: with the protocol."
    )
    return Section("Scores", Table(head, rows, frozenset(head[:2])), notes=[*notes, seeds])


def _score_cells(there: list[Entry], reference: Reference) -> list[str]:
    played = [entry for entry in there if entry.points]
    early = sum(not entry.finished for entry in there)
    runs = (f"{len(played)} of " if len(played) < len(there) else "") + str(len(there))
    runs += f" ({early} unfinished)" if early else ""
    if not played:
        return [runs, "-", "-", "-", "-"]
    scores, at = [e.score for e in played], [e.points[-1].env_steps * e.frames_per_step for e in played]
    frames = " to ".join(dict.fromkeys(map(count, (min(at), max(at)))))
    mean = estimates([scores])["mean"]
    normalised = reference.normalised(game_of(there[0].env), mean.value)
    spread = f"{figure(min(scores))} to {figure(max(scores))}" if len(scores) > 1 else "-"
    return [runs, frames, _estimate(mean, figure), spread, "-" if normalised is None else percent(normalised)]


def _published(reference: Reference, env: str, others: list[str]) -> list[str]:
    scores = reference.games.get(game_of(env), {})
    return [figure(scores[name]) if name in scores else "-" for name in others]


def _over_games(found: dict[str, list[Entry]], reference: Reference, others: list[str]) -> Section | None:
    """None if no method has scores of two games that can be normalised."""
    head, rows = ["method", "games", "runs", *STATISTICS], []
    games: set[str] = set()
    for label, entries in found.items():
        scores: dict[str, list[float]] = defaultdict(list)
        for entry in entries:
            game = game_of(entry.env)
            if entry.points and (x := reference.normalised(game, entry.score)) is not None:
                scores[game].append(x)
        if len(scores) > 1:
            rows.append([label, *_aggregate(list(scores.values()))])
            games |= scores.keys()
    if not rows:
        return None
    for name in others:
        theirs = [(game, reference.games[game][name]) for game in sorted(games) if name in reference.games[game]]
        if known := [[x] for game, score in theirs if (x := reference.normalised(game, score)) is not None]:
            rows.append([f"{name} (published)", *_aggregate(known)])
    note = (
        "Human-normalised scores. Median and mean are over the games' means; the interquartile mean (IQM) is over all runs "
        f"of all games. In brackets: {percent(LEVEL)} intervals of the stratified bootstrap, which draws runs again within "
        "each game (a game with one run adds no width). Published figures are over those of these games that the paper has."
    )
    return Section("Over games", Table(head, rows, frozenset(head[:1])), notes=[note])


def _aggregate(games: list[list[float]]) -> list[str]:
    found = estimates(games)
    cells = (_estimate(found[name], percent) for name in STATISTICS)
    return [str(len(games)), str(sum(map(len, games))), *cells]


def _estimate(x: Estimate, form: Any) -> str:
    return form(x.value) if x.low is None else f"{form(x.value)} [{form(x.low)}, {form(x.high)}]"


def curves(found: dict[str, list[Entry]], out: Path) -> dict[str, Path]:
    """An image for each environment, beside `out`."""
    images: dict[str, Path] = {}
    labels = _short(found)
    envs = sorted({entry.env for entries in found.values() for entry in entries if entry.points})
    for env in envs:
        groups: dict[str, list[Curve]] = defaultdict(list)
        for label, entries in found.items():
            there = [entry for entry in entries if entry.env == env and entry.points]
            for entry in there:
                steps, seconds, returns, updates = np.array(entry.points, float).T
                early = steps[-1] < EARLY * max(other.points[-1].env_steps for other in there)
                curve = Curve({}, steps, seconds, updates, returns, True, entry.frames_per_step)
                groups[f"{labels[label]} (ended early)" if early else labels[label]].append(curve)
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in game_of(env))
        images[env] = out.with_name(f"{out.name}.png" if len(envs) == 1 else f"{out.name}-{name}.png")
        if list(images.values()).count(images[env]) > 1:  # another environment's name becomes the same
            images[env] = out.with_name(f"{out.name}-{name}-{len(images)}.png")
        draw(dict(groups), images[env], Look(steps="frames" if env.startswith("ALE/") else "steps"))
    return images


def _short(labels: Iterable[str]) -> dict[str, str]:
    """Labels for an image; a method that would have the label of another keeps all of its own."""
    short = {label: textwrap.shorten(label, LONGEST_LABEL, placeholder=" ...") for label in labels}
    found = list(short.values())
    return {label: x if found.count(x) == 1 else textwrap.fill(label, LONGEST_LABEL) for label, x in short.items()}


# What it took.


def _runs(found: dict[str, list[Entry]], reference: Reference) -> Section:
    head = ["run", "environment", "method", "seed", "return", "normalised", "frames", "updates", "wall time", "frames/s"]
    head += ["samples/s", "replay ratio", "lag (updates)", "bytes/item", "hardware", "state"]
    rows, machines = [], dict[str, str]()
    for label, entries in found.items():
        for entry in entries:
            score = entry.score if entry.points else None
            normalised = None if score is None else reference.normalised(game_of(entry.env), score)
            machine = machines.setdefault(entry.machine(), _letters(len(machines)))
            cells = [str(entry.path), entry.env, label, str(entry.seed), *_cells([(score, figure), (normalised, percent)])]
            state = entry.state() if entry.points else f"{entry.state()}; no evaluation"
            rows.append([*cells, *_took(entry), machine, state])
    rows.sort(key=lambda row: (row[1], row[2], row[3]))
    text = frozenset(("run", "environment", "method", "hardware", "state"))
    note = (
        "Frames are env steps times the frame skip (env steps where there is none). Frames/s and samples/s are means over "
        "the whole run; samples/s are updates/s times the batch. The replay ratio is how often an item was sampled on "
        "average; the lag is by how many updates the actors' weights were behind the learner's, on average; bytes/item is "
        "the RAM of the store for each item (a transition, or a window of them)."
    )
    return Section("Runs", Table(head, rows, text), notes=[note], items=[f"{x}: {name}" for name, x in machines.items()])


def _letters(i: int) -> str:
    return string.ascii_uppercase[i % 26] * (i // 26 + 1)


def _took(entry: Entry) -> list[str]:
    seconds, updates = entry.last("time_s"), entry.last("learner_steps")
    frames = entry.done * entry.frames_per_step if entry.lines else None
    lags = [x for line in entry.lines if (x := number(line, "lag_updates")) is not None]
    sizes = ((number(line, "store_bytes"), number(line, "store_items")) for line in reversed(entry.lines))
    item = next((nbytes / items for nbytes, items in sizes if nbytes and items), None)
    per_second = 1 / seconds if seconds else None
    return _cells(
        [
            (frames, count),
            (updates, count),
            (seconds, format_seconds),
            (None if frames is None or per_second is None else frames * per_second, figure),
            (None if updates is None or per_second is None else updates * entry.batch * per_second, figure),
            (entry.last("replay_ratio"), figure),
            (statistics.fmean(lags) if lags else None, figure),
            (item, figure),
        ]
    )


def _cells(values: Sequence[tuple[float | None, Any]]) -> list[str]:
    return ["-" if x is None else form(x) for x, form in values]


def count(x: float) -> str:
    """Of frames or steps."""
    if x >= 999.5e6:  # what would be rounded to 1000 M
        return f"{x / 1e9:.3g} G"
    if x >= 1e6:
        return f"{x / 1e6:.3g} M"
    return f"{x:,.0f}"
