"""Demonstration sets: whole episodes of an expert on disk, as step records that any recipe can cut blocks from.

    demos/
      manifest.json               what was recorded, where each episode lies, and the sha256 of every shard; written last
      shard-00000.safetensors     columns [rows, ...] of the episodes, one after another; about 64 MB each
      .recording                  while it is recorded; without a manifest: its recording was cut off

The records are those of `veldt.records.step`: an episode of k actions is k + 1 rows, from its first through its last. The
action of the last one is zero. Nothing that is read can be executed, and nothing is believed before it was checked.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from veldt.envs import Envs, is_atari, make_env
from veldt.envs.atari import PROTOCOLS, Atari, find_protocol
from veldt.errors import UserError
from veldt.experiment.checkpoint import MANIFEST, Corrupt, _fingerprint, _sync, _write
from veldt.records.step import FLAG, REWARD, EnvSpec, is_observation
from veldt.records.tree import Array, ArraySpec, Spec, Tree, spec
from veldt.seeds import derive

if TYPE_CHECKING:  # to describe a set needs no torch
    from veldt.acting.policy import Policy
    from veldt.algorithms.base import Algorithm
    from veldt.records.block import Block, Schema

log = logging.getLogger("veldt")
FORMAT, VERSION = "veldt-demonstrations", 1
RECORDING = ".recording"
SHARD = 64 * 2**20  # bytes of a shard
LARGEST_MANIFEST = 256 * 2**20  # bytes that are read
LARGEST = 2**48  # of any count or size in a manifest
ATTEMPTS = 20  # episodes that may be played for each that is wanted
MAX_LENGTH = 27_000  # steps; 108K Atari frames
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")

Expert = Callable[[Any], Any]  # one observation, or a dict of them by key -> one action
MakeExpert = Callable[[Any], Expert]  # the environment that is being played -> who plays it


class Shard(NamedTuple):
    file: str
    rows: int
    sha256: str
    bytes: int


class Demos:
    """A demonstration set. `open` believes nothing that it did not check."""

    def __init__(self, path: Path, manifest: dict[str, Any], columns: Spec, shards: list[Shard], stops: Array) -> None:
        self.path, self.columns, self.shards = path, columns, shards
        self.env, self.policy, self.seed = str(manifest["env"]), str(manifest["policy"]), int(manifest["seed"])
        self.action_space = str(manifest["action_space"])
        self.protocol: dict[str, Any] | None = manifest["protocol"]  # how Atari was played
        self.discarded = int(manifest["discarded"])  # episodes that were not good enough
        self.wanted = int(manifest["wanted"])  # episodes that were asked for
        self.stops = stops  # [episodes], the row after each
        self.lengths = np.diff(stops, prepend=0) - 1  # [episodes], actions
        self.returns = np.array([episode["return"] for episode in manifest["episodes"]], np.float64)  # [episodes]

    @classmethod
    def open(cls, directory: str | Path) -> Demos:
        """Reads the manifest, and verifies that every shard is what it says. Raises a UserError that names the file."""
        path = Path(directory)
        try:
            manifest = _read_manifest(path)
            columns = _read_columns(manifest)
            shards = [_read_shard(path, columns, number, entry) for number, entry in enumerate(manifest["shards"])]
            demos = cls(path, manifest, columns, shards, _read_stops(manifest, sum(shard.rows for shard in shards)))
            demos._check_rows()
        except Corrupt as error:
            raise UserError(f"{path} is no demonstration set that can be read: {error}.") from None
        return demos

    @property
    def steps(self) -> int:
        """Actions in all; each episode has one row more."""
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def __len__(self) -> int:
        return len(self.stops)

    def check(self, env: EnvSpec, protocol: str = "") -> None:
        """Raises a UserError if these are records of another kind of environment, or of another Atari protocol."""
        ours = {**env.step, "action": env.action}
        for name in {**ours, **self.columns}:
            if self.columns.get(name) != ours.get(name):
                here, there = (_describe(x.get(name)) for x in (ours, self.columns))
                raise UserError(
                    f"The demonstrations in {self.path} do not fit {env.name}: {name} is {there} there and {here} here; "
                    f"they were recorded from {self.env}."
                )
        if self.action_space != str(env.action_space):
            raise UserError(
                f"The demonstrations in {self.path} do not fit {env.name}: they have the actions {self.action_space}, but "
                f"it has {env.action_space}."
            )
        self._check_protocol(env, protocol)
        if env.name != self.env:
            log.warning("the demonstrations in %s were recorded from %s, not from %s", self.path, self.env, env.name)
        columns = self._rows("action", "last")
        if not _inside(env.action_space, columns["action"][~columns["last"]]):
            raise UserError(f"The demonstrations in {self.path} have actions that are not in {env.action_space}.")

    def episodes(self) -> Iterator[Tree]:
        """Columns [k + 1, ...] of each episode of k actions. One shard is in memory at a time, and one episode."""
        begin, rest, number = 0, {name: np.zeros((0, *c.shape), c.dtype) for name, c in self.columns.items()}, 0
        for shard in self.shards:
            loaded = self._load(shard)
            rest = {name: np.concatenate((x, loaded[name])) if len(x) else loaded[name] for name, x in rest.items()}
            end, at = begin + len(rest["first"]), begin
            while number < len(self) and self.stops[number] <= end:
                rows = slice(at - begin, int(self.stops[number]) - begin)
                yield {name: x[rows].copy() for name, x in rest.items()}
                at, number = int(self.stops[number]), number + 1
            begin, rest = at, {name: x[at - begin :].copy() for name, x in rest.items()}

    def _load(self, shard: Shard) -> Tree:
        try:
            loaded = load_file(self.path / shard.file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path / shard.file} cannot be read any more ({error}).") from None
        for name, column in self.columns.items():
            if column.dtype.kind == "f" and not np.isfinite(loaded[name]).all():
                raise UserError(f"{self.path / shard.file} has a {name} that is not finite; record it again.")
        return loaded

    def _rows(self, *names: str) -> Tree:
        """A few small columns of all rows."""
        parts: dict[str, list[Array]] = {name: [] for name in names}
        for shard in self.shards:
            with safe_open(self.path / shard.file, "np") as file:
                for name in names:
                    parts[name].append(file.get_tensor(name))
        return {name: np.concatenate(x) for name, x in parts.items()}

    def _check_protocol(self, env: EnvSpec, protocol: str) -> None:
        wanted = dataclasses.asdict(find_protocol(protocol)) if is_atari(env.name) else None
        if wanted is None and self.protocol is None:
            return
        if self.protocol is None or wanted is None or self.env != env.name:
            raise UserError(f"The demonstrations in {self.path} are of {self.env}, not of {env.name}.")
        for name, value in wanted.items():
            if self.protocol.get(name) != value:
                raise UserError(
                    f"The demonstrations in {self.path} were played by another protocol than {protocol or 'dqn'!r}: "
                    f"{name} is {reprlib.repr(self.protocol.get(name))} there and {value} here."
                )

    def _check_rows(self) -> None:
        """Episodes begin and end where the manifest says, and returned what it says."""
        rows = self._rows("first", "last", "reward", "discount")
        first, last = np.zeros((2, len(rows["first"])), np.bool_)
        first[np.concatenate(([0], self.stops[:-1]))] = True
        last[self.stops - 1] = True
        if not (np.array_equal(first, rows["first"]) and np.array_equal(last, rows["last"])):
            raise Corrupt("its episodes do not begin and end where its manifest says")
        if not (np.isfinite(rows["reward"]).all() and np.isin(rows["discount"], (0, 1)).all()):
            raise Corrupt("it has rewards that are not finite, or discounts that are neither 0 nor 1")
        for stop, length, total in zip(self.stops, self.lengths, self.returns, strict=True):
            if math.fsum(rows["reward"][stop - length - 1 : stop]) != total:
                raise Corrupt("its rewards are not those of its manifest")


def _describe(column: ArraySpec | None) -> str:
    return "missing" if column is None else f"{list(column.shape)} {column.dtype}"


def _inside(space: spaces.Space[Any], actions: Array) -> bool:
    """Whether recorded actions [n, ...] can be taken; those of discrete spaces count from 0."""
    if isinstance(space, spaces.Box):
        slack = 1e-4 * np.maximum(1, abs(np.nan_to_num(actions)))
        return bool((np.isfinite(actions) & (actions >= space.low - slack) & (actions <= space.high + slack)).all())
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete), space
    return bool(((actions >= 0) & (actions < (space.n if isinstance(space, spaces.Discrete) else space.nvec))).all())


# Reading what may be anything.


def _read_manifest(path: Path) -> dict[str, Any]:
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
        raise Corrupt(f"its {MANIFEST} has {size:,} bytes, which is too many")
    try:
        manifest: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Corrupt(f"its {MANIFEST} is no JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Corrupt(f"its {MANIFEST} is not of the format {FORMAT}")
    if manifest.get("version") != VERSION:
        found = reprlib.repr(manifest.get("version"))
        raise Corrupt(f"its {MANIFEST} has version {found}, this Veldt reads version {VERSION}")
    try:
        same = manifest.pop("sha256", None) == _digest(manifest)
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise Corrupt(f"its {MANIFEST} was changed")
    return _checked(manifest)


def _checked(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, where everything is of its kind."""
    kinds: dict[str, type] = {"env": str, "policy": str, "action_space": str}
    kinds |= {"columns": dict, "shards": list, "episodes": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    wrong += [name for name in ("discarded", "wanted") if not _is_count(manifest.get(name))]
    wrong += [] if _is_count(manifest.get("seed"), math.inf) else ["seed"]
    if not isinstance(manifest.get("protocol"), dict | None):
        wrong.append("protocol")
    if wrong:
        raise Corrupt(f"its {MANIFEST} has no right {wrong[0]}")
    if not manifest["shards"] or not manifest["episodes"]:
        raise Corrupt(f"its {MANIFEST} has no episodes")
    return manifest


def _is_count(x: Any, most: float = LARGEST) -> bool:
    return type(x) is int and 0 <= x <= most


def _read_columns(manifest: dict[str, Any]) -> Spec:
    columns: Spec = {}
    for name, entry in manifest["columns"].items():
        shape, dtype = (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
        if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)) or dtype not in DTYPES:
            raise Corrupt(f"its {MANIFEST} has no right column {reprlib.repr(name)}")
        columns[name] = spec(tuple(shape), dtype)
    needed = {"reward": REWARD, "discount": REWARD, "first": FLAG, "last": FLAG, "valid": FLAG}
    strange = [name for name in columns if name not in needed and name != "action" and not is_observation(name)]
    if strange or "action" not in columns or any(columns.get(name) != column for name, column in needed.items()):
        raise Corrupt(f"its {MANIFEST} has other columns than a step record has")
    return columns


def _read_shard(path: Path, columns: Spec, number: int, entry: Any) -> Shard:
    """A shard, after its size, its hash and its header were found to be right."""
    name = _shard_name(number)
    if not isinstance(entry, dict) or entry.get("file") != name:  # never follow a path out of the directory
        raise Corrupt(f"its {MANIFEST} names another file than {name}")
    values: dict[str, Any] = {key: entry.get(key) for key in Shard._fields}
    shard = Shard(**values)
    if not (_is_count(shard.rows) and _is_count(shard.bytes) and isinstance(shard.sha256, str)) or shard.rows == 0:
        raise Corrupt(f"its {MANIFEST} has no right numbers for {name}")
    try:
        found = _regular(path / name)
    except FileNotFoundError:
        raise Corrupt(f"{name} is missing") from None
    if found != shard.bytes:
        raise Corrupt(f"{name} has {found:,} bytes instead of {shard.bytes:,}")
    if shard.rows * _row_bytes(columns) > shard.bytes:
        raise Corrupt(f"{name} has no room for the {shard.rows:,} rows that it should have")
    if _fingerprint(path / name) != {"sha256": shard.sha256, "bytes": shard.bytes}:
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
        raise Corrupt(f"{path.name} is no safetensors file") from None
    wanted = {
        name: ((rows, *c.shape), codes[c.dtype.kind] + (str(8 * c.dtype.itemsize) if c.dtype.kind != "b" else ""))
        for name, c in columns.items()
    }
    if found != wanted:
        raise Corrupt(f"{path.name} has other columns, shapes or dtypes than its {MANIFEST} says")


def _read_stops(manifest: dict[str, Any], rows: int) -> Array:
    """The row after each episode; episodes follow one another, and each has at least one action."""
    stops: list[int] = []
    for episode in manifest["episodes"]:
        known: dict[str, Any] = episode if isinstance(episode, dict) else {}
        start, stop, length, total = (known.get(key, -1) for key in ("start", "stop", "length", "return"))
        if not (_is_count(start) and _is_count(stop) and _is_count(length) and type(total) is float):
            raise Corrupt(f"its {MANIFEST} has no right numbers for episode {len(stops)}")
        if start != (stops[-1] if stops else 0) or length < 1 or stop - start != length + 1:
            raise Corrupt(f"its {MANIFEST} has an episode {len(stops)} that does not follow the one before")
        stops.append(stop)
    if stops[-1] != rows:
        raise Corrupt(f"its {MANIFEST} has episodes of {stops[-1]:,} rows, but shards of {rows:,}")
    return np.array(stops, np.int64)


def _regular(path: Path) -> int:
    """The size of a plain file: anything else, such as a pipe, is not opened."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Corrupt(f"{path.name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise Corrupt(f"{path.name} is no file")
    return found.st_size


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _row_bytes(columns: Spec) -> int:
    return sum(math.prod(c.shape) * c.dtype.itemsize for c in columns.values())


# Recording.


class Recording:
    """A demonstration set that is being written: shards as they fill, the manifest last."""

    def __init__(self, directory: Path, columns: Spec) -> None:
        self.directory, self.columns = directory, columns
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.discarded, self.best = 0, -math.inf
        self._shards: list[Shard] = []
        self._shard_rows = max(1, SHARD // _row_bytes(columns))
        self._pending: list[Tree] = []
        self._failed = False
        self._made = self._claim()

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    def add(self, episode: Tree, least: float = -math.inf) -> bool:
        """Takes a whole episode, columns [k + 1, ...], if it returned at least so much."""
        total = math.fsum(episode["reward"])
        self.best = max(self.best, total)
        if total < least:
            self.discarded += 1
            return False
        self._pending.append(episode)
        self._flush(self._shard_rows)
        self.returns.append(total)
        self.lengths.append(len(episode["first"]) - 1)
        return True

    def close(self, info: dict[str, Any]) -> None:
        """Writes the manifest of the whole episodes; if there are none, nothing is left."""
        if self._failed or not self.returns:
            self._remove()
            return
        self._flush(1)
        stops = np.cumsum(np.array(self.lengths) + 1).tolist()
        episodes = [
            {"start": stop - length - 1, "stop": stop, "length": length, "return": total}
            for stop, length, total in zip(stops, self.lengths, self.returns, strict=True)
        ]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **info,
            "discarded": self.discarded,
            "columns": {name: {"shape": list(c.shape), "dtype": str(c.dtype)} for name, c in self.columns.items()},
            "shards": [shard._asdict() for shard in self._shards],
            "episodes": episodes,
        }
        self._write(MANIFEST, lambda path: _write_text(path, json.dumps(manifest | {"sha256": _digest(manifest)})))
        (self.directory / RECORDING).unlink(missing_ok=True)

    def _claim(self) -> bool:
        """Takes the directory, which must be empty or not there yet; whether it was made."""
        path, made = self.directory, not self.directory.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                what = "a demonstration set" if (path / MANIFEST).exists() else "something"
                cut = " that was cut off" if (path / RECORDING).exists() and not (path / MANIFEST).exists() else ""
                raise UserError(f"{path} holds {what}{cut} already; choose another directory, or delete it.")
            (path / RECORDING).touch(exist_ok=False)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); choose another directory.") from None
        return made

    def _flush(self, least: int) -> None:
        """Writes shards for as long as so many rows are pending."""
        if sum(len(part["first"]) for part in self._pending) < least:
            return
        whole = {name: np.concatenate([part[name] for part in self._pending]) for name in self.columns}
        at, end = 0, len(whole["first"])
        while end - at >= least:
            stop = min(at + self._shard_rows, end)
            self._save({name: x[at:stop] for name, x in whole.items()})
            at = stop
        self._pending = [{name: x[at:].copy() for name, x in whole.items()}]

    def _save(self, part: Tree) -> None:
        name = _shard_name(len(self._shards))
        fingerprint = self._write(name, lambda path: _write(path, part))
        self._shards.append(Shard(name, len(part["first"]), fingerprint["sha256"], fingerprint["bytes"]))

    def _write(self, name: str, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Writes a file aside, and renames it: it is there as a whole or not at all."""
        aside = self.directory / f".aside-{name}"
        try:
            fingerprint = write(aside)
            os.rename(aside, self.directory / name)
            _sync(self.directory)
        except (OSError, SafetensorError) as error:
            self._failed = True
            self._remove()
            raise UserError(f"The demonstrations cannot be written to {self.directory} ({error}).") from None
        return fingerprint

    def _remove(self) -> None:
        for path in (*self.directory.glob(".aside-*"), *self.directory.glob("shard-*"), self.directory / RECORDING):
            path.unlink(missing_ok=True)
        if self._made and self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()


def _write_text(path: Path, text: str) -> dict[str, Any]:
    with open(path, "w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    return {}


def record(
    directory: str | Path,
    envs: Envs,  # one
    policy: Policy,
    episodes: int,
    seed: int = 0,
    min_return: float = -math.inf,
    max_length: int = MAX_LENGTH,
    name: str = "",
    progress: Callable[[Recording], None] = lambda recording: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Demos | None:
    """Plays until there are so many episodes with at least that return, and writes them to the directory.

    Whatever ends it before that, the whole episodes until then are kept. None: `stopping` said so and there were none.
    """
    assert envs.n == 1, envs.n
    recording = Recording(Path(directory), {**envs.spec.step, "action": envs.spec.action})
    protocol = envs.env.protocol if isinstance(envs.env, Atari) else None
    info = {
        "env": envs.name,
        "protocol": None if protocol is None else _named(protocol),
        "action_space": str(envs.spec.action_space),
        "policy": name or type(policy).__name__,
        "seed": seed,
        "wanted": episodes,
    }
    try:
        for episode in play(envs, policy, seed, max_length, stopping):
            recording.add(episode, min_return)
            progress(recording)
            if len(recording.returns) == episodes:
                break
            if recording.discarded >= ATTEMPTS * episodes:
                raise UserError(_too_few(recording, episodes, min_return))
    finally:
        recording.close(info)
    return Demos.open(directory) if recording.returns else None


def _too_few(recording: Recording, episodes: int, least: float) -> str:
    kept = len(recording.returns)
    where = f" They are in {recording.directory}." if kept else ""
    return (
        f"Only {kept} of {kept + recording.discarded} episodes returned {least:g} or more, not {episodes}; the best had "
        f"{recording.best:g}: lower --min-return, or take a better policy.{where}"
    )


def _named(protocol: Any) -> dict[str, Any]:
    name = next((name for name, known in PROTOCOLS.items() if known == protocol), "")
    return {"name": name, **dataclasses.asdict(protocol)}


def play(
    envs: Envs,
    policy: Policy,
    seed: int,
    max_length: int = MAX_LENGTH,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Tree]:
    """Whole episodes of one environment, columns [k + 1, ...] each, until `stopping` says so.

    The policy is not asked where its action would be ignored. An episode that does not end is cut, as an actor does it.
    """
    nothing = np.zeros((1, *envs.spec.action.shape), envs.spec.action.dtype)
    number, cut = 0, True
    while True:
        if cut:
            policy.reset(0)
            record = envs.reset(derive(seed, "demonstrations", number))
            number += 1
        else:
            record = envs.step(nothing)
        rows: list[Tree] = []
        while not stopping():
            cut = len(rows) == max_length and not record["last"][0]
            if cut:
                record["last"] = np.ones_like(record["last"])
            action = nothing if record["last"][0] else _ask(policy, record).astype(nothing.dtype, copy=False)
            rows.append({**{column: x[0].copy() for column, x in record.items()}, "action": action[0].copy()})
            if record["last"][0]:
                break
            record = envs.step(action)
        else:
            return
        yield {column: np.stack([row[column] for row in rows]) for column in rows[0]}


def _ask(policy: Policy, record: Tree) -> Array:
    sent, out = policy.send(0, record), policy.recv(0)
    assert sent and out is not None
    return out["action"]


class Scripted:
    """A policy for one environment from a function that makes experts: one for each episode, once it has begun."""

    def __init__(self, make: MakeExpert, game: Any, spec: EnvSpec, name: str = "the expert") -> None:
        self.make, self.game, self.spec, self.name = make, game, spec, name
        self._expert: Expert | None = None
        self._action: Array | None = None

    def send(self, group: int, step: Tree) -> bool:
        if step["first"][0] or self._expert is None:
            made: Any = self.make(self.game)
            if not callable(made):
                kind = type(made).__name__
                raise UserError(f"{self.name} must return a function from an observation to an action, not a {kind}.")
            self._expert = made
        seen: Any = {name.removeprefix("obs/"): step[name][0].copy() for name in self.spec.observation}
        assert self._expert is not None
        self._action = self._own(self._expert(seen["obs"] if "obs" in self.spec.observation else seen))
        return True

    def recv(self, group: int) -> Tree | None:
        action, self._action = self._action, None
        return None if action is None else {"action": action[None]}

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self._expert = self._action = None

    def _own(self, action: Any) -> Array:
        """The action as it is recorded: discrete ones count from 0, and continuous ones are kept within bounds."""
        space, column = self.spec.action_space, self.spec.action
        try:
            x = np.asarray(action)
            well = x.shape == column.shape and x.dtype.kind in ("biuf" if isinstance(space, spaces.Box) else "biu")
        except (TypeError, ValueError):
            well = False
        if well and isinstance(space, spaces.Box):
            x = np.clip(x.astype(np.float64), space.low, space.high)
        elif well:
            assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete), space
            x = x.astype(np.int64) - space.start
        if not well or not _inside(space, x[None]):
            raise UserError(f"{self.name} gave the action {reprlib.repr(action)}, which is not in {space}.")
        return x.astype(column.dtype)


def make_played(env: str, protocol: str = "") -> tuple[Envs, Any]:
    """One environment that emits records, and the game inside, which an expert may look at.

    One that has a vector version of its own is played without it: that has no game for itself. Atari's emulators cannot
    be looked into, so an expert is given their vector.
    """
    envs = make_env(env, 1, protocol=protocol)
    if not isinstance(envs.env, SyncVectorEnv | Atari):
        envs.close()
        envs = Envs(make_env(lambda: gym.make(env, disable_env_checker=True), 1).env, env)
    return envs, envs.env.envs[0].unwrapped if isinstance(envs.env, SyncVectorEnv) else envs.env


# Cutting.


def blocks(demos: Demos, schema: Schema, algorithm: Algorithm, actor: int = 0) -> Iterator[tuple[Block, None]]:
    """The episodes as blocks of a run's schema. No window has steps of two episodes.

    What an algorithm records beside the action is zero, and so is its recurrent state (Gulcehre et al. 2020), but for what
    it knows without a network (its `known_state`); priorities are the largest so far. Blocks are those of
    `actor`, in its incarnation 0.
    """
    from veldt.acting.recorder import Recorder

    sink: Any = _Sink()  # as much of a store as a recorder needs
    recorder = Recorder(_Replayed(schema, algorithm), sink, algorithm, schema, actor, first_priorities="largest")
    for episode in demos.episodes():
        for t in range(len(episode["first"])):
            recorder.send(0, {name: x[t : t + 1] for name, x in episode.items()})
            recorder.recv(0)
            yield from sink.take()
        recorder.flush(0)
        yield from sink.take()


class _Sink:
    """Takes every block."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Block, None]] = []

    def insert(self, block: Block, priorities: Array | None) -> bool:
        assert priorities is None, priorities
        self._blocks.append((block, None))
        return True

    def take(self) -> list[tuple[Block, None]]:
        taken, self._blocks = self._blocks, []
        return taken


class _Replayed:
    """A policy that takes the action of the record, and knows little of what else an algorithm records."""

    def __init__(self, schema: Schema, algorithm: Algorithm) -> None:
        columns = {**schema.layout.spec, **schema.start_layout.spec}
        self._zeros = {name: np.zeros((1, *c.shape), c.dtype) for name, c in columns.items()}
        self._known_state: Callable[[Array], Tree] = functools.partial(
            algorithm.known_state, state=schema.start_layout.spec
        )
        self._state: Tree = {}  # that is known, before the next record
        self._out: Tree | None = None

    def send(self, group: int, step: Tree) -> bool:
        before = {} if step["first"][0] else self._state
        self._out = {**self._zeros, **before, **step}
        self._state = self._known_state(step["action"])
        return True

    def recv(self, group: int) -> Tree | None:
        out, self._out = self._out, None
        return out

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self._out = None
