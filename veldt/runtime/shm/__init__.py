"""Shared memory between the processes of one host. There are no locks, so no process can die holding one.

    memory   its mapping, and what lies in it: arrays of a message, the newest value of something (weights), arrays that
             outlive their process (a store's blocks), bells that wake a process
    ring     one writer, one reader, a bounded number of messages: streams and calls

Imports `records.tree`, `machine` and `errors`; knows nothing of nodes.
"""
