"""Watching a run. Imported by experiment and cli.

    sinks.py        where metrics and the log go: JSON lines, a log file; groups of metrics
    events.py       TensorBoard events
    trackers.py     Weights & Biases, MLflow
    bottleneck.py   how fast counts grow, and the sentence that names what limits a run
    links.py        numbers as text, and the rows of the live table
    view.py         draws them on a terminal
    top.py          watches a run from another process
    plot.py         learning curves
    plot_rates.py   rates and waiting times against time
    scores.py       human-normalised scores, statistics over games with intervals; atari57.json: reference scores
    report.py       a results page of many runs
    page.py         tables and images as Markdown and HTML

May import records and the top-level modules metrics, machine and errors; nothing that imports torch.
"""
