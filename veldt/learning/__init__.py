"""Learning: feed -> learner (loss -> one flat gradient) -> updater -> publisher -> params.

    feed.py            Feed: batches from a store; prepares the next one
    learner.py         Learner: one update a step; LearnerConfig
    updater.py         Updater, the protocol: what becomes of a gradient; Owned: the optimizer is in this process
    publisher.py       Publisher: hands weights to the params
    params.py          Params, the protocol; LatestParams; networks as flat vectors
    diagnosis.py       what an algorithm measures on whole blocks
    optim.py           Adam, RMSProp, SGD on flat vectors
    returns.py         n-step returns, V-trace, value rescaling
    distributions.py   distributions of actions

May import records, storing, nets and `algorithms.base`.
"""
