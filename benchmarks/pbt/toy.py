"""The toy of Jaderberg et al. 2017 (figure 2), with the rules of veldt pbt: two members, two weights, two settings.

    python benchmarks/pbt/toy.py docs/results/pbt_toy.png

The quality is 1.2 - a^2 - b^2; a member climbs the gradient of 1.2 - h0 a^2 - h1 b^2. The grid has h = (1, 0) and (0, 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from veldt.experiment.populations.rules import Exploit, Explore, Range, exploit, explore
from veldt.records.tree import Array
from veldt.watching.plot import save, tidy

STEPS, READY, RATE, NOISE, SEEDS = 200, 5, 0.02, 0.01, range(20)
RANGES = {name: Range("uniform", 0.0, 1.0) for name in ("h0", "h1")}
ARMS = {
    "PBT: exploit and explore": (True, True),
    "exploit only": (True, False),
    "explore only": (False, True),
    "grid search": (False, False),
}


def run(copies: bool, explores: bool, seed: int) -> tuple[Array, Array]:
    """The weights [STEPS + 1, member, 2] and the quality [STEPS + 1, member]."""
    rng = np.random.default_rng(seed)
    weights = np.full((2, 2), 0.9)
    tuned = [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    path = [weights.copy()]
    how = Explore(resample=0.25)
    for step in range(1, STEPS + 1):
        weights = weights * (1 - 2 * RATE * np.array([[x["h0"], x["h1"]] for x in tuned]))
        if step % READY == 0:
            measured = {i: [float(1.2 - w @ w + rng.normal(0, NOISE))] for i, w in enumerate(weights)}
            for i in range(2):
                donor = exploit(Exploit("truncation"), i, measured, rng) if copies else None
                if donor is not None:
                    weights[i] = weights[donor]  # with only the weights copied, the settings stay
                if explores and (donor is not None or not copies):
                    tuned[i] = explore(how, tuned[i if donor is None else donor], RANGES, rng)
        path.append(weights.copy())
    found = np.stack(path)
    return found, 1.2 - (found**2).sum(-1)


def main() -> None:
    from matplotlib.figure import Figure

    figure = Figure((10.0, 5.2), layout="constrained")
    axes = figure.subplots(2, len(ARMS), squeeze=False)
    for column, (name, (copies, explores)) in enumerate(ARMS.items()):
        runs = [run(copies, explores, seed) for seed in SEEDS]
        best = [float(quality[-1].max()) for _, quality in runs]
        print(f"{name}: best member at the end {np.mean(best):.3f} (worst of {len(best)} seeds {min(best):.3f})")
        weights, quality = runs[0]
        for i in range(2):
            axes[0, column].plot(quality[:, i], color=f"C{i}", linewidth=1.2)
            axes[1, column].plot(weights[:, i, 0], weights[:, i, 1], ".", markersize=2, color=f"C{i}")
        axes[0, column].axhline(1.2, color="0.6", linewidth=0.8, linestyle=":")
        axes[0, column].set(title=name, ylim=(-0.6, 1.3), xlabel="step")
        axes[1, column].set(xlim=(-0.02, 1.0), ylim=(-0.02, 1.0), xlabel="a", aspect="equal")
    axes[0, 0].set_ylabel("quality")
    axes[1, 0].set_ylabel("b")
    for axis in axes.ravel():
        axis.title.set_fontsize(9)
        tidy(axis)
    save(figure, Path(sys.argv[1] if len(sys.argv) > 1 else "toy.png"))


if __name__ == "__main__":
    main()
