"""What both ends of a gRPC stream between a run and an actor have in common: addresses, tokens, timing, options of gRPC."""

import ipaddress
import os
import stat
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # failed connections are not logged on the terminal
# gRPC's newer polling (event engine) passes each message through two more threads: 238 us for a bare call instead of 157.
# A gRPC that no longer knows these names would print a warning.
if tuple(map(int, version("grpcio").split(".")[:2])) < (1, 90):
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import grpc as grpc  # both ends import it from here, after these variables are set

from veldt.errors import UserError

SERVICE, METHOD = "veldt", "actor"
HEARTBEAT_S = 0.5  # without sending a frame, after which a heartbeat is sent
SILENCE_S = 3.0  # without a frame, after which the other end counts as gone
HANDSHAKE_S = 5.0  # for HELLO and WELCOME
POLL_S = 0.05  # between two looks at all rings when no bell has rung
ACK_S = 0.02  # that an acknowledgement waits for a message to travel with
MIN_TOKEN_BYTES = 16
MAX_UNIX_PATH = 107  # bytes of a socket's path


class LinkLost(RuntimeError):
    """The run cannot be reached any more, or has closed the stream."""


def printable(text: str) -> str:
    """What another machine said, without codes that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:500])


def is_unix(address: str) -> bool:
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: str | Path) -> str:
    """A token from a file that only its owner can read."""
    try:
        text = _read_private(path, "token file").decode().strip()
    except UnicodeDecodeError as error:
        raise UserError(f"The token file {path} cannot be read: {error}.") from None
    return check_token(text)


def read_key(path: str | Path | None) -> bytes:
    """A TLS key from a file that only its owner can read; empty where no file is named."""
    return _read_private(path, "key") if path else b""


def _read_private(path: str | Path, what: str) -> bytes:
    path = Path(path)
    try:
        # It may be a link, as secrets often are; to open a pipe would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UserError(f"The {what} {path} is not a regular file.")
            data = file.read(1 << 20)
    except OSError as error:
        raise UserError(f"The {what} {path} cannot be read: {error.strerror}.") from None
    if mode & 0o077:
        raise UserError(f"The {what} {path} can be read by others; run: chmod 600 {path}")
    return data


def check_token(token: str) -> str:
    if len(token) < MIN_TOKEN_BYTES or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"A token has at least {MIN_TOKEN_BYTES} letters and digits; make one with: "
            "python -c 'import secrets; print(secrets.token_hex(16))'"
        )
    return token


@dataclass
class Door:
    """Where the gate listens: `unix:/path`, or `HOST:PORT` with a token, and with TLS beyond this host."""

    address: str
    certificate: bytes = b""
    key: bytes = b""

    def check(self, token: str) -> None:
        check_address(self.address)
        if is_unix(self.address):
            return
        if not token:
            raise UserError(f"The run does not listen on {self.address} without a token; give a token file.")
        check_token(token)
        if bool(self.certificate) != bool(self.key):
            raise UserError("TLS needs both a certificate and its key.")
        if not self.certificate and not is_loopback(self.address):
            raise UserError(
                f"The run does not listen on {self.address} without TLS; give a certificate and its key, or listen on "
                "127.0.0.1."
            )


def check_address(address: str) -> None:
    if is_unix(address):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > MAX_UNIX_PATH:
            raise UserError(f"The path of a socket must be absolute and at most {MAX_UNIX_PATH} bytes long, not {path!r}.")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise UserError(f"{address!r} is not an address: give unix:/path, HOST:PORT or [HOST]:PORT.")


# gRPC options of both ends.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # windows are fixed: no pings that measure the bandwidth
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_metadata_size", 4096),
    ("grpc.absolute_max_metadata_size", 8192),
]
