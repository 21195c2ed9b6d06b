"""gRPC streams, for actors that share no memory with the run: over a Unix socket on this host, over TCP with TLS elsewhere.

    connection, wire     addresses, tokens and timing; frames and their checks
    gate, streams        the run's end: admits actors; one actor's stream
    seats                what the run keeps for an actor, and messages in flight between its stream and the rings
    link, session        the actor's end: its stream; its seats with their counts
    mailboxes            what a session has of each channel and of each value
    relay                the actor's end for many actors of one host: between their rings and one link

    actor -- Link == stream == Gate -- ring -- store, policy
    actors -- rings -- Relay == stream == Gate -- rings -- store, policy

Each end has its own event loop, which runs only while that end is stepped. Neither starts a thread.
Imports `runtime.shm` and the plan and board of `runtime.local`. Nothing here is ever unpickled.
"""
