"""The command line: what it prints, its exit codes, and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from PIL import Image
from test_run import flags, tiny, whole_state

from veldt import __version__
from veldt.__main__ import COMMANDS, main
from veldt.cli.bench import BENCHES
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.run import Run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("cli") / "r", steps=700)


def refused(capsys: Captured, *argv: Any) -> str:
    """One sentence on stderr, exit code 2, and nothing else."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("veldt: ") and captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err and "╭" not in captured.err
    assert len(captured.err) < 700, captured.err
    return captured.err


TRAIN = ("train", "dqn", "--quiet")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trian"], "There is no command 'trian'. Did you mean train?"),
        (["zzzz"], "There are: recipes, train"),
        (["train"], "Name the recipe to train: dqn"),
        (["train", "dqm"], "There is no recipe 'dqm'. Did you mean dqn?"),
        (["train", "--env", "CartPole-v1"], "Name the recipe to train"),
        (
            [*TRAIN, "--learner.decay", "0.9"],
            "decay has no effect here: it needs --learner.optimizer rmsprop.",
        ),
        (
            ["train", "apex-dqn", "--central.groups", "4"],
            "groups has no effect here: it needs --inference central.",
        ),
        ([*TRAIN, "--protocol", "dqn"], "protocol 'dqn' is for Atari (ALE/...), not for CartPole-v1"),
        ([*TRAIN, "--env", "CartPole-v9"], "There is no environment 'CartPole-v9'. Did you mean CartPole-v1"),
        ([*TRAIN, "--env", "nothing_here:make"], "nothing_here cannot be imported"),
        ([*TRAIN, "--steps", "-5"], "steps must be greater than 0, not -5"),
        ([*TRAIN, "--steps", "0"], "steps must be greater than 0"),
        ([*TRAIN, "--learner.lr", "nan"], "learner.lr must be greater than 0"),
        ([*TRAIN, "--store.capacity", "2XB"], "store.capacity '2XB' is neither steps nor bytes"),
        ([*TRAIN, "--store.capacity", "90000GB"], "lower store.capacity"),
        ([*TRAIN, "--store.capacity", "10"], "store"),
        ([*TRAIN, "--env", "Pendulum-v1"], "dqn needs a Discrete action space, but Pendulum-v1 has Box"),
        ([*TRAIN, "--config", "no-such-file.yaml"], "There is no no-such-file.yaml"),
        ([*TRAIN, "--algorithm.gamma", "1.5"], "gamma"),
        (["resume", "no-such-run"], "no-such-run is not a run directory"),
        (["eval", "no-such-run"], "no-such-run is not a run directory"),
        (["plot", "no-such-run"], "no-such-run is not a run directory"),
        (["plot"], "run"),
        (["top", "x" * 300], "cannot be used (File name too long)"),
        (["resume", "x" * 300], "cannot be used (File name too long)"),
        ([*TRAIN, "--run", "x" * 300], "cannot be used (File name too long)"),
        (["bench", "lerner"], "There is no benchmark 'lerner'. Did you mean learner?"),
        (["bench", "learner", "--rounds", "0"], "rounds must be greater than 0, not 0."),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *argv)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*TRAIN, "--env"], ["--env"]),
        ([*TRAIN, "--lr", "1"], ["Unrecognized options: --lr", "Perhaps you meant", "--learner.lr FLOAT"]),
        ([*TRAIN, "--learner.lrr", "1"], ["Unrecognized options: --learner.lrr", "--learner.lr FLOAT"]),
        ([*TRAIN, "--actor.refresh", "4"], ["Unrecognized options: --actor.refresh"]),
        ([*TRAIN, "--zzzzzz", "1"], ["Unrecognized options: --zzzzzz", "veldt train dqn --help"]),
        ([*TRAIN, "extra"], ["Unrecognized options: extra"]),
        ([*TRAIN, "--steps", "many"], ["--steps", "'many'", "Total number of env steps"]),
        (
            [*TRAIN, "--learner.optimizer", "adamw"],
            ["'adamw'", "--learner.optimizer", "('adam', 'rmsprop', 'adagrad', 'sgd')"],
        ),
        (["resume"], ["PATH", "veldt resume --help"]),
        (["resume", "no-such-run", "--stepz", "3"], ["Unrecognized options: --stepz", "--steps"]),
        (["bench", "learner", "--zzzzzz"], ["Unrecognized options: --zzzzzz"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_a_wrong_flag_or_value_is_named_with_the_flags_that_are_close(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], says: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(argv)
    text = capsys.readouterr().err
    assert caught.value.code == 2 and "Traceback" not in text and text.count("\n") < 20
    for words in says:
        assert words in text, text
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def shown(capsys: Captured, *argv: str) -> tuple[str, str]:
    """What --help says above its lists of flags, and the lists."""
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--help"])
    assert caught.value.code == 0
    above, _, lists = capsys.readouterr().out.partition("-h, --help")
    return above, lists


def test_help_lists_the_flags_that_have_an_effect_and_says_what_the_others_need(capsys: Captured) -> None:
    above, lists = shown(capsys, "train", "dqn")
    assert "--learner.lr FLOAT" in lists and "Learning rate." in lists and "(default: 0.001)" in lists
    for flag in ("--actor.refresh", "--central.", "--gate.", "--queue", "--protocol", "--learner.decay", "--actors "):
        assert flag not in lists, flag
    assert "--central.*: --inference central" in above and "--gate.seats" not in above
    _, lists = shown(capsys, "train", "apex-dqn")
    assert "--actor.refresh INT" in lists and "--queue INT" in lists and "--gate.listen STR" in lists
    assert "--central." not in lists and "--gate.seats" not in lists
    _, lists = shown(capsys, "train", "apex-dqn", "--inference", "central", "--gate.listen", "localhost:7777")
    assert "--central.groups INT" in lists and "--gate.seats INT" in lists and "--actor.refresh" not in lists
    above, lists = shown(capsys, "train", "impala", "--env", "ALE/Pong-v5")
    assert "--learner.decay FLOAT" in lists and "--protocol STR" in lists
    assert "--algorithm.hidden" not in lists and "--demos" not in lists and "--demos:" in above


def test_a_directory_that_cannot_be_written_is_named(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        assert "cannot be written" in refused(capsys, *TRAIN, "--run", path, *flags())


def test_a_directory_of_another_config_is_refused(capsys: Captured, run: Run) -> None:
    text = refused(capsys, *TRAIN, "--run", run.path, *flags(steps=700), "--seed", "9")
    assert "was started with a different config: seed is 0 there and 9 here" in text


def test_damaged_checkpoints_are_one_sentence_for_every_command(capsys: Captured, tmp_path: Path) -> None:
    damaged = tiny(tmp_path / "r", steps=300)
    for path in (tmp_path / "r" / "checkpoints").glob("[0-9]*/weights.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    for argv in (
        ["eval", damaged.path],
        ["resume", damaged.path, "--quiet"],
        [*TRAIN, "--run", damaged.path, *flags(steps=300)],
    ):
        assert "No checkpoint in" in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "cannot be read as YAML"), ("stepz: 3", "no setting 'stepz'"), ("steps: x", "steps must be")],
)
def test_a_bad_config_file_is_named(capsys: Captured, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert says in refused(capsys, *TRAIN, "--config", tmp_path / "bad.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(capsys, *TRAIN, "--config", tmp_path / "binary.yaml")
    assert "cannot be read" in refused(capsys, *TRAIN, "--config", tmp_path)


def test_eval_refuses_what_it_cannot_do(capsys: Captured, run: Run, tmp_path: Path) -> None:
    assert "episodes must be greater than 0" in refused(capsys, "eval", run.path, "--episodes", "0")
    assert ".gif or an .mp4" in refused(capsys, "eval", run.path, "--video", tmp_path / "x.avi")
    (tmp_path / "config.yaml").write_text((run.path / "config.yaml").read_text())
    assert "has no checkpoint yet" in refused(capsys, "eval", tmp_path)


# Help.


def test_the_list_of_commands(capsys: Captured) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        for command in COMMANDS:
            assert f"  {command} " in out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "argv",
    [*([command] for command in COMMANDS), ["train", "dqn"], *(["bench", name] for name in BENCHES)],
    ids=" ".join,
)
def test_every_command_has_help_with_an_example(capsys: Captured, argv: list[str]) -> None:
    code: Any = 0
    try:
        code = main([*argv, "--help"])
    except SystemExit as left:
        code = left.code
    assert code in (0, None)
    out = " ".join(capsys.readouterr().out.split())
    assert "Example" in out and f"veldt {argv[0]}" in out
    if argv[0] == "train":
        for flag in ("--env", "--steps", "--learner.lr", "--store.capacity", "--algorithm.gamma", "--config"):
            assert flag in out
        assert "Env steps between two checkpoints" in out, "every setting is explained"


def test_recipes_are_listed(capsys: Captured) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "dqn" in out and "Mnih" in out and "veldt train dqn" in out


def test_a_flag_may_be_written_in_every_usual_way() -> None:
    from veldt.cli.resume import Resume

    for argv in (["x", "--steps", "5"], ["x", "--steps=5"], ["--steps", "5", "x"]):
        assert tyro.cli(Resume, args=argv).config.steps == 5


# Training.


def test_train_eval_resume_plot(capsys: Captured, tmp_path: Path) -> None:
    """The walk through the README, in small."""
    path = tmp_path / "r"
    assert main(["train", "dqn", "--env", "CartPole-v1", "--run", str(path), *flags(steps=600)]) == 0
    out = capsys.readouterr().out
    for part in ("dqn on CartPole-v1", "obs [4] float32", "parameters", "store: 400 items", str(path), "veldt eval"):
        assert part in out, out
    assert "\x1b" not in out, "no colours where there is no terminal"

    assert main(["eval", str(path), "--episodes", "3", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = json.loads(lines[-1])
    assert set(numbers) >= {"mean_return", "returns", "mean_length"}
    assert len(numbers["returns"]) == 3 and numbers["mean_return"] == sum(numbers["returns"]) / 3
    assert lines[0].startswith("3 episodes: mean return")
    assert Run(path).evaluate(3).returns == numbers["returns"]

    assert main(["resume", str(path), "--steps", "900", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert Run(path).metrics[-1]["env_steps"] >= 900

    assert main(["train", "dqn", "--env", "CartPole-v1", "--run", str(path), *flags(steps=1_000)]) == 0
    out = capsys.readouterr().out
    assert "resuming from checkpoint" in out and "resumed from learner step" in out

    assert main(["plot", str(path), "-o", str(tmp_path / "x.png")]) == 0
    with Image.open(tmp_path / "x.png") as image:
        assert image.format == "PNG"
    assert main(["eval", str(path), "--episodes", "1", "--video", str(tmp_path / "x.gif")]) == 0
    assert (tmp_path / "x.gif").stat().st_size > 1_000


def test_the_config_of_another_run_is_reproduced_and_flags_win_over_it(run: Run, tmp_path: Path) -> None:
    config = str(run.path / "config.yaml")
    assert main([*TRAIN, "--config", config, "--run", str(tmp_path / "same")]) == 0
    same = Run(tmp_path / "same")
    assert same.config == run.config
    assert whole_state(same) == whole_state(run)
    argv = [*TRAIN, f"--config={config}", "--seed", "7", "--run", str(tmp_path / "other"), "--steps", "300"]
    assert main(argv) == 0
    other = Run(tmp_path / "other").config
    assert (other.seed, other.steps, other.learner) == (7, 300, run.config.learner)
    assert (
        main([*TRAIN, "--config", config, "--env", "veldt/Chain-v0", "--run", str(tmp_path / "chain"), "--steps", "100"])
        == 0
    )
    chain = Run(tmp_path / "chain").config
    assert (chain.env, chain.learner) == ("veldt/Chain-v0", run.config.learner)


def test_code_that_a_flag_names_needs_no_trust_however_the_flag_is_written(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "few.yaml"
    file.write_text("steps: 100\n")
    for flag in ("--algorithm.network-from", "--algorithm.network_from"):
        said = refused(capsys, *TRAIN, "--config", file, flag, "nothing_here:make", "--run", tmp_path / "r")
        assert "nothing_here cannot be imported" in said


def test_a_config_file_may_hold_a_few_settings_alone(tmp_path: Path) -> None:
    few = {"env": "veldt/Chain-v0", "steps": 100, "learner": {"batch": 8}, "store": {"capacity": "300", "min_size": 20}}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(few))
    assert main([*TRAIN, "--config", str(tmp_path / "few.yaml"), "--run", str(tmp_path / "r")]) == 0
    config = Run(tmp_path / "r").config
    assert (config.env, config.steps, config.learner.batch, config.store.capacity) == ("veldt/Chain-v0", 100, 8, "300")


def test_a_diverged_run_is_told_in_one_sentence_and_a_failing_code(capsys: Captured, tmp_path: Path) -> None:
    argv = [*TRAIN, "--env", "veldt/Chain-v0", "--run", str(tmp_path / "r"), *flags(), "--store.min-size", "20"]
    import veldt.algorithms.dqn as dqn

    loss = dqn.DQN.loss
    patch = pytest.MonkeyPatch()

    def poisoned(*args: Any) -> Any:
        out = loss(*args)
        return out._replace(losses={name: x * float("nan") for name, x in out.losses.items()})

    patch.setattr(dqn.DQN, "loss", poisoned)
    try:
        code = main(argv)
    finally:
        patch.undo()
    captured = capsys.readouterr()
    assert code == 1
    assert captured.err.count("\n") == 1 and "diverged" in captured.err and "learner.lr" in captured.err
    assert "10 updates in a row" in (tmp_path / "r" / "log.txt").read_text()


# Real processes.

SLOW = '''
import time
from pathlib import Path
from veldt.envs.small import Chain

class Stuck(Chain):
    """Stands still for a minute after 200 steps."""
    count = 0
    def step(self, action):
        Stuck.count += 1
        if Stuck.count == 200:
            Path("stuck").touch()
            time.sleep(60)
        return super().step(action)
'''


def start(tmp_path: Path, *argv: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-m", "veldt", *map(str, argv)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"nothing within {seconds} s"
        time.sleep(0.005)


def end(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it did not end within {seconds} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_one_signal_ends_it_with_a_checkpoint_and_a_second_process_is_refused_meanwhile(
    tmp_path: Path, capsys: Captured, number: signal.Signals
) -> None:
    path = tmp_path / "r"
    process = start(tmp_path, "train", "dqn", "--run", path, *flags(steps=10**6))
    try:
        wait_for(process, lambda: len(list((path / "checkpoints").glob("[0-9]*"))) >= 2)
        if number == signal.SIGINT:
            assert f"is in use by process {process.pid}" in refused(capsys, *TRAIN, "--run", path, *flags(steps=10**6))
            assert Run(path).evaluate(1).returns, "a run that is being trained can be evaluated"
        process.send_signal(number)
        began = time.monotonic()
    finally:
        out, err = end(process, 60)
    assert time.monotonic() - began < 5
    assert process.returncode == 128 + number
    assert "Traceback" not in err, err
    assert "Stopping after a final checkpoint" in err and f"veldt resume {path}" in out
    checkpoint = Checkpoints(path / "checkpoints").load()
    assert checkpoint is not None and checkpoint.manifest["scheduled"] is False
    assert not list(path.rglob(".aside*"))
    at = checkpoint.manifest["env_steps"]
    assert main(["resume", str(path), "--quiet", "--steps", str(at + 50)]) == 0
    assert Run(path).metrics[-1]["env_steps"] >= at + 50


def test_a_signal_during_the_last_evaluation_ends_it_and_the_run_says_that_it_is_done(tmp_path: Path) -> None:
    path = tmp_path / "r"
    evaluated = ["--eval.every", "100", "--eval.episodes", "100000"]
    argv = ["train", "dqn", "--run", path, *flags(steps=60), *evaluated, "--store.min-size", "16"]
    process = start(tmp_path, *argv)
    try:
        log = path / "log.txt"
        wait_for(process, lambda: log.exists() and "evaluating the last weights" in log.read_text())
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
    finally:
        out, err = end(process, 60)
    assert process.returncode == 128 + signal.SIGTERM and time.monotonic() - began < 5
    assert "not evaluated: interrupted" in err and f"Done. Evaluate with: veldt eval {path}" in out


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow_envs.py").write_text(SLOW)
    argv = ["train", "dqn", "--env", "slow_envs:Stuck", "--run", tmp_path / "r", *flags(), "--eval.every", "0"]
    process = start(tmp_path, *argv)
    try:
        wait_for(process, (tmp_path / "stuck").exists)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "repeat to stop immediately" in line:
                break
        assert process.poll() is None, "the first one waits for the step to end"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
    finally:
        end(process, 30)
    assert time.monotonic() - began < 2
    assert process.returncode == 130


def test_the_installed_command_refuses_and_fails_with_codes(tmp_path: Path) -> None:
    """What no call inside this process can show: the codes the shell sees, and no traceback for the user's mistakes."""
    process = start(tmp_path, "train", "dqn", "--env", "CartPole-v9")
    out, err = end(process, 90)
    assert (process.returncode, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("veldt: There is no environment")
    (tmp_path / "broken_envs.py").write_text(SLOW.replace("time.sleep(60)", "raise RuntimeError('gone')"))
    process = start(tmp_path, *TRAIN, "--env", "broken_envs:Stuck", "--run", tmp_path / "r", *flags(), "--eval.every", "0")
    out, err = end(process, 90)
    assert process.returncode == 1
    assert "broken_envs:Stuck: step raised RuntimeError: gone" in err


def test_a_reader_that_goes_away_leaves_no_traceback(tmp_path: Path) -> None:
    """veldt train ... | head -1"""
    process = start(tmp_path, "train", "dqn", "--run", tmp_path / "r", *flags(steps=900))
    assert process.stdout is not None and process.stderr is not None
    try:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=90) in (0, 1)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.stderr.close()
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def test_the_replay_bench_compares_itself_with_cpprb(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cpprb")
    assert (
        main(["bench", "replay", "--pixels", "600", "--vectors", "1000", "--batch", "16", "--rounds", "1", "--json"]) == 0
    )
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert len(results) == 3
    for figures in results.values():
        assert figures["sample ours/cpprb speed"] > 0 and figures["update ours/cpprb speed"] > 0
    assert 7_056 < next(iter(results.values()))["bytes_per_transition"] < 9_000


def test_the_command_ends_without_taking_its_objects_apart() -> None:
    """That takes longer than all else after a signal. What is registered for the end is done, what was printed is there."""
    code = (
        "import atexit, sys, veldt.__main__ as command\n"
        "class Slow:\n    def __del__(self): print('taken apart')\n"
        "slow = Slow(); atexit.register(print, 'registered'); command.command()"
    )
    for words, expected, told in ((["recipes"], 0, "apex-dqn"), (["no-such-command"], 2, "")):
        words = [sys.executable, "-c", code, *words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == expected and told in done.stdout
        assert done.stdout.endswith("registered\n") and "taken apart" not in done.stdout
