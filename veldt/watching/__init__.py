"""Watching a run. Imported by experiment and cli.

    sinks.py        where metrics and the log go: JSON lines, TensorBoard, Weights & Biases, a file
    rates.py        how fast counts grow
    links.py        the rows of the live table; view.py draws them, screen.py is the terminal, text.py formats numbers
    bottleneck.py   the sentence that names what limits a run
    top.py          watches a run from another process
    plot.py         learning curves and rates

May import records and the top-level modules metrics and errors; nothing that imports torch.
"""
