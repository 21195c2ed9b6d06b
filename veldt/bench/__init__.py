"""Benchmarks (`veldt bench`): Veldt against the limits of the machine and against other libraries.

Contenders take turns in one run, and medians are reported.

    learner, replay, transport   one learner step; the store; messages between processes
    dqn, apex, impala            whole runs on CartPole
    scaling, inference           env steps per second over the number of actors; local against central inference
    latency, window, prices      parts of `inference`: what runs in light processes, its measurements, what steps cost
    peers, timing                shared by the others

May import all other packages but `cli`; only `cli.bench` and the zygote import it.
"""
