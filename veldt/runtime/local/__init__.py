"""Local: the nodes of a program in supervised processes of one host, connected by shared memory.

    local        the runtime, and its running program: states of nodes, orders to processes
    plan         which nodes share a process, and what processes share
    supervisor   starts, restarts and ends processes
    watchdog     what it knows of each process; kills those that hang
    zygote       the process that all others are forked from
    process      one process: hosts nodes and serves them
    board        heartbeats, flags and counts of all processes, in shared memory

Imports `runtime.shm`, `program`, `ports` and, in the processes that use it, `runtime.grpc`.
"""
