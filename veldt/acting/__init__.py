"""Acting: how step records become actions and blocks.

    actor.py        Actor: steps groups of environments with a policy; imports no torch
    evaluator.py    Evaluator: plays greedy episodes with the newest weights
    seam.py         Policy, the protocol between actors and inference, with its ports; imports no torch
    policy.py       LocalPolicy: inference in the actor's own process
    batched.py      BatchedPolicy: inference for many actors in one forward pass
    model.py        Model: the network with the newest weights that both policies act with
    exploration.py  schedules: how much each environment explores
    recorder.py     Recorder: a policy that wraps a policy and writes blocks to a store

May import records, envs, algorithms, learning.params and the protocol of a store; no topology, experiment or runtime.
"""
