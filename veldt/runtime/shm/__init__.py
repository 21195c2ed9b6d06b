"""Shared memory between the processes of one host. Nothing in it is ever locked, so no process can die holding a lock.

    memory   descriptors of shared memory (memfd), which have no name that could be left behind
    bell     wakes a process that sleeps until something happens
    format   how the arrays of a message lie in memory
    ring     one writer, one reader, a bounded number of messages: streams and calls
    latest   one writer, many readers, the newest value wins: weights
    arena    arrays that outlive the process that made them: a store's blocks

Imports `records.tree` and nothing of what a node is.
"""
