"""Acting: how step records become actions and blocks.

    actor.py      Policy, the protocol between actors and inference, with its ports; imports no torch
                  Actor: steps groups of environments with a policy
                  Evaluator: plays greedy episodes with the newest weights
    policy.py     LocalPolicy: inference in the actor's own process; BatchedPolicy: for many actors in one forward pass;
                  how much each environment explores
    graphed.py    GraphedForward: forward passes as CUDA graphs
    recorder.py   Recorder: a policy that wraps a policy and writes blocks to a store

May import records, envs, algorithms, learning.params and the protocol of a store; no topology, experiment or runtime.
"""
