"""Watching a run. Imported by experiment and cli.

    sinks.py        where metrics and the log go: JSON lines, TensorBoard, Weights & Biases, a file
    bottleneck.py   how fast counts grow, and the sentence that names what limits a run
    links.py        numbers as text, and the rows of the live table
    view.py         draws them on a terminal
    top.py          watches a run from another process
    plot.py         learning curves and rates
    scores.py       human-normalised scores, statistics over games with intervals; atari57.json: reference scores
    report.py       a results page of many runs
    page.py         tables and images as Markdown and HTML

May import records and the top-level modules metrics, machine and errors; nothing that imports torch.
"""
