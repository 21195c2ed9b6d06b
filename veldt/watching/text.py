"""Numbers of metrics as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Line = Mapping[str, Any]  # of metrics.jsonl


def number(line: Line, key: str) -> float | None:
    """None: it is missing, or not a finite number."""
    x = line.get(key)
    return float(x) if isinstance(x, int | float) and math.isfinite(x) else None


def amount(x: float, unit: str = "") -> str:
    """A number with its unit (see `metrics.Metric`)."""
    if unit == "fraction":
        return percent(x)
    if unit.startswith("bytes"):
        return format_bytes(x) + unit.removeprefix("bytes")
    if unit == "s" or unit.endswith("/s"):
        return f"{short(x)} {unit}"
    return f"{plain(x)} {unit[:-1] if x == 1 and unit.endswith('s') else unit}".rstrip()


def plain(x: float) -> str:
    """A count in full, any other number short."""
    return f"{x:,.0f}" if x == int(x) else short(x)


def percent(x: float) -> str:
    return f"{100 * x:,.0f} %"


def short(x: float) -> str:
    """A number of which two or three digits matter."""
    if x == 0 or abs(x) >= 10:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 1 else f"{x:.2g}"


def format_bytes(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if abs(n) < 999.95:  # what would be rounded to 1000.0 belongs to the next unit
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def format_seconds(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
