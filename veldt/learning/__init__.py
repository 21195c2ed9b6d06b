"""Learning: `feed` -> `learner` (loss -> one flat gradient) -> `updater` -> `publisher` -> `params`; and the mathematics
that algorithms share: `optim`, `returns`, `distributions`.

It may import `veldt.records`, `veldt.storing`, `veldt.nets` and `veldt.algorithms.base`.
"""
