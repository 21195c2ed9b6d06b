"""Where blocks wait to be learned from: a replay, a queue, a mixture with demonstrations, and what these are made of.

Imports `veldt.records` and nothing above it.
"""
