"""A page for each recipe: every setting, what its paper says, and why ours is another.

python -m veldt.experiment.recipe_pages docs/recipes
"""

import sys
from pathlib import Path
from typing import Any

from veldt.experiment.papers import PAPERS
from veldt.experiment.recipes import RECIPES, make
from veldt.experiment.settings import flat, without_effect

PIXELS = {"Atari": "ALE/Pong-v5", "MinAtar": "MinAtar/Breakout-v1", "other": "CartPole-v1"}
CONTINUOUS = PIXELS | {"continuous actions": "Pendulum-v1"}
GRASPING = {"Grasp": "veldt/Grasp-v0", "TwoGoals": "veldt/TwoGoals-v0", "other": "Pendulum-v1"}
VECTORS = {"MuJoCo": "HalfCheetah-v5", "other": "Pendulum-v1"}
LEFT_OUT = ("recipe", "env", "seed")
# Values that depend on the machine, of the first column.
OF_THE_MACHINE = {("dqn", "threads"): "cores, at most 8", ("apex-dqn", "inference"): "central with a GPU"} | {
    (recipe, "actors"): "cores - 1" for recipe in RECIPES if recipe not in ("dqn", "apex-dpg", "qt-opt")
}
OF_THE_MACHINE |= {(recipe, "workers"): "cores" for recipe in RECIPES}
OF_THE_MACHINE |= {
    ("gorila", "bundles"): "cores - 1",
    ("gorila", "store.capacity"): "1,000,000 in all, at least 100,000 each",
}


def variants(recipe: str) -> dict[str, str]:
    """The columns of a page, and the environment that stands for each; the paper's numbers are the first's."""
    others = {"apex-dpg": VECTORS, "qt-opt": GRASPING, "impala": CONTINUOUS, "seed-vtrace": CONTINUOUS}
    return others.get(recipe, PIXELS)


def page(recipe: str) -> str:
    paper, doc = PAPERS[recipe], (RECIPES[recipe].__doc__ or "").strip()
    columns = variants(recipe)
    ours = [effective(recipe, env) for env in columns.values()]
    lines = [
        f"# {recipe}",
        "",
        f"Written by `python -m veldt.experiment.recipe_pages docs/recipes`. {doc}",
        "",
        f"Paper: {paper.name}." + (f" Its values are from: {paper.where}." if paper.where else ""),
        "Empty: the setting has no effect there, or we do not know what the paper says of it.",
        *([f"Beside the settings, this is not the paper's: {'; '.join(paper.departures)}."] if paper.departures else []),
        "",
        f"| setting | {' | '.join(columns)} | paper | where | why {next(iter(columns))} differs from the paper |",
        "|---|" + "--:|" * len(columns) + "--:|---|---|",
    ]
    for name in ours[0] | ours[1] | ours[-1]:
        cells = [name, *(shown(values.get(name)) for values in ours), "", "", ""]
        cells[1] = OF_THE_MACHINE.get((recipe, name), cells[1])
        if name in paper.settings:
            cells[-3:] = shown(paper.settings[name]), paper.elsewhere.get(name, paper.where), paper.why.get(name, "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def effective(recipe: str, env: str) -> dict[str, Any]:
    """The settings that have an effect."""
    config = make(recipe, env)
    idle = without_effect(config)
    return {name: value for name, value in flat(config).items() if name not in idle and name not in LEFT_OUT}


def shown(value: Any) -> str:
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, str) and value.replace("_", "").isdigit():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        (Path(folder) / f"{recipe}.md").write_text(page(recipe))


if __name__ == "__main__":
    main(*sys.argv[1:])
