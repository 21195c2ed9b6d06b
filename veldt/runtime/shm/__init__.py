"""Shared memory between the processes of one host. There are no locks, so no process can die holding one.

    memory   its mapping, formats of messages, arrays that outlive their process, and bells that wake a process
    ring     one writer, one reader, a bounded number of messages: streams and calls
    latest   one writer, many readers, only the newest value: weights

Imports `records.tree`, `machine` and `errors`; knows nothing of nodes.
"""
