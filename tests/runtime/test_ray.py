"""The runtime on Ray: where sites go, and a run on a real cluster of several raylets, of which any part may die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from chaos import alive, wait_until

from veldt.cli.on_ray import FLAGS as FLAGS_OF_CLUSTER
from veldt.cli.on_ray import SEATS, Cluster, split
from veldt.cli.train import EXAMPLE
from veldt.errors import ProcessFailed, UserError
from veldt.experiment.run import Run
from veldt.runtime import ray as on_ray
from veldt.runtime.ray import Child, Head, Output, Site, Status, sites_to_add

HERE = Path(__file__).parents[1]
NO_RAY = "Ray is not installed: pip install 'veldt[ray]'"


def test_every_other_host_gets_one_site_as_long_as_there_are_seats() -> None:
    hosts = {"a": 4, "b": 2, "c": 8, "d": 0}
    assert sites_to_add(hosts, {}, 0, 64) == {"a": 4, "b": 2, "c": 8}, "as many actors as CPUs"
    assert sites_to_add(hosts, {"b": 2}, 3, 64) == {"a": 3, "c": 3}
    assert sites_to_add(hosts, {}, 0, 7) == {"a": 4, "b": 2, "c": 1}
    assert sites_to_add(hosts, {"a": 4, "b": 3}, 3, 7) == {}


def test_flags_of_the_cluster_are_taken_out() -> None:
    flags = ["--env", "X", "--runtime", "ray", "--steps=5", "--address=h:1", "--site-actors", "3"]
    assert split(flags) == (["--env", "X", "--steps=5"], Cluster("h:1", 3, SEATS))
    assert split(["--runtime=ray"]) == ([], Cluster("", 0, SEATS))
    for other in (["--runtime", "local", "--env", "X"], ["--env", "X"], ["--runtime=inline"], []):
        assert split(other) == (other, None)
    with pytest.raises(UserError, match="--site-actors and --site-seats are numbers"):
        split(["--runtime", "ray", "--site-actors", "many"])


def test_the_flags_are_in_the_help() -> None:
    assert all(flag in EXAMPLE for flag in ("--runtime ray", *FLAGS_OF_CLUSTER))


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UserError, match=r"--runtime ray needs Ray .*: pip install 'veldt\[ray\]'"), on_ray.connected(""):
        raise AssertionError("there is no Ray")


def test_nothing_else_imports_ray() -> None:
    code = "import sys, veldt.cli.train, veldt.cli.actor, veldt.runtime.local.process, veldt.experiment.site\n"
    code += "assert not {'ray', 'veldt.runtime.ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_command_is_heard_and_dies_with_its_parent() -> None:
    child = Child(("recipes",))
    wait_until(lambda: child.code is not None, 30, "it ends")
    lines, count = child.output.since(0)
    assert child.code == 0 and count == len(lines) and any("apex-dqn" in line for line in lines)
    assert child.output.since(count) == ([], count) and child.output.since(count - 2) == (lines[-2:], count)
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    code = "import time; from veldt.runtime.ray import Child; print(Child(('eval', '--help')).process.pid, flush=True); "
    code += "time.sleep(60)"
    code = code.replace("('eval', '--help')", "('actor', '--connect', 'unix:/nowhere', '--patience', '50')")
    env = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        command = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: "--patience" in command.cmdline(), 10, "it is started")
        parent.kill()
    wait_until(lambda: not alive(command), 5, "it is gone")


def test_each_line_is_heard_once_while_more_come() -> None:
    output, heard, wanted = Output(), list[str](), [str(n) for n in range(20_000)]

    def lines() -> Iterator[str]:
        for line in wanted:
            if int(line) % 1_000 == 0:  # no more than are kept
                wait_until(lambda: len(heard) >= int(line), 20, "it is heard")  # noqa: B023
            yield line + "\n"

    count, before = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=output.read, args=(lines(),))
    try:
        reader.start()
        until = time.monotonic() + 20.0
        while len(heard) < len(wanted) and time.monotonic() < until:
            new, count = output.since(count)
            heard += new
    finally:
        sys.setswitchinterval(before)
        reader.join(30.0)
    assert heard == wanted


class FakeRay:
    """One head, which answers what it is told to; `None`: not in time."""

    class exceptions:  # noqa: N801
        class RayError(Exception): ...

        class GetTimeoutError(RayError): ...

    def __init__(self, answers: list[Any], exists: bool) -> None:
        self.answers, self.known, self.calls, self.util, self.head = answers, exists, list[Any](), MagicMock(), MagicMock()
        self.head.stop.remote = lambda number: self.calls.append(("stop", number))

    def get(self, _: Any, timeout: float) -> Any:
        answer = self.answers.pop(0)
        if answer is None:
            raise self.exceptions.GetTimeoutError("Get timed out")
        return answer

    def get_actor(self, name: str) -> Any:
        if not self.known:
            raise ValueError(name)
        return self.head

    def kill(self, actor: Any) -> None:
        self.calls.append("kill")

    def remote(self, kind: type) -> Any:
        made = MagicMock()
        made.options.return_value.remote.return_value = self.head
        return made

    def get_runtime_context(self) -> Any:
        return MagicMock(get_node_id=lambda: "here")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "here", "Resources": {"CPU": 2.0}}]


@pytest.mark.parametrize("exists", [True, False])
def test_a_head_that_is_not_placed_is_not_left_behind(exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start the run later. A head of an earlier driver goes on."""
    fake = FakeRay([None], exists)
    monkeypatch.setattr(on_ray, "connected", lambda address: contextlib.nullcontext(fake))
    with pytest.raises(ProcessFailed, match="did not start in 120 s; it needs 1 free CPU and 0 free GPUs"):
        on_ray.drive(on_ray.ClusterRun("/runs/a", (), "/"), "auto", 0, lambda line: None, lambda: 0)
    assert fake.calls == ([] if exists else ["kill"])


def test_a_head_that_was_restarted_is_told_to_stop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray.time, "sleep", lambda seconds: None)
    answers = [Status(None, ["a", "b"], 2, {}), None, Status(None, [], 1, {}), Status(130, ["c"], 1, {})]
    fake, heard = FakeRay(list(answers), True), list[str]()
    assert on_ray._watch(fake, fake.head, heard.append, lambda: signal.SIGINT) == 130
    assert fake.calls == [("stop", signal.SIGINT)] * 2 + ["kill"] and heard == ["a", "b", "c"]


def test_why_a_site_failed_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, head, site = FakeRay([], True), Head.__new__(Head), MagicMock()
    monkeypatch.setattr(on_ray, "load", lambda: fake)
    head._sites, head._acting, head._failed, head._child = {"abc": (site, 2)}, {}, {}, MagicMock(output=Output())
    for answer in ((2, ""), (0, "no such env"), (0, "no such env"), (0, "")):
        fake.answers.append(answer)
        head._ask_sites({"abc": 2})
        assert head._acting == {"abc": answer[0]}
    assert head._child.output.since(0) == (["the site of host abc failed, and is started again: no such env"], 1)


def test_a_site_is_started_again_however_often_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "Child", lambda *_: MagicMock(code=1, output=MagicMock(last=lambda: "why")))
    site = Site("h:1", "token", b"", 2, ())
    site.restarts = 5_000
    assert site.poll() == (0, "why") and 0 < site._due - time.monotonic() <= 30


def test_no_site_gets_a_token_that_is_not_written_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, head = FakeRay([], True), Head.__new__(Head)
    fake.nodes = lambda: [{"NodeID": host, "Resources": {"CPU": 2.0}, "Alive": True} for host in ("here", "there")]  # type: ignore[method-assign]
    monkeypatch.setattr(on_ray, "load", lambda: fake)
    head.run = on_ray.ClusterRun(str(tmp_path), (), "/", seats=4)
    head._sites, head._acting, head._child, head._context = {}, {}, MagicMock(code=None), fake.get_runtime_context()
    head.address, head.certificate = "h:1", b""
    for text, sites in (("", 0), ("abc\n", 1)):
        (tmp_path / "token").write_text(text)
        head._reconcile()
        assert len(head._sites) == sites


def test_the_certificate_is_for_the_heads_address_alone(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509", reason=NO_RAY)
    key, certificate = on_ray.make_certificate("192.0.2.7")
    for name, data in (("key", key), ("certificate", certificate)):
        on_ray.write_private(tmp_path / name, data)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert [str(name.value) for name in names.value] == ["192.0.2.7"]
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "certificate", tmp_path / "key")


# On a real cluster: several raylets on this machine.

FLAGS = "--env veldt/Counter-v0 --actors 1 --envs-per-actor 2 --eval.every 0 --steps 100_000_000 --checkpoint.every 20_000"
FLAGS += " --log.every 0.5 --site-actors 2 --runtime ray"


@contextlib.contextmanager
def cluster_of(cpus: int) -> Iterator[Any]:
    pytest.importorskip("ray", reason=NO_RAY)
    from ray.cluster_utils import Cluster as Raylets

    cluster = Raylets(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def driver(run: Path, cluster: Any, recipe: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "veldt",
        "train",
        recipe,
        *FLAGS.split(),
        "--run",
        str(run),
        "--address",
        cluster.address,
    ]
    log = (run.parent / "driver.log").open("w")
    with log, subprocess.Popen([*command, *more], stdout=log, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def newest(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        found: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        return found
    return {}


def belonging_to(run: Path) -> list[psutil.Process]:
    """The run's process, the commands of its sites, and all below them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(run) in " ".join(process.cmdline()) or "--connect" in process.cmdline():
                found += [process, *process.children(recursive=True)]
    return [process for process in found if alive(process) and process.pid != os.getpid()]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["apex-dqn", "seed-vtrace"])
def test_hosts_come_and_go_and_the_head_is_restarted(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def acting(n: int) -> Callable[[], bool]:
        def there() -> bool:
            line = newest(run)
            return int(line.get("gate_actors", 0)) == n and line["time_s"] > 0

        return there

    def goes_on() -> None:
        steps = newest(run)["env_steps"]
        wait_until(lambda: newest(run)["env_steps"] > steps + 500, 60, "it goes on")

    with cluster_of(2) as cluster:
        second = cluster.add_node(num_cpus=2)
        with driver(run, cluster, recipe) as process:
            wait_until(acting(2), 120, "the second host acts")
            cluster.add_node(num_cpus=2)
            wait_until(acting(4), 90, "a host that was added acts")
            goes_on()
            before = belonging_to(run)
            cluster.remove_node(second, allow_graceful=False)
            wait_until(acting(2), 90, "a host is gone")
            goes_on()
            trained = next(x for x in before if alive(x) and "train" in x.cmdline() and x.pid != process.pid)
            worker, children = trained.parent(), trained.children(recursive=True)
            assert worker is not None and "Head" in " ".join(worker.cmdline()), worker
            worker.kill()
            wait_until(lambda: not any(map(alive, [trained, *children])), 10, "the run dies with its head")
            wait_until(lambda: sum(line.get("gate_actors", 0) == 2 for line in Run(run).metrics[-3:]) == 3, 120, "again")
            goes_on()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130, (tmp_path / "driver.log").read_text()
        wait_until(lambda: not belonging_to(run), 20, "nothing is left")
        assert (run / "checkpoints" / "latest").exists()
        assert "other hosts: 2, with 4 actors" in (tmp_path / "driver.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_driver_may_leave_and_another_finds_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with cluster_of(2) as cluster:
        with driver(run, cluster, "apex-dqn") as first:
            wait_until(lambda: newest(run).get("env_steps", 0) > 1_000, 90, "it trains")
            first.kill()
            first.wait(10)
        steps = newest(run)["env_steps"]
        wait_until(lambda: newest(run)["env_steps"] > steps + 1_000, 60, "it goes on without a driver")
        with driver(run, cluster, "apex-dqn", "--seed", "5") as other:
            assert other.wait(60) == 2 and "with other flags" in (tmp_path / "driver.log").read_text()
        with driver(run, cluster, "apex-dqn") as second:
            wait_until(lambda: "env/s" in (tmp_path / "driver.log").read_text(), 60, "it says what the run says")
            second.send_signal(signal.SIGINT)
            assert second.wait(60) == 130
        assert "resuming" not in (run / "log.txt").read_text(), "it was never started anew"
        wait_until(lambda: not belonging_to(run), 20, "nothing is left")
