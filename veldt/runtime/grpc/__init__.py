"""gRPC streams, for actors that share no memory with the run: on this host over a Unix socket, elsewhere over TCP with TLS.

    connection, wire     addresses, tokens and timing; frames and their checks
    gate, streams        the run's side: takes actors in; one actor's stream
    seats, lanes         what the run keeps for an actor; what is on its way between a stream and the rings
    doors, event_bell    where the run listens; how its event loop is woken
    link, mailboxes      the actor's side

Imports `runtime.shm` and the plan and board of `runtime.local`. Nothing here is ever unpickled.
"""
