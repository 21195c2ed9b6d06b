"""Recording: writes a demonstration set. `record` plays episodes with a policy, such as a Scripted expert."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from safetensors import SafetensorError

from veldt.acting.actor import Policy, ask
from veldt.demos.set import FORMAT, RECORDING, VERSION, Demos, Shard, digest, is_inside, row_bytes, shard_name
from veldt.env_kwargs import read_kwargs
from veldt.envs import Envs, make_env
from veldt.envs.atari import PROTOCOLS, Atari
from veldt.errors import UserError
from veldt.files import MANIFEST, sync_directory, write_arrays
from veldt.records.adapter import Adapter
from veldt.records.masks import MASK
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Spec, Tree
from veldt.seeds import derive

SHARD = 64 * 2**20  # bytes of a shard
ATTEMPTS = 20  # episodes played at most for each one wanted
MAX_LENGTH = 27_000  # steps; 108K Atari frames


class Recording:
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

    def add(self, episode: Tree, least: float = -math.inf) -> None:
        """Keeps a whole episode, columns [k + 1, ...], if its return is at least `least`."""
        total = math.fsum(episode["reward"])
        self.best = max(self.best, total)
        if total < least:
            self.discarded += 1
            return
        self._pending.append(episode)
        self._flush(self._shard_rows)
        self.returns.append(total)
        self.lengths.append(len(episode["first"]) - 1)

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
        text = json.dumps(manifest | {"sha256": digest(manifest)})
        self._write(MANIFEST, lambda path: path.write_text(f"{text}\n"))
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
            rows = {name: x[at : at + self._shard_rows] for name, x in whole.items()}
            file, length = shard_name(len(self._shards)), len(rows["first"])
            self._shards.append(Shard(file, length, **self._write(file, functools.partial(write_arrays, arrays=rows))))
            at += length
        self._pending = [{name: x[at:].copy() for name, x in whole.items()}]

    def _write(self, name: str, write: Callable[[Path], Any]) -> Any:
        """Writes a temporary file, syncs and renames it, so that the file is whole or missing."""
        aside = self.directory / f".aside-{name}"
        try:
            written = write(aside)
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
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
    protocol: dict[str, Any] | None = None
    if isinstance(envs.env, Atari):
        known = next((key for key, x in PROTOCOLS.items() if x == envs.env.protocol), "")
        protocol = {"name": known, **dataclasses.asdict(envs.env.protocol)}
    info = {
        "env": envs.name,
        "protocol": protocol,
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
            action = nothing if record["last"][0] else ask(policy, record)["action"].astype(nothing.dtype, copy=False)
            rows.append({**{column: x[0].copy() for column, x in record.items()}, "action": action[0].copy()})
            if record["last"][0]:
                break
            record = envs.step(action)
        else:
            return
        yield {column: np.stack([row[column] for row in rows]) for column in rows[0]}


Expert = Callable[[Any], Any]  # one observation, or a dict of them by key -> one action
MakeExpert = Callable[[Any], Expert]  # the environment that is played -> its expert


class Immediate(Policy):
    """A policy of one environment that answers immediately."""

    def __init__(self, answer: Callable[[Tree], Tree]) -> None:
        self.answer = answer
        self._out: Tree | None = None

    def send(self, group: int, step: Tree) -> bool:
        self._out = self.answer(step)
        return True

    def recv(self, group: int) -> Tree | None:
        out, self._out = self._out, None
        return out

    def reset(self, group: int) -> None:
        self._out = None


class Scripted(Immediate):
    """A policy from a function that makes an expert at the start of each episode."""

    def __init__(self, make: MakeExpert, game: Any, spec: EnvSpec, name: str = "the expert") -> None:
        super().__init__(self._act)
        self.make, self.game, self.spec, self.name = make, game, spec, name
        self._expert: Expert | None = None

    def _act(self, step: Tree) -> Tree:
        if step["first"][0] or self._expert is None:
            made: Any = self.make(self.game)
            if not callable(made):
                kind = type(made).__name__
                raise UserError(f"{self.name} must return a function from an observation to an action, not a {kind}.")
            self._expert = made
        seen: Any = {name.removeprefix("obs/"): step[name][0].copy() for name in self.spec.seen}
        assert self._expert is not None
        given = self._expert(seen["obs"] if "obs" in self.spec.observation else seen)
        action = self._checked(given)[None]
        masks = self.spec.adapter.masks if self.spec.adapter is not None else None
        if masks is not None and not masks.allows(step[MASK], action)[0]:
            raise UserError(f"{self.name} returned the action {reprlib.repr(given)}, which its action_mask forbids.")
        return {"action": action}

    def reset(self, group: int) -> None:
        super().reset(group)
        self._expert = None

    def _checked(self, action: Any) -> Array:
        """The action as it is recorded: discrete ones count from 0, continuous ones are clipped to their bounds."""
        space, column, adapter = self.spec.action_space, self.spec.action, self.spec.adapter
        if adapter is not None and adapter.taken is not space:
            return self._composed(adapter, action)
        try:
            x = np.asarray(action)
            valid = x.shape == column.shape and x.dtype.kind in ("biuf" if isinstance(space, spaces.Box) else "biu")
        except (TypeError, ValueError):
            valid = False
        if valid and isinstance(space, spaces.Box):
            x = np.clip(x.astype(np.float64), space.low, space.high)
        elif valid:
            assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete), space
            x = x.astype(np.int64) - space.start
        if not valid or not is_inside(space, x[None]):
            raise UserError(f"{self.name} returned the action {reprlib.repr(action)}, which is not in {space}.")
        return x.astype(column.dtype)

    def _composed(self, adapter: Adapter, action: Any) -> Array:
        """The same for what is recorded in another form than the environment takes it."""
        with contextlib.suppress(TypeError, ValueError, IndexError, KeyError):
            x = adapter.recorded(action)
            if is_inside(self.spec.action_space, x[None]):
                return x
        raise UserError(f"{self.name} returned the action {reprlib.repr(action)}, which is not in {adapter.taken}.")


def make_played(env: str, protocol: str = "", **options: Any) -> tuple[Envs, Any]:
    """One environment that emits records, and the Gymnasium environment inside, which an expert may inspect. `options` are
    those of `make_env`.

    An environment with a vector version of its own is made without it, as that has no single environment inside. Atari
    has none either: there the expert gets the vector environment.
    """
    envs = make_env(env, 1, protocol=protocol, **options)
    if not isinstance(envs.env, SyncVectorEnv | Atari):
        envs.close()
        single = functools.partial(gym.make, env, disable_env_checker=True, **read_kwargs(options.pop("kwargs", ())))
        seen = {name: x for name, x in options.items() if name in ("clip", "image_size", "grayscale", "combine")}
        made = make_env(single, 1, **options)
        envs = Envs(made.env, env, **seen, masks=made.adapter.settings["masks"])
    return envs, envs.env.envs[0].unwrapped if isinstance(envs.env, SyncVectorEnv) else envs.env
