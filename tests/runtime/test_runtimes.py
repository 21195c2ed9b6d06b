"""What every runtime keeps to: the same cases in one thread and in processes of their own."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest
from chaos import Checker, Oracle, Producer, Sink, Strict, Ticker, config_of, play, program_of, wait
from running import run_until

from veldt.__main__ import main
from veldt.acting.actor import Actor
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.errors import ProcessFailed, UserError
from veldt.program import INCARNATION, ROWS, Program
from veldt.records.block import Schema, Window
from veldt.records.tree import spec
from veldt.runtime import Inline, Stuck
from veldt.runtime.local import watchdog, zygote
from veldt.runtime.local.local import Local
from veldt.storing.limiters import SamplesPerInsert
from veldt.storing.replay import Replay
from veldt.topologies.stores import make_replay

RUNTIMES = {"inline": Inline, "local": Local}


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


@pytest.fixture(params=list(RUNTIMES))
def runtime(request: pytest.FixtureRequest) -> Any:
    return RUNTIMES[request.param]()


def is_local(runtime: Any) -> bool:
    return isinstance(runtime, Local)


# Calls and streams.


def central(pause: float = 0.0, actors: int = 2, groups: int = 2, n: int = 3) -> Program:
    """Actors that ask one policy for everything."""
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    policy = program.add("policy", Oracle, pause)
    envs = functools.partial(make_env, Strict)
    for i in range(actors):
        name, own = f"actor/{i}", tuple(range(i * groups, (i + 1) * groups))
        program.add(name, Actor, envs, n, policy, counters, 5, name, own, INCARNATION)
    return program


def test_every_environment_gets_the_action_for_its_own_state(runtime: Any) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") >= 1_500, 30, "1,500 steps")
        assert nodes.metrics().get("restarts", 0.0) == 0, "an environment got another's action"

    play(runtime, central(), scenario)


def test_an_answer_to_an_earlier_life_is_dropped_and_no_question_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        for kill in range(9):
            name = ("policy", "actor/0", "actor/1")[kill % 3]
            goals = {x: chaos.steps_of(nodes, x) + 200 for x in ("actor/0", "actor/1")}
            pid = chaos.kill(nodes, name)
            yield from wait(lambda: chaos.child(nodes, name).pid not in (0, pid), 10, "a new life")  # noqa: B023
            for x, goal in goals.items():
                yield from wait(lambda: chaos.steps_of(nodes, x) >= goal, 10, f"{x} goes on")  # noqa: B023
        assert nodes.metrics()["restarts"] == 9

    play(Local(), central(0.002), scenario)  # a question is nearly always on its way
    assert "AssertionError" not in caplog.text, "an environment got an action of an earlier life"


def test_the_blocks_of_each_actor_arrive_in_order_and_unchanged(runtime: Any) -> None:
    rows = {"obs": spec((3,), np.float32), "frame": spec((40, 40), np.float64), "action": spec((), np.int64)}
    schema = Schema(rows, Window(lookahead=2), 4)
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    sink = program.add("sink", Sink, schema, counters)
    for i in range(3):
        program.add(f"producer/{i}", Producer, sink, schema, i, counters, 200)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") >= 600, 30, "all blocks are in")
        assert nodes.count("env_steps") == nodes.count("learner_steps") == 600

    play(runtime, program, scenario)


# Back-pressure and rates.


def refusing_store(config: Any, schema: Schema, memory: Any = None, counters: Any = None) -> Replay:
    store = make_replay(config, schema, memory, counters)
    store.limiter = chaos.Never()
    return store


def refused(config: Any) -> Program:
    """A program whose store never takes a block."""
    program = program_of(config)
    node = program.nodes["store"]
    program.nodes["store"] = dataclasses.replace(node, build=refusing_store)
    return program


def test_actors_whose_blocks_are_refused_stop_and_memory_stays_bounded(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    program = refused(config)
    if not is_local(runtime):
        with pytest.raises(Stuck, match="cannot do any work"):
            run_until(runtime, program, lambda nodes: False)
        return

    def scenario(nodes: Any) -> Iterator[None]:
        seen = [0.0, time.monotonic()]

        def stands_still() -> bool:
            if nodes.count("env_steps") != seen[0]:
                seen[:] = nodes.count("env_steps"), time.monotonic()
            return seen[0] > 0 and time.monotonic() - seen[1] > 0.4

        yield from wait(stands_still, 20, "the actors stop")
        n, block = config.envs_per_actor, config.actor.block
        most = (
            config.actors * (config.queue + 3 * n) * block
        )  # a full stream, what waits in the recorder, and what it writes on
        assert config.actors * config.queue * block * 0.5 < nodes.count("env_steps") <= most
        sizes = [os.fstat(fd).st_size for fd in nodes.resources()[1]]
        used = [chaos.used_memory(pid) for pid in nodes.resources()[0]]
        deadline = time.monotonic() + 0.5
        yield from wait(lambda: time.monotonic() > deadline, 1, "a while")
        assert [os.fstat(fd).st_size for fd in nodes.resources()[1]] == sizes
        assert sum(chaos.used_memory(pid) for pid in nodes.resources()[0]) - sum(used) < 4e6
        assert nodes.metrics()["restarts"] == 0 and all(child.pid for child in nodes.supervisor.children.values())
        ended.append(time.monotonic())

    ended: list[float] = []
    play(runtime, program, scenario)
    assert time.monotonic() - ended[0] < 2.0, "they can be stopped while they wait"


def test_a_program_that_waits_for_ever_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STUCK_S", 1.0)
    with pytest.raises(Stuck, match=r"actor/0 waiting for work.*look at the store's limiter"):
        run_until(Local(step_timeout=0.4), refused(config_of()), lambda nodes: False)


@pytest.mark.parametrize("sleep", [0.0, 0.02], ids=["learner-waits", "actors-wait"])
def test_the_samples_per_insert_hold_through_the_whole_run(runtime: Any, sleep: float) -> None:
    config = config_of(**{"store.samples_per_insert": 4.0})
    envs = config.envs()
    envs.close()
    law = make_replay(config, config.schema(envs.spec)).limiter
    assert isinstance(law, SamplesPerInsert)
    seen: list[tuple[float, float]] = []

    def scenario(nodes: Any) -> Iterator[None]:
        def look() -> bool:
            told = nodes.metrics()
            if told.get("store_sampled"):
                seen.append((told["store_inserted"], told["store_sampled"]))
            return len(seen) >= 5 and seen[-1][1] >= 1_000

        yield from wait(look, 20, "five looks, and a thousand samples")

    play(runtime, program_of(config, Checker, 64, sleep), scenario)
    for inserted, sampled in seen:
        assert abs(law.ratio * (inserted - law.min_size) - sampled) <= law.tolerance, (inserted, sampled, law)


# Errors, and what is left behind.


def failing() -> Program:
    return program_of(config_of(), chaos.Failing)


def test_an_error_in_a_service_ends_the_run_with_its_traceback(runtime: Any) -> None:
    kind = ProcessFailed if is_local(runtime) else ZeroDivisionError
    with pytest.raises(kind, match="the twelfth of never") as caught:
        play(runtime, failing(), lambda nodes: wait(lambda: False, 30, "the error"))
    if isinstance(caught.value, ProcessFailed):
        assert caught.value.traceback.count("Traceback (most recent call last)") == 1
        assert "in step" in caught.value.traceback and "chaos.py" in caught.value.traceback
        assert str(caught.value).startswith("learner failed with ZeroDivisionError: ")


def flags(**changes: Any) -> list[str]:
    """The small settings for the command line."""
    out: list[str] = []
    for name, value in (chaos.SMALL | changes).items():
        out += [f"--{name}", str(value)]
    return out


def test_an_error_in_a_service_is_told_once_by_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ["train", "apex-dqn", "--env", "veldt/Counter-v0", "--quiet", "--run", str(tmp_path / "r")]
    assert main([*run, *flags(**{"algorithm.network_from": "chaos:Breaking"})]) == 1
    told = capfd.readouterr().err
    assert told.count("Traceback (most recent call last)") == 1
    last = told.splitlines()[-1]
    assert last.startswith("veldt: learner failed with ZeroDivisionError: the twelfth of never. See ")
    assert last.endswith(f"continue with: veldt resume {tmp_path / 'r'} --trust")
    assert "ZeroDivisionError: the twelfth of never" in (tmp_path / "r" / "log.txt").read_text()
    assert not (tmp_path / "r" / "processes.json").exists()


class Stop(Exception):
    pass


@pytest.mark.parametrize("ending", ["normal", "error", "until raises"])
def test_nothing_is_left_behind(runtime: Any, ending: str) -> None:
    def stop(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 200, 20, "200 steps")
        nodes.snapshot()
        if ending == "until raises":
            raise Stop
        yield from wait(lambda: ending == "normal", 20, "the error")

    before = chaos.belongings()
    if ending == "normal":
        play(runtime, program_of(config_of(), Checker), stop)
    else:
        with pytest.raises((Stop, ProcessFailed, ZeroDivisionError)):
            play(runtime, failing() if ending == "error" else program_of(config_of(), Checker), stop)
    assert chaos.belongings() == before


def test_a_program_that_cannot_be_built_leaves_nothing_behind(runtime: Any) -> None:
    program = program_of(config_of(), Checker, "not a number", "of too many", "arguments")
    before = chaos.belongings()
    with pytest.raises((TypeError, ProcessFailed), match="takes from 3 to 5 positional arguments"):
        run_until(runtime, program, lambda nodes: False)
    assert chaos.belongings() == before


# State.


def settled(nodes: Any) -> Any:
    """A condition: the store has not changed for a while."""
    seen: list[Any] = [None, 0.0]

    def still() -> bool:
        counts = nodes.state()["store"]["counts"]
        if counts != seen[0]:
            seen[:] = counts, time.monotonic()
        return time.monotonic() - seen[1] > 0.3

    return still


def test_the_state_of_all_nodes_goes_out_and_in_and_is_the_same(runtime: Any) -> None:
    config = config_of(**{"store.samples_per_insert": 4.0, "store.capacity": "600"})
    saved: dict[str, Any] = {}

    def save(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("learner_steps") > 60 and nodes.count("env_steps") > 1_500, 30, "some work")
        nodes.cut()
        if is_local(runtime):  # what was on its way to the store still arrives
            yield from wait(settled(nodes), 20, "the store stands still")
        snapshot = nodes.snapshot()
        saved["state"] = snapshot.state()
        saved["blocks"] = {name: store.blocks(0, 1 << 40) for name, store in snapshot.stores().items()}
        saved["rows"] = chaos.check_blocks(snapshot)

    def load(nodes: Any) -> Iterator[None]:
        nodes.load_state(saved["state"])
        for name, store in nodes.stores().items():
            first, _, arrays = saved["blocks"][name]
            store.load_blocks(first, arrays)
        again = nodes.state()
        assert set(again) == set(saved["state"])
        for name, part in saved["state"].items():
            assert chaos.fingerprint(again[name]) == chaos.fingerprint(part), name
        assert nodes.count("env_steps") == saved["state"]["counters"]["counts"]["env_steps"]
        nodes.resume(1)
        assert chaos.check_blocks(nodes.snapshot()) == saved["rows"]
        begun = nodes.count("learner_steps")
        yield from wait(lambda: nodes.count("learner_steps") > begun + 60, 30, "it goes on from there")

    play(runtime, program_of(config), save)
    first, stop, _ = saved["blocks"]["store"]
    counts = saved["state"]["store"]["counts"]
    assert (first, stop) == (counts["oldest"], counts["next"]) and stop - first > 10
    play(runtime, program_of(config), load)


def test_blocks_read_beside_the_store_are_whole(tmp_path: Path) -> None:
    """Under a store that wraps all the time."""

    def scenario(nodes: Any) -> Iterator[None]:
        rows = 0
        for _ in range(10):
            goal = nodes.count("env_steps") + 100
            yield from wait(lambda: nodes.count("env_steps") > goal, 20, "some steps")  # noqa: B023
            rows += chaos.check_blocks(nodes.snapshot())
        assert rows > 1_000
        store = nodes.snapshot().stores()["store"]
        gone = store.oldest + 5
        yield from wait(lambda: nodes.state()["store"]["counts"]["oldest"] >= gone, 20, "some of them go")
        first, stop, arrays = store.blocks(0, 1 << 40)
        assert gone <= first <= stop == store.next, "what has gone since is left out"
        assert all(len(x) == stop - first for x in arrays.values())

    play(Local(), program_of(config_of(**{"store.capacity": "300"}), Checker), scenario)


# Places, names, and what the supervisor tells.


def tickers() -> Program:
    program = Program()
    counters = program.add("counters", Counters, ROWS)
    a = program.add("a", Ticker, counters, 300, level=1.0, label="a")
    program.add("b", Ticker, counters, 200, level=3.0, label="b", other=a, on=a)
    program.add("c", Ticker, counters, 100, level=8.0, label="c")
    return program


def test_counts_and_metrics_of_all_are_merged_and_on_shares_a_process(runtime: Any) -> None:
    told: dict[str, float] = {}
    looked = [time.monotonic()]

    def scenario(nodes: Any) -> Iterator[None]:
        def all_have_told() -> bool:
            if time.monotonic() - looked[0] > 0.7:  # processes tell at their own times
                looked[0] = time.monotonic()
                told.clear()
                told.update(nodes.metrics())
            return {"pid a", "pid b", "pid c"} <= told.keys()

        if is_local(runtime):  # in one thread, the end of all work is an error
            yield from wait(lambda: nodes.count("env_steps") >= 600, 20, "all steps")
            yield from wait(all_have_told, 20, "all have told")
            assert nodes.count("env_steps") == 600
        else:
            yield from wait(lambda: nodes.count("env_steps") >= 400, 20, "most steps")
            told.update(nodes.metrics())

    play(runtime, tickers(), scenario)
    pids = [told[f"pid {name}"] for name in "abc"]
    if is_local(runtime):
        assert pids[0] == pids[1] != pids[2] and os.getpid() not in pids
        assert told["level"] == (2.0 + 8.0) / 2  # the mean of processes, and in each the mean of its nodes
    else:
        assert pids == [os.getpid()] * 3
        assert told["level"] == 4.0


def test_a_node_that_only_its_own_process_can_use_is_named() -> None:
    program = tickers()
    alone = program.add("alone", Ticker)
    program.add("d", Ticker, other={"deep": [alone]})
    with pytest.raises(
        UserError, match=r"d needs alone, which has no ports and can be used in one process only: add it with on=alone\."
    ):
        run_until(Local(), program, lambda nodes: True)


class OfThisModule(Ticker):
    def step(self) -> bool:
        return super().step()


def test_classes_and_lambdas_of_a_test_module_travel(runtime: Any) -> None:
    step = 7

    class Inner(Ticker):
        def step(self) -> bool:
            worked = super().step()
            self.counters.add("env_steps", worked * (step - 1))
            return worked

    program = Program()
    counters = program.add("counters", Counters, ROWS)
    program.add("a", OfThisModule, counters, 10)
    program.add("b", Inner, counters, 10)
    program.add("c", lambda counters: Ticker(counters, step), counters)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") == 87, 20, "all have counted")

    play(runtime, program, scenario)


SCRIPT = """
import gymnasium as gym
import numpy as np
import veldt
from veldt.envs.small import Counter

class Mine(Counter):
    pass

def net(env):
    import chaos
    return chaos.Net(env)

run = veldt.train("apex-dqn", env=lambda: Mine(longest=5), network=net, run="r", quiet=True, **SETTINGS)
print("env steps:", run.metrics[-1]["env_steps"])
"""


def test_a_script_without_a_guard_can_train_its_own_environment_in_processes(tmp_path: Path) -> None:
    settings = {name: x for name, x in chaos.SMALL.items() if name != "algorithm.network_from"} | {"steps": 2_000}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("SETTINGS", repr(settings)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("env steps: 2"), done.stdout


def test_files_in_the_working_directory_are_not_taken_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "select", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    zygote.discard()
    monkeypatch.chdir(tmp_path)

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") == 600, 20, "all steps")

    play(Local(), tickers(), scenario)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_processes_have_names_in_ps_and_in_the_run_directory(tmp_path: Path) -> None:
    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count("env_steps") > 0, 20, "a step")
        table = json.loads((tmp_path / "processes.json").read_text())
        assert set(table) == {"supervisor", "zygote", "learner", "actor/0", "actor/1"}
        assert table["supervisor"]["pid"] == os.getpid()
        assert table["learner"]["nodes"] == ["store", "learner"]
        assert table["actor/1"]["nodes"] == ["policy/1", "recorder/1", "actor/1"]
        for name in set(table) - {"supervisor"}:
            assert command_line(table[name]["pid"]).startswith(f"veldt {name}")
            assert Path(f"/proc/{table[name]['pid']}/comm").read_text().strip() == f"veldt {name}"[:15]
        old = chaos.kill(nodes, "actor/0")
        assert old == table["actor/0"]["pid"]

        def replaced() -> bool:
            row = json.loads((tmp_path / "processes.json").read_text())["actor/0"]
            return row["restarts"] == 1 and row["pid"] not in (0, old)

        yield from wait(replaced, 10, "the table names the new one")

    play(Local(tmp_path), program_of(config_of(), Checker), scenario)
    assert not (tmp_path / "processes.json").exists()


def test_who_has_more_than_a_thousand_files_open_can_run_processes() -> None:
    """Their numbers are too large for select."""
    zygote.discard()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_000:
        pytest.skip("this machine allows no more files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_000), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    try:

        def scenario(nodes: Any) -> Iterator[None]:
            yield from wait(lambda: nodes.count("env_steps") > 100, 20, "100 steps")

        play(Local(), program_of(config_of(), Checker), scenario)
        zygote.discard()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
