"""Runs in one process: what they leave behind, that they can be repeated, resumed, extended, and survive a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium.wrappers import TimeLimit
from safetensors.numpy import load_file

import veldt
from veldt.envs import EnvError
from veldt.envs.small import Chain
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import load_config
from veldt.experiment.manifest import read_manifest
from veldt.experiment.run import Run
from veldt.experiment.session import Interrupted, Session
from veldt.experiment.settings import as_plain, flat
from veldt.learning.learner import Diverged
from veldt.learning.params import LatestParams
from veldt.watching.sinks import JsonLines

TINY: dict[str, Any] = {
    "steps": 1_500,
    "envs_per_actor": 4,
    "algorithm.hidden": (16,),
    "store.capacity": "400",  # the ring wraps
    "store.min_size": 100,
    "store.samples_per_insert": 4.0,
    "learner.batch": 16,
    "learner.prefetch": 1,
    "eval.every": 500,
    "eval.episodes": 2,
    "checkpoint.every": 300,
    "log.every": 0.02,
}


def tiny(path: Path, env: Any = "CartPole-v1", recipe: str = "dqn", **changes: Any) -> Run:
    return veldt.train(recipe, env=env, run=path, quiet=True, **TINY | changes)


def flags(**changes: Any) -> list[str]:
    """The same settings for the command line."""
    out: list[str] = []
    for name, value in (TINY | changes).items():
        out += [f"--{name}", *(str(x) for x in (value if isinstance(value, tuple) else (value,)))]
    return out


def whole_state(run: Run) -> dict[str, Any]:
    """All that the newest checkpoint holds, but for the clock: counters, random states, and hashes of every array."""
    checkpoint = run.checkpoints().load()
    assert checkpoint is not None
    state = {key: value for key, value in checkpoint.manifest.items() if key != "time_s"}
    state["blocks"] = [
        (store, file["first"], file["stop"], _rows_hash(run, run.checkpoints().blocks / file["file"]))
        for store, files in checkpoint.manifest["blocks"].items()
        for file in files
    ]
    return state


def _rows_hash(run: Run, path: Path) -> str:
    """Of the columns alone: the bytes between the fields of a packed record may hold anything."""
    envs = veldt.make_env(run.config.env)
    envs.close()
    labels = path.name.startswith("labelled")
    layout = (run.config.learner_schema if labels else run.config.schema)(envs.spec).layout
    digest = hashlib.sha256()
    rows = {name.removeprefix("rows/"): x for name, x in load_file(path).items() if name.startswith("rows/")}
    rows["packed"] = np.ascontiguousarray(rows["packed"]).view(layout.record)
    for name, column in layout.columns(rows).items():
        digest.update(name.encode() + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


class Stop(BaseException):
    """Stands for a kill: nothing catches it, and no checkpoint is saved."""


@contextmanager
def stopping(monkeypatch: pytest.MonkeyPatch, rounds: int, how: Callable[[Session], None]) -> Iterator[None]:
    """After so many rounds something happens to the session."""
    finished, count = Session.finished, 0

    def counted(self: Session, nodes: Any) -> bool:
        nonlocal count
        count += 1
        if count == rounds:
            how(self)
        return finished(self, nodes)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "finished", counted)
        yield


def crash(session: Session) -> None:
    raise Stop


def interrupt(session: Session) -> None:
    session.interrupted = 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs") / "finished")


def test_a_run_leaves_its_config_metrics_events_log_and_checkpoints(finished: Run) -> None:
    names = {path.name for path in finished.path.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "log.txt", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents.") for name in names)
    assert not [name for name in names if name.startswith(".aside")]
    checkpoints = sorted(path.name for path in (finished.path / "checkpoints").iterdir())
    best = [name for name in checkpoints if name.startswith("best-")]
    assert checkpoints == ["000004", "000005", "best", *best, "blocks", "latest"] and len(best) == 1
    assert os.readlink(finished.path / "checkpoints" / "latest") == "000005"
    assert os.readlink(finished.path / "checkpoints" / "best") == best[0]
    assert finished.config == recipes.make("dqn", "CartPole-v1", **TINY)


def test_every_line_of_metrics_has_the_three_clocks_and_they_never_go_back(finished: Run) -> None:
    lines = [json.loads(text) for text in (finished.path / "metrics.jsonl").read_text().splitlines()]
    assert lines
    for line in lines:
        assert {"time_s", "env_steps", "learner_steps"} <= set(line)
    for name in ("time_s", "env_steps", "learner_steps"):
        values = [line[name] for line in lines]
        assert values == sorted(values), name
    assert lines[-1]["env_steps"] >= 1_500
    assert {"eval_return", "eval_length"} <= {name for line in lines for name in line}
    assert sum("eval_return" in line for line in lines) == 3 + 1  # every 500 env steps, each told once; the last weights


def test_env_steps_end_within_one_round_of_what_was_asked(finished: Run) -> None:
    assert 1_500 <= finished.metrics[-1]["env_steps"] <= 1_500 + 4


def test_the_log_names_every_checkpoint(finished: Run) -> None:
    text = (finished.path / "log.txt").read_text()
    for number in range(1, 6):
        assert f"checkpoint {number} at " in text


def test_evaluation_is_repeatable_and_has_as_many_episodes_as_asked(finished: Run) -> None:
    first, again, other = finished.evaluate(7), finished.evaluate(7), finished.evaluate(7, seed=1)
    assert first == again
    assert len(first.returns) == len(first.lengths) == 7
    assert first.returns != other.returns
    assert first.mean_return == np.mean(first.returns) and first.mean_length == np.mean(first.lengths)
    with pytest.raises(UserError, match="episodes must be greater than 0"):
        finished.evaluate(0)


def test_a_run_may_be_evaluated_in_another_environment_of_the_same_kind(finished: Run) -> None:
    assert finished.config.env == "CartPole-v1"
    other = finished.evaluate(3, env="veldt/TMazeFixed-v0")  # four floats and two actions as well
    assert other.mean_length >= 31 and set(other.returns) <= {0.0, 1.0}
    with pytest.raises(UserError, match=r"Catch-v0 does not fit .*: its observation obs is"):
        finished.evaluate(3, env="veldt/Catch-v0")


def test_reading_a_run_changes_nothing_in_its_directory(finished: Run) -> None:
    """A run may be evaluated while another process trains it, and is in the middle of a checkpoint."""
    checkpoints = finished.path / "checkpoints"
    aside = checkpoints / ".aside-000005"
    aside.mkdir()
    (aside / "weights.safetensors").write_bytes(b"being written")
    part = checkpoints / "blocks" / ".aside-store-000000009999.safetensors"
    part.write_bytes(b"being written")
    try:
        finished.evaluate(1)
        finished.weights_hash()
        assert (aside / "weights.safetensors").exists() and part.exists()
    finally:
        (aside / "weights.safetensors").unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        if aside.exists():
            aside.rmdir()


@pytest.mark.parametrize("selector", ["uniform", "prioritized", "ranked"])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_the_same_seed_gives_the_same_run_and_stopped_and_resumed_gives_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: str, prefetch: int
) -> None:
    annealed = {"store.beta_end": 1.0} if selector != "uniform" and prefetch == 4 else {}
    changes = {"store.selector": selector, "learner.prefetch": prefetch} | annealed
    straight = tiny(tmp_path / "a", **changes)
    expected = whole_state(straight)
    assert expected["weights"] and expected["learner_steps"] > 100
    # Stopped in the middle of the second, the third and the last stretch between two checkpoints.
    for rounds in (150, 120, 70):
        with stopping(monkeypatch, rounds, crash), pytest.raises(Stop):
            tiny(tmp_path / "b", **changes)
    resumed = tiny(tmp_path / "b", **changes)
    assert whole_state(resumed) == expected
    assert resumed.weights_hash() == straight.weights_hash()
    assert resumed.evaluate(3) == straight.evaluate(3)
    lines = [json.loads(text) for text in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "resumed_from" in line]) == 3


@pytest.mark.parametrize("per_insert", [1.0, 32.0], ids=["actor-ahead", "learner-behind"])
def test_resume_is_exact_whoever_the_limiter_holds_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_insert: float
) -> None:
    changes = {"store.samples_per_insert": per_insert, "learner.prefetch": 4, "learner.publish_every": 7, "steps": 700}
    expected = whole_state(tiny(tmp_path / "a", **changes))
    with stopping(monkeypatch, 120 if per_insert == 1 else 700, crash), pytest.raises(Stop):
        tiny(tmp_path / "b", **changes)
    assert (tmp_path / "b" / "checkpoints" / "latest").exists()
    assert whole_state(tiny(tmp_path / "b", **changes)) == expected


@pytest.mark.parametrize("optimizer", ["rmsprop", "sgd"])
def test_resume_is_exact_with_the_other_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    changes: dict[str, Any] = {"learner.optimizer": optimizer, "learner.anneal": True, "steps": 700}
    changes |= {"learner.square_start": 0.5} if optimizer == "rmsprop" else {}
    expected = whole_state(tiny(tmp_path / "a", **changes))
    with stopping(monkeypatch, 120, crash), pytest.raises(Stop):
        tiny(tmp_path / "b", **changes)
    assert whole_state(tiny(tmp_path / "b", **changes)) == expected


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    runs = [tiny(tmp_path / str(seed), seed=seed, steps=400) for seed in (0, 1)]
    again = tiny(tmp_path / "again", seed=0, steps=400)
    assert runs[0].weights_hash() != runs[1].weights_hash()
    assert again.weights_hash() == runs[0].weights_hash()


def test_an_interrupted_run_says_so_keeps_its_work_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopping(monkeypatch, 130, interrupt), pytest.raises(Interrupted) as caught:
        tiny(tmp_path / "r")
    assert caught.value.code == 130
    state = whole_state(Run(tmp_path / "r"))
    assert state["scheduled"] is False
    at = state["env_steps"]
    assert at % 300 != 0 and at < 1_500
    run = veldt.resume(tmp_path / "r", quiet=True)
    assert whole_state(run)["scheduled"] is True
    resumed = [line for line in run.metrics if "resumed_from" in line]
    assert [line["env_steps"] for line in resumed] == [at]
    assert [line["resumed_from"] for line in resumed] == [state["learner_steps"]]
    # The schedule of the checkpoints is that of the uninterrupted run.
    numbers = [int(line.split(" at ")[1].split()[0]) for line in _log(run).splitlines() if " env steps, " in line]
    assert [number // 300 for number in numbers] == [1, at // 300, 2, 3, 4, 5]


def _log(run: Run) -> str:
    return (run.path / "log.txt").read_text()


def test_a_finished_run_is_not_trained_again(finished: Run, tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", steps=400)
    before = whole_state(run)
    assert whole_state(tiny(tmp_path / "r", steps=400)) == before


def test_more_steps_go_on_from_the_end(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", steps=400)
    first = whole_state(run)
    assert first["env_steps"] >= 400
    longer = veldt.resume(tmp_path / "r", quiet=True, steps=700)
    assert longer.metrics[-1]["env_steps"] >= 700
    assert longer.config.steps == 700
    assert whole_state(longer)["learner_steps"] > first["learner_steps"]
    assert min(line["env_steps"] for line in longer.metrics if "resumed_from" in line) == first["env_steps"]


def test_settings_that_do_not_touch_what_is_learned_may_change_on_resume(tmp_path: Path) -> None:
    tiny(tmp_path / "r", steps=400)
    run = tiny(tmp_path / "r", steps=500, **{"log.every": 5.0, "checkpoint.keep": 3})
    assert run.config.checkpoint.keep == 3


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"learner.lr": 1e-4}, {"algorithm.hidden": (8,)}, {"env": "veldt/Chain-v0"}], ids=str
)
def test_a_directory_of_another_config_is_refused(finished: Run, change: dict[str, Any]) -> None:
    before = (finished.path / "config.yaml").read_text()
    with pytest.raises(UserError, match=f"was started with a different config: {next(iter(change))} is"):
        tiny(finished.path, **change)
    assert (finished.path / "config.yaml").read_text() == before


def test_a_config_file_says_everything(finished: Run, tmp_path: Path) -> None:
    config = load_config(finished.path / "config.yaml")
    assert flat(config) == flat(finished.config)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(as_plain(config)))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- 1\n- 2\n", "must hold settings by name"),
        ("stepz: 5\n", "There is no setting 'stepz'. Did you mean steps"),
        ("steps: many\n", "steps must be a int, not 'many'"),
        ("learner: 3\n", "learner is a group of settings"),
        ("recipe: dqm\n", "There is no recipe 'dqm'. Did you mean dqn"),
        ("x: !!python/object/apply:os.getcwd []\n", "cannot be read as YAML"),
    ],
)
def test_a_bad_config_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        load_config(tmp_path / "config.yaml")
    assert "\n" not in str(caught.value)


def test_resume_wants_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        veldt.resume(tmp_path)


def test_a_run_without_checkpoint_cannot_be_evaluated(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((finished.path / "config.yaml").read_text())
    with pytest.raises(UserError, match="has no checkpoint yet"):
        Run(tmp_path).evaluate(1)


def test_a_second_process_or_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def another(session: Session) -> None:
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}") as caught:
            veldt.train("dqn", run=session.path, quiet=True, **TINY | {"steps": 400})
        refused.append(str(caught.value))

    with stopping(monkeypatch, 5, another):
        run = tiny(tmp_path / "r", steps=400)
    assert len(refused) == 1
    assert run.metrics[-1]["env_steps"] >= 400
    tiny(tmp_path / "r", steps=500)  # and after its end the directory is free again


def test_a_run_in_a_thread_works(tmp_path: Path) -> None:
    done: list[Run] = []
    thread = threading.Thread(target=lambda: done.append(tiny(tmp_path / "r", steps=400)))
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive() and done
    assert done[0].weights_hash() == tiny(tmp_path / "main", steps=400).weights_hash()


def test_new_directories_have_telling_names_and_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [veldt.train("dqn", env="veldt/Chain-v0", quiet=True, **TINY | {"steps": 60}) for _ in range(2)]
    assert runs[0].path != runs[1].path
    for run in runs:
        assert run.path.parent == Path("runs") and run.path.name.startswith("dqn-veldt-Chain-v0-s0-")


def test_a_callable_environment_trains_and_resumes_in_this_process(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", env=lambda: TimeLimit(Chain(5), 50), steps=300)
    assert run.config.env.startswith("local:")
    assert run.evaluate(2).mean_length > 0
    assert veldt.resume(tmp_path / "r", quiet=True, steps=400).metrics[-1]["env_steps"] >= 400


def test_without_checkpoints_on_the_way_there_is_one_at_the_end(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", steps=400, **{"checkpoint.every": 0, "eval.every": 0})
    assert whole_state(run)["number"] == 1
    assert not any("eval_return" in line for line in run.metrics)


def test_a_store_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lower store\.capacity"):
        tiny(tmp_path / "r", **{"store.capacity": "900000GB"})
    assert not (tmp_path / "r").exists()


def test_a_failing_environment_is_named_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    class Breaks(Chain):
        def step(self, action: Any) -> Any:
            if self.state == 3:
                raise ZeroDivisionError("the bridge is out")
            return super().step(action)

    with pytest.raises(EnvError, match=r"Breaks.*step raised ZeroDivisionError: the bridge is out"):
        tiny(tmp_path / "r", env=Breaks)
    text = (tmp_path / "r" / "log.txt").read_text()
    assert "the bridge is out" in text and "Traceback" in text and "Breaks" in text


def test_divergence_stops_the_run_and_no_weights_that_are_not_finite_are_published_or_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[bool] = []
    publish = LatestParams.publish

    def watch(self: LatestParams, weights: Any) -> None:
        published.append(bool(np.isfinite(weights.vector).all()))
        publish(self, weights)

    monkeypatch.setattr(LatestParams, "publish", watch)
    changes = {"learner.lr": 1e38, "learner.optimizer": "sgd", "learner.clip_norm": 0.0, "checkpoint.every": 8}
    changes |= {"store.min_size": 20, "learner.publish_every": 1, "algorithm.huber": False}
    with pytest.raises(Diverged, match="10 updates in a row"):
        tiny(tmp_path / "r", **changes)
    assert published and all(published)
    checkpoint = Run(tmp_path / "r").checkpoints().load()
    assert checkpoint is not None
    for name, array in checkpoint.weights().items():
        assert np.isfinite(array).all(), name


def test_one_poisoned_batch_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from veldt.algorithms.dqn import DQN

    loss, calls = DQN.loss, 0

    def poisoned(self: DQN, net: Any, target: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        out = loss(self, net, target, batch)
        if calls % 20 == 0:
            return out._replace(losses={name: x * float("nan") for name, x in out.losses.items()})
        return out

    monkeypatch.setattr(DQN, "loss", poisoned)
    run = tiny(tmp_path / "r")
    assert calls > 100
    assert run.metrics[-1]["skipped_updates"] == calls // 20
    assert _log(run).count("skipped") == calls // 20


# A full disk.


def temporary(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.name.startswith(".aside")]


def unlisted(path: Path) -> set[str]:
    """Block files that no checkpoint of a run needs."""
    checkpoints = Checkpoints(path / "checkpoints")
    listed = {file["file"] for p in checkpoints._paths() for file in chain(*read_manifest(p)["blocks"].values())}
    return {p.name for p in (path / "checkpoints" / "blocks").iterdir()} - listed


@contextmanager
def full_disk(
    monkeypatch: pytest.MonkeyPatch, path: Path, begin: Callable[[], None], end: Callable[[], None]
) -> Iterator[list]:
    """The disk is full while the second and third checkpoint are written. Yields what was found after each."""
    save, found = Checkpoints.save, []

    def saving(self: Checkpoints, number: int, nodes: Any, info: dict[str, Any]) -> bool:
        if number == 2:
            begin()
        if number == 4:
            end()
        done = save(self, number, nodes, info)
        newest = Checkpoints(path / "checkpoints").load()
        found.append((done, newest.number if newest else None, temporary(path), unlisted(path)))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", saving)
        yield found


def check_full_disk(found: list[Any], run: Run, reference: Run) -> None:
    assert [done for done, *_ in found] == [True, False, False, True, True], "retried at every interval"
    assert [newest for _, newest, *_ in found] == [1, 1, 1, 4, 5], "the last good one stays loadable"
    for _, _, left, extra in found:
        assert left == [] and extra == set()
    text = _log(run)
    assert "checkpoint 2 could not be written" in text and "checkpoint 3 could not be written" in text
    # Not even the course of the training depends on it.
    assert run.weights_hash() == reference.weights_hash()


def test_training_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Run) -> None:
    """A real small disk where mounting is allowed; else the error of one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = _mount(disk, "3m")
    ballast = disk / "ballast"
    try:
        if mounted:
            begin, end = lambda: _fill(ballast), ballast.unlink
        else:
            patch = pytest.MonkeyPatch()

            def no_room(*args: Any, **kwargs: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            begin, end = lambda: patch.setattr("veldt.files.save_file", no_room), patch.undo
        with full_disk(monkeypatch, disk / "r", begin, end) as found:
            run = tiny(disk / "r")
        check_full_disk(found, run, finished)
        for text in (disk / "r" / "metrics.jsonl").read_text().splitlines():
            assert {"time_s", "env_steps", "learner_steps"} <= set(json.loads(text))
    finally:
        if mounted:
            subprocess.run(["umount", disk], check=True, timeout=30)


def _mount(path: Path, size: str) -> bool:
    if os.geteuid() != 0:
        return False
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


def _fill(path: Path) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (65536, 4096, 1):
            try:
                while True:
                    os.write(handle, bytes(size))
            except OSError:
                pass  # no room for this much
    finally:
        os.close(handle)


LIMITED = """
import json, resource, sys
from pathlib import Path
import pytest
from test_run import TINY, full_disk, tiny

path = Path(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
# So small that neither a checkpoint nor another line of metrics fits; the log has a little room left.
size = lambda: (path / "log.txt").stat().st_size + 1000
with full_disk(pytest.MonkeyPatch(), path, lambda: limit(size()), lambda: limit(hard)) as found:
    run = tiny(path, **{"log.every": 0.001})
print(json.dumps([[done, newest, [str(p) for p in left], sorted(extra)] for done, newest, left, extra in found]))
"""


def test_training_survives_files_that_cannot_grow(tmp_path: Path, finished: Run) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "r")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = [(ok, newest, left, set(extra)) for ok, newest, left, extra in json.loads(done.stdout.splitlines()[-1])]
    check_full_disk(found, Run(tmp_path / "r"), finished)
    assert "metrics cannot be written" in _log(Run(tmp_path / "r"))
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    for text in lines:  # a line that did not fit is dropped as a whole
        assert {"time_s", "env_steps", "learner_steps"} <= set(json.loads(text))
    assert json.loads(lines[-1])["env_steps"] >= 1_500, "lines are written again when there is room"


def test_metrics_that_cannot_be_written_do_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Run
) -> None:
    write = JsonLines.write

    def failing(self: JsonLines, line: dict[str, Any]) -> None:
        if 300 < line["env_steps"] < 900:
            raise OSError(errno.EIO, "the disk is gone")
        write(self, line)

    monkeypatch.setattr(JsonLines, "write", failing)
    run = tiny(tmp_path / "r")
    assert run.weights_hash() == finished.weights_hash()
    assert _log(run).count("metrics cannot be written") == 1
    steps = [line["env_steps"] for line in run.metrics]
    assert not [n for n in steps if 300 < n < 900] and steps[-1] >= 1_500


def test_the_log_of_the_package_is_left_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("veldt")
    before = (logger.level, list(logger.handlers))
    tiny(tmp_path / "r", steps=60)
    assert (logger.level, list(logger.handlers)) == before


def test_a_negative_seed_of_an_evaluation_is_refused(finished: Run) -> None:
    with pytest.raises(UserError, match="seed must not be negative"):
        finished.evaluate(1, seed=-1)


NO_EVALUATIONS = TINY | {"eval.every": 0}
SHORT = NO_EVALUATIONS | {"steps": 80, "store.capacity": "1000", "store.min_size": 300}
SHORT_QUEUE = {name: x for name, x in NO_EVALUATIONS.items() if not name.startswith("store.")}
SHORT_QUEUE |= {"runtime": "inline", "steps": 40}


@pytest.mark.parametrize(
    ("recipe", "settings", "why"),
    [
        ("dqn", SHORT, "the 300 items that learning starts with (store.min_size)"),
        ("impala", SHORT_QUEUE, "the 16 items that learning starts with (learner.batch)"),
    ],
)
def test_a_run_without_an_update_says_so_and_why(
    recipe: str, settings: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = veldt.train(recipe, env="CartPole-v1", run=tmp_path / "r", **settings)
    words = capsys.readouterr().out.splitlines()[-1]
    assert run.metrics[-1]["learner_steps"] == 0 and "Done" not in words
    sentence = f"The run ended without an update: its store had {run.metrics[-1]['store_items']:,.0f} of {why}."
    assert words.startswith(f"{sentence} Nothing was learned.") and sentence in _log(run)
    assert words.endswith(f"veldt resume {run.path} --steps {10 * settings['steps']}")


def test_a_run_with_updates_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its path has a space, so commands that name it are quoted."""
    path = tmp_path / "my run"
    run = veldt.train("dqn", env="CartPole-v1", run=path, **NO_EVALUATIONS | {"steps": 300})
    assert capsys.readouterr().out.splitlines()[-1] == f"Done. Evaluate with: veldt eval '{path}'"
    steps = run.metrics[-1]["env_steps"]
    assert repr(run) == f"Run('{path}', dqn on CartPole-v1, {steps} of 300 env steps)"
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"time_s": 1, "env_steps": 1234, "eval_return": 7.25}\n')
    assert repr(run).endswith("1,234 of 300 env steps, greedy return 7.2)")
    assert repr(Run(tmp_path / "none")) == f"Run('{tmp_path / 'none'}', without metrics)"


def test_a_policy_clips_observations_where_its_run_did(tmp_path: Path) -> None:
    for clip in (False, True):
        path = tmp_path / str(clip)
        assert veldt.load(tiny(path, steps=150, clip_observations=clip).path).clip == clip
