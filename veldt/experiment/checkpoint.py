"""Checkpoints: safetensors files and a JSON manifest with their hashes; nothing in them can be executed.

    checkpoints/
      000003/            manifest.json   what belongs to this checkpoint, with sha256, and all state that is not an array
                         weights.safetensors   the network's weights by name; weights-NODE.safetensors if several have some
                         state.safetensors     target, optimizer, priorities, counters, ...
      blocks/            store-000000000000.safetensors ...   each block of the store once, shared by all checkpoints
      latest             link to the newest
      best-000000060000/ manifest.json, weights.safetensors   the weights with the best evaluation, by env steps
      best               link to it

A checkpoint is written aside, synced and renamed: it is there as a whole or not at all. Its cost does not grow with the
store: only the blocks that are new since the last one are written. If there is no room for the stores, it has all else; a
run that is resumed from it begins with empty ones.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from veldt.errors import UserError
from veldt.experiment.manifest import (
    FORMAT,
    STATE,
    WEIGHTS,
    check_best,
    check_finite,
    check_like,
    check_store,
    read_manifest,
)
from veldt.files import MANIFEST, Corrupt, check_room, fingerprint, sync_directory, write_arrays
from veldt.records.tree import Tree
from veldt.runtime.base import Nodes

log = logging.getLogger("veldt")
RETRIES = 10
CHUNK = 64 * 2**20  # bytes of blocks that are copied and written at a time


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: dict[str, Any]

    @property
    def number(self) -> int:
        return int(self.manifest["number"])

    def clock(self, name: str) -> float:
        """Its env_steps or time_s, of which only the checkpoints of a run have both."""
        if name not in self.manifest:
            raise UserError(f"{self.path} cannot be restored: its manifest has an invalid {name}.")
        return float(self.manifest[name])

    def weights(self, node: str = "") -> Tree:
        """Of a node; of the first that has weights, unless one is named. Empty: there are none."""
        files: dict[str, str] = self.manifest["weights"]
        file = files[node] if node else next(iter(files.values()), "")
        try:
            weights = load_file(self.path / file) if file else {}
            check_finite(file, weights)
        except (Corrupt, SafetensorError, LookupError, TypeError, ValueError) as error:
            why = error if isinstance(error, Corrupt) else f"{file} cannot be read ({error})"
            raise UserError(f"{self.path}: {why}; delete that checkpoint to use the previous one.") from None
        return weights

    def state(self) -> dict[str, dict[str, Any]]:
        """Of all nodes. Raises what reading and taking apart a file can raise."""
        state: dict[str, dict[str, Any]] = {name: dict(part) for name, part in self.manifest["nodes"].items()}
        for key, array in load_file(self.path / STATE).items():
            node, _, name = key.partition(":")
            state[node][name] = array
        for node in self.manifest["weights"]:
            state[node] |= {f"weights/{name}": array for name, array in self.weights(node).items()}
        return state


class Checkpoints:
    def __init__(self, directory: Path, keep: int = 2, with_stores: bool = True) -> None:
        self.directory, self.keep, self.with_stores = directory, keep, with_stores
        self.blocks = directory / "blocks"
        for path in (self.directory, self.blocks):
            if path.is_symlink():
                raise UserError(f"{path} is a symbolic link, which Veldt does not follow; put the directory itself there.")
        self._saved: dict[str, list[dict[str, Any]]] = {}  # store -> its block files that may still be wanted
        self._sound: dict[str, bool] = {}  # block files that were verified
        self._new: list[Path] = []  # block files of the checkpoint that is being written

    def save(self, number: int, nodes: Nodes, info: dict[str, Any]) -> bool:
        """Writes a checkpoint. If the disk has no room for it, leaves out the stores; if it has none for the rest either,
        says so, keeps the last one, and returns False."""
        info = {"format": FORMAT, "number": number, **info}
        state, stores = nodes.state(), nodes.stores()
        rest = {name: x for name, x in state.items() if name not in stores}
        try:
            try:
                final = self._write(info, state, stores) if self.with_stores else self._write(info, rest, {})
            except (OSError, SafetensorError) as error:
                if not (self.with_stores and stores):
                    raise
                final = self._write(info, rest, {})
                log.warning("checkpoint %d has the weights, but not the replay: %s", number, error)
        except (OSError, SafetensorError) as error:
            log.error(
                "checkpoint %d could not be written (%s); training continues, and the last good one is kept", number, error
            )
            return False
        # It is there. What follows makes it easier to find and frees disk space; the next one can do that as well.
        for tidy, what in ((sync_directory, self.directory), (self._point_to, final), (self._prune, final)):
            try:
                tidy(what)
            except OSError as error:
                log.warning("checkpoint %d was written, but cleaning up after it failed (%s)", number, error)
        return True

    def _write(self, info: dict[str, Any], state: dict[str, dict[str, Any]], stores: dict[str, Any]) -> Path:
        final = self.directory / f"{info['number']:06d}"
        self._new = []
        try:
            self.blocks.mkdir(parents=True, exist_ok=True)
            files = self._save_blocks(stores, spare=2 * _nbytes(state))
            self._place(final, state, {**info, "blocks": files})
        except (OSError, SafetensorError):
            for part in (*self.blocks.glob(".aside-*"), *self._new):
                part.unlink(missing_ok=True)
            raise
        self._saved |= files
        return final

    def _place(self, final: Path, state: dict[str, dict[str, Any]], manifest: dict[str, Any]) -> None:
        """Writes a checkpoint aside and moves it to its place."""
        aside = self.directory / f".aside-{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            self._save_state(aside, state, manifest)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(aside, final)
        except (OSError, SafetensorError):
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def weights(self) -> Tree | None:
        """The weights of the newest checkpoint that verifies, even while a run writes and deletes checkpoints there."""
        return self._weights("", lambda: self.load(blocks=False))

    def best_weights(self) -> Tree | None:
        """As `weights`, of the best evaluation."""
        return self._weights("best-", self.best)

    def _weights(self, prefix: str, find: Callable[[], Checkpoint | None]) -> Tree | None:
        for _ in range(RETRIES):
            before = self._paths(prefix)
            try:
                checkpoint = find()
                if checkpoint is not None or self._paths(prefix) == before:
                    return None if checkpoint is None else checkpoint.weights()
            except (UserError, FileNotFoundError):
                if self._paths(prefix) == before:
                    raise
        raise UserError(f"{self.directory} changes faster than it can be read; try again.")

    def best(self) -> Checkpoint | None:
        """The weights with the best evaluation, and in its manifest what that was; None: there are none that verify."""
        for path in self._paths("best-"):
            try:
                found = self._verify(path)
                check_best(found.manifest)
                return found
            except Corrupt as error:
                log.warning("checkpoint %s is not used: %s", path.name, error)
        return None

    def save_best(self, weights: Tree, info: dict[str, Any]) -> bool:
        """Replaces the best weights. `info` is what was evaluated: env_steps, learner_steps, mean_return."""
        state = {"learner": {f"weights/{name}": x for name, x in weights.items()}}
        info = {"format": FORMAT, "number": info["env_steps"], "blocks": {}, **info}
        final = self.directory / f"best-{info['env_steps']:012d}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._place(final, state, info)
        except (OSError, SafetensorError) as error:
            log.error("the best weights could not be written (%s); training continues", error)
            return False
        try:
            self._point_to(final, "best")
        except OSError as error:  # not every file system has links, and nothing reads this one
            log.warning("the best weights were written, but not the link to them (%s)", error)
        for path in self._paths("best-"):
            if path != final:
                shutil.rmtree(path, ignore_errors=True)
        return True

    def load(self, blocks: bool = True) -> Checkpoint | None:
        """The newest checkpoint that verifies, with its block files or without; None if there is none at all."""
        worst: list[str] = []
        damaged: Checkpoint | None = None
        for path in self._paths():
            try:
                checkpoint = self._verify(path)
                files = chain(*checkpoint.manifest["blocks"].values()) if blocks else ()
                bad = [file["file"] for file in files if not self._is_sound(file)]
            except Corrupt as error:
                log.warning("checkpoint %s is not used: %s", path.name, error)
                worst.append(f"{path.name}: {error}")
                continue
            if not bad:
                return checkpoint
            log.warning("checkpoint %s is incomplete: %s damaged", path.name, ", ".join(bad))
            damaged = damaged or checkpoint
        if damaged is None and worst:
            raise UserError(
                f"No checkpoint in {self.directory} can be read ({'; '.join(worst)}); delete that directory to start over."
            )
        return damaged

    def at(self, number: int) -> Checkpoint:
        """The checkpoint of this number. Raises Corrupt."""
        return self._verify(self.directory / f"{number:06d}")

    def add(self, state: dict[str, dict[str, Any]], manifest: dict[str, Any]) -> None:
        """A checkpoint that no running nodes made; its blocks are there already."""
        final = self.directory / f"{manifest['number']:06d}"
        self._place(final, state, manifest)
        sync_directory(self.directory)
        self._point_to(final)
        self._prune(final)

    def restore(self, checkpoint: Checkpoint, nodes: Nodes) -> None:
        try:
            state = checkpoint.state()
            for name, part in nodes.state().items():
                check_like(name, state.get(name, part), part)
            for name in nodes.stores().keys() & state.keys():
                check_store(name, state[name])
            nodes.load_state(state)
            self._load_blocks(checkpoint, nodes)
        except (Corrupt, SafetensorError, LookupError, TypeError, ValueError, OverflowError) as error:
            why = str(error) if isinstance(error, Corrupt) else f"it does not fit this run: {type(error).__name__}, {error}"
            raise UserError(f"{checkpoint.path} cannot be restored: {why}.") from error
        self._saved = checkpoint.manifest["blocks"]

    def _load_blocks(self, checkpoint: Checkpoint, nodes: Nodes) -> None:
        for name, store in nodes.stores().items():
            if name not in checkpoint.manifest["nodes"]:  # it was saved without its replay
                continue
            for file in checkpoint.manifest["blocks"][name]:
                if self._is_sound(file):
                    store.load_blocks(file["first"], load_file(self.blocks / file["file"]))
                else:
                    lost = store.drop_blocks(file["first"], file["stop"])
                    log.error("%s is damaged: %d items of %s are lost", file["file"], lost, name)
            for first, stop in _gaps(checkpoint.manifest["blocks"][name], store.oldest, store.next):
                store.drop_blocks(first, stop)

    def _save_blocks(self, stores: dict[str, Any], spare: int) -> dict[str, list[dict[str, Any]]]:
        """Writes the blocks that no earlier checkpoint has, and lists all files that hold a block of the stores. Leaves
        `spare` bytes of the disk free, for what is not in a store."""
        files: dict[str, list[dict[str, Any]]] = {}
        for name, store in stores.items():
            files[name] = [file for file in self._saved.get(name, []) if file["stop"] > store.oldest]
            since = max(files[name][-1]["stop"] if files[name] else 0, store.oldest)
            check_room(self.blocks, (store.next - since) * store.schema.nbytes + spare)
            most = max(1, CHUNK // store.schema.nbytes)
            for start in range(since, store.next, most):
                first, stop, arrays = store.blocks(start, most)
                if first >= stop:  # gone before they could be copied
                    continue
                file = {"file": f"{quote(name, '')}-{first:012d}.safetensors", "first": first, "stop": stop}
                aside = self.blocks / f".aside-{file['file']}"
                file |= write_arrays(aside, arrays)
                self._new.append(self.blocks / file["file"])
                os.rename(aside, self._new[-1])
                self._sound[file["file"]] = True
                files[name].append(file)
        sync_directory(self.blocks)
        return files

    def _save_state(self, path: Path, states: dict[str, dict[str, Any]], manifest: dict[str, Any]) -> None:
        weights: dict[str, Tree] = {}  # by node
        arrays: Tree = {}
        manifest["nodes"] = {}
        for node, state in states.items():
            manifest["nodes"][node] = {}
            for name, value in state.items():
                if not isinstance(value, np.ndarray):
                    manifest["nodes"][node][name] = value
                elif name.startswith("weights/"):
                    weights.setdefault(node, {})[name.removeprefix("weights/")] = value
                else:
                    arrays[f"{node}:{name}"] = value
        manifest["weights"] = {
            node: WEIGHTS if len(weights) == 1 else f"weights-{quote(node, '')}.safetensors" for node in weights
        }
        files = {STATE: arrays} | {manifest["weights"][node]: x for node, x in weights.items()}
        manifest["files"] = {name: write_arrays(path / name, x) for name, x in files.items()}
        body = json.dumps(manifest)
        with open(path / MANIFEST, "w") as file:
            file.write(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path)

    def _verify(self, path: Path) -> Checkpoint:
        manifest = read_manifest(path)
        for name, expected in manifest["files"].items():
            if fingerprint(path / name) != expected:
                raise Corrupt(f"{name} does not match its checksum")
        return Checkpoint(path, manifest)

    def _is_sound(self, file: dict[str, Any]) -> bool:
        name = file["file"]
        if name not in self._sound:
            own = Path(name).name == name  # never follow a path out of the directory
            expected = {"sha256": file["sha256"], "bytes": file["bytes"]}
            self._sound[name] = own and fingerprint(self.blocks / name) == expected
        return self._sound[name]

    def _paths(self, prefix: str = "") -> list[Path]:
        """Newest first."""
        names = self.directory.glob(f"{prefix}[0-9]*")
        found = (p for p in names if p.name.removeprefix(prefix).isdecimal() and not p.is_symlink())
        return sorted((p for p in found if p.is_dir()), reverse=True)

    def _point_to(self, path: Path, link: str = "latest") -> None:
        aside = self.directory / f".aside-{link}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(path.name)
        try:
            os.rename(aside, self.directory / link)
        finally:
            aside.unlink(missing_ok=True)

    def _prune(self, newest: Path) -> None:
        """Deletes all but the newest checkpoints, then the block files that none of those needs.

        Checkpoints after this one are damaged, or it would have gone on from them: they are the first to go.
        """
        paths = self._paths()
        kept = [path for path in paths if path.name <= newest.name][: self.keep]
        for path in paths:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        try:
            wanted = {file["file"] for path in kept for file in chain(*read_manifest(path)["blocks"].values())}
        except Corrupt:
            return  # what a damaged checkpoint needs is unknown: delete nothing
        self._saved = {name: [x for x in files if x["file"] in wanted] for name, files in self._saved.items()}
        for path in self.blocks.glob("*.safetensors"):
            if path.name not in wanted:
                path.unlink(missing_ok=True)

    def clean(self) -> None:
        """Removes what a killed writer left behind. Only for the process that holds the run directory."""
        for path in (*self.directory.glob(".aside-*"), *self.blocks.glob(".aside-*")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _nbytes(state: dict[str, dict[str, Any]]) -> int:
    return sum(x.nbytes for part in state.values() for x in part.values() if isinstance(x, np.ndarray))


def _gaps(files: list[dict[str, Any]], oldest: int, stop: int) -> Iterator[tuple[int, int]]:
    """The blocks of oldest ... stop - 1 that no file has: they went while the checkpoint was written."""
    at = oldest
    for file in files:
        if file["first"] > at:
            yield at, min(stop, file["first"])
        at = max(at, file["stop"])
    if at < stop:
        yield at, stop
