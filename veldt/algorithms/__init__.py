"""Algorithms, one file a paper.

    base.py     Algorithm, the contract; Batch and Loss; what the algorithms of the package share
    dqn.py      DQN and its double, dueling, n-step and prioritized variants
    dpg.py      Ape-X DPG
    r2d2.py     R2D2
    vtrace.py   V-trace actor-critic (IMPALA, SEED RL)

May import records, nets, `learning.returns`, `learning.distributions`, `bounds` and `errors`.
"""
