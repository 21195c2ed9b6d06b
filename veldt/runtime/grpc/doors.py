"""Doors: the addresses where a run listens, and the credentials that each needs."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from veldt.errors import UserError
from veldt.runtime.grpc.connection import check_address, check_token, is_loopback, is_unix


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


def make_folder(path: Path) -> None:
    """Makes the folder of a socket, which only this user may enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"The folder of a socket must be accessible to you alone: chmod 700 {path}, or choose a new one.")


def remove_socket(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"{path} exists and is not a socket; choose another path.")
        path.unlink()
