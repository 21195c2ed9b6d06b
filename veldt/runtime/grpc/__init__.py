"""gRPC streams, for actors that share no memory with the run: over a Unix socket on this host, over TCP with TLS elsewhere.

    connection, wire     addresses, tokens and timing; frames and their checks
    gate, streams        the run's end: admits actors; one actor's stream
    seats, lanes         what the run keeps for an actor; messages in flight between its stream and the rings
    doors, event_bell    where the run listens; how its event loop is woken
    link, session        the actor's end: its stream; the protocol's state
    mailboxes            the actor's outboxes, inboxes, cells and rows

Imports `runtime.shm` and the plan and board of `runtime.local`. Nothing here is ever unpickled.
"""
