"""The data that travels along the chain.

    tree.py      arrays by name, and how rows of them are laid out
    step.py      step records and their time alignment; EnvSpec
    block.py     blocks, windows, and which steps can be trained on
    history.py   stacked history
    masks.py     action masks: which actions are legal
    checks.py    what records and blocks that come from elsewhere may contain

May import numpy, Gymnasium's spaces and `errors`; runs without torch and numba.
"""
