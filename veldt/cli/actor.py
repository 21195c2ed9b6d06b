"""Joins a run that listens (veldt train ... --gate.listen HOST:PORT) as an actor, from this machine or another.

It takes a free seat of the run, gets its settings from there, and can be stopped and started again at any time.

Example: veldt actor --connect trainer.local:7777 --token-file token --certificate run.crt
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from veldt.errors import ProcessFailed
from veldt.signals import interruptible


@dataclass(frozen=True)
class Actor:
    connect: str
    """HOST:PORT of the run, or unix:/path of its socket."""
    token_file: Path | None = None
    """File with the run's token, readable by you alone."""
    certificate: Path | None = None
    """The run's TLS certificate (PEM), or that of its issuer; needed for another host."""
    env: str = ""
    """Allow importing this environment, if the run's is module:callable; Gymnasium ids need no permission."""
    network: str = ""
    """Allow importing this function, if the run's network is made by one (algorithm.network_from module:callable)."""
    wrappers: tuple[str, ...] = ()
    """Allow importing these functions, if the run's environments are wrapped by them."""
    env_kwargs: tuple[str, ...] = ()
    """Allow these arguments of the environment, key=value; numbers and booleans need no permission."""
    compress: bool = False
    """Compress messages (lz4)."""
    patience: float = 60.0
    """Seconds without a connection before the actor gives up."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Actor, args=argv, prog="veldt actor", description=__doc__)
    from veldt.experiment import joined
    from veldt.runtime.grpc.connection import LinkLost, read_token
    from veldt.runtime.grpc.link import Link

    token = read_token(args.token_file) if args.token_file is not None else ""
    certificate = joined.read_certificate(args.certificate)
    link = Link(args.connect, token, certificate, compress=args.compress, patience=args.patience)
    left: list[int] = []
    try:
        told = link.connect().get("assignment")
        with interruptible(left.append, "Leaving the run"):
            assignment = joined.parse(told, args.env, args.network, args.wrappers, args.env_kwargs)
            joined.live(link, assignment, leaving=lambda: bool(left))
    except LinkLost as error:
        raise ProcessFailed(str(error)) from None
    finally:
        link.close()
    if left:
        print("Left the run.")
        return 128 + left[0]
    print("The run has ended.")
    return 0
