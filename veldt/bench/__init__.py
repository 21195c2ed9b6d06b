"""Measurements: ours against the limit, and ours against a peer, alternating in one run. Medians."""
