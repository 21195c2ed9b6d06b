"""Frames: the messages between the run's gate and an actor that shares no memory with the run.

A frame is a header of 24 bytes and a payload. The payload of a message is the raw bytes of its arrays as they are in shared
memory (`shm.Format`), so that a gate copies them in one piece; formats are sent once, from the run to the actor, and frames
refer to them by number. A frame is checked before anything of it is kept: its length and kind, and that booleans are 0 or 1
and floats finite. It needs no checksum: it travels within one host, or under TLS. Nothing here is ever unpickled.
"""

import contextlib
import importlib
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from veldt.counters import NAMES
from veldt.errors import UserError
from veldt.records.tree import Array, Tree
from veldt.runtime.shm.memory import ALIGN, Bytes, Format

lz4: Any = None  # where it is not installed
with contextlib.suppress(ImportError):
    lz4 = importlib.import_module("lz4.block")

PROTOCOL = 5
HEADER = struct.Struct("<BBBB4xqq")  # kind, channel, format, flags, number, ack; the arrays after it are aligned
HELLO, WELCOME, DATA, ACK, HEARTBEAT, WANT, VALUE, REPORT, LEAVE, END = KINDS = range(1, 11)
LZ4 = 1  # flag: the payload is compressed
STATUS = struct.Struct(f"<B{2 * len(NAMES)}q")  # flags; counts of the run; how much of them this session has counted
STOPPING, HOLD, QUIT = 1, 2, 4
PART = struct.Struct("<QQ")  # offset of this part in the value, and bytes of the whole value
PART_BYTES = 1 << 20
JSON_BYTES = 1 << 17  # at most, in one frame of an actor
MAX_METRICS = 256
MAX_CHANNELS = 256  # of a stream: a header has one byte for it
MAX_ACTORS = 256  # of a site
SMALL = 512  # bytes; smaller messages are not compressed
MAX_BYTES = 1 << 30  # of a message


class Refused(ValueError):
    """An invalid frame; the message says why."""


class Frame(NamedTuple):
    kind: int
    channel: int
    format: int
    flags: int
    number: int
    ack: int
    payload: memoryview


def frame(
    kind: int, *parts: Any, channel: int = 0, format_: int = 0, flags: int = 0, number: int = 0, ack: int = 0
) -> bytes:
    """The bytes of a frame; its payload is the given buffers, one after the other."""
    return b"".join((HEADER.pack(kind, channel, format_, flags, number, ack), *parts))


def parse(data: bytes) -> Frame:
    if len(data) < HEADER.size:
        raise Refused("a frame is too short")
    received = Frame._make((*HEADER.unpack_from(data), memoryview(data)[HEADER.size :]))
    if received.kind not in KINDS or received.flags & ~LZ4:
        raise Refused("a frame has an unknown kind")
    return received


class Columns:
    """Packs and checks the arrays of one format."""

    def __init__(self, format_: Format, finite: bool = True) -> None:
        self.format = format_
        self._parts: list[tuple[str, bytes]] = []  # name, and the padding that follows
        self._checks: list[tuple[np.dtype[Any], int, int]] = []  # dtype, begin, end: adjacent arrays are checked at once
        ends = [*format_.offsets[1:], format_.nbytes]
        parts = zip(format_.columns, format_.dtypes, format_.offsets, ends, strict=False)
        for (name, code, shape), dtype, begin, after in parts:
            known = dtype.kind in "biuf" and dtype.itemsize <= ALIGN and dtype.newbyteorder("<") == dtype
            if not known or min(shape, default=0) < 0 or after > MAX_BYTES:
                raise Refused(f"{name!r} cannot be sent as {code} {shape}")
            end = begin + dtype.itemsize * math.prod(shape)
            self._parts.append((name, bytes(after - end)))
            if dtype.kind == "b" or (dtype.kind == "f" and finite):
                if self._checks and self._checks[-1][0] == dtype and begin - self._checks[-1][2] < ALIGN:
                    begin = self._checks.pop()[1]
                self._checks.append((dtype, begin, end))

    def pack(self, tree: Tree) -> list[Any]:
        parts: list[Any] = []
        for name, fill in self._parts:
            x = tree[name]
            parts.append(x if x.flags.c_contiguous else np.ascontiguousarray(x))
            if fill:
                parts.append(fill)
        return parts

    def check(self, payload: Bytes) -> None:
        if len(payload) != self.format.nbytes:
            raise Refused(f"a message of {self.format.nbytes} bytes came with {len(payload)}")
        for dtype, begin, end in self._checks:
            if not _is_valid(payload, dtype, begin, end):
                wrong = "booleans that are neither 0 nor 1" if dtype.kind == "b" else "values that are not finite"
                for name, x in self.format.views(payload).items():
                    if x.dtype == dtype and not _is_valid(x.tobytes(), dtype, 0, x.nbytes):
                        raise Refused(f"{name!r} has {wrong}")
                raise Refused("the padding between the arrays of a message is invalid")


def _is_valid(payload: Bytes, dtype: np.dtype[Any], begin: int, end: int) -> bool:
    """Whether all booleans are 0 or 1, or all floats finite."""
    if dtype.kind == "b":
        return not bytes(payload[begin:end]).translate(None, b"\0\1")
    x: Array = np.ndarray(((end - begin) // dtype.itemsize,), dtype, payload, begin)
    return b"\0" not in np.isfinite(x).tobytes()


class Formats:
    """The formats that the messages of one direction of a channel may have."""

    def __init__(self, formats: Sequence[Format], finite: bool = True) -> None:
        assert len(formats) < 256, len(formats)
        self._columns = [Columns(format_, finite) for format_ in formats]
        self.described = [format_.columns for format_ in formats]  # as JSON: for `parse_formats`
        self._known: dict[Any, int] = {}  # columns of a tree, or a format -> its number
        self.largest = max((c.format.nbytes for c in self._columns), default=0)

    def pack(self, tree: Tree, compress: bool = False) -> tuple[int, int, list[Any]]:
        """(number of the format, flags, payload in parts)"""
        key = tuple([(name, x.dtype, x.shape) for name, x in tree.items()])
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self._find(tree)
        parts = self._columns[number].pack(tree)
        if compress and self._columns[number].format.nbytes > SMALL:
            raw = b"".join(parts)
            small = lz4.compress(raw, store_size=False)
            if len(small) < len(raw):
                return number, LZ4, [small]
        return number, 0, parts

    def check(self, received: Frame) -> tuple[Format, Bytes]:
        """The format of a message, and its bytes after all checks."""
        if received.format >= len(self._columns):
            raise Refused("a message has an unknown format")
        columns = self._columns[received.format]
        payload: Bytes = received.payload
        if received.flags & LZ4:
            if lz4 is None:
                raise Refused("a message is compressed, but lz4 is not installed here")
            try:
                payload = lz4.decompress(received.payload, uncompressed_size=columns.format.nbytes)
            except (lz4.LZ4BlockError, ValueError, MemoryError):
                raise Refused("a message cannot be decompressed") from None
        columns.check(payload)
        return columns.format, payload

    def unpack(self, received: Frame) -> Tree:
        """The arrays, as read-only views of the payload."""
        format_, payload = self.check(received)
        return format_.views(payload)

    def number(self, format_: Format) -> int:
        found = self._known.get(format_)
        if found is None:
            found = self._known[format_] = self.described.index(format_.columns)
        return found

    def _find(self, tree: Tree) -> int:
        """The format of a tree, whose columns may be in any order."""
        found = {name: (x.dtype.str, x.shape) for name, x in tree.items()}
        wanted = [{name: (dtype, shape) for name, dtype, shape in c.format.columns} for c in self._columns]
        if found in wanted:
            return wanted.index(found)
        if not wanted:
            raise UserError("The run accepts no messages here; the actor and the run do not match.")
        closest = max(wanted, key=lambda columns: len(columns.items() & found.items()))
        name = min(name for name, _ in closest.items() ^ found.items())
        run, actor = (f"{x[name][0]} {x[name][1]}" if name in x else "nothing" for x in (closest, found))
        raise UserError(
            f"Column {name!r}: the run expects {run}, and this actor has {actor}; start the actor with the environment and "
            "the configuration of the run."
        )


def parse_formats(described: Any) -> list[Format]:
    try:
        return [Format([(str(n), str(d), tuple(map(int, shape))) for n, d, shape in columns]) for columns in described]
    except (TypeError, ValueError, OverflowError):
        raise Refused("invalid formats") from None


VALUE_HEAD = struct.Struct("<Q")  # bytes of the format, which precedes the arrays and is padded to a multiple of 8


def pack_value(format_: Format, data: Array) -> bytes:
    """A cell's value, preceded by its format."""
    described = format_.dump()
    described += b" " * (-len(described) % ALIGN)
    return VALUE_HEAD.pack(len(described)) + described + data.tobytes()


def unpack_value(data: bytes | bytearray) -> Tree:
    """The arrays that `pack_value` packed, as views."""
    try:
        (length,) = VALUE_HEAD.unpack_from(data)
        (format_,) = parse_formats([json.loads(bytes(data[VALUE_HEAD.size : VALUE_HEAD.size + length]))])
    except (struct.error, ValueError, RecursionError):
        raise Refused("a value without a format") from None
    payload = memoryview(data)[VALUE_HEAD.size + length :]
    if len(payload) != format_.nbytes:
        raise Refused("a value does not match its format")
    return Columns(format_).format.views(payload)


def dump_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def load_json(payload: memoryview, limit: int = JSON_BYTES) -> dict[str, Any]:
    if len(payload) > limit:
        raise Refused(f"{len(payload)} bytes of JSON, more than {limit}")
    try:
        value = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        raise Refused("invalid JSON") from None
    if not isinstance(value, dict):
        raise Refused("JSON that is not an object")
    return value


def load_report(payload: memoryview) -> tuple[list[int], dict[str, float]]:
    """The counts of a REPORT, in the order of `NAMES`, and its metrics."""
    report = load_json(payload)
    counts, metrics = report.get("counts"), report.get("metrics", {})
    if not isinstance(counts, list) or len(counts) != len(NAMES):
        raise Refused("invalid counts")
    if any(type(n) is not int or abs(n) > 1 << 53 for n in counts):
        raise Refused("counts that are not integers")
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise Refused("invalid metrics")
    if any(len(name) > 128 or type(x) not in (int, float) or not -1e300 < x < 1e300 for name, x in metrics.items()):
        raise Refused("metrics that are not numbers")
    return counts, {name: float(x) for name, x in metrics.items()}
