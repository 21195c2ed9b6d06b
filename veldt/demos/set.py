"""Demos: opens, verifies and reads a demonstration set."""

from __future__ import annotations

import dataclasses
import logging
import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from veldt.demos.manifest import Shard, read_columns, read_manifest, read_shard, read_stops
from veldt.envs import is_atari
from veldt.envs.atari import find_protocol
from veldt.errors import UserError
from veldt.files import Corrupt
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, ArraySpec, Spec, Tree

log = logging.getLogger("veldt")


class Demos:
    """A demonstration set whose manifest and shards were verified."""

    def __init__(self, path: Path, manifest: dict[str, Any], columns: Spec, shards: list[Shard], stops: Array) -> None:
        self.path, self.columns, self.shards = path, columns, shards
        self.env, self.policy, self.seed = str(manifest["env"]), str(manifest["policy"]), int(manifest["seed"])
        self.action_space = str(manifest["action_space"])
        self.protocol: dict[str, Any] | None = manifest["protocol"]  # Atari: its settings
        self.discarded = int(manifest["discarded"])  # episodes below the minimum return
        self.wanted = int(manifest["wanted"])  # episodes that were asked for
        self.stops = stops  # [episodes], the row after each
        self.lengths = np.diff(stops, prepend=0) - 1  # [episodes], actions
        self.returns = np.array([episode["return"] for episode in manifest["episodes"]], np.float64)  # [episodes]

    @classmethod
    def open(cls, directory: str | Path) -> Demos:
        """Reads the manifest and verifies every shard. Raises a UserError that names the file."""
        path = Path(directory)
        try:
            manifest = read_manifest(path)
            columns = read_columns(manifest)
            shards = [read_shard(path, columns, number, entry) for number, entry in enumerate(manifest["shards"])]
            demos = cls(path, manifest, columns, shards, read_stops(manifest, sum(shard.rows for shard in shards)))
            demos._check_rows()
        except Corrupt as error:
            raise UserError(f"{path} is not a readable demonstration set: {error}.") from None
        return demos

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
                here, there = (_describe(x.get(name)) for x in (ours, self.columns))
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
        columns = self._rows("action", "last")
        if not is_inside(env.action_space, columns["action"][~columns["last"]]):
            raise UserError(f"The demonstrations in {self.path} have actions that are not in {env.action_space}.")

    def episodes(self) -> Iterator[Tree]:
        """Columns [k + 1, ...] of each episode of k actions. Holds one shard and one episode in RAM at a time."""
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
            raise UserError(f"{self.path / shard.file} can no longer be read ({error}).") from None
        for name, column in self.columns.items():
            if column.dtype.kind == "f" and not np.isfinite(loaded[name]).all():
                raise UserError(f"{self.path / shard.file} has values of {name} that are not finite; record it again.")
        return loaded

    def _rows(self, *names: str) -> Tree:
        """A few small columns of all rows."""
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
        if not (np.array_equal(first, rows["first"]) and np.array_equal(last, rows["last"])):
            raise Corrupt("its episodes do not begin and end where its manifest says")
        if not (np.isfinite(rows["reward"]).all() and np.isin(rows["discount"], (0, 1)).all()):
            raise Corrupt("it has rewards that are not finite, or discounts that are neither 0 nor 1")
        for stop, length, total in zip(self.stops, self.lengths, self.returns, strict=True):
            if math.fsum(rows["reward"][stop - length - 1 : stop]) != total:
                raise Corrupt("its rewards do not sum to the returns in its manifest")


def _describe(column: ArraySpec | None) -> str:
    return "missing" if column is None else f"{list(column.shape)} {column.dtype}"


def is_inside(space: spaces.Space[Any], actions: Array) -> bool:
    """Whether recorded actions [n, ...] are in the space; discrete ones count from 0."""
    if isinstance(space, spaces.Box):
        slack = 1e-4 * np.maximum(1, abs(np.nan_to_num(actions)))
        return bool((np.isfinite(actions) & (actions >= space.low - slack) & (actions <= space.high + slack)).all())
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete), space
    return bool(((actions >= 0) & (actions < (space.n if isinstance(space, spaces.Discrete) else space.nvec))).all())
