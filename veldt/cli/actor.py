"""Joins a run that listens (veldt train ... --gate.listen HOST:PORT) as an actor, from this machine or another.

It takes a free seat of the run, gets its settings from there, and can be stopped and started again at any time. With
--actors it is a site: that many actors in processes of this host, which restarts them, with one connection for all.

Example: veldt actor --connect trainer.local:7777 --token-file token --certificate run.crt --actors 8
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from veldt.errors import ProcessFailed, UserError
from veldt.machine import runs_processes
from veldt.signals import interruptible

MAX_ACTORS = 256  # of a site


@dataclass(frozen=True)
class Actor:
    connect: str
    """HOST:PORT of the run, or unix:/path of its socket."""
    actors: int = 0
    """Start a site of this many actors, each in a supervised process; 0: a single actor, in this process."""
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
    step_timeout: float = 30.0
    """With --actors: seconds that an environment step may take before its actor is restarted."""


def run(argv: list[str]) -> int:
    args = tyro.cli(Actor, args=argv, prog="veldt actor", description=__doc__)
    if not 0 <= args.actors <= MAX_ACTORS or args.step_timeout <= 0:
        raise UserError(f"--actors is at most {MAX_ACTORS}, and --step-timeout is above 0.")
    from veldt.experiment import joined
    from veldt.runtime.grpc.connection import LinkLost, read_token
    from veldt.runtime.grpc.link import Link

    token = read_token(args.token_file) if args.token_file is not None else ""
    certificate = joined.read_certificate(args.certificate)
    how = (token, certificate, "", args.compress, args.patience)
    link = Link(args.connect, *how, actors=max(1, args.actors))
    left: list[int] = []
    try:
        link.connect()
        with interruptible(left.append, "Leaving the run"):
            allowed = (args.env, args.network, args.wrappers, args.env_kwargs)
            assignments = [joined.parse(seat.assignment, *allowed) for seat in link.session.seats]
            _act(args, link, assignments, lambda: bool(left))
    except LinkLost as error:
        raise ProcessFailed(str(error)) from None
    finally:
        link.close()
    if left:
        print("Left the run.")
        return 128 + left[0]
    print("The run has ended.")
    return 0


def _act(args: Actor, link: Any, assignments: list[Any], leaving: Callable[[], bool]) -> None:
    if not args.actors:
        from veldt.experiment import joined

        return joined.live(link, assignments[0], leaving)
    if not runs_processes():
        raise UserError("A site needs Linux on x86-64 or aarch64; without --actors a single actor runs anywhere.")
    from veldt.experiment import site

    site.live(link, assignments, leaving, args.step_timeout)
