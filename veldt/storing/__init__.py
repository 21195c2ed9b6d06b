"""Stores: where blocks wait until the learner samples them.

    store.py      Store, the protocol that recorder and learner see; Sample, Blocks
    replay.py     Replay: items are drawn again and again by a selector; the oldest blocks are evicted
    queue.py      UnrollQueue: each item once, oldest first (IMPALA)
    mixture.py    Mixture: a replay of the run and one of demonstrations (R2D3)
    selectors.py  which items a replay draws; sumtree.py is what prioritized draws use
    limiters.py   when inserts or samples wait
    ring.py       BlockRing: the blocks and counts of a store; slots.py: where blocks lie; windows.py: how they are read
    messages.py   blocks as messages between processes
    size.py       how many slots a capacity takes

May import records and the top-level modules (ports, program, metrics, errors, machine); no other package.
Torch is imported for pinned buffers alone.
"""
