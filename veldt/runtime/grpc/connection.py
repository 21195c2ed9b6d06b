"""gRPC between a run and actors that share no memory with it: what both ends of a stream have in common.

    link.py   the actor's end, which comes back by itself when the stream broke
    gate.py   a process of the run that takes every actor's frames, checks them, and brings them into shared memory

    actor -- Link == stream == Gate -- ring -- store, policy

Both ends have an event loop of their own that runs only while they are stepped; neither starts a thread.
"""

from __future__ import annotations

import ipaddress
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # who fails to get in does not fill the terminal
# gRPC's newer way to poll hands each message through two more threads: 238 us for a bare call instead of 157. (One that
# does not know these names any more would say so on the terminal.)
if tuple(map(int, version("grpcio").split(".")[:2])) < (1, 90):
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import grpc as grpc  # both ends take it from here, after it was told

from veldt.errors import UserError

SERVICE, METHOD = "veldt", "actor"
BEAT_S = 0.5  # who has said nothing for so long says that it is there
SILENT_S = 3.0  # who was not heard for so long is gone
GREET_S = 5.0  # for HELLO and WELCOME
LOOK_S = 0.05  # at all rings, though no bell rang
ACK_S = 0.02  # an acknowledgement waits so long for a message that it can go with
TOKEN_BYTES = 16  # at least
UNIX_BYTES = 107  # of a socket's path


class LinkLost(RuntimeError):
    """The run cannot be reached any more, or does not want this actor."""


def is_unix(address: str) -> bool:
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: str | Path) -> str:
    """A token from a file that nobody else can read."""
    path = Path(path)
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The token file {path} cannot be read: {error}.") from None
    if mode & 0o077:
        raise UserError(f"The token file {path} can be read by others; run: chmod 600 {path}")
    return check_token(text)


def check_token(token: str) -> str:
    if len(token) < TOKEN_BYTES or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"A token is at least {TOKEN_BYTES} letters and digits; make one with: "
            "python -c 'import secrets; print(secrets.token_hex(16))'"
        )
    return token


def check_address(address: str) -> None:
    if is_unix(address):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > UNIX_BYTES:
            raise UserError(f"The path of a socket is absolute and at most {UNIX_BYTES} bytes long: {path!r} is not.")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise UserError(f"{address!r} is no address: give unix:/path, HOST:PORT or [HOST]:PORT.")


# What both ends tell gRPC.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # what may be on its way is fixed, and no pings measure how much it could be
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_metadata_size", 4096),
    ("grpc.absolute_max_metadata_size", 8192),
]
