"""Checkpoints that are killed in the middle, cut short, flipped, or on a disk that is full: what was good stays good."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invariants import check_valid
from safetensors import SafetensorError
from test_run import Stop, crash, stopping, tiny, whole_state

import veldt.files as disk
from veldt.errors import UserError
from veldt.experiment import checkpoint as module
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import exclusive
from veldt.experiment.manifest import read_manifest
from veldt.experiment.run import Run, resume
from veldt.ports import Source
from veldt.records.block import Block, Schema, Window
from veldt.records.tree import spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized

SCHEMA = Schema({"obs": spec((40,), np.float32), "t": spec((), np.int64), "valid": spec((), np.bool_)}, Window(), fresh=4)
SLOTS = 12


class Fake:
    """A program with a store and one more node, without torch. All it holds follows from how often `advance` was called,
    so that what was read back can be checked alone."""

    def __init__(self) -> None:
        self.round = 0
        self.store = Replay(SCHEMA, Prioritized(SLOTS * SCHEMA.starts), MinSize(1), SLOTS * SCHEMA.starts, SLOTS, seed=1)
        self.weights = np.zeros(1)

    def advance(self, blocks: int = 3) -> None:
        self.round += 1
        for _ in range(blocks):
            rows = SCHEMA.layout.zeros(SCHEMA.rows)
            columns = SCHEMA.layout.columns(rows)
            serial = self.store.next
            columns["obs"][:], columns["t"][:], columns["valid"][:] = serial, serial, True
            priorities = np.full(SCHEMA.starts, 1.0 + serial)
            block = Block(SCHEMA, rows, {}, np.ones(SCHEMA.starts, np.bool_))
            assert self.store.insert(block, priorities, Source(0, serial))

    def state(self) -> dict[str, dict[str, Any]]:
        learner = {
            "weights/w": np.full((64, 8), self.round, np.float32),
            "target/w": np.full(9, self.round),
            "steps": self.round,
        }
        return {"learner": learner, "store": self.store.state()}

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.round = state["learner"]["steps"]
        self.weights, self.target = state["learner"]["weights/w"], state["learner"]["target/w"]
        if "store" in state:
            self.store.load_state(state["store"])

    def stores(self) -> dict[str, Any]:
        return {"store": self.store}

    def check(self) -> None:
        """Nothing is torn, and all is of the same round."""
        assert (self.weights == self.round).all() and (self.target == self.round).all()
        check_valid(self.store)
        columns = SCHEMA.layout.columns(self.store.rows)
        for serial in range(self.store.oldest, self.store.next):
            slot = serial % self.store.n_slots
            if self.store.items[slot].any():
                rows = slice(slot * SCHEMA.rows, (slot + 1) * SCHEMA.rows)
                for name in ("obs", "t"):
                    assert (columns[name][rows] == serial).all(), (serial, columns[name][rows])
                assert columns["valid"][rows].all()


def save(checkpoints: Checkpoints, fake: Fake) -> bool:
    return checkpoints.save(fake.round, fake, {"time_s": 0.0, "env_steps": fake.round, "scheduled": True})  # type: ignore[arg-type]


def read(directory: Path, items: int | None = None) -> Fake:
    """The newest checkpoint, restored and checked."""
    fake, checkpoints = Fake(), Checkpoints(directory)
    checkpoint = checkpoints.load()
    assert checkpoint is not None
    checkpoints.restore(checkpoint, fake)  # type: ignore[arg-type]
    assert fake.round == checkpoint.number
    fake.check()
    whole = min(3 * fake.round, SLOTS) * SCHEMA.starts
    assert fake.store.size == (whole if items is None else items)
    return fake


def written(directory: Path, rounds: int = 3, keep: int = 2) -> Fake:
    fake, checkpoints = Fake(), Checkpoints(directory, keep)
    for _ in range(rounds):
        fake.advance()
        assert save(checkpoints, fake)
    return fake


def files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink() and "latest" not in p.parts)


def verify(directory: Path) -> None:
    """Every hash of the newest checkpoint, computed here."""
    checkpoint = Checkpoints(directory).load()
    assert checkpoint is not None
    body, digest, _ = (checkpoint.path / "manifest.json").read_text().split("\n")
    assert hashlib.sha256(body.encode()).hexdigest() == digest
    manifest = json.loads(body)
    listed = [(checkpoint.path / name, file) for name, file in manifest["files"].items()]
    listed += [(directory / "blocks" / file["file"], file) for file in manifest["blocks"].get("store", [])]
    for path, file in listed:
        data = path.read_bytes()
        assert len(data) == file["bytes"] and hashlib.sha256(data).hexdigest() == file["sha256"], path


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load() is None


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    fake = written(tmp_path, rounds=9)  # the ring has wrapped twice
    again = read(tmp_path)
    verify(tmp_path)
    np.testing.assert_array_equal(again.store.selector.save(), fake.store.selector.save())
    assert fake.store.latest == {0: 26} and again.store.latest == {}, "channels start anew"
    for _ in range(3):  # the same draws
        a, b = again.store.sample(8), fake.store.sample(8)
        assert a is not None and b is not None
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.weights, b.weights)


def test_only_new_blocks_are_written_and_what_nobody_needs_is_deleted(tmp_path: Path) -> None:
    fake, checkpoints = Fake(), Checkpoints(tmp_path)
    for number in range(1, 9):
        fake.advance()
        save(checkpoints, fake)
        newest = checkpoints.load()
        assert newest is not None and newest.number == number
        assert newest.manifest["blocks"]["store"][-1]["first"] == 3 * (number - 1)
        listed = {f["file"] for p in checkpoints._paths() for f in chain(*read_manifest(p)["blocks"].values())}
        assert {p.name for p in (tmp_path / "blocks").iterdir()} == listed
        assert len(checkpoints._paths()) == min(2, number)
    assert len(listed) <= SLOTS // 3 + 1


def test_a_checkpoint_without_new_blocks_needs_no_new_file(tmp_path: Path) -> None:
    fake, checkpoints = Fake(), Checkpoints(tmp_path)
    fake.advance()
    save(checkpoints, fake)
    fake.advance(blocks=0)
    assert save(checkpoints, fake)
    assert len(list((tmp_path / "blocks").iterdir())) == 1
    again, checkpoint = Fake(), Checkpoints(tmp_path).load()
    assert checkpoint is not None and checkpoint.number == 2
    Checkpoints(tmp_path).restore(checkpoint, again)  # type: ignore[arg-type]
    assert again.store.size == 3 * SCHEMA.starts
    again.check()


def test_a_resumed_writer_goes_on_where_the_other_stopped(tmp_path: Path) -> None:
    written(tmp_path, rounds=3)
    checkpoints, fake = Checkpoints(tmp_path), Fake()
    checkpoint = checkpoints.load()
    assert checkpoint is not None
    checkpoints.restore(checkpoint, fake)  # type: ignore[arg-type]
    for _ in range(4):
        fake.advance()
        assert save(checkpoints, fake)
        assert read(tmp_path).round == fake.round


# Kills.


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_killed_while_it_writes_checkpoints(tmp_path: Path, kills: int) -> None:
    """A process that does nothing but checkpoint is killed at random moments, and another takes over."""
    rng = np.random.default_rng(kills)
    reached = 0
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            try:
                _write_for_ever(tmp_path)
            finally:
                os._exit(1)
        try:
            _wait_for(lambda at=reached: _newest(tmp_path) > at, f"a checkpoint after {reached}")
            time.sleep(float(rng.random()) * 0.03)  # the moment of the kill
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        fake = read(tmp_path)
        verify(tmp_path)
        assert fake.round > reached
        reached = fake.round


def _write_for_ever(directory: Path) -> None:
    logging.disable()
    fake, checkpoints = Fake(), Checkpoints(directory)
    checkpoint = checkpoints.load()
    if checkpoint is not None:
        checkpoints.restore(checkpoint, fake)  # type: ignore[arg-type]
    while True:
        fake.advance()
        save(checkpoints, fake)


def _newest(directory: Path) -> int:
    return max((int(p.name) for p in directory.glob("[0-9]*")), default=0)


def _wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.001)


@contextmanager
def failing_at(call: int, error: Callable[[], BaseException]) -> Iterator[list[str]]:
    """The call-th of all calls that touch the disk raises; the list has the names of the calls so far."""
    seen: list[str] = []
    patch = pytest.MonkeyPatch()

    def guard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == call:
                raise error()
            if len(seen) > call and error is Killed:
                raise Killed  # a dead process does nothing more, not even tidy up
            return function(*args, **kwargs)

        return guarded

    def half(arrays: Any, path: Path) -> None:
        """A file is written in pieces: a kill in the middle leaves the first ones."""
        save_file(arrays, path)
        seen.append("half")
        if len(seen) == call:
            os.truncate(path, path.stat().st_size // 2)
            raise error()

    save_file = disk.save_file
    patch.setattr(disk, "save_file", guard("save_file", half))
    for one in (module, disk):
        patch.setattr(one, "open", guard("open", open), raising=False)
    for name in ("rename", "fsync", "replace", "unlink"):
        patch.setattr(module.os, name, guard(name, getattr(os, name)))
    for name in ("rmtree", "disk_usage"):
        patch.setattr(module.shutil, name, guard(name, getattr(shutil, name)))
    for name in ("mkdir", "symlink_to", "write_text", "unlink"):
        patch.setattr(Path, name, guard(name, getattr(Path, name)))
    try:
        yield seen
    finally:
        patch.undo()


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a power cut: files and their directory are synced, then renamed, then the directory above is synced."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def syncing(handle: int) -> None:
        events.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)))
        fsync(handle)

    def renaming(source: Path, to: Path) -> None:
        events.append(("rename", os.path.relpath(to, tmp_path)))
        rename(source, to)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    written(tmp_path, rounds=1)
    final = events.index(("rename", "000001"))
    block = "store-000000000000.safetensors"
    before = events[:final]
    for name in ("manifest.json", "weights.safetensors", "state.safetensors"):
        assert ("sync", f".aside-000001/{name}") in before, name
    assert ("sync", ".aside-000001") in before
    assert before.index(("sync", f"blocks/.aside-{block}")) < before.index(("rename", f"blocks/{block}"))
    assert ("sync", "blocks") in before[before.index(("rename", f"blocks/{block}")) :]
    assert ("sync", ".") in events[final:]
    assert events.index(("rename", "latest")) > final


class Killed(BaseException):
    """Nothing in the code under test catches this, so it stands for a kill."""


def no_space() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def bad_file() -> BaseException:
    return SafetensorError("I/O error: no space left on device")


def six(directory: Path) -> tuple[Fake, Checkpoints]:
    """A writer that has six checkpoints, and the state of the seventh."""
    template = directory.parent / "template"
    if not template.exists():
        written(template, rounds=6)
    shutil.copytree(template, directory, symlinks=True)
    fake, checkpoints = taken_over(directory)
    fake.advance()
    return fake, checkpoints


def taken_over(directory: Path) -> tuple[Fake, Checkpoints]:
    """What a new process does: tidies up and loads."""
    fake, checkpoints = Fake(), Checkpoints(directory, keep=2)
    checkpoints.clean()
    checkpoint = checkpoints.load()
    assert checkpoint is not None
    checkpoints.restore(checkpoint, fake)  # type: ignore[arg-type]
    return fake, checkpoints


def calls_of_a_save(directory: Path) -> list[str]:
    fake, checkpoints = six(directory)
    with failing_at(10**9, no_space) as seen:
        assert save(checkpoints, fake)
    assert {"save_file", "half", "rename", "fsync", "open", "rmtree"} <= set(seen)
    return seen


def listed(checkpoints: Checkpoints) -> set[str]:
    """The block files that the checkpoints need."""
    return {file["file"] for p in checkpoints._paths() for file in chain(*read_manifest(p)["blocks"].values())}


def go_on(directory: Path) -> Fake:
    """A new process writes two more checkpoints."""
    fake, checkpoints = taken_over(directory)
    for _ in range(2):
        fake.advance()
        assert save(checkpoints, fake)
    return fake


def test_a_kill_at_every_point_of_a_checkpoint(tmp_path: Path) -> None:
    for call, name in enumerate(calls_of_a_save(tmp_path / "count"), 1):
        directory = tmp_path / str(call)
        fake, checkpoints = six(directory)
        with failing_at(call, Killed), pytest.raises(Killed):
            save(checkpoints, fake)
        assert read(directory).round in (6, 7), (call, name)
        verify(directory)
        fake = go_on(directory)
        assert read(directory).round == fake.round, (call, name)
        verify(directory)
        assert not list(directory.rglob(".aside*")), (call, name)
        assert len(list(directory.glob("[0-9]*"))) == 2, (call, name)
        assert {path.name for path in (directory / "blocks").iterdir()} == listed(checkpoints), (call, name)
        shutil.rmtree(directory)


@pytest.mark.parametrize("error", [no_space, bad_file])
def test_an_error_at_every_point_of_a_checkpoint(
    tmp_path: Path, error: Callable[[], BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in the log, the last good checkpoint stays or the new one has all but the store, nothing is left behind,
    and the next one works."""
    for call, name in enumerate(calls_of_a_save(tmp_path / "count"), 1):
        if error is bad_file and name not in ("save_file", "half"):
            continue
        directory = tmp_path / str(call)
        fake, checkpoints = six(directory)
        caplog.clear()
        with failing_at(call, error):
            done = save(checkpoints, fake)
        newest = checkpoints.load()
        assert newest is not None and (done or "could not be written" in caplog.text), (call, name)
        empty = not newest.manifest["blocks"]
        assert empty == ("has the weights, but not the replay" in caplog.text), (call, name)
        assert read(directory, 0 if empty else None).round == (7 if done else 6), (call, name)
        verify(directory)
        assert not list(directory.rglob(".aside*")), (call, name)
        if not done:
            left = {path.name for path in (directory / "blocks").iterdir()} - listed(checkpoints)
            assert not left, f"{left} is left behind after call {call}, {name}"
        for _ in range(2):
            fake.advance()
            assert save(checkpoints, fake), (call, name)
        assert read(directory).round == 9
        assert {path.name for path in (directory / "blocks").iterdir()} == listed(checkpoints), (call, name)
        shutil.rmtree(directory)


# No room for the store.


def room_for(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=nbytes))


def test_the_weights_are_saved_where_the_store_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as it happens; when there is room again, so is the store."""
    fake, checkpoints = Fake(), Checkpoints(tmp_path)
    for round_, room in enumerate([1, 0, 1, 0, 0, 0, 1, 1], 1):
        with monkeypatch.context() as patch:
            if not room:
                room_for(73_000, patch)
            fake.advance()
            assert save(checkpoints, fake)
        assert read(tmp_path, None if room else 0).round == round_
        verify(tmp_path)
        assert {path.name for path in (tmp_path / "blocks").iterdir()} == listed(checkpoints)
    assert caplog.text.count("has the weights, but not the replay") == 4
    room_for(10_000, monkeypatch)
    fake.advance()
    assert not save(checkpoints, fake)
    assert read(tmp_path).round == 8, "not even the weights"


@pytest.mark.parametrize("recipe", ["dqn", "impala"])
def test_a_run_goes_on_without_its_replay(tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"checkpoint.store": False}
    if recipe == "impala":  # in processes, with a queue
        changes |= {"store.samples_per_insert": 1.0, "store.min_size": 0, "actors": 1, "store.capacity": "4000"}
    run = tiny(tmp_path / "r", recipe=recipe, steps=900, **changes)
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None and checkpoint.manifest["blocks"] == {} and "store" not in checkpoint.manifest["nodes"]
    assert not list(run.checkpoints().blocks.iterdir())
    capsys.readouterr()
    more = 1_800 if recipe == "dqn" else 9_000  # more than the queue holds, so that the learner takes some
    resume(tmp_path / "r", steps=more, **{"checkpoint.store": True})
    assert "the replay was not saved and is empty" in capsys.readouterr().out
    assert "the replay was not saved and is empty" in (run.path / "log.txt").read_text()
    last, again = run.metrics[-1], run.checkpoints().load()
    assert last["learner_steps"] > checkpoint.manifest["nodes"]["learner"]["steps"] > 0
    assert again is not None and again.manifest["blocks"].keys() == {"store"}


# Damage.


@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.long)])
def test_one_flipped_byte_or_a_file_cut_short_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    rng = np.random.default_rng(times)
    good = tmp_path / "good"
    written(good, rounds=3)
    newest = Checkpoints(good).load()
    assert newest is not None and newest.number == 3
    state = [path.relative_to(good) for path in files(newest.path)]
    blocks = [Path("blocks") / file["file"] for file in newest.manifest["blocks"]["store"]]
    assert len(state) == 3 and len(blocks) == 3
    for number in range(times):
        caplog.clear()
        directory = tmp_path / str(number)
        shutil.copytree(good, directory, symlinks=True)
        name = (*state, *blocks)[number % 6]
        damage(directory / name, rng)
        if name in state:  # the one before it is used, as a whole
            assert read(directory).round == 2, name
            assert "checkpoint 000003 is not used" in caplog.text
        elif name == blocks[-1]:  # the one before it does not need that file
            assert read(directory).round == 2, name
            assert f"checkpoint 000003 is incomplete: {name.name} damaged" in caplog.text
        else:  # both need it: the newest is used, without the blocks of that file
            fake = read(directory, items=6 * SCHEMA.starts)
            assert fake.round == 3 and fake.store.size == 6 * SCHEMA.starts, name
            assert f"{name.name} is damaged: {3 * SCHEMA.starts} items of store are lost" in caplog.text
            draw = fake.store.sample(64)
            assert draw is not None
            lost = range(3 * blocks.index(name), 3 * blocks.index(name) + 3)
            assert not np.isin(draw.keys // SCHEMA.starts, lost).any()
        go_on(directory)
        taken_over(directory)[0].check()
        shutil.rmtree(directory)


def damage(path: Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    at = int(rng.integers(len(data)))
    if rng.random() < 0.75:
        data[at] ^= int(rng.integers(1, 256))
    else:
        del data[at:]
    path.write_bytes(data)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    written(tmp_path, rounds=2)
    path = tmp_path / "000002" / "manifest.json"
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = Checkpoints(tmp_path).load()
        assert found is not None and found.number == 1, at
    path.write_bytes(data + b"\n")
    found = Checkpoints(tmp_path).load()
    assert found is not None and found.number == 1
    path.write_bytes(data)
    assert read(tmp_path).round == 2


@pytest.mark.parametrize("missing", ["manifest.json", "weights.safetensors", "state.safetensors", "blocks"])
def test_a_missing_file_is_found(tmp_path: Path, missing: str) -> None:
    written(tmp_path, rounds=2)
    newest = tmp_path / "blocks" / "store-000000000003.safetensors"
    (newest if missing == "blocks" else tmp_path / "000002" / missing).unlink()
    assert read(tmp_path).round == 1


def test_when_all_are_damaged_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    written(tmp_path, rounds=3)
    for path in tmp_path.glob("[0-9]*/weights.safetensors"):
        damage(path, np.random.default_rng(0))
    with pytest.raises(
        UserError, match=r"No checkpoint in .* can be read .*000003.*000002.*; delete that directory"
    ) as caught:
        Checkpoints(tmp_path).load()
    assert "\n" not in str(caught.value)


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, rounds=1)
    rewritten(tmp_path / "000001" / "manifest.json", format=99)
    with pytest.raises(UserError, match="it has format 99, this Veldt reads format 2"):
        Checkpoints(tmp_path).load()


def rewritten(path: Path, **changes: Any) -> None:
    """A manifest with other entries, signed again; None: without that entry."""
    manifest = json.loads(path.read_text().split("\n")[0]) | changes
    body = json.dumps({name: x for name, x in manifest.items() if x is not None})
    path.write_text(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")


def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    """It named the one node that had weights."""
    written(tmp_path, rounds=1)
    rewritten(tmp_path / "000001" / "manifest.json", format=1, weights=None, learner="learner")
    found = Checkpoints(tmp_path).load()
    assert found is not None and found.weights().keys() == {"w"}
    fake = Fake()
    Checkpoints(tmp_path).restore(found, fake)  # type: ignore[arg-type]
    assert fake.round == 1
    fake.check()


@pytest.mark.parametrize("weights", ["../000002/weights.safetensors", "/etc/passwd", "none.safetensors"])
def test_a_manifest_that_names_files_elsewhere_is_not_followed(weights: str, tmp_path: Path) -> None:
    written(tmp_path, rounds=2)
    rewritten(tmp_path / "000002" / "manifest.json", weights={"learner": weights})
    found = Checkpoints(tmp_path).load()
    assert found is not None and found.number == 1


@pytest.mark.parametrize(
    "body", ["{}", "[]", "7", "{", '{"format": 1}', '{"format": 1, "number": 2, "nodes": [], "files": 3}']
)
def test_a_manifest_that_is_signed_and_says_nothing_is_passed_over(tmp_path: Path, body: str) -> None:
    written(tmp_path, rounds=2)
    digest = hashlib.sha256(body.encode()).hexdigest()
    (tmp_path / "000002" / "manifest.json").write_text(f"{body}\n{digest}\n")
    checkpoint = Checkpoints(tmp_path).load()
    assert checkpoint is not None and checkpoint.number == 1


def test_fewer_are_kept_and_the_newest_sound_one_is_always_among_them(tmp_path: Path) -> None:
    """Damaged checkpoints with higher numbers do not push out the one that was just written."""
    written(tmp_path, rounds=5, keep=3)
    for number in (4, 5):
        damage(tmp_path / f"{number:06d}" / "weights.safetensors", np.random.default_rng(0))
    fake, checkpoints = Fake(), Checkpoints(tmp_path, keep=1)
    checkpoint = checkpoints.load()
    assert checkpoint is not None and checkpoint.number == 3
    checkpoints.restore(checkpoint, fake)  # type: ignore[arg-type]
    fake.advance()
    assert save(checkpoints, fake)
    assert read(tmp_path).round == 4


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "state.safetensors", "blocks"])
def test_a_real_run_goes_on_after_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the checkpoint before, so that the end is the same; or without the blocks that both had, and it is said so."""
    straight = tiny(tmp_path / "straight", steps=900)
    with stopping(monkeypatch, 170, crash), pytest.raises(Stop):
        tiny(tmp_path / "r", steps=900)
    run = Run(tmp_path / "r")
    newest = run.checkpoints().load()
    assert newest is not None and newest.number == 2
    oldest = run.checkpoints().blocks / newest.manifest["blocks"]["store"][0]["file"]
    damage(oldest if name == "blocks" else newest.path / name, np.random.default_rng(1))
    tiny(tmp_path / "r", steps=900)
    text = (run.path / "log.txt").read_text()
    if name == "blocks":
        assert "items of store are lost" in text
        assert run.metrics[-1]["env_steps"] >= 900
    else:
        assert "checkpoint 000002 is not used" in text
        assert whole_state(run) == whole_state(straight)


def test_a_run_that_lost_every_block_fills_its_store_anew(tmp_path: Path) -> None:
    """The counts of what was inserted and sampled stay, so the limiter is far off its mark; it must not stand still."""
    run = tiny(tmp_path / "r", steps=600)
    for path in run.checkpoints().blocks.iterdir():
        damage(path, np.random.default_rng(0))
    tiny(tmp_path / "r", steps=1_200)
    assert run.metrics[-1]["env_steps"] >= 1_200
    assert "items of store are lost" in (run.path / "log.txt").read_text()


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", steps=700)
    for path in (tmp_path / "r" / "checkpoints").glob("[0-9]*/manifest.json"):
        path.write_bytes(b"")
    before = {path: path.read_bytes() for path in files(tmp_path / "r" / "checkpoints")}
    for attempt in (lambda: tiny(run.path, steps=900), lambda: run.evaluate(1), run.weights_hash):
        with pytest.raises(UserError, match="can be read"):
            attempt()
    assert {path: path.read_bytes() for path in files(tmp_path / "r" / "checkpoints")} == before


# The lock.


def test_a_directory_has_one_holder_and_the_lock_dies_with_it(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with exclusive(tmp_path):
                os.write(write_end, b"held")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(read_end, 4) == b"held"
        with pytest.raises(UserError, match=f"is in use by process {pid}; stop it"), exclusive(tmp_path):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
    with exclusive(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_process_that_the_holder_forked_does_not_hold_the_lock(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            with exclusive(tmp_path):
                forked = os.fork()
                if forked:
                    os.write(write_end, str(forked).encode())
                signal.pause()
        finally:
            os._exit(1)
    forked = int(os.read(read_end, 100))
    try:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with exclusive(tmp_path):
            os.kill(forked, 0)  # it is there
    finally:
        os.kill(forked, signal.SIGKILL)
        os.close(read_end)
        os.close(write_end)


def test_blocks_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a checkpoint never copies the whole store; and the chunks are the store again."""
    whole = tiny(tmp_path / "whole", steps=600)
    monkeypatch.setattr("veldt.experiment.checkpoint.CHUNK", 1)
    run = tiny(tmp_path / "r", steps=600)
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None
    files = checkpoint.manifest["blocks"]["store"]
    assert all(file["stop"] == file["first"] + 1 for file in files) and len(files) > 10
    tiny(tmp_path / "whole", steps=900), tiny(tmp_path / "r", steps=900)
    assert run.weights_hash() == whole.weights_hash()


def test_weights_are_found_while_a_trainer_prunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that was listed is gone when it is read, and a newer one is there."""
    written(tmp_path, rounds=3, keep=3)
    checkpoints, verify = Checkpoints(tmp_path), Checkpoints._verify
    aside = tmp_path.parent / "newest"
    (tmp_path / "000003").rename(aside)
    shutil.rmtree(tmp_path / "000001")

    def pruned(self: Checkpoints, path: Path) -> Any:
        if aside.exists():
            shutil.rmtree(path)
            aside.rename(tmp_path / "000003")
        return verify(self, path)

    monkeypatch.setattr(Checkpoints, "_verify", pruned)
    assert checkpoints.weights() is not None
