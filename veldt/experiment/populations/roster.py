"""What a terminal shows of a population: a live table of its members, or elsewhere a line each time one is ready."""

import statistics
import time
from collections.abc import Collection
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from veldt.experiment.populations.population import Member, Outcome, Population
from veldt.watching.lineage import Line
from veldt.watching.links import format_seconds
from veldt.watching.view import heading, make_table

MOST = 30  # rows; of a larger population the best


class Roster:
    def __init__(self, population: Population, quiet: bool = False) -> None:
        self.population, self.quiet = population, quiet
        self.console = Console()
        self._live: Live | None = None
        self._began, self._quanta = time.monotonic(), self._done
        self._training: Collection[int] = ()

    def __enter__(self) -> "Roster":
        if not self.quiet and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self.picture)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, training: Collection[int]) -> None:
        self._training = set(training)

    def tell_ready(self, index: int, outcome: Outcome, waiting: int) -> None:
        """That a quantum has ended; `waiting`: as many members are about to decide."""
        spec = self.population.spec
        done, total = self._done + waiting, spec.quanta * spec.size
        value = f"failed, {outcome.failed}" if outcome.failed else f"fitness {statistics.fmean(outcome.returns):.4g}"
        self._say(f"{done}/{total} member {index} at {outcome.env_steps:,} env steps: {value}; left {self.left(waiting)}")

    def tell_decided(self, line: Line) -> None:
        if copied := line.get("copied"):
            changes = ", ".join(f"{tail(name)} {number(x)}" for name, x in line["next"].items())
            whom = f"member {copied['member']} ({copied['fitness']:.4g})"
            self._say(f"member {line['member']} copies {whom} and goes on with {changes}")
        if self.population.members[line["member"]].out:
            self._say(f"member {line['member']} is given up")

    def _say(self, text: str) -> None:
        if not self.quiet and self._live is None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def _done(self) -> int:
        return sum(member.quantum for member in self.population.members)

    def left(self, waiting: int = 0) -> str:
        """Estimated from what was done since the start."""
        fresh = self._done + waiting - self._quanta
        if fresh <= 0:
            return "-"
        spec = self.population.spec
        total = sum(member.quantum if member.out else spec.quanta for member in self.population.members)
        return format_seconds((total - self._done - waiting) * (time.monotonic() - self._began) / fresh)

    def picture(self) -> RenderableType:
        population, spec = self.population, self.population.spec
        total, config = spec.quanta * spec.size, spec.base.config
        steps = sum(member.env_steps for member in population.members)
        passed = format_seconds(time.monotonic() - self._began)
        title = f"{spec.name}: {spec.size} x {config.recipe} on {config.env}"
        head = heading(title, f"time {passed}, left {self.left()}")
        bar = ProgressBar(total=total, completed=self._done, complete_style="cyan", finished_style="green")
        copies = sum(member.copies for member in population.members)
        count = Text(f"{steps:,} of {spec.size * spec.steps:,} env steps; {copies} copies")
        return Group(head, Padding(bar, 0), count, Padding(self._table(), (1, 0, 0, 0)))  # the bar: a line of its own

    def _table(self) -> Table:
        names = list(self.population.spec.ranges)
        numbers = ("env steps", "fitness", *map(tail, names), "copied")
        table = make_table("member", *numbers, "", right=numbers)
        shown = self.population.members
        if len(shown) > MOST:
            shown = sorted(shown, key=lambda m: -(m.fitness if m.fitness is not None else float("-inf")))[:MOST]
        for member in shown:
            fitness = "-" if member.fitness is None else f"{member.fitness:.4g}"
            copied = "" if member.copied is None else str(member.copied)
            tuned = [number(member.tuned[name]) for name in names]
            table.add_row(str(member.index), f"{member.env_steps:,}", fitness, *tuned, copied, self._state(member))
        return table

    def _state(self, member: Member) -> Text:
        if member.index in self._training:
            return Text("trains", "green")
        if member.out:
            return Text(f"given up: {member.failed}"[:60], "red")
        if member.failed:
            return Text(f"failed: {member.failed}"[:60], "yellow")
        return Text("done" if self.population.finished(member) else "", "dim")


def tail(name: str) -> str:
    return name.rpartition(".")[2]


def number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
