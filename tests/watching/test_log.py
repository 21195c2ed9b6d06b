"""Metrics as JSON lines and TensorBoard events, the log file, and the screen."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import resource
import struct
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from test_run import tiny

from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.settings import as_plain
from veldt.watching import sinks
from veldt.watching.events import TensorBoard
from veldt.watching.links import format_seconds
from veldt.watching.sinks import CONSTANTS, JsonLines, Metrics, group_of, log_to, read_metrics
from veldt.watching.trackers import MLflow, Wandb
from veldt.watching.view import Screen


def line(steps: int, **more: Any) -> dict[str, Any]:
    return {"time_s": steps / 100, "env_steps": steps, "learner_steps": steps // 2, **more}


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_lines_come_back(tmp_path: Path) -> None:
    lines = [line(0, loss=0.5), line(10, loss=1e-30, text="x"), line(20, flag=True)]
    sink = JsonLines(tmp_path / "m.jsonl")
    for x in lines:
        sink.write(x)
    sink.close()
    assert read_metrics(tmp_path / "m.jsonl") == lines


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write(line(1, a=math.nan, b=math.inf, c=-math.inf, d=1.0))
    sink.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert (found["a"], found["b"], found["c"], found["d"]) == (None, None, None, 1.0)


def test_a_line_cut_short_by_a_kill_is_removed_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    for steps in (1, 2, 3):
        sink.write(line(steps))
    sink.close()
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert [x["env_steps"] for x in read_metrics(path)] in ([], [1], [1, 2], [1, 2, 3]), size
        sink = JsonLines(path)
        sink.write(line(9))
        sink.close()
        whole = data[:size].count(b"\n")
        assert [json.loads(text)["env_steps"] for text in path.read_text().splitlines()] == [*range(1, whole + 1), 9]


def test_after_a_resume_repeated_steps_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    for x in (
        line(100),
        line(200),
        line(250, loss=1.0),
        line(290, loss=2.0),
        line(200, resumed_from=100),
        line(240, loss=3.0),
        line(210, loss=4.0, resumed_from=105),
        line(260, loss=5.0),
    ):
        sink.write(x)
    sink.close()
    found = read_metrics(path)
    assert [x["env_steps"] for x in found] == [100, 200, 200, 210, 260]
    assert [x.get("loss") for x in found] == [None, None, None, 4.0, 5.0]


def test_a_long_file_is_read_without_what_is_not_wanted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    for i in range(2_000):
        more = {"eval_return": float(i)} if i % 100 == 0 else {}
        sink.write(line(i, **more, **{f"metric {k}": k + i / 7 for k in range(100)}))
    sink.write(line(1_050, resumed_from=500))
    sink.close()
    whole = [{name: x[name] for name in ("time_s", "env_steps", "eval_return") if name in x} for x in read_metrics(path)]
    assert read_metrics(path, ["eval_return"]) == [*whole[:-1], {**whole[-1], "resumed_from": 500}]
    tracemalloc.start()
    found = read_metrics(path, ["eval_return"], having="eval_return")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [x["eval_return"] for x in found[:-1]] == [100.0 * i for i in range(11)] and "resumed_from" in found[-1]
    assert most < 0.1 * path.stat().st_size


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=30))
def test_steps_never_decrease_after_resumes(tmp_path_factory: pytest.TempPathFactory, plan: list) -> None:
    """Steps rise within a session; a resume starts again from somewhere at or before the end."""
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    sink, steps = JsonLines(path), 0
    for number, resumes in plan:
        steps = number % (steps + 1) if resumes else steps + number
        sink.write(line(steps, **({"resumed_from": steps // 2} if resumes else {})))
    sink.close()
    found = [x["env_steps"] for x in read_metrics(path)]
    assert found == sorted(found)
    assert not plan or found[-1] == steps


def test_lines_that_cannot_be_parsed_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f"{json.dumps(line(1))}\n{{broken\n\n{json.dumps(line(2))}\n")
    assert [x["env_steps"] for x in read_metrics(path)] == [1, 2]


def test_a_line_that_does_not_fit_on_the_disk_is_dropped_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = Metrics([JsonLines(path), TensorBoard(tmp_path)])
    metrics.write(line(1, loss=1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        metrics.write(line(2, loss=2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.write(line(3, loss=3.0))
    metrics.close()
    assert [json.loads(text)["env_steps"] for text in path.read_text().splitlines()] == [1, 3]
    assert scalars(tmp_path)["learner/loss"] == [(1, 1.0), (3, 3.0)]


def test_an_event_that_does_not_fit_on_the_disk_hides_none_of_the_later_ones(tmp_path: Path) -> None:
    metrics = Metrics([TensorBoard(tmp_path)])
    metrics.write(line(1, loss=1.0))
    (path,) = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        metrics.write(line(2, loss=2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.write(line(3, loss=3.0))
    metrics.close()
    assert scalars(tmp_path)["learner/loss"] == [(1, 1.0), (3, 3.0)]


@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("the service has ended")])
def test_a_sink_that_fails_is_logged_once_and_does_not_disturb_the_others(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def write(self, line: dict[str, Any]) -> None:
            raise error

        def close(self) -> None:
            raise error

    class Keeps:
        def __init__(self) -> None:
            self.lines: list[dict[str, Any]] = []
            self.closed = False

        def write(self, line: dict[str, Any]) -> None:
            self.lines.append(line)

        def close(self) -> None:
            self.closed = True

    keeps = Keeps()
    metrics = Metrics([Fails(), keeps])
    for steps in (1, 2, 3):
        metrics.write(line(steps))
    metrics.close()
    assert len(keeps.lines) == 3 and keeps.closed
    assert caplog.text.count("metrics cannot be written to Fails") == 1


def test_each_sink_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def write(self, line: dict[str, Any]) -> None:
            raise OSError("gone")

        def close(self) -> None:
            return

    class Fuller(Fails):
        pass

    Metrics([Fails(), Fuller()]).write(line(1))
    assert "written to Fails" in caplog.text and "written to Fuller" in caplog.text


def test_a_line_that_was_cut_short_is_removed_though_it_is_longer_than_what_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "CHUNK", 7)
    path = tmp_path / "m.jsonl"
    for text, left in (("", ""), ("x" * 50, ""), ("a\n" + "x" * 50, "a\n"), ("x" * 50 + "\n", "x" * 50 + "\n")):
        path.write_text(text)
        JsonLines(path).close()
        assert path.read_text() == left


def test_tensorboard_reads_our_events_and_they_equal_the_json_lines(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", steps=6_000)  # rates need a second
    expected: dict[str, list[tuple[int, float]]] = {}
    for text in (run.path / "metrics.jsonl").read_text().splitlines():
        x = json.loads(text)
        for name, value in x.items():
            if name not in CONSTANTS | {"env_steps", "time_s"} and isinstance(value, int | float):
                at = x["eval_env_steps"] if name.startswith("eval_") else x["env_steps"]  # of the weights that played
                expected.setdefault(group_of(name), []).append((at, float(np.float32(value))))
    for name in ("returns/eval_env_steps", "returns/eval_time_s", "returns/eval_learner_steps"):
        del expected[name]
    assert {
        *("returns/eval_return", "returns/train_return", "rates/env_steps_per_s", "store/store_items", "system/cpu_all"),
        *("learner/loss", "learner/learner_steps", "learner/gradient_norm", "learner/learning_rate"),
    } <= set(expected)
    assert scalars(run.path) == expected
    assert {name.partition("/")[0] for name in expected} == {"returns", "rates", "store", "learner", "system"}


def test_constants_are_what_a_run_puts_on_every_line(tmp_path: Path) -> None:
    lines = tiny(tmp_path / "r", steps=600).metrics
    assert len(lines) > 1 and set(lines[0]) >= CONSTANTS
    assert all(len({json.dumps(x[name]) for x in lines}) == 1 for name in CONSTANTS)


def test_tensorboard_has_the_settings_of_a_run_as_hyperparameters(tmp_path: Path) -> None:
    TensorBoard(tmp_path, {"learner.lr": 5e-4, "steps": 60_000, "env": "Käfig-v1", "algorithm.double": True}).close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert reader.PluginTagToContent("hparams").keys() == {"_hparams_/session_start_info"}
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    values = {name: getattr(x, str(x.WhichOneof("kind"))) for name, x in found.hparams.items()}
    assert values == {"learner.lr": 5e-4, "steps": 60_000, "env": "Käfig-v1", "algorithm.double": True}
    assert found.group_name == tmp_path.name


def test_tensorboard_events_of_a_resumed_run_are_all_readable(tmp_path: Path) -> None:
    for steps in (300, 600):
        tiny(tmp_path / "r", steps=steps)
    steps = [step for step, _ in scalars(tmp_path / "r")["learner/learner_steps"]]
    assert steps[-1] >= 600 and "system/resumed_from" in scalars(tmp_path / "r")


@given(
    st.dictionaries(
        st.text("abc_/", min_size=1, max_size=200),
        st.floats(width=32, allow_nan=False) | st.integers(-(10**9), 10**9),
        max_size=20,
    ),
    st.integers(0, 2**62),
)
def test_any_scalars_survive_tensorboard(tmp_path_factory: pytest.TempPathFactory, values: dict, steps: int) -> None:
    directory = tmp_path_factory.mktemp("tb")
    sink = TensorBoard(directory)
    sink.write({"time_s": 1.0, "env_steps": steps, **values})
    sink.close()
    expected = {group_of(name): [(steps, float(np.float32(x)))] for name, x in values.items()}
    assert scalars(directory) == expected


def test_a_number_too_large_for_an_event_does_not_stop_the_run(tmp_path: Path) -> None:
    metrics = Metrics([TensorBoard(tmp_path)])
    try:
        metrics.write(line(1, huge=1e300, tiny=1e-300, loss=1.0))
    finally:
        metrics.close()
    assert scalars(tmp_path)["learner/loss"] == [(1, 1.0)]


def test_every_event_has_its_two_checksums(tmp_path: Path) -> None:
    """A flipped byte makes TensorBoard stop, so the frames are what it expects."""
    sink = TensorBoard(tmp_path)
    sink.write(line(5, loss=2.0))
    sink.close()
    (path,) = tmp_path.iterdir()
    data, at, frames = path.read_bytes(), 0, 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8 + 4 + length + 4
        frames += 1
    assert at == len(data) and frames == 2


# Weights & Biases, MLflow.

CONFIG = as_plain(
    recipes.make("dqn", **{"log.wandb_entity": "me", "log.wandb_tags": ("a", "b"), "log.mlflow_uri": "file:x"})
)
LINE = line(20, loss=0.5, cores=2, eval_return=7.0, eval_env_steps=15, **{"busy/env": 0.25})


@pytest.mark.parametrize(("kind", "extra"), [(Wandb, "wandb"), (MLflow, "mlflow")])
def test_a_service_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UserError, match=rf"pip install 'veldt\[{extra}\]'"):
        kind(tmp_path, CONFIG)


def test_wandb_gets_every_line_and_a_resumed_run_is_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, told = [], []
    run = SimpleNamespace(log=told.append, define_metric=lambda *_, **__: None, finish=lambda: told.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: begun.append(settings) or run))
    for _ in range(2):
        sink = Wandb(tmp_path, CONFIG)
        sink.write(LINE)
        sink.close()
    numbers = {"learner/learner_steps": 10, "learner/loss": 0.5, "returns/eval_return": 7.0, "system/busy_env": 0.25}
    assert told == 2 * [numbers | {"env_steps": 20, "time_s": 0.2, "eval_env_steps": 15}, "finished"]
    first, second = begun
    assert first == second and first["id"] and first["resume"] == "allow" and first["config"] == CONFIG
    assert (first["project"], first["entity"], first["group"], first["tags"]) == ("veldt", "me", None, ["a", "b"])
    (tmp_path / "wandb.id").write_text("../../other\n")
    Wandb(tmp_path, CONFIG)
    assert begun[-1]["id"].isalnum(), "a run directory may be somebody else's"


def test_wandb_that_cannot_be_reached_ends_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        raise RuntimeError("no key\nmore")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(UserError, match=r"\(no key\); WANDB_MODE=offline"):
        Wandb(tmp_path, CONFIG)
    assert not (tmp_path / "wandb.id").exists()


class FakeMLflow:
    """The calls that the sink makes, as mlflow has them."""

    entities = SimpleNamespace(Metric=lambda *values: values)
    exceptions = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fails = False

    def MlflowClient(self, tracking_uri: str | None) -> Any:  # noqa: N802
        assert tracking_uri == "file:x"
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **_: Any) -> Any:
            if self.fails:
                raise self.exceptions.MlflowException("gone")
            self.told.append((name, *args))
            info = SimpleNamespace(run_id="run1")
            return {"get_experiment_by_name": None, "create_experiment": "7", "create_run": SimpleNamespace(info=info)}.get(
                name
            )

        return call


def test_mlflow_gets_every_line_and_a_resumed_run_is_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for _ in range(2):
        sink = MLflow(tmp_path, CONFIG)
        sink.write(LINE)
        sink.close()
    names = [call[0] for call in fake.told if call[0] != "log_param"]
    batch = ["update_run", "log_batch", "set_terminated"]
    assert names == ["get_experiment_by_name", "create_experiment", "create_run", *batch, *batch]
    assert ("log_param", "run1", "learner.lr", CONFIG["learner"]["lr"]) in fake.told
    _, run, metrics = next(call for call in fake.told if call[0] == "log_batch")
    assert run == "run1" and {(name, x, step) for name, x, _, step in metrics} == {
        *{("learner/learner_steps", 10.0, 20), ("learner/loss", 0.5, 20), ("system/busy_env", 0.25, 20)},
        ("returns/eval_return", 7.0, 15),
    }
    fake.fails = True
    with pytest.raises(OSError, match="MLflow: gone"):  # which `Metrics` logs once
        sink.write(LINE)
    sink.write(LINE)  # not sent: the next attempt is a minute later


# The screen.


def screen_on(terminal: bool, quiet: bool = False) -> tuple[Screen, io.StringIO]:
    text = io.StringIO()
    screen = Screen("dqn on CartPole-v1", 1_000, quiet=True)
    screen.quiet = quiet
    screen.console = Console(file=text, force_terminal=terminal, width=100)
    return screen, text


FULL = line(
    500,
    eval_return=123.4,
    train_return=50.0,
    loss=0.25,
    epsilon=0.1,
    env_steps_per_s=2_000.0,
    learner_steps_per_s=900.0,
    replay_ratio=8.0,
    store_items=400,
    store_bytes=10_000,
    left_s=75.0,
)


def test_without_a_terminal_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veldt.watching.view.PLAIN_EVERY", 0.0)
    screen, text = screen_on(terminal=False)
    screen.write(FULL)
    screen.write(line(510, resumed_from=255))
    screen.write(line(520))
    out = text.getvalue()
    assert out.count("\n") == 3
    for part in ("50 %", "greedy 123.4", "exploring 50.0", "loss 0.25", "ratio 8.0", "left 1:15"):
        assert part in out
    assert "resumed from learner step 255" in out


def test_plain_lines_are_rare_but_every_evaluation_is_printed() -> None:
    screen, text = screen_on(terminal=False)
    for steps in range(100):
        screen.write(line(steps, **({"eval_return": 7.0} if steps == 50 else {})))
    out = text.getvalue().splitlines()
    assert 2 <= len(out) < 50 and sum("greedy 7.0" in x for x in out) == 1


def test_on_a_terminal_the_newest_value_of_each_number_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr("veldt.watching.view.Console", lambda **_: Console(file=text, force_terminal=True, width=100))
    screen = Screen("dqn on CartPole-v1", 1_000)
    try:
        screen.write(line(1))  # before anything is known
        screen.write(FULL | {"bad_observations": 3.0, "skipped_updates": 2.0})
        screen.write(line(510, loss=None, bottleneck="It is the learner."))
    finally:
        screen.close()
    out = text.getvalue()
    last = out[out.rindex("dqn on CartPole-v1") :]
    for part in (
        "510 of 1,000",
        "greedy return",
        "123.4",
        "replay ratio",
        "400 items, 10.0 KB",
        "bad observations",
        "0.25",
    ):
        assert part in last, part
    assert "It is the learner." in last and "exploring 50.0" not in out, "no plain lines"


def test_plain_lines_name_the_bottleneck_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veldt.watching.view.PLAIN_EVERY", 0.0)
    now = [0.0]
    monkeypatch.setattr("veldt.watching.view.time", SimpleNamespace(monotonic=lambda: now[0]))
    screen, text = screen_on(terminal=False)
    for seconds, sentence in (
        (0, "The learner is busy 97% of its time."),
        (20, "The learner is busy 98.5% of its time."),  # the same again
        (40, "The actors wait."),
        (45, "The learner is busy 97% of its time."),  # too soon
        (49, "The learner is busy 98% of its time."),
        (50, "The learner is busy 99% of its time."),
        (70, None),
        (90, ""),
    ):
        now[0] = seconds
        screen.write(line(10 * seconds, bottleneck=sentence))
    out = text.getvalue().splitlines()
    told = [x.strip() for x in out if "steps" not in x]
    assert told == ["The learner is busy 97% of its time.", "The actors wait.", "The learner is busy 99% of its time."]
    assert len(out) == 8 + 3 and out[1].strip() == told[0], "after the line it belongs to"


def test_quiet_says_nothing() -> None:
    screen, text = screen_on(terminal=False, quiet=True)
    screen.say("hello")
    screen.write(FULL)
    screen.close()
    assert text.getvalue() == ""


@pytest.mark.parametrize("name", ["runs/[a]", "runs/[/b]", "runs/[bold]x"])
def test_names_are_printed_as_they_are(name: str) -> None:
    screen, text = screen_on(terminal=False)
    screen.say(f"run: {name}")
    assert text.getvalue() == f"run: {name}\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (75, "1:15"), (3_725, "1:02:05"), (None, "-"), (math.inf, "-")]
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


# The log file.


def test_the_log_goes_to_its_file_and_warnings_to_stderr_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("veldt")
    with log_to(tmp_path / "log.txt"):
        log.info("quietly")
        log.warning("loudly")
    log.warning("after it")
    text = (tmp_path / "log.txt").read_text()
    assert "INFO quietly" in text and "WARNING loudly" in text and "after it" not in text
    assert capsys.readouterr().err == "WARNING: loudly\n"


def test_a_quiet_log_says_nothing_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to(tmp_path / "log.txt", quiet=True):
        logging.getLogger("veldt").warning("loudly")
    assert "loudly" in (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().err == ""


def test_a_log_file_on_a_full_disk_prints_no_tracebacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "regular", os.open)  # it refuses devices
    with log_to(Path("/dev/full"), quiet=True):
        logging.getLogger("veldt").info("no room")
    assert capsys.readouterr().err == ""
