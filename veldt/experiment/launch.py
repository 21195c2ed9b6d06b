"""The runtime, gate and device that a config asks for; and whether this machine has them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch

from veldt.errors import UserError
from veldt.experiment.config import Config, GateConfig
from veldt.runtime import Inline, Runtime
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local
from veldt.runtime.local.plan import Gate

LIVES = 10_000  # that a process may have between two resumes


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"There is no device {name!r}; use cpu or cuda.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"No CUDA device is available here as {name!r}; use --device cpu.")


def check_gate(gate: GateConfig) -> None:
    """Raises a UserError where the run is not allowed to listen, or cannot."""
    if gate.listen:
        from veldt.runtime.grpc.connection import Door

        Door(gate.listen, *_tls(gate)).check("a-token-that-is-made-later")


def make_runtime(config: Config, path: Path, number: int, say: Callable[[str], None]) -> Runtime:
    """`number` is that of the checkpoint to resume from, or 0."""
    if config.runtime == "inline":
        zygote.discard()
        return Inline()
    gate: Gate | None = None
    if config.gate.listen:
        gate = _listening(config, path, say)
    elif config.transport == "grpc":
        gate = make_gate(config)
    return Local(path, config.step_timeout, LIVES * number, config.queue, gate)


def make_gate(config: Config, token: str = "", certificate: bytes = b"", key: bytes = b"") -> Gate:
    """gRPC for a config's own actors, and for those that may join."""
    from veldt.experiment.joined import assign

    seats = tuple(assign(config, seat) for seat in range(config.gate.remote))
    own = config.transport == "grpc"
    return Gate(own, seats, config.gate.listen, token, certificate, key, config.gate.compress)


def _listening(config: Config, path: Path, say: Callable[[str], None]) -> Gate:
    from veldt.experiment.joined import make_token

    gate = config.gate
    certificate, key = _tls(gate)
    file = Path(gate.token_file) if gate.token_file else path / "token"
    tls = f" --certificate {gate.certificate}" if certificate else ""
    where = gate.listen.replace("0.0.0.0", socket.gethostname())
    say(f"actors may join: veldt actor --connect {where} --token-file {file}{tls}")
    return make_gate(config, make_token(file), certificate, key)


def _tls(gate: GateConfig) -> tuple[bytes, bytes]:
    from veldt.experiment.joined import read_secret

    certificate, key = (read_secret(path) if path else b"" for path in (gate.certificate, gate.key))
    return certificate, key
