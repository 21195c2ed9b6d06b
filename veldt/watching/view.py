"""A line of metrics on a terminal: the chain, link by link, and the sentence that names its bottleneck."""

import contextlib
import math
import re
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from veldt.machine import format_bytes
from veldt.metrics import FACT, PACKAGE, TROUBLE, Declarations
from veldt.watching.links import Line, LinkRow, amount, fill, format_seconds, links, number, percent, value_of

WIDEST = 120  # columns; in a wider table numbers are too far from their names
WIDE = 100  # columns from which there is room for bars
NARROW = 64  # columns below which the chain is a list, and facts are in one column
HIGH = 0.9  # fraction of the time from which a link may be the slowest
PLAIN_EVERY = 5.0  # seconds between two plain lines; every evaluation is printed
ADVICE_EVERY = 10.0  # seconds between two sentences about the bottleneck in plain lines
COUNTS = {"learner_steps": "updates", "episodes": "episodes", "evaluations": "evaluations"}
NUMBERS = {
    "greedy return": "{eval_return:.1f}[ at {eval_env_steps}]",
    "exploring return": "{train_return:.1f}",
    "loss": "{loss:.4g}",
}
MEMORY = ("memory_bytes", "memory_planned")
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
        passed, left = (format_seconds(number(line, key)) for key in ("time_s", "left_s"))
        yield heading(self.title, f"time {passed}, left {left}")
        if self.steps:
            done = min(1.0, max(0.0, (number(line, "env_steps") or 0.0) / self.steps))
            bar = ProgressBar(total=1.0, completed=done, width=width, complete_style="cyan", finished_style="green")
            yield Padding(bar, 0)  # a line of its own
        yield Text(_progress(line, self.steps))
        chain = links(line, self.declarations)
        if chain:
            yield Padding(_narrow_chain(chain) if width < NARROW else _chain(chain, width), (1, 0, 0, 0))
        columns = 3 if width >= WIDE else 2 if width >= NARROW else 1
        yield Padding(_facts(line, columns, self.declarations), (1, 0, 0, 0))
        if cpu := _cpu(line):
            yield Text.assemble(("CPU ", "dim"), cpu)
        sentence = line.get("bottleneck")
        if isinstance(sentence, str) and sentence:
            yield Padding(Text(sentence, "bold"), (1, 0, 0, 0))


def heading(title: str, beside: str) -> Table:
    head = Table.grid(expand=True, padding=(0, 2))
    head.add_column(overflow="fold")
    head.add_column(justify="right", no_wrap=True)
    head.add_row(Text(title, "bold"), Text(beside))
    return head


def _progress(line: Line, steps: int) -> str:
    done = number(line, "env_steps")
    text = f"{'-' if done is None else f'{done:,.0f}'}{f' of {steps:,}' if steps else ''} env steps"
    text += f" ({percent(part_done(done, steps))})" if steps and done is not None else ""
    counts = ((number(line, key), unit) for key, unit in COUNTS.items())
    return ", ".join([text, *(amount(x, unit) for x, unit in counts if x is not None)])


def part_done(env_steps: float, steps: int) -> float:
    """In whole percent; 1 only at the end, and not more: actors step together, so a run may take a few steps too many."""
    return max(0, min(99 if env_steps < steps else 100, round(100 * env_steps / steps))) / 100


def _narrow_chain(chain: list[LinkRow]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for link in chain:
        shares = [Text.assemble("busy ", _fraction(link.busy))] if link.busy is not None else []
        shares += [Text.assemble("waits ", _fraction(link.waits))] if link.waits is not None else []
        parts = [Text(link.rate)] if link.rate else []
        table.add_row(Text(link.name), Text("; ").join([*parts, *shares, *map(Text, link.more)]))
    return table


def _chain(chain: list[LinkRow], width: int) -> Table:
    bars = [""] if width >= WIDE else []
    table = make_table("link", "rate", "busy", *bars, "waits", right=("rate", "busy", "waits"))
    table.add_column("what else")
    for link in chain:
        cells: list[RenderableType] = [Text(link.name), Text(link.rate or "-"), _fraction(link.busy)]
        if bars:
            cells.append("" if link.busy is None else _bar(link.busy))
        table.add_row(*cells, _fraction(link.waits), Text("; ".join(link.more)))
    return table


def make_table(first: str, *others: str, right: Container[str]) -> Table:
    """The first column names a row."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim underline")
    table.add_column(first, style="cyan", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def _fraction(x: float | None) -> Text:
    return Text("" if x is None else percent(x), "bold yellow" if x is not None and x >= HIGH else "")


def _bar(x: float) -> ProgressBar:
    x = min(1.0, max(0.0, x))
    style = "yellow" if x >= HIGH else "cyan"
    return ProgressBar(total=1.0, completed=x, width=12, complete_style=style, finished_style=style)


def _facts(line: Line, columns: int, declarations: Declarations) -> Table:
    """The numbers beside the chain, `columns` in a row."""
    asked = " (free)" if number(line, "samples_per_insert") == 0 else "[ (asked: {samples_per_insert:g})]"
    texts = NUMBERS | {"replay ratio": "{replay_ratio:.2f}" + asked}
    facts = [(name, Text(fill(text, line))) for name, text in texts.items()]
    used, planned = (None if x is None else format_bytes(x) for x in (number(line, key) for key in MEMORY))
    if used is not None:
        facts.append(("memory", Text(used if planned is None else f"{used} of {planned} planned")))
    for metric in declarations.values():
        name, x = metric.name.replace("_", " "), number(line, metric.name)
        if metric.column == FACT and (text := value_of(metric, line, declarations)):
            facts.append((name, Text(text)))
        elif metric.column == TROUBLE and (x or (x is not None and metric.name == "restarts")):
            facts.append((name, Text(fill(metric.text or f"{x:,.0f}", line), "bold red" if x else "")))
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
    rows = -(-len(facts) // columns)
    for i in range(rows):  # read down, column by column
        table.add_row(*(cell for fact in facts[i::rows] for cell in fact))
    return table


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


PLAIN = {  # what a plain line shows
    "eval_return": "greedy {:.1f}",
    "eval_env_steps": "of {:,.0f} steps",
    "train_return": "exploring {:.1f}",
    "bad_fraction": "bad observations {:.2%}",
    "loss": "loss {:.3g}",
    "epsilon": "epsilon {:.2f}",
    "sigma": "sigma {:.2f}",
    "env_steps_per_s": "env/s {:,.0f}",
    "learner_steps_per_s": "updates/s {:,.0f}",
    "replay_ratio": "ratio {:.1f}",
    "store_items": "stored {:,.0f}",
}


class Screen:
    """Where a run was started from: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, title: str, steps: int, quiet: bool = False, declarations: Declarations = PACKAGE) -> None:
        self.title, self.steps, self.quiet, self.declarations = title, steps, quiet, declarations
        self.console = Console(stderr=False)
        self._live: Live | None = None
        self._latest: dict[str, Any] = {}
        self._printed = self._advised = -math.inf  # when the last plain line and the last advice were printed
        self._advice = ""
        if not quiet and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=False)
            self._live.start()

    def say(self, text: str, wrap: bool = False) -> None:
        """`wrap`: between words, on a terminal; otherwise a line stays whole, so that it can be copied."""
        if not self.quiet:
            with contextlib.suppress(OSError):  # the terminal was closed
                whole = not (wrap and self.console.is_terminal)
                self.console.print(text, highlight=False, soft_wrap=whole, markup=False)

    def write(self, line: dict[str, Any]) -> None:
        self._latest |= {key: x for key, x in line.items() if x is not None}
        if self._live is not None:
            self._live.update(View(self.title, dict(self._latest), self.steps, self.declarations))
        elif not self.quiet and (time.monotonic() - self._printed >= PLAIN_EVERY or "eval_return" in line):
            self._printed = time.monotonic()
            self.say(self._text(line))
            self._advise(line.get("bottleneck") or "")

    def close(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _advise(self, sentence: str) -> None:
        """Prints the bottleneck if it differs from the last one in more than its numbers."""
        words = re.sub(r"[\d.,]+", "", sentence)
        if words and words != self._advice and time.monotonic() - self._advised >= ADVICE_EVERY:
            self._advice, self._advised = words, time.monotonic()
            self.say(f"       {sentence}")

    def _text(self, line: dict[str, Any]) -> str:
        if "resumed_from" in line:
            return f"resumed from learner step {line['resumed_from']:,}"
        done = 100 * part_done(line["env_steps"], self.steps)
        parts = [f"{done:3.0f} %  {line['env_steps']:>9,} steps"]
        parts += [form.format(line[key]) for key, form in PLAIN.items() if key in line]
        return "  ".join([*parts, f"left {format_seconds(line.get('left_s'))}"])
