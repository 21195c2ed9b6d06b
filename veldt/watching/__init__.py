"""Watching a run: metrics files and events, rates, the live table, the bottleneck, `veldt top`, plots.

Imports `metrics`, `errors`, `records` and nothing that imports torch; `experiment` and `cli` import it.
"""
