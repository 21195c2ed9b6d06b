"""Shared memory between the processes of one host. There are no locks, so no process can die holding one.

    memory   descriptors of shared memory (memfd) and its mapping; it has no name, so none is left behind
    bell     wakes a sleeping process
    format   names, types and offsets of the arrays of a message
    ring     one writer, one reader, a bounded number of messages: streams and calls
    latest   one writer, many readers, only the newest value: weights
    arena    arrays that outlive the process that made them: a store's blocks

Imports `records.tree`, `machine` and `errors`; knows nothing of nodes.
"""
