"""Watching a run from another process: running, ended, killed or no run at all; and without disturbing it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from rich.console import Console
from test_apex import TINY
from test_run import tiny
from test_view import CHAIN, FULL, SENTENCE

from veldt.__main__ import main
from veldt.experiment.directory import exclusive
from veldt.metrics import RATE, TOTAL, Metric
from veldt.program import Program
from veldt.topologies import TOPOLOGIES, single
from veldt.watching import top
from veldt.watching.links import links
from veldt.watching.top import Look, Process, Tail, Watched, ago, holder, process_table

Captured = pytest.CaptureFixture[str]


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "that did not happen in time"
        time.sleep(0.02)
    return found


def written(path: Path, *lines: dict[str, Any], steps: int = 200_000) -> Path:
    """The files of a run directory that `veldt top` reads."""
    path.mkdir(parents=True)
    config = {"recipe": "apex-dqn", "env": "CartPole-v1", "steps": steps, "log": {"every": 1.0}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def shown(capsys: Captured, *argv: Any) -> str:
    assert main(["top", *map(str, argv)]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: Captured, *argv: Any) -> str:
    assert main(["top", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("veldt: ") and err.count("\n") == 1, err
    return err


# A run that is running.


def last_line(path: Path) -> dict[str, Any]:
    tail = Tail(path / "metrics.jsonl")
    tail.read()
    return tail.latest


def processes(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((path / "processes.json").read_text())
    except FileNotFoundError:
        return {}
    return found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The real command, with a run that does not end by itself."""
    path = tmp_path_factory.mktemp("top") / "runs" / "r"
    settings = TINY | {"steps": 10**9, "checkpoint.every": 0, "algorithm.hidden": 16}
    flags = [word for name, x in settings.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    command = [sys.executable, "-m", "veldt", "train", "apex-dqn", "--run", str(path), "--quiet", *flags]
    with subprocess.Popen(command) as process:
        try:
            wait_for(lambda: process.poll() is None and last_line(path).get("learner_steps", 0) > 50)
            yield path, process
        finally:
            process.kill()


class Terminal:
    """`veldt top` on a terminal of its own."""

    def __init__(self, *argv: Any) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, 0x5414, b"\x28\x00\x64\x00\x00\x00\x00\x00")  # TIOCSWINSZ: 40 lines of 100 columns
        command = [sys.executable, "-m", "veldt", "top", *map(str, argv)]
        environment = {key: x for key, x in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")} | {
            "TERM": "xterm"
        }
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.fd, self.text = ours, ""

    def read(self) -> str:
        """All output so far."""
        with contextlib.suppress(OSError):  # EIO: it has ended
            while select.select([self.fd], [], [], 0)[0] and (data := os.read(self.fd, 1 << 16)):
                self.text += data.decode(errors="replace")
        return self.text

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def test_a_running_run_is_shown_with_its_processes(trainer: Any, capsys: Captured) -> None:
    path, process = trainer
    text = shown(capsys, path, "--once")
    for part in ("apex-dqn on CartPole-v1", "environments", "steps/s", "store", "learner", "updates/s"):
        assert part in text, part
    assert f"{path} is running as process {process.pid}" in text
    look = Watched(path).look()
    assert look.pid == process.pid and look.steps == 10**9 and look.line["env_steps"] > 0
    found = {p.name: p for p in look.processes}
    assert {"supervisor", "zygote", "learner", "actor/0", "evaluator"} <= set(found)
    assert {name: p.pid for name, p in found.items()} == {name: x["pid"] for name, x in processes(path).items()}
    for p in found.values():
        assert p.state in ("running", "sleeping", "disk-sleep", "idle"), p
        assert p.memory and p.memory > 10_000_000 and p.threads and p.cpu is not None, p
        assert f"{p.name} {p.pid}" in text
    assert found["learner"].restarts == 0 and found["supervisor"].restarts is None


def test_every_link_of_a_running_run_is_shown(trainer: Any, capsys: Captured) -> None:
    path, _ = trainer
    wait_for(lambda: [link.name for link in links(last_line(path))] == CHAIN and last_line(path).get("bottleneck"))
    text = shown(capsys, path)
    for part in (*CHAIN, "blocks/s", "queue", "behind", "CPU", "cores"):
        assert part in text, part


def test_cpu_usage_is_measured_between_looks(trainer: Any) -> None:
    seen = Watched(trainer[0])
    seen.look()
    wait_for(lambda: any(p.name == "learner" and (p.cpu or 0) > 0.02 for p in seen.look().processes))


def test_watching_until_ctrl_c_does_not_disturb_the_run(trainer: Any) -> None:
    path, process = trainer
    wait_for(lambda: (path / "checkpoints" / "best").exists())  # after the first evaluation
    names = sorted(x.name for x in path.iterdir())
    before = processes(path)
    with Terminal(path, "--every", "0.1") as terminal:
        wait_for(lambda: terminal.read().count("updates/s") > 3 and "evaluator" in terminal.text)
        terminal.process.send_signal(signal.SIGINT)
        assert wait_for(lambda: terminal.process.poll() is not None) and terminal.process.returncode == 130
        assert "Traceback" not in terminal.read() and terminal.text.count("\x1b[?25h") >= 1, "the cursor is there again"
    steps = last_line(path)["env_steps"]
    wait_for(lambda: process.poll() is None and last_line(path)["env_steps"] > steps)
    assert processes(path) == before and sorted(x.name for x in path.iterdir()) == names


def test_without_a_directory_running_runs_are_listed(trainer: Any, capsys: Captured, monkeypatch: Any) -> None:
    path, process = trainer
    (path.parent / "file").touch()
    written(path.parent / "another", FULL)
    monkeypatch.chdir(path.parent.parent)
    text = shown(capsys)
    assert "runs/r " in text and f"process {process.pid}" in text and "of 1,000,000,000 env steps" in text
    assert "another" not in text and "veldt top runs/r" in text


def test_a_run_that_is_killed_while_watched(trainer: Any, capsys: Captured) -> None:
    """The last test that needs the run."""
    path, process = trainer
    learner = processes(path)["learner"]["pid"]
    with Terminal(path, "--every", "0.1") as terminal:
        wait_for(lambda: f"process {process.pid}" in terminal.read())
        os.kill(learner, signal.SIGKILL)  # it comes back, and that shows
        wait_for(lambda: processes(path).get("learner", {}).get("restarts") == 1 and processes(path)["learner"]["pid"])
        new = str(processes(path)["learner"]["pid"])
        wait_for(lambda: new in terminal.read())
        process.kill()
        process.wait()
        wait_for(lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 0
        assert "This run is not running: it was killed at" in " ".join(terminal.read().split())
    text = shown(capsys, path)
    assert f"veldt resume {path}" in text and "it was killed at" in text and "updates/s" in text
    assert not Watched(path).look().processes, "those that processes.json names have gone"


# Runs that are not running.


def test_a_run_that_has_ended(tmp_path: Path, capsys: Captured) -> None:
    run = tiny(tmp_path / "a b", steps=3_000)  # long enough for rates
    for argv in ([run.path], [run.path, "--once"]):
        text = shown(capsys, *argv)
        assert "dqn on CartPole-v1" in text and "updates/s" in text
        assert "This run has ended," in text and f"veldt eval '{run.path}'" in text


def test_a_stopped_run_says_when_it_stopped_and_how_to_resume(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path / "r", FULL)
    os.utime(path / "metrics.jsonl", (time.time() - 7_200, time.time() - 7_200))
    text = shown(capsys, path)
    assert "This run is not running: it stopped at 123,456 of 200,000 env steps, 2 h ago." in text
    assert SENTENCE in text


def test_a_run_without_metrics(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path / "r")
    assert "is not running, and has no metrics" in shown(capsys, path)
    (path / "metrics.jsonl").unlink()
    assert "is not running, and has no metrics" in shown(capsys, path)
    with exclusive(path):
        assert f"is running as process {os.getpid()}; it has no metrics yet" in shown(capsys, path)
        (path / "config.yaml").unlink()
        assert "no metrics yet" in shown(capsys, path), "it has just begun"


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: Captured, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "none", Path("/proc/version")):
        assert "is not a run directory" in refused(capsys, path)
    assert "No run is running in runs/" in refused(capsys)
    written(tmp_path / "runs" / "r", FULL)
    assert "No run is running in runs/" in refused(capsys)
    for every in ("0", "nan", "-1", "1e9"):
        assert "every must be from" in refused(capsys, tmp_path / "runs" / "r", "--every", every)


def test_a_run_in_one_process_is_that_process(tmp_path: Path) -> None:
    path = written(tmp_path / "r", FULL)
    with exclusive(path):
        (process,) = Watched(path).look().processes
    assert (process.name, process.pid) == ("train", os.getpid()) and process.memory and process.threads


def test_old_metrics_are_highlighted(tmp_path: Path) -> None:
    path = written(tmp_path / "r", FULL)
    with exclusive(path):
        assert Watched(path).look()._status()[1] == "dim"
        os.utime(path / "metrics.jsonl", (time.time() - 30, time.time() - 30))
        text, style = Watched(path).look()._status()
    assert style == "yellow" and "these numbers are 30 s old" in text


# Nodes that the package does not know.


class Scout:
    METRICS: ClassVar = (Metric("maps", "maps", TOTAL, rate="maps_per_s", column=RATE), Metric("ink", "bytes", TOTAL))

    def __init__(self) -> None:
        self.maps = 0

    def step(self) -> bool:
        self.maps += 1
        return True

    def metrics(self) -> dict[str, float]:
        return {"maps": float(self.maps), "ink": 1_000.0}


def test_metrics_of_a_users_node_are_shown(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_scouts(program: Program, *rest: Any) -> None:
        single(program, *rest)
        for i in range(2):
            program.add(f"scout/{i}", Scout)

    monkeypatch.setitem(TOPOLOGIES, "single", with_scouts)
    run = tiny(tmp_path / "r", steps=3_000)
    assert run.metrics[-1]["ink"] == 2_000 and run.metrics[-1]["maps_per_s"] > 0, "both together"
    text = shown(capsys, run.path)
    assert "scout" in text and "maps/s" in text and "ink 2.0 KB" in text
    (run.path / "metrics.json").unlink()
    assert "maps/s" not in shown(capsys, run.path)


# The process that holds a run.


def test_the_holder_is_found_without_touching_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert holder(tmp_path) == 0
    with exclusive(tmp_path):
        monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("it would disturb the run"))
        assert holder(tmp_path) == os.getpid()
        before = (tmp_path / ".lock").stat()
        assert before.st_mtime_ns == (tmp_path / ".lock").stat().st_mtime_ns
    assert holder(tmp_path) == 0


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "999999999", "self", "1", "1\n2"])
def test_a_lock_file_without_a_holder(tmp_path: Path, text: str) -> None:
    (tmp_path / ".lock").write_text(str(os.getpid()) if text == "self" else text)
    assert holder(tmp_path) == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"supervisor": 3, "learner": []}', '{"supervisor": {"pid": 1}}'])
def test_processes_of_another_run_are_not_shown(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "r", FULL)
    (path / "processes.json").write_text(text)
    with exclusive(path):
        assert [p.name for p in Watched(path).look().processes] == ["train"]


def test_a_reused_pid_is_not_a_process_of_the_run(tmp_path: Path) -> None:
    path = written(tmp_path / "r", FULL)
    with subprocess.Popen(["sleep", "60"]) as other, exclusive(path):
        try:
            table = {"supervisor": {"pid": os.getpid()}, "learner": {"pid": other.pid, "restarts": 2}}
            table |= {"actor/0": {"pid": 0, "restarts": 1}, "actor/1": {"pid": 2**22 + 1}, "actor/2": {"pid": "x"}}
            table |= {"actor/3": {"pid": -5}, "actor/4": {"pid": 1e200}}
            (path / "processes.json").write_text(json.dumps(table))
            found = {p.name: p for p in Watched(path).look().processes}
        finally:
            other.kill()
    assert found["supervisor"].memory and found["learner"] == Process("learner", other.pid, "gone", restarts=2)
    assert found["actor/0"].state == "starting" and found["actor/1"].state == "gone"
    assert found["actor/3"].state == found["actor/4"].state == "gone"


# The end of a file that grows.


def test_lines_are_read_as_they_are_written_and_incomplete_ones_later(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() is None and tail.latest == {}
    data = b"".join(json.dumps({"env_steps": n, f"only_{n}": n}).encode() + b"\n" for n in range(5))
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert tail.read() is not None
        whole = data[:size].count(b"\n")
        assert tail.latest.get("env_steps", -1) == whole - 1, size
        assert len(tail.latest) == (1 + whole if whole else 0), "numbers that are not in every line are kept"


def test_an_incomplete_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    for text, steps in (
        ('{"env_steps": 1}\n{"env_st', 1),
        ('eps": 2}', 1),
        ('\n{"env_steps": 3}\n{', 3),
        ('"env_steps": 4}\n', 4),
    ):
        with open(path, "a") as file:
            file.write(text)
        tail.read()
        assert tail.latest == {"env_steps": steps}


def test_invalid_lines_are_skipped(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path / "r", FULL)
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'\n{broken\n\xff\xfe\x00\n7\n[1]\n"text"\nnull\n{"loss": NaN, "env_steps": null, "episodes": "many"}\n')
        file.write(b'{"env_steps": 9999999, "lo')
    text = shown(capsys, path)
    assert "123,456 of 200,000 env steps" in text and "9,999,999" not in text and "4,312 steps/s" in text


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    monkeypatch.setattr(top, "END", 1_000)
    lines = [json.dumps({"env_steps": n, f"only_{n}": n, "pad": "x" * 50}).encode() + b"\n" for n in range(10_000)]
    path.write_bytes(b"".join(lines[:9_000]))
    tail = Tail(path)
    tail.read()
    assert tail.latest["env_steps"] == 8_999 and 5 < len(tail.latest) < 15
    with open(path, "ab") as file:
        file.write(lines[9_000])
    tail.read()
    assert tail.latest["env_steps"] == 9_000
    with open(path, "ab") as file:
        file.write(b"".join(lines[9_001:]))
    tail.read()
    assert tail.latest["env_steps"] == 9_999 and len(tail.latest) < 30, "what came between two looks may be long as well"


def test_a_new_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"env_steps": 500, "loss": 1.0}\n{"env_steps": 600}\n')
    tail = Tail(path)
    tail.read()
    path.write_text('{"env_steps": 3}\n')
    tail.read()
    assert tail.latest == {"env_steps": 3}


def test_a_resume_discards_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"env_steps": 500, "eval_return": 1.0}\n{"env_steps": 400, "resumed_from": 7}\n{"env_steps": 410}\n')
    tail = Tail(path)
    tail.read()
    assert tail.latest == {"env_steps": 410, "resumed_from": 7}


# What it looks like, and what it costs.


def picture(look: Look, width: int = 80, height: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or None, record=True)
    console.print(look.picture(console, height))
    return console.export_text().splitlines()


def many(n: int) -> Look:
    processes = [Process(f"actor/{i}", 100 + i, "sleeping", 0.5, 10**8, 3, i % 2) for i in range(n)]
    return Look(
        Path("runs/r"), {"recipe": "apex-dqn", "env": "CartPole-v1", "steps": 200_000}, FULL, 7, processes, 0.3, False
    )


@pytest.mark.parametrize("width", [80, 120])
def test_the_picture_fits_the_terminal_however_many_processes_there_are(width: int) -> None:
    for height in (24, 30, 50):
        lines = picture(many(64), width, height)
        assert len(lines) <= height and max(map(len, lines)) <= width
        assert lines[-1].strip() == "runs/r is running as process 7; these numbers are 0.3 s old."
        assert sum("actor/" in line for line in lines) + 1 <= max(1, height - 20)
    assert sum(line.startswith("actor/") for line in picture(many(64), width)) == 64


def test_processes_that_do_not_fit_are_summed_up() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(process_table(many(10).processes, 4))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [line[0] for line in lines] == ["process", "actor/0", "actor/1", "actor/2", "7"]
    assert lines[1][1:] == ["100", "sleeping", "50", "%", "100.0", "MB", "3", "0"]
    assert lines[-1] == ["7", "more", "350", "%", "4"]


def test_at_40_columns_processes_have_the_numbers_that_matter() -> None:
    console = Console(file=io.StringIO(), width=40, record=True)
    console.print(process_table(many(2).processes, 4, narrow=True))
    lines = console.export_text().splitlines()
    assert lines[0].split() == ["process", "state", "CPU", "memory"] and "…" not in "".join(lines)
    assert lines[1].split() == ["actor/0", "sleeping", "50", "%", "100.0", "MB"]


def test_it_imports_no_torch(tmp_path: Path) -> None:
    """Importing torch would take longer than everything else."""
    path = written(tmp_path / "r", FULL)
    code = (
        "import sys; from veldt.__main__ import main\n"
        f"assert main(['top', {str(path)!r}]) == 0\n"
        "print([name for name in ('torch', 'numba', 'matplotlib', 'gymnasium') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] in ("[]", "['gymnasium']")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (7, "7 s"), (119, "119 s"), (120, "2 min"), (9_000, "2 h"), (10**6, "12 days")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert ago(seconds) == text
