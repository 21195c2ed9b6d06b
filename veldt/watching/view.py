"""What a line of metrics looks like on a terminal: the chain, link by link, and the sentence that names its bottleneck.

    environments -> policy -> recorder -> store -> learner -> weights -> (back to policy)

Any number may be missing, early in a run or in one that an older version wrote: it is shown as "-" or left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from veldt.machine import format_bytes

Line = Mapping[str, Any]  # of metrics.jsonl

WIDEST = 120  # columns; beyond that numbers stand too far from their names
WIDE = 100  # columns from which there is room for bars
HIGH = 0.9  # part of the time from which a link may well be the slowest
TROUBLES = ("restarts", "bad_observations", "skipped_updates")  # counts that ought to be 0


@dataclass(frozen=True)
class Link:
    """One link of the chain at one moment. `busy` and `waits` are parts of the time of the process it is in."""

    name: str
    rate: str = ""
    busy: float | None = None
    waits: float | None = None
    rest: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        return bool(self.rate or self.rest) or self.busy is not None or self.waits is not None


@dataclass(frozen=True)
class View:
    """A picture of a run, as wide as there is room for."""

    title: str
    line: Line
    steps: int = 0  # env steps that the run was asked for; 0: that is not known

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        for part in self._parts(width):
            yield from console.render(part, options.update(width=width))

    def _parts(self, width: int) -> Iterator[RenderableType]:
        line = self.line
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(overflow="fold")
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self.title, "bold"), Text(_clock(line)))
        yield head
        if self.steps:
            done = min(1.0, max(0.0, (number(line, "env_steps") or 0.0) / self.steps))
            bar = ProgressBar(total=1.0, completed=done, width=width, complete_style="cyan", finished_style="green")
            yield Padding(bar, 0)
        yield Text(_progress(line, self.steps))
        chain = links(line)
        if chain:
            yield Padding(_chain(chain, width), (1, 0, 0, 0))
        yield Padding(_facts(line, 3 if width >= WIDE else 2), (1, 0, 0, 0))
        sentence = line.get("bottleneck")
        if isinstance(sentence, str) and sentence:
            yield Padding(Text(sentence, "bold"), (1, 0, 0, 0))


def number(line: Line, key: str) -> float | None:
    """None: it is missing, or no finite number."""
    x = line.get(key)
    return float(x) if isinstance(x, int | float) and math.isfinite(x) else None


def links(line: Line) -> list[Link]:
    """The links of which anything is known."""

    def rate(key: str, unit: str) -> str:
        x = number(line, key)
        return "" if x is None else f"{short(x)} {unit}"

    def some(key: str, text: str) -> list[str]:
        """The text with {} replaced by a part of 1 in percent, where that is known."""
        x = number(line, key)
        return [] if x is None else [text.format(percent(x))]

    whole = number(line, "busy/env") is None and number(line, "busy/policy") is None
    acting = [*_envs(line), *(some("busy/actor", "{} of the time with the policy") if whole else [])]
    exploring = [f"{key} {x:.3f}" for key in ("epsilon", "sigma") if (x := number(line, key)) is not None]
    batch = number(line, "inference_batch")
    exploring += [] if batch is None else [f"{short(batch)} environments at once"]
    moved = number(line, "bytes_per_s")
    sent = [] if moved is None else [f"{format_bytes(moved)}/s"]
    policy = Link("policy", "", number(line, "busy/policy"), number(line, "wait/inference"), tuple(exploring))
    if policy.known:
        policy = replace(policy, rate=rate("env_steps_per_s", "actions/s"))
    drawn = rate("sampled_per_s", "items/s")
    chain = [
        Link("environments", rate("env_steps_per_s", "steps/s"), number(line, "busy/env"), None, tuple(acting)),
        policy,
        Link(
            "recorder",
            rate("blocks_per_s", "blocks/s"),
            None,
            number(line, "wait/actor"),
            (*sent, *some("queue_fill", "queue {} full")),
        ),
        Link(
            "store",
            rate("inserted_per_s", "items/s"),
            None,
            None,
            (*_stored(line), *some("refusing", "refuses {} of blocks")),
        ),
        Link(
            "learner",
            rate("learner_steps_per_s", "updates/s"),
            number(line, "busy/learner"),
            number(line, "wait/learner"),
            (*([drawn] if drawn else []), *some("busy/sample", "drawing {}")),
        ),
        Link("weights", rate("published_per_s", "published/s"), None, None, tuple(_behind(line))),
    ]
    return [link for link in chain if link.known]


def _envs(line: Line) -> list[str]:
    envs, actors = number(line, "envs"), number(line, "actors")
    if envs is None:
        return []
    return [f"{envs:,.0f}" if actors is None else f"{envs:,.0f} in {_count(actors, 'actor')}"]


def _stored(line: Line) -> list[str]:
    items, capacity, size = (number(line, f"store_{name}") for name in ("items", "capacity", "bytes"))
    if items is None:
        return []
    most = "" if capacity is None else f" of {capacity:,.0f}"
    return [f"{items:,.0f}{most} items" + ("" if size is None else f", {format_bytes(size)}")]


def _behind(line: Line) -> list[str]:
    """By how much the weights that actors act with are behind."""
    updates, seconds = number(line, "lag_updates"), number(line, "lag_s")
    parts = [] if updates is None else [f"{short(updates)} updates"]
    parts += [] if seconds is None else [f"{short(seconds)} s"]
    return [f"actors {', '.join(parts)} behind"] if parts else []


def _clock(line: Line) -> str:
    return f"time {format_seconds(number(line, 'time_s'))}, left {format_seconds(number(line, 'left_s'))}"


def _progress(line: Line, steps: int) -> str:
    done = number(line, "env_steps")
    of = f" of {steps:,}" if steps else ""
    parts = [f"{'-' if done is None else f'{done:,.0f}'}{of} env steps"]
    if steps and done is not None:
        parts[0] += f" ({percent(done / steps)})"
    for key, name in (("learner_steps", "update"), ("episodes", "episode"), ("evaluations", "evaluation")):
        x = number(line, key)
        if x is not None:
            parts.append(_count(x, name))
    return ", ".join(parts)


def _chain(chain: list[Link], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim underline")
    table.add_column("link", style="cyan", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("", no_wrap=True)
    table.add_column("waits", justify="right", no_wrap=True)
    table.add_column("what else")
    for link in chain:
        cells: list[RenderableType] = [link.name, link.rate or "-", _part(link.busy)]
        if width >= WIDE:
            cells.append("" if link.busy is None else _bar(link.busy))
        table.add_row(*cells, _part(link.waits), "; ".join(link.rest))
    return table


def _part(x: float | None) -> Text:
    return Text("" if x is None else percent(x), "bold yellow" if x is not None and x >= HIGH else "")


def _bar(x: float) -> ProgressBar:
    x = min(1.0, max(0.0, x))
    style = "yellow" if x >= HIGH else "cyan"
    return ProgressBar(total=1.0, completed=x, width=12, complete_style=style, finished_style=style)


def _facts(line: Line, columns: int) -> Table:
    """What is known beside the chain, so many to a row; the longest has a row of its own."""
    facts = [(name, Text(value)) for name, value in _numbers(line)]
    for key in TROUBLES:
        x = number(line, key)
        if x or (x is not None and key == "restarts"):
            facts.append((key.replace("_", " "), Text(f"{x:,.0f}", "bold red" if x else "")))
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
    rows = -(-len(facts) // columns)
    for i in range(rows):  # read down, column by column
        table.add_row(*(cell for fact in facts[i::rows] for cell in fact))
    whole = Table.grid()
    whole.add_row(table)
    cpu = _cpu(line)
    if cpu:
        whole.add_row(Text.assemble(("CPU ", "dim"), cpu))
    return whole


def _numbers(line: Line) -> Iterator[tuple[str, str]]:
    def show(key: str, form: str) -> str:
        x = number(line, key)
        return "-" if x is None else format(x, form)

    yield "greedy return", show("eval_return", ".1f")
    yield "exploring return", show("train_return", ".1f")
    yield "loss", show("loss", ".4g")
    asked = number(line, "samples_per_insert")
    wanted = "" if asked is None else f" (asked: {asked:g})" if asked else " (free)"
    yield "replay ratio", show("replay_ratio", ".2f") + wanted
    used, planned = number(line, "memory_bytes"), number(line, "memory_planned")
    if used is not None:
        yield "memory", format_bytes(used) + ("" if planned is None else f" of {format_bytes(planned)} planned")


def _cpu(line: Line) -> str:
    """Cores that a process of each kind uses, and all of them together."""
    kinds = [(kind, number(line, f"cpu/{kind}")) for kind in ("actor", "inference", "learner", "evaluator")]
    each = ", ".join(f"{kind} {x:.2f}" for kind, x in kinds if x is not None)
    used, cores = number(line, "cpu/all"), number(line, "cores")
    if used is None:
        return each
    whole = f"{used:.2f}" if cores is None else f"{used:.2f} of {_count(cores, 'core')}"
    return f"{whole} ({each})" if each else whole


def _count(n: float, name: str) -> str:
    return f"{n:,.0f} {name}{'' if n == 1 else 's'}"


def percent(x: float) -> str:
    return f"{100 * x:,.0f} %"


def short(x: float) -> str:
    """A number of which two or three digits matter."""
    if x == 0 or abs(x) >= 10:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 1 else f"{x:.2g}"


def format_seconds(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
