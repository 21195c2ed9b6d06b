"""A line of metrics on a terminal: the chain, link by link, and the sentence that names its bottleneck.

A line may lack any number: it is shown as "-" or left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from veldt.metrics import FACT, PACKAGE, TROUBLE, Declarations
from veldt.watching.links import Link, links, value_of
from veldt.watching.text import Line, amount, format_bytes, format_seconds, number, percent

WIDEST = 120  # columns; in a wider table numbers are too far from their names
WIDE = 100  # columns from which there is room for bars
HIGH = 0.9  # fraction of the time from which a link may be the slowest
KINDS = ("actor", "inference", "learner", "evaluator")  # of processes, in the order in which they are shown


@dataclass(frozen=True)
class View:
    """A picture of a run, as wide as there is room for."""

    title: str
    line: Line
    steps: int = 0  # env steps that the run will take; 0: unknown
    declarations: Declarations = field(default_factory=lambda: PACKAGE)

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
        chain = links(line, self.declarations)
        if chain:
            yield Padding(_chain(chain, width), (1, 0, 0, 0))
        yield Padding(_facts(line, 3 if width >= WIDE else 2, self.declarations), (1, 0, 0, 0))
        sentence = line.get("bottleneck")
        if isinstance(sentence, str) and sentence:
            yield Padding(Text(sentence, "bold"), (1, 0, 0, 0))


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
            parts.append(amount(x, f"{name}s"))
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
        cells: list[RenderableType] = [Text(link.name), Text(link.rate or "-"), _fraction(link.busy)]
        if width >= WIDE:
            cells.append("" if link.busy is None else _bar(link.busy))
        table.add_row(*cells, _fraction(link.waits), Text("; ".join(link.more)))
    return table


def _fraction(x: float | None) -> Text:
    return Text("" if x is None else percent(x), "bold yellow" if x is not None and x >= HIGH else "")


def _bar(x: float) -> ProgressBar:
    x = min(1.0, max(0.0, x))
    style = "yellow" if x >= HIGH else "cyan"
    return ProgressBar(total=1.0, completed=x, width=12, complete_style=style, finished_style=style)


def _facts(line: Line, columns: int, declarations: Declarations) -> Table:
    """The numbers beside the chain, `columns` in a row; the longest has a row of its own."""
    facts = [(name, Text(value)) for name, value in _numbers(line)]
    for metric in declarations.values():
        name, x = metric.name.replace("_", " "), number(line, metric.name)
        if metric.column == FACT and (text := value_of(metric, line, declarations)):
            facts.append((name, Text(text)))
        elif metric.column == TROUBLE and (x or (x is not None and metric.name == "restarts")):
            facts.append((name, Text(f"{x:,.0f}", "bold red" if x else "")))
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
    """Cores that one process of each kind uses, and cores that all processes use together."""
    names = [f"cpu/{kind}" for kind in KINDS] + sorted(name for name in line if name.startswith("cpu/"))
    kinds = [(name.removeprefix("cpu/"), number(line, name)) for name in dict.fromkeys(names) if name != "cpu/all"]
    each = ", ".join(f"{kind} {x:.2f}" for kind, x in kinds if x is not None)
    used, cores = number(line, "cpu/all"), number(line, "cores")
    if used is None:
        return each
    whole = f"{used:.2f}" if cores is None else f"{used:.2f} of {amount(cores, 'cores')}"
    return f"{whole} ({each})" if each else whole
