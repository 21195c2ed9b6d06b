"""Local: the nodes of a program in supervised processes of one host, connected by shared memory.

    local        the runtime, and its running program
    plan         which nodes share a process, and what processes share
    supervisor   starts, restarts and ends processes; children, orders, counts and watchdog are parts of it
    zygote       the process that all others are forked from
    process      one process: hosts nodes and serves them
    board        heartbeats, flags and counts of all processes, in shared memory
    state        sends the state of nodes between processes

Imports `runtime.shm`, `program`, `ports` and, in the processes that use it, `runtime.grpc`.
"""
