"""Algorithms, one file a paper.

    base.py          Algorithm, the contract; Batch and Loss; Defaults
    dqn.py           DQN and its double, dueling, n-step and prioritized variants
    dpg.py           Ape-X DPG
    r2d2.py          R2D2
    vtrace.py        V-trace actor-critic (IMPALA, SEED RL)
    transitions.py   what DQN, DPG and R2D2 share

May import records, nets, `learning.returns`, `learning.distributions`, `bounds` and `errors`.
"""
