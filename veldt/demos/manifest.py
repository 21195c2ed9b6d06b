"""The files of a demonstration set: reads and checks a manifest and shards that may hold anything."""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from veldt.files import MANIFEST, Corrupt, fingerprint
from veldt.records.step import FLAG, REWARD, is_observation
from veldt.records.tree import Array, Spec, spec

FORMAT, VERSION = "veldt-demonstrations", 1
RECORDING = ".recording"
LARGEST_MANIFEST = 256 * 2**20  # bytes
LARGEST = 2**48  # of any count or size in a manifest
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")


class Shard(NamedTuple):
    file: str
    rows: int
    sha256: str
    bytes: int


def read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise Corrupt("there is no such directory")
    file = path / MANIFEST
    try:
        size = _regular(file)
    except FileNotFoundError:
        cut = any(path.glob("shard-*")) or (path / RECORDING).exists()
        why = "its recording was cut off; delete it and record again" if cut else "veldt record makes one"
        raise Corrupt(f"it has no {MANIFEST}, {why}") from None
    if size > LARGEST_MANIFEST:
        raise Corrupt(f"its {MANIFEST} has {size:,} bytes, more than the {LARGEST_MANIFEST:,} allowed")
    try:
        manifest: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Corrupt(f"its {MANIFEST} is not valid JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Corrupt(f"its {MANIFEST} is not of the format {FORMAT}")
    if manifest.get("version") != VERSION:
        found = reprlib.repr(manifest.get("version"))
        raise Corrupt(f"its {MANIFEST} has version {found}, this Veldt reads version {VERSION}")
    try:
        same = manifest.pop("sha256", None) == digest(manifest)
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise Corrupt(f"its {MANIFEST} was changed")
    return _checked(manifest)


def _checked(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, after the type of every entry was checked."""
    kinds: dict[str, type] = {"env": str, "policy": str, "action_space": str}
    kinds |= {"columns": dict, "shards": list, "episodes": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    wrong += [name for name in ("discarded", "wanted") if not _is_count(manifest.get(name))]
    wrong += [] if _is_count(manifest.get("seed"), math.inf) else ["seed"]
    if not isinstance(manifest.get("protocol"), dict | None):
        wrong.append("protocol")
    if wrong:
        raise Corrupt(f"its {MANIFEST} has an invalid {wrong[0]}")
    if not manifest["shards"] or not manifest["episodes"]:
        raise Corrupt(f"its {MANIFEST} has no episodes")
    return manifest


def _is_count(x: Any, most: float = LARGEST) -> bool:
    return type(x) is int and 0 <= x <= most


def read_columns(manifest: dict[str, Any]) -> Spec:
    columns: Spec = {}
    for name, entry in manifest["columns"].items():
        shape, dtype = (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
        if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)) or dtype not in DTYPES:
            raise Corrupt(f"its {MANIFEST} has an invalid column {reprlib.repr(name)}")
        columns[name] = spec(tuple(shape), dtype)
    needed = {"reward": REWARD, "discount": REWARD, "first": FLAG, "last": FLAG, "valid": FLAG}
    strange = [name for name in columns if name not in needed and name != "action" and not is_observation(name)]
    if strange or "action" not in columns or any(columns.get(name) != column for name, column in needed.items()):
        raise Corrupt(f"its {MANIFEST} does not have the columns of a step record")
    return columns


def read_shard(path: Path, columns: Spec, number: int, entry: Any) -> Shard:
    """A shard, after its size, its hash and its header were checked."""
    name = shard_name(number)
    if not isinstance(entry, dict) or entry.get("file") != name:  # never follow a path out of the directory
        raise Corrupt(f"its {MANIFEST} does not name {name} where it should")
    values: dict[str, Any] = {key: entry.get(key) for key in Shard._fields}
    shard = Shard(**values)
    if not (_is_count(shard.rows) and _is_count(shard.bytes) and isinstance(shard.sha256, str)) or shard.rows == 0:
        raise Corrupt(f"its {MANIFEST} has invalid numbers for {name}")
    try:
        found = _regular(path / name)
    except FileNotFoundError:
        raise Corrupt(f"{name} is missing") from None
    if found != shard.bytes:
        raise Corrupt(f"{name} has {found:,} bytes instead of {shard.bytes:,}")
    if shard.rows * row_bytes(columns) > shard.bytes:
        raise Corrupt(f"{name} is too small for the {shard.rows:,} rows that it should have")
    if fingerprint(path / name) != {"sha256": shard.sha256, "bytes": shard.bytes}:
        raise Corrupt(f"{name} is not what was written")
    _check_header(path / name, columns, shard.rows)
    return shard


def _check_header(path: Path, columns: Spec, rows: int) -> None:
    codes = {"b": "BOOL", "u": "U", "i": "I", "f": "F"}
    try:
        with safe_open(path, "np") as file:
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in headers.items()}
    except (OSError, SafetensorError, ValueError):
        raise Corrupt(f"{path.name} is not a safetensors file") from None
    wanted = {
        name: ((rows, *c.shape), codes[c.dtype.kind] + (str(8 * c.dtype.itemsize) if c.dtype.kind != "b" else ""))
        for name, c in columns.items()
    }
    if found != wanted:
        raise Corrupt(f"{path.name} does not have the columns, shapes and dtypes that its {MANIFEST} says")


def read_stops(manifest: dict[str, Any], rows: int) -> Array:
    """The row after each episode; episodes follow one another, and each has at least one action."""
    stops: list[int] = []
    for episode in manifest["episodes"]:
        known: dict[str, Any] = episode if isinstance(episode, dict) else {}
        start, stop, length, total = (known.get(key, -1) for key in ("start", "stop", "length", "return"))
        if not (_is_count(start) and _is_count(stop) and _is_count(length) and type(total) is float):
            raise Corrupt(f"its {MANIFEST} has invalid numbers for episode {len(stops)}")
        if start != (stops[-1] if stops else 0) or length < 1 or stop - start != length + 1:
            raise Corrupt(f"its {MANIFEST} has an episode {len(stops)} that does not follow the one before")
        stops.append(stop)
    if stops[-1] != rows:
        raise Corrupt(f"its {MANIFEST} has episodes of {stops[-1]:,} rows, but shards of {rows:,}")
    return np.array(stops, np.int64)


def _regular(path: Path) -> int:
    """The size of a regular file; anything else, such as a pipe, is never opened."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Corrupt(f"{path.name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise Corrupt(f"{path.name} is not a regular file")
    return found.st_size


def digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def row_bytes(columns: Spec) -> int:
    return sum(math.prod(c.shape) * c.dtype.itemsize for c in columns.values())
