"""Plots the results of `veldt sweep benchmarks/impala/lag.yaml`: a panel for each lag and learning rate.

python benchmarks/impala/plot_lag.py sweeps/lag -o lag.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from veldt.watching.sinks import evaluations, read_metrics

CORRECTIONS = {"V-trace": "tab:blue", "one-step": "tab:orange", "no correction": "tab:red"}
LAGS = {"no lag": "no lag", "20 behind": "20 updates behind", "50 behind": "50 updates behind"}


def curves(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Env steps [E] and greedy returns [seeds, E] of the evaluations of one setting."""
    files = sorted(directory.glob("seed-*/metrics.jsonl"))
    found = [[(point.env_steps, point.mean_return) for point in evaluations(read_metrics(file))] for file in files]
    count = min(map(len, found))
    array = np.array([lines[:count] for lines in found], float)  # [seeds, E, 2]
    return array[:, :, 0].mean(0), array[:, :, 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's directory")
    parser.add_argument("-o", "--out", type=Path, default=Path("lag.png"))
    args = parser.parse_args()
    rates = {"lr-0.001": "learning rate 0.001", "lr-0.003": "learning rate 0.003"}
    figure, panels = plt.subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True)
    for row, (rate, rate_name) in enumerate(rates.items()):
        for column, (lag, lag_name) in enumerate(LAGS.items()):
            panel = panels[row, column]
            for name, color in CORRECTIONS.items():
                directory = args.sweep / f"{name} {lag} {rate}".replace(" ", "-")
                if directory.is_dir():
                    steps, returns = curves(directory)
                    panel.plot(steps, returns.mean(0), color=color, label=name)
                    panel.plot(steps, returns.T, color=color, alpha=0.25, linewidth=0.7)
            panel.set_title(f"{lag_name}, {rate_name}", fontsize=10)
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("env steps")
        panel.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}K")
    for panel in panels[:, 0]:
        panel.set_ylabel("greedy return")
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
