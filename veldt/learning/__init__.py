"""Learning: feed -> learner (loss -> one flat gradient) -> updater -> publisher -> params.

    learner.py         Learner: one update a step; LearnerConfig
    feed.py            Feed: batches from a store, prepares the next one
    captured.py        Captured: the update as one CUDA graph
    optim.py           Updater, the protocol: what becomes of a gradient; Owned: the optimizer is in this process;
                       Adam, RMSProp, SGD on flat vectors
    activations.py     about how much memory a loss takes
    params.py          LatestParams: hands out the newest weights; Publisher: gives them to it; networks as flat vectors
    returns.py         n-step returns, V-trace, value rescaling
    distributions.py   distributions of actions

May import records, storing, nets and `algorithms.base`.
"""
