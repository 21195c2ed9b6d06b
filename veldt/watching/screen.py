"""A run on the screen of the terminal that started it."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from veldt.metrics import PACKAGE, Declarations
from veldt.watching.text import format_seconds
from veldt.watching.view import View

PLAIN_EVERY = 5.0  # seconds between two plain lines; every evaluation is printed
ADVICE_EVERY = 10.0  # seconds between two sentences about the bottleneck in plain lines


class Screen:
    """A live table on a terminal, plain lines elsewhere."""

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

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

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
        done = 100 * line["env_steps"] / self.steps
        parts = [f"{done:3.0f} %  {line['env_steps']:>9,} steps"]
        for name, key, form in (
            ("greedy", "eval_return", ".1f"),
            ("exploring", "train_return", ".1f"),
            ("loss", "loss", ".3g"),
            ("epsilon", "epsilon", ".2f"),
            ("sigma", "sigma", ".2f"),
            ("env/s", "env_steps_per_s", ",.0f"),
            ("updates/s", "learner_steps_per_s", ",.0f"),
            ("ratio", "replay_ratio", ".1f"),
            ("stored", "store_items", ",.0f"),
        ):
            if key in line:
                parts.append(f"{name} {format(line[key], form)}")
        return "  ".join([*parts, f"left {format_seconds(line.get('left_s'))}"])
