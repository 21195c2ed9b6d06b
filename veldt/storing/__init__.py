"""Stores: where blocks wait until the learner samples them.

    store.py      Store, the protocol that recorder and learner see; Sample, Blocks; blocks as messages between processes
    replay.py     Replay: items are drawn again and again by a selector; Mixture: with demonstrations beside it (R2D3)
    selectors.py  which items a replay draws; the sum tree
    ranks.py      items drawn by the rank of their priority; the heap
    limiters.py   when inserts or samples wait
    ring.py       BlockRing: what all stores have in common; UnrollQueue: each item once, oldest first (IMPALA)
    slots.py      where blocks lie, and how many a capacity takes; windows.py: how they are read
    device.py     the same on a GPU, from a copy of the blocks there

May import records and the top-level modules (ports, program, metrics, errors, machine); no other package.
Torch is imported for pinned buffers and for a store on a GPU alone.
"""
