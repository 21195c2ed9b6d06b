"""Recording: writes a demonstration set. `record` plays episodes with a policy and records them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from veldt.demos.manifest import FORMAT, RECORDING, VERSION, Shard, digest, row_bytes, shard_name
from veldt.demos.set import Demos
from veldt.envs import Envs
from veldt.envs.atari import PROTOCOLS, Atari
from veldt.errors import UserError
from veldt.files import MANIFEST, sync_directory, write_arrays
from veldt.records.tree import Array, Spec, Tree
from veldt.seeds import derive

if TYPE_CHECKING:  # recording with an expert needs no torch
    from veldt.acting.actor import Policy

SHARD = 64 * 2**20  # bytes of a shard
ATTEMPTS = 20  # episodes played at most for each one wanted
MAX_LENGTH = 27_000  # steps; 108K Atari frames


class Recording:
    """Writes a demonstration set: shards as they fill, the manifest last."""

    def __init__(self, directory: Path, columns: Spec) -> None:
        self.directory, self.columns = directory, columns
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.discarded, self.best = 0, -math.inf
        self._shards: list[Shard] = []
        self._shard_rows = max(1, SHARD // row_bytes(columns))
        self._pending: list[Tree] = []
        self._failed = False
        self._made = self._claim()

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    def add(self, episode: Tree, least: float = -math.inf) -> bool:
        """Keeps a whole episode, columns [k + 1, ...], if its return is at least `least`. Returns whether it did."""
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
        """Writes the manifest; if there are no episodes, removes everything."""
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
        self._write(MANIFEST, lambda path: _write_text(path, json.dumps(manifest | {"sha256": digest(manifest)})))
        (self.directory / RECORDING).unlink(missing_ok=True)

    def _claim(self) -> bool:
        """Claims the directory, which must be empty or missing. Returns whether it was created."""
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
        """Writes shards while at least `least` rows are pending."""
        if sum(len(x["first"]) for x in self._pending) < least:
            return
        whole = {name: np.concatenate([x[name] for x in self._pending]) for name in self.columns}
        at, end = 0, len(whole["first"])
        while end - at >= least:
            stop = min(at + self._shard_rows, end)
            self._save({name: x[at:stop] for name, x in whole.items()})
            at = stop
        self._pending = [{name: x[at:].copy() for name, x in whole.items()}]

    def _save(self, rows: Tree) -> None:
        name = shard_name(len(self._shards))
        written = self._write(name, lambda path: write_arrays(path, rows))
        self._shards.append(Shard(name, len(rows["first"]), written["sha256"], written["bytes"]))

    def _write(self, name: str, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Writes a temporary file and renames it, so that the file is whole or missing."""
        aside = self.directory / f".aside-{name}"
        try:
            written = write(aside)
            os.rename(aside, self.directory / name)
            sync_directory(self.directory)
        except (OSError, SafetensorError) as error:
            self._failed = True
            self._remove()
            raise UserError(f"The demonstrations cannot be written to {self.directory} ({error}).") from None
        return written

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
    envs: Envs,  # a single environment
    policy: Policy,
    episodes: int,
    seed: int = 0,
    min_return: float = -math.inf,
    max_length: int = MAX_LENGTH,
    name: str = "",
    progress: Callable[[Recording], None] = lambda recording: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Demos | None:
    """Plays until `episodes` of them return at least `min_return`, and writes these to the directory.

    If it ends early, the whole episodes until then are kept. None: `stopping` was true before the first one ended.
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
        f"{recording.best:g}: lower --min-return, or use a better policy.{where}"
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
    """Whole episodes of one environment, columns [k + 1, ...] each, until `stopping` is true.

    The policy sees no last record: its action would be ignored. An episode longer than `max_length` is truncated, as an
    actor's cut does it.
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
