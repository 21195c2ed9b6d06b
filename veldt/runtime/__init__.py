"""Runtimes: where the nodes of a program run.

    base       the protocols of a runtime and of a running program; the host builds nodes and steps them
    inline     all nodes in one thread
    proxies    stand for nodes of other processes
    services   call nodes for other processes
    local      supervised processes of one host
    grpc       actors that share no memory with the run
    shm        shared memory

Imports `program`, `ports`, `shared`, `metrics`, `counters` and `records.tree`; knows no role.
"""

from veldt.runtime.base import Nodes, Runtime, Stuck
from veldt.runtime.inline import Inline

__all__ = ["Inline", "Nodes", "Runtime", "Stuck"]
