"""gRPC streams, for actors that share no memory with the run: over a Unix socket on this host, over TCP with TLS elsewhere.

    connection, wire     addresses, tokens and timing; frames and their checks
    gate, streams        the run's end: admits actors; one actor's stream
    seats                what the run keeps for an actor, and messages in flight between its stream and the rings
    link, session        the actor's end: its stream; its mailboxes, cells and counts

    actor -- Link == stream == Gate -- ring -- store, policy

Each end has its own event loop, which runs only while that end is stepped. Neither starts a thread.
Imports `runtime.shm` and the plan and board of `runtime.local`. Nothing here is ever unpickled.
"""
