"""A figure of a population: its family tree, the values of what is tuned, and the fitness, over env steps."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.watching.lineage import Line, ancestors, read_lineage
from veldt.watching.plot import save, tidy

BEST, OTHER = "C3", "0.65"
LOG_FROM = 30.0  # ratio of the largest to the smallest value from which an axis is logarithmic


def draw_lineage(directory: Path, out: Path) -> None:
    """The ancestors of the best member are red."""
    from matplotlib.figure import Figure

    lines = read_lineage(directory)
    ready = _by_member(lines)
    if not ready:
        raise UserError(f"{directory} has no member that was ready yet; let the population run for longer.")
    best = _best(ready)
    path = set(ancestors(lines, best))
    names = [name for name, value in lines[0]["tuned"].items() if isinstance(value, int | float)]
    figure = Figure((8.0, 3.4 + 2.0 * (1 + len(names))), layout="constrained")
    tall = [max(2.0, 0.22 * len(ready)), *[2.0] * (1 + len(names))]
    axes = figure.subplots(2 + len(names), 1, sharex=True, squeeze=False, height_ratios=tall)[:, 0]
    _draw_tree(axes[0], ready, path)
    _draw_fitness(axes[1], ready, path)
    for axis, name in zip(axes[2:], names, strict=True):
        _draw_values(axis, name, lines, ready, path)
    axes[0].set_title(directory.resolve().name, loc="left", fontsize=11)
    axes[0].set_title(f"red: member {best}, the best, and its ancestors", loc="right", fontsize=8, color="0.4")
    axes[-1].set_xlabel("env steps of a member")
    axes[-1].set_xlim(left=0)
    for axis in axes:
        tidy(axis)
    save(figure, out)


def _by_member(lines: list[Line]) -> dict[int, list[Line]]:
    ready: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line["event"] == "ready":
            ready[line["member"]].append(line)
    return dict(sorted(ready.items()))


def _best(ready: dict[int, list[Line]]) -> int:
    """By the newest fitness; of a member that has copied since, that of the one it copied."""
    scores = {}
    for member, own in ready.items():
        copied = own[-1].get("copied") or {}
        found = copied.get("fitness", own[-1].get("fitness"))
        scores[member] = float("-inf") if found is None else float(found)
    return max(scores, key=lambda member: (scores[member], -member))


def _draw_tree(axis: Any, ready: dict[int, list[Line]], path: set[tuple[int, int]]) -> None:
    """A member is a line to the right; a copy is a line from the member that was copied."""
    at = {(line["member"], line["quantum"]): line["env_steps"] for own in ready.values() for line in own}
    for member, own in ready.items():
        before = 0
        for line in own:
            inside = (member, line["quantum"]) in path
            axis.plot([before, line["env_steps"]], [member, member], **_look(inside), solid_capstyle="butt")
            before = line["env_steps"]
            if line.get("failed"):
                axis.plot(before, member, marker="x", color="black", markersize=5)
            if copied := line.get("copied"):
                donor = copied["member"], copied["quantum"]
                used = donor in path and (member, line["quantum"] + 1) in path
                axis.plot([at.get(donor, before), before], [donor[0], member], linestyle=":", **_look(used))
                axis.plot(before, member, marker="o", markersize=3, color=BEST if used else OTHER)
    axis.set_ylabel("member")
    axis.set_yticks(list(ready) if len(ready) <= 24 else [0, len(ready) - 1])
    axis.invert_yaxis()


def _draw_fitness(axis: Any, ready: dict[int, list[Line]], path: set[tuple[int, int]]) -> None:
    found = []
    for member, own in ready.items():
        points = [(line["env_steps"], line["fitness"], line["quantum"]) for line in own if line["fitness"] is not None]
        if points:
            axis.plot([x for x, _, _ in points], [y for _, y, _ in points], color=OTHER, linewidth=0.7)
        found += [(x, y) for x, y, quantum in points if (member, quantum) in path]
    if found:
        found.sort()
        axis.plot([x for x, _ in found], [y for _, y in found], color=BEST, linewidth=1.8, marker="o", markersize=3)
    axis.set_ylabel("fitness")


def _draw_values(axis: Any, name: str, lines: list[Line], ready: dict[int, list[Line]], path: set[tuple[int, int]]) -> None:
    values = [line["tuned"][name] for line in lines]
    for member, own in ready.items():
        before = 0
        for line in own:
            inside = (member, line["quantum"]) in path
            axis.plot([before, line["env_steps"]], [line["tuned"][name]] * 2, **_look(inside), zorder=2 + inside)
            before = line["env_steps"]
    if min(values) > 0 and max(values) / min(values) >= LOG_FROM:
        axis.set_yscale("log")
    axis.set_ylabel(name.rpartition(".")[2])


def _look(inside: bool) -> dict[str, Any]:
    return {"color": BEST if inside else OTHER, "linewidth": 1.8 if inside else 0.8}
