"""Demos: opens, verifies and reads a demonstration set, whose files may hold anything."""

import dataclasses
import hashlib
import json
import logging
import math
import os
import reprlib
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
from gymnasium import spaces
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from veldt.envs import is_atari
from veldt.envs.atari import find_protocol
from veldt.errors import UserError
from veldt.files import MANIFEST, Corrupt, fingerprint
from veldt.foreign import plain
from veldt.records.masks import MASK
from veldt.records.step import SIGNALS, EnvSpec, is_observation
from veldt.records.tree import Array, Spec, Tree, spec, zeros

FORMAT, VERSION = "veldt-demonstrations", 1
RECORDING = ".recording"
LARGEST_MANIFEST = 256 * 2**20  # bytes
LARGEST = 2**48  # of any count or size in a manifest
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")

log = logging.getLogger("veldt")


class Shard(NamedTuple):
    file: str
    rows: int
    sha256: str
    bytes: int


class Demos:
    def __init__(self, path: Path) -> None:
        manifest = read_manifest(path)
        self.path, self.columns = path, read_columns(manifest)
        self.env, self.policy, self.seed = str(manifest["env"]), str(manifest["policy"]), int(manifest["seed"])
        self.action_space = str(manifest["action_space"])
        self.protocol: dict[str, Any] | None = manifest["protocol"]  # Atari: its settings
        self.discarded = int(manifest["discarded"])  # episodes below the minimum return
        self.wanted = int(manifest["wanted"])  # episodes that were asked for
        self.shards = [read_shard(path, self.columns, i, entry) for i, entry in enumerate(manifest["shards"])]
        self.stops = read_stops(manifest, sum(shard.rows for shard in self.shards))  # [episodes], the row after each
        self.lengths = np.diff(self.stops, prepend=0) - 1  # [episodes], actions
        self.returns = np.array([episode["return"] for episode in manifest["episodes"]], np.float64)  # [episodes]
        self._check_rows()

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Reads the manifest and verifies every shard. Raises a UserError that names the file."""
        try:
            return cls(Path(directory))
        except Corrupt as error:
            raise UserError(f"{Path(directory)} is not a readable demonstration set: {error}.") from None

    @property
    def steps(self) -> int:
        """The number of actions; each episode has one row more."""
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def __len__(self) -> int:
        return len(self.stops)

    def check(self, env: EnvSpec, protocol: str = "") -> None:
        """Raises a UserError unless the records fit this environment and Atari protocol."""
        ours = {**env.step, "action": env.action}
        for name in {**ours, **self.columns}:
            if self.columns.get(name) != ours.get(name):
                here, there = (x.get(name, "missing") for x in (ours, self.columns))
                raise UserError(
                    f"The demonstrations in {self.path} do not fit {env.name}: {name} is {there} there and {here} here; "
                    f"they were recorded from {self.env}."
                )
        if self.action_space != str(env.action_space):
            raise UserError(
                f"The demonstrations in {self.path} do not fit {env.name}: their action space is {self.action_space}, but "
                f"that of the environment is {env.action_space}."
            )
        self._check_protocol(env, protocol)
        if env.name != self.env:
            log.warning("the demonstrations in %s were recorded from %s, not from %s", self.path, self.env, env.name)
        columns = self._rows("action", "last", *([MASK] if env.mask else []))
        taken = ~columns["last"]
        if not is_inside(env.action_space, columns["action"][taken]):
            raise UserError(f"The demonstrations in {self.path} have actions that are not in {env.action_space}.")
        masks = env.adapter.masks if env.adapter is not None else None
        if masks is not None and not masks.allows(columns[MASK][taken], columns["action"][taken]).all():
            raise UserError(f"The demonstrations in {self.path} have actions that their action_mask forbids.")

    def episodes(self) -> Iterator[Tree]:
        """Columns [k + 1, ...] of each episode of k actions. Holds one shard and one episode in RAM at a time."""
        begin, rest = 0, zeros(self.columns, 0)
        for shard in self.shards:
            loaded = self._load(shard)
            rest = {name: np.concatenate((x, loaded[name])) if len(x) else loaded[name] for name, x in rest.items()}
            whole = self.stops[(self.stops > begin) & (self.stops <= begin + len(rest["first"]))] - begin
            ends = [0, *whole.tolist()]
            for start, stop in pairwise(ends):
                yield {name: x[start:stop].copy() for name, x in rest.items()}
            begin, rest = begin + ends[-1], {name: x[ends[-1] :].copy() for name, x in rest.items()}

    def _load(self, shard: Shard) -> Tree:
        try:
            loaded = load_file(self.path / shard.file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path / shard.file} can no longer be read ({error}).") from None
        for name, column in self.columns.items():
            if column.dtype.kind == "f" and not np.isfinite(loaded[name]).all():
                raise UserError(f"{self.path / shard.file} has values of {name} that are not finite; record it again.")
        return loaded

    def _rows(self, *names: str) -> Tree:
        found: dict[str, list[Array]] = {name: [] for name in names}
        for shard in self.shards:
            with safe_open(self.path / shard.file, "np") as file:
                for name in names:
                    found[name].append(file.get_tensor(name))
        return {name: np.concatenate(x) for name, x in found.items()}

    def _check_protocol(self, env: EnvSpec, protocol: str) -> None:
        wanted = dataclasses.asdict(find_protocol(protocol)) if is_atari(env.name) else None
        if wanted is None and self.protocol is None:
            return
        if self.protocol is None or wanted is None or self.env != env.name:
            raise UserError(f"The demonstrations in {self.path} are of {self.env}, not of {env.name}.")
        for name, value in wanted.items():
            if self.protocol.get(name) != value:
                raise UserError(
                    f"The demonstrations in {self.path} were not played with protocol {protocol or 'dqn'!r}: "
                    f"{name} is {reprlib.repr(self.protocol.get(name))} there and {value} here."
                )

    def _check_rows(self) -> None:
        """Raises Corrupt unless episodes begin, end and return what the manifest says."""
        rows = self._rows("first", "last", "reward", "discount")
        first, last = np.zeros((2, len(rows["first"])), np.bool_)
        first[np.concatenate(([0], self.stops[:-1]))] = True
        last[self.stops - 1] = True
        marked = np.array_equal(first, rows["first"]) and np.array_equal(last, rows["last"])
        require(marked, "its episodes do not begin and end where its manifest says")
        valid = np.isfinite(rows["reward"]).all() and np.isin(rows["discount"], (0, 1)).all()
        require(valid, "it has rewards that are not finite, or discounts that are neither 0 nor 1")
        for stop, length, total in zip(self.stops, self.lengths, self.returns, strict=True):
            found = math.fsum(rows["reward"][stop - length - 1 : stop])
            require(found == total, "its rewards do not sum to the returns in its manifest")


def is_inside(space: spaces.Space[Any], actions: Array) -> bool:
    """Whether recorded actions [n, ...] are in the space; discrete ones count from 0."""
    if isinstance(space, spaces.Box):
        slack = 1e-4 * np.maximum(1, abs(np.nan_to_num(actions)))
        return bool((np.isfinite(actions) & (actions >= space.low - slack) & (actions <= space.high + slack)).all())
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete), space
    return bool(((actions >= 0) & (actions < (space.n if isinstance(space, spaces.Discrete) else space.nvec))).all())


# The manifest and the shards.


def require(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise Corrupt(otherwise)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, after the type of every entry was checked."""
    require(path.is_dir(), "there is no such directory")
    file = path / MANIFEST
    try:
        size = _regular(file)
    except FileNotFoundError:
        cut = any(path.glob("shard-*")) or (path / RECORDING).exists()
        why = "its recording was cut off; delete it and record again" if cut else "veldt record makes one"
        raise Corrupt(f"it has no {MANIFEST}, {why}") from None
    require(size <= LARGEST_MANIFEST, f"its {MANIFEST} has {size:,} bytes, more than the {LARGEST_MANIFEST:,} allowed")
    try:
        manifest: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Corrupt(f"its {MANIFEST} is not valid JSON") from None
    known = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    require(known, f"its {MANIFEST} is not of the format {FORMAT}")
    version, shown = manifest.get("version"), reprlib.repr(manifest.get("version"))
    require(version == VERSION, f"its {MANIFEST} has version {shown}, this Veldt reads version {VERSION}")
    try:
        same = manifest.pop("sha256", None) == digest(manifest)
    except (ValueError, RecursionError):
        same = False
    require(same, f"its {MANIFEST} was changed")
    manifest = plain(manifest)
    kinds: dict[str, Any] = {"env": str, "policy": str, "action_space": str, "protocol": dict | None}
    kinds |= {"columns": dict, "shards": list, "episodes": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    wrong += [name for name in ("discarded", "wanted") if not _is_count(manifest.get(name))]
    wrong += [] if _is_count(manifest.get("seed"), math.inf) else ["seed"]
    require(not wrong, f"its {MANIFEST} has an invalid {', '.join(wrong[:1])}")
    require(manifest["shards"] and manifest["episodes"], f"its {MANIFEST} has no episodes")
    return cast(dict[str, Any], manifest)


def _is_count(x: Any, most: float = LARGEST) -> bool:
    return type(x) is int and 0 <= x <= most


def read_columns(manifest: dict[str, Any]) -> Spec:
    columns: Spec = {}
    for name, entry in manifest["columns"].items():
        shape: Any = entry.get("shape") if isinstance(entry, dict) else None
        dtype: Any = entry.get("dtype") if isinstance(entry, dict) else None
        valid = isinstance(shape, list) and len(shape) <= 8 and all(map(_is_count, shape)) and dtype in DTYPES
        require(valid, f"its {MANIFEST} has an invalid column {reprlib.repr(name)}")
        columns[name] = spec(tuple(shape), dtype)
    others = {name for name in columns if name not in (*SIGNALS, MASK) and not is_observation(name)}
    complete = others == {"action"} and all(columns.get(name) == column for name, column in SIGNALS.items())
    require(complete, f"its {MANIFEST} does not have the columns of a step record")
    return columns


def read_shard(path: Path, columns: Spec, number: int, entry: Any) -> Shard:
    """A shard, after its size, its hash and its header were checked."""
    name = shard_name(number)
    named = isinstance(entry, dict) and entry.get("file") == name  # never follow a path out of the directory
    require(named, f"its {MANIFEST} does not name {name} where it should")
    shard = Shard(**{key: entry.get(key) for key in Shard._fields})
    counted = _is_count(shard.rows) and _is_count(shard.bytes) and isinstance(shard.sha256, str) and shard.rows > 0
    require(counted, f"its {MANIFEST} has invalid numbers for {name}")
    try:
        found = _regular(path / name)
    except FileNotFoundError:
        raise Corrupt(f"{name} is missing") from None
    require(found == shard.bytes, f"{name} has {found:,} bytes instead of {shard.bytes:,}")
    fits = shard.rows * row_bytes(columns) <= shard.bytes
    require(fits, f"{name} is too small for the {shard.rows:,} rows that it should have")
    same = fingerprint(path / name) == {"sha256": shard.sha256, "bytes": shard.bytes}
    require(same, f"{name} does not match its checksum")
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
    require(found == wanted, f"{path.name} does not have the columns, shapes and dtypes that its {MANIFEST} says")


def read_stops(manifest: dict[str, Any], rows: int) -> Array:
    """The row after each episode; episodes follow one another, and each has at least one action."""
    stops = [0]
    for number, episode in enumerate(manifest["episodes"]):
        known: dict[str, Any] = episode if isinstance(episode, dict) else {}
        start, stop, length, total = (known.get(key, -1) for key in ("start", "stop", "length", "return"))
        counted = _is_count(start) and _is_count(stop) and _is_count(length) and type(total) is float
        require(counted, f"its {MANIFEST} has invalid numbers for episode {number}")
        follows = start == stops[-1] and length >= 1 and stop - start == length + 1
        require(follows, f"its {MANIFEST} has an episode {number} that does not follow the one before")
        stops.append(stop)
    require(stops[-1] == rows, f"its {MANIFEST} has episodes of {stops[-1]:,} rows, but shards of {rows:,}")
    return np.array(stops[1:], np.int64)


def _regular(path: Path) -> int:
    """The size of a regular file; anything else, such as a pipe, is never opened."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Corrupt(f"{path.name} cannot be read ({error.strerror})") from None
    require(stat.S_ISREG(found.st_mode), f"{path.name} is not a regular file")
    return found.st_size


def digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def row_bytes(columns: Spec) -> int:
    return sum(math.prod(c.shape) * c.dtype.itemsize for c in columns.values())
