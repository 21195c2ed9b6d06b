"""TensorBoard events: scalars by group, and the settings for its table of hyperparameters.

A file is a sequence of: a length, its masked CRC, a protobuf Event, its masked CRC. (Importing the writer of TensorBoard
takes longer than starting a run.)
"""

import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veldt.foreign import regular
from veldt.watching.sinks import append_whole, grouped

LARGEST = 3.4e38  # of the numbers that a float32 can hold


class TensorBoard:
    def __init__(self, directory: Path, settings: Mapping[str, Any] | None = None) -> None:
        """`settings`: by dotted name."""
        path = directory / f"events.out.tfevents.{int(time.time())}.{os.getpid()}.veldt"
        self._file = open(path, "ab", buffering=0, opener=regular)  # noqa: SIM115
        self._event(_field(3, b"brain.Event:2"))
        if settings:
            self._event(_field(5, _hyperparameters(settings, directory.name)))

    def write(self, line: dict[str, Any]) -> None:
        """What an evaluation found is at the env steps of its weights."""
        evaluated = {name: x for name, x in line.items() if name.startswith("eval_")}
        self._scalars(grouped({name: x for name, x in line.items() if name not in evaluated}), int(line["env_steps"]))
        self._scalars(grouped(evaluated), int(line.get("eval_env_steps", line["env_steps"])))

    def _scalars(self, numbers: dict[str, float], env_steps: int) -> None:
        values = b""
        for name, x in numbers.items():
            single = max(-LARGEST, min(LARGEST, x)) if math.isfinite(x) else x
            values += _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", single))
        if values:
            self._event(b"\x10" + _varint(env_steps) + _field(5, values))

    def _event(self, body: bytes) -> None:
        body = b"\x09" + struct.pack("<d", time.time()) + body
        length = struct.pack("<Q", len(body))
        append_whole(self._file.fileno(), length + _masked_crc(length) + body + _masked_crc(body))

    def close(self) -> None:
        self._file.close()


def _hyperparameters(settings: Mapping[str, Any], group: str) -> bytes:
    """A Summary with the plugin's SessionStartInfo; TensorBoard makes the table from those of all runs."""
    entries = b"".join(_field(1, _field(1, name.encode()) + _field(2, _value(x))) for name, x in settings.items())
    info = entries + _field(4, group.encode()) + b"\x29" + struct.pack("<d", time.time())
    plugin = _field(1, b"hparams") + _field(2, _field(3, info))
    tensor = b"\x08\x01" + _field(2, _field(2, b"\x08\x01")) + _field(5, struct.pack("<f", 0.0))  # float32 of shape [1]
    metadata = _field(1, plugin)
    return _field(1, _field(1, b"_hparams_/session_start_info") + _field(8, tensor) + _field(9, metadata))


def _value(x: Any) -> bytes:
    """A google.protobuf.Value."""
    if isinstance(x, bool):
        return b"\x20" + bytes([x])
    if isinstance(x, int | float):
        return b"\x11" + struct.pack("<d", x)
    return _field(3, str(x).encode())


def _varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC = [_crc_of_byte(byte) for byte in range(256)]


def _masked_crc(data: bytes) -> bytes:
    """CRC-32C, masked as TensorBoard does."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
