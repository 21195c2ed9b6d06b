"""Local: the nodes of a program in supervised processes of one host, joined by shared memory.

    local        what a session starts and steps
    plan         which nodes share a process, and what processes share
    supervisor   starts processes, restarts them, ends them; children, orders and watchdog belong to it
    zygote       the process that all others are forked from
    process      one process: hosts nodes and serves them
    board, state where processes are seen alive and counted; state on its way between them

Imports `runtime.shm`, `program` and `ports`.
"""
