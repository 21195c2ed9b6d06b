"""Populations of runs: population-based training (Jaderberg et al. 2017), and the search for settings with Optuna."""
