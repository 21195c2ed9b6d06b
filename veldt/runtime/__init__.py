"""Runtimes: where the nodes of a program run.

    base       Runtime and Nodes, the protocols
    inline     all nodes in one thread
    host       builds nodes and steps the workers among them; used by every runtime
    proxies    what stands for a node in another process
    services   what calls a node for the callers in other processes
    local/     supervised processes of one host; shm/: their shared memory; grpc/: actors that share no memory with the run

Knows `program`, `ports`, `shared`, `metrics`, `counters` and `records.tree`, and no role.
"""

from __future__ import annotations

from veldt.runtime.base import Nodes, Runtime, Stuck
from veldt.runtime.inline import Inline

__all__ = ["Inline", "Nodes", "Runtime", "Stuck"]
