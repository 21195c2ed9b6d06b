"""Algorithms, one file a paper: `dqn`, `dpg` (Ape-X DPG), `r2d2`, `vtrace` (IMPALA). `base` is the contract that each
fulfils, `transitions` what DQN, DPG and R2D2 share.

It may import `veldt.records`, `veldt.nets`, `veldt.learning.returns` and `veldt.learning.distributions`.
"""
