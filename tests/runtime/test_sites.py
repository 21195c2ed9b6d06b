"""Sites: many actors of one host over one stream, and what of them may be killed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import chaos
import numpy as np
import psutil
import pytest
from chaos import Checker, Verdict, config_of, play, program_of, steps_of, wait
from test_grpc import World, answer_to, block, number_of, question, say, until

import veldt
from veldt import callables
from veldt.counters import NAMES, Counters
from veldt.errors import UserError
from veldt.experiment import site as site_module
from veldt.experiment.joined import Assignment
from veldt.experiment.prepare import make_gate
from veldt.program import ROWS, Program
from veldt.records.tree import Tree
from veldt.runtime.base import Stuck
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import LinkLost, grpc
from veldt.runtime.grpc.link import Link
from veldt.runtime.grpc.relay import HOLD, ORDERS, Forward, LanePlan, Relay, SitePlan
from veldt.runtime.grpc.wire import frame, parse_formats
from veldt.runtime.local import watchdog, zygote
from veldt.runtime.local.board import Board, SharedRows
from veldt.runtime.local.local import Local
from veldt.runtime.shm.memory import Latest, make_shared_memory
from veldt.runtime.shm.ring import Reader, Writer

HERE = Path(__file__).parents[1]
TOKEN = "0123456789abcdef" * 4
SEATS = ("seat/0", "seat/1", "seat/2")


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veldt")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(**options: Any) -> World:
        worlds.append(World(tmp_path, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


# One stream for many seats.


def numbered(n: int) -> Tree:
    """The n-th question in a ring, which says so."""
    return question(n) | {"@port": np.array([1, n, n])}


class Site:
    """The rings of some actors, and relays in front of them, one after the other."""

    def __init__(self, world: World, actors: int) -> None:
        self.world, self.actors = world, actors
        self.fds = [make_shared_memory("veldt test") for _ in range(3 * actors)]
        self.blocks = [Writer(fd, max_slots=16) for fd in self.fds[0::3]]
        self.questions = [Writer(fd, max_slots=8) for fd in self.fds[1::3]]
        self.answers = [Reader(fd) for fd in self.fds[2::3]]
        self.sent, self.asked, self.answered = ([0] * actors for _ in range(3))
        self.got: list[list[int]] = [[] for _ in range(actors)]  # blocks that the run has
        first = world.link(seat="", actors=actors)
        first.connect()
        self.session, self.seats = first.session.id, [seat.name for seat in first.session.seats]
        self.plans = [
            [
                LanePlan(*([format_.columns for format_ in parse_formats(port[name] or [])] for name in FORMATS), *known)
                for port in seat.ports
                for known in [(port["written"], port["tail"])]
            ]
            for seat in first.session.seats
        ]
        first.detach()
        self.link = self.relay()

    def relay(self) -> Link:
        """The next process in its place: it knows the session, and what is in shared memory."""

        def box(session: Any, seat: int, lane: str, channel: int, port: dict[str, Any]) -> Any:
            stream, there, back = self.fds[3 * seat : 3 * seat + 3]
            if lane == "store":
                return Forward(session, channel, port, self.plans[seat][0], Reader(stream), None)
            return Forward(session, channel, port, self.plans[seat][1], Reader(there), Writer(back))

        link = self.world.link(seat="", actors=self.actors, make_box=box, id_=self.session)
        link.connect()
        return link

    def kill(self) -> None:
        """As SIGKILL would: nothing more is sent."""
        self.link._closing = True
        self.link._end()
        self.link = self.relay()

    def pump(self, more: bool = True) -> None:
        for i in range(self.actors):
            if more and self.blocks[i].put(block(self.sent[i])):
                self.sent[i] += 1
            if more and self.questions[i].put(numbered(self.asked[i])):
                self.asked[i] += 1
            while (message := self.answers[i].peek()) is not None:
                n = answer_to(message)
                if message["@reply"][0] >= 0:  # not the answer to a call of the earlier session
                    assert n == message["@reply"][0] == self.answered[i], "in order, with their numbers"
                    self.answered[i] += 1
                self.answers[i].pop()
            store = self.world.stores[int(self.seats[i].removeprefix("actor/"))]
            while (message := store.peek()) is not None:
                self.got[i].append(number_of(message))
                store.pop()
        self.link.wake()
        self.link.wait(0.002)

    def pump_one(self, actor: int) -> None:
        """Calls of one actor, as fast as they are answered."""
        self.questions[actor].put(numbered(0))
        while self.answers[actor].peek() is not None:
            self.answers[actor].pop()
        self.link.wake()
        self.link.wait(0.002)

    def check(self) -> None:
        def all_there() -> bool:
            self.pump(more=False)
            return [len(got) for got in self.got] == self.sent and self.answered == self.asked

        until(all_there, None)
        self.pump(more=False)
        assert self.got == [list(range(n)) for n in self.sent]

    def close(self) -> None:
        self.link.close()
        for fd in self.fds:
            os.close(fd)


FORMATS = ("formats", "answers")


@pytest.fixture
def site(make: Callable[..., World]) -> Iterator[Site]:
    world = make(seats=3, owned=False)
    world.start("answer")
    earlier = world.link(seat="")  # so that the rings of the first seat have messages of another session
    earlier.connect()
    assert earlier.session.mailboxes["store"].put(block(0)) and earlier.session.mailboxes["policy"].put(numbered(0))
    until(lambda: earlier.session.mailboxes["policy"].peek(), earlier)
    earlier.close()
    assert number_of(world.stores[0].peek() or {}) == 0
    world.stores[0].pop()
    site = Site(world, 3)
    yield site
    site.close()


def relays_die(site: Site, times: int, seed: int) -> None:
    rng = Random(seed)
    for _ in range(times):
        moment = time.monotonic() + rng.uniform(0.0, 0.1)
        while time.monotonic() < moment:
            site.pump()
        if rng.random() < 0.5:
            site.kill()
        else:
            site.world.kill_gate()
            site.world.start_gate()
    goals = [n + 20 for n in site.answered]
    until(lambda: site.pump() or all(n > goal for n, goal in zip(site.answered, goals, strict=True)), None)
    site.check()
    assert min(site.sent) > 20 and site.world.ask()[2] == site.seats


def test_messages_of_many_actors_travel_over_one_stream_once_and_in_order(site: Site) -> None:
    """Whoever of the relay and the gate is killed."""
    relays_die(site, 6, seed=0)


@pytest.mark.long
def test_relays_may_be_killed_many_times(site: Site) -> None:
    relays_die(site, 100, seed=1)


def test_a_message_is_acknowledged_while_other_actors_of_the_site_are_busy(site: Site) -> None:
    """A ring whose next message is larger waits for that: a busy neighbour must not hold it up."""
    until(lambda: site.pump_one(0) or site.answers[0].popped > 50, None)
    for n in range(3):
        assert site.blocks[1].put(block(n))
        until(lambda n=n: site.pump_one(0) or site.blocks[1].popped > n, None, 3.0)  # type: ignore[misc]


def test_a_site_has_all_of_its_seats_or_none(make: Callable[..., World]) -> None:
    world = make(seats=3, owned=False)
    two = world.link(seat="", actors=2)
    two.connect()
    assert [seat.name for seat in two.session.seats] == ["actor/0", "actor/1"]
    with pytest.raises(LinkLost, match="2 seats are needed and 1 are free; the run has 3"):
        world.link(seat="", actors=2, patience=0.3).connect()
    third = world.link(seat="")
    third.connect()
    assert world.ask()[2] == ["actor/0", "actor/1", "actor/2"]
    two.close()
    until(lambda: world.ask()[2] == ["actor/2"], third)
    again = world.link(seat="", actors=2)
    again.connect()
    assert [(seat.name, seat.incarnation) for seat in again.session.seats] == [("actor/0", 2), ("actor/1", 2)]


def test_a_gate_that_was_killed_while_it_gave_seats_gives_the_rest(make: Callable[..., World]) -> None:
    """Also when its successor has had the first of them for so long that anybody may take it."""
    world = make(seats=3, owned=False, reconnect=0.05)
    link = world.link(seat="", actors=2)
    world.shared.records.words(0, 2)[:] = memoryview(bytes.fromhex(link.session.id)).cast("q")
    time.sleep(0.1)
    link.connect()
    assert [seat.name for seat in link.session.seats] == ["actor/0", "actor/1"]


def test_a_number_of_actors_that_cannot_be_is_refused(make: Callable[..., World]) -> None:
    world = make(owned=False)
    known = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": "1" * 32, "seat": ""}
    for actors in (0, -1, True, 1.5, "3", None, 257, 1 << 40):
        said = [frame(wire.HELLO, wire.dump_json(known | {"actors": actors}))]
        assert say(world.address, said) == grpc.StatusCode.INVALID_ARGUMENT, actors
    assert world.ask()[2] == []


def test_a_site_speaks_for_its_own_seats_alone(make: Callable[..., World]) -> None:
    world = make(seats=3, owned=False)
    report = wire.dump_json({"counts": [5] * len(NAMES), "metrics": {}})
    known = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "seat": "", "actors": 2}
    for life, kind in enumerate((wire.REPORT, wire.DATA, wire.ACK, wire.WANT), 1):
        hello = frame(wire.HELLO, wire.dump_json(known | {"session": f"{life:032x}"}))
        beyond = frame(kind, report, channel={wire.REPORT: 2, wire.WANT: 1}.get(kind, 4))
        assert say(world.address, [hello, beyond, frame(wire.LEAVE)]) == grpc.StatusCode.INVALID_ARGUMENT, kind
        for seat in range(2):  # its seats are not kept for half a minute
            world.shared.records.words(seat * 256, 2)[:] = memoryview(bytes(16)).cast("q")
    assert [world.count(seat) for seat in range(3)] == [0, 0, 0] and world.stores[2].waiting == 0


def test_each_actor_of_a_site_counts_for_itself(make: Callable[..., World]) -> None:
    world = make(seats=2, owned=False)
    link = world.link(seat="", actors=2)
    link.connect()
    for i, seat in enumerate(link.session.seats):
        seat.counts[0] = 3 + 4 * i
        seat.add({"epsilon": 0.5 + i})
    reports: dict[str, Any] = {}
    until(lambda: (world.count(0), world.count(1)) == (3, 7), link)
    until(lambda: reports.update(world.ask()[1]) or len(reports) == 2, link)
    assert reports == {"actor/0": {"epsilon": 0.5}, "actor/1": {"epsilon": 1.5}}
    until(lambda: (link.session.rows.run[0], link.session.rows.counted[0]) == (10, 10), link)


def test_a_reader_that_has_the_newest_value_asks_for_a_newer_one() -> None:
    """By that a relay knows when to fetch weights, once for all of its actors."""
    fd = make_shared_memory("veldt test")
    relay, actors = Latest(fd), [Latest(fd), Latest(fd)]
    assert not relay.wanted and actors[0].read(-1) is None
    relay.write(5, {"x": np.zeros(3)})
    assert not relay.wanted
    assert [actor.read(-1) is not None for actor in actors] == [True, True] and not relay.wanted
    assert actors[1].read(5) is None and relay.wanted
    relay.write(6, {"x": np.ones(3)})
    assert not relay.wanted and actors[0].read(5) is not None
    os.close(fd)


def test_a_relay_that_is_restarted_on_hold_hears_that_the_run_goes_on(site: Site) -> None:
    """On hold a process makes no step, and only rests."""
    site.link.detach()
    lanes = tuple(dict(zip(("store", "policy"), plans, strict=True)) for plans in site.plans)
    plan = SitePlan(site.world.address, site.session, "", b"", False, 20.0, tuple(site.seats), lanes)
    orders, counts = np.zeros(len(ORDERS), np.int64), make_shared_memory("veldt test")
    orders[HOLD] = 1
    relay = Relay(plan, Counters(SharedRows(counts, Board(make_shared_memory("veldt test"), 1), 0)), orders, {})
    for i, actor in enumerate(site.seats):
        stream, there, back = site.fds[3 * i : 3 * i + 3]
        relay._rings |= {(actor, "store"): (Reader(stream), None), (actor, "policy"): (Reader(there), Writer(back))}
        relay._counts[actor] = memoryview(np.zeros(len(NAMES), np.int64))
    until(lambda: relay.rest(0.05) or not orders[HOLD], None, 5.0)
    relay.close()
    os.close(counts)


# With a real run.


@contextlib.contextmanager
def started(*flags: Any) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "veldt", "actor", "--network", "chaos:Net", *map(str, flags)]
    env, pipes = os.environ | {"PYTHONPATH": paths}, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def listening(caplog: pytest.LogCaptureFixture) -> str:
    found = re.search(r"listening on (\S+:\d+)", caplog.text)
    return found[1] if found else ""


def processes(pid: int) -> dict[str, int]:
    """Of a site, by name."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[" ".join(process.cmdline()).strip().removeprefix("veldt ")] = process.pid
    return found


@pytest.mark.parametrize("recipe", [pytest.param("apex-dqn", marks=pytest.mark.long), "seed-vtrace"])
def test_a_site_acts_while_its_parts_are_killed_and_leaves_nothing(
    recipe: str, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An actor and the relay are killed, and nothing is corrupt or doubled. Then the site itself is killed."""
    config = config_of(recipe=recipe, actors=1, **{"gate.listen": "127.0.0.1:0", "gate.seats": 3})
    stack = contextlib.ExitStack()

    def all_act(nodes: Any) -> Iterator[None]:
        goals = {seat: steps_of(nodes, seat) + 200 for seat in SEATS}
        yield from wait(lambda: all(steps_of(nodes, seat) > goal for seat, goal in goals.items()), 40, "all act")

    def scenario(nodes: Any) -> Iterator[None]:
        verdict = Verdict(nodes)
        yield from wait(lambda: listening(caplog), 20, "it listens")
        flags = ("--connect", listening(caplog), "--token-file", token, "--actors", 3)
        here = stack.enter_context(started(*flags))
        yield from all_act(nodes)
        for victim in ("actor/2", "relay"):
            pid = processes(here.pid)[victim]
            os.kill(pid, signal.SIGKILL)
            yield from wait(lambda: processes(here.pid).get(victim, pid) != pid, 10, "it is restarted")  # noqa: B023
            yield from all_act(nodes)
        yield from wait(verdict.more(200), 20, "all is well")
        assert verdict.look()["gate_refused"] == 0 and nodes.state()["store"]["counts"]["duplicates"] == 0
        if recipe == "seed-vtrace":
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in processes(here.pid).values()]
            assert maps and not any("torch" in text or "llvmlite" in text for text in maps)
        family = chaos.family(here.pid)
        assert len(family) == 6, "keeper, zygote, relay and actors"
        here.kill()
        yield from wait(lambda: not any(map(chaos.alive, family)), 5, "all is gone")
        chaos.check_blocks(nodes.snapshot())

    with stack:
        gate = make_gate(config, TOKEN)
        play(Local(gate=gate), program_of(config, Checker, 8 if recipe == "seed-vtrace" else 64), scenario, 120)


def test_a_site_leaves_when_it_is_told_and_ends_with_the_run(token: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(recipe="seed-vtrace", actors=1, **{"gate.listen": "127.0.0.1:0", "gate.seats": 3})
    stack, last = contextlib.ExitStack(), list[subprocess.Popen[str]]()

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: listening(caplog), 20, "it listens")
        flags = ("--connect", listening(caplog), "--token-file", token, "--actors", 3)
        first = stack.enter_context(started(*flags))
        yield from wait(lambda: all(steps_of(nodes, seat) > 50 for seat in SEATS), 40, "all act")
        first.send_signal(signal.SIGINT)
        yield from wait(lambda: first.poll() is not None, 10, "it leaves")
        assert first.returncode == 130, first.communicate()[0]
        before = {seat: steps_of(nodes, seat) for seat in SEATS}
        last.append(stack.enter_context(started(*flags)))
        yield from wait(lambda: all(steps_of(nodes, s) > n + 50 for s, n in before.items()), 20, "another has its seats")

    with stack:
        play(Local(gate=make_gate(config, TOKEN)), program_of(config, Checker, 8), scenario, 90)
        output, _ = last[0].communicate(timeout=20)
        assert last[0].returncode == 0 and "The run has ended." in output, output


def test_a_site_waits_for_a_run_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of a run would say that it is stuck."""
    monkeypatch.setattr(watchdog, "STUCK_S", 0.2)
    monkeypatch.setattr(watchdog, "WATCH_S", 0.05)
    for excused in (True, False):
        watch = watchdog.Watchdog({}, Board(make_shared_memory("veldt test"), 1), -1, step_timeout=0.1)
        until, stuck = time.monotonic() + 0.6, False
        while time.monotonic() < until and not stuck:
            if excused:
                watch.excuse()
            try:
                watch.check(7)
            except Stuck:
                stuck = True
        assert stuck != excused


def test_what_a_run_asks_of_a_site_in_vain_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VELDT_LIGHT", "")  # and as it was after the test
    for name in ("start_early", "discard"):
        monkeypatch.setattr(site_module.zygote, name, lambda **_: None)
    link: Any = SimpleNamespace(session=SimpleNamespace(seats=[]))
    central, local = (
        Assignment(0, "CartPole-v1", frozenset(), None, {"nonsense": 1}),
        Assignment(1, "X", frozenset(), object()),
    )
    for asked, words in (
        ([central], "cannot be built here .TypeError"),
        ([central, local], "central and for local inference"),
    ):
        with pytest.raises(UserError, match=words):
            site_module.live(link, asked, lambda: False, 10.0)


class Lost:
    """A relay that has lost the run."""

    def step(self) -> bool:
        raise LinkLost("The run at h:1 could not be reached.")


def test_a_site_that_has_lost_its_run_says_so_without_a_traceback() -> None:
    program = Program()
    program.add("counters", Counters, ROWS)
    program.add("relay", Lost, light=True, keep=True)
    refused = pytest.raises(LinkLost, match=r"^The run at h:1 could not be reached\.$")
    with refused, site_module.loss_of_the_link(), Local().start(program) as nodes:
        until(nodes.step, None)


class Importer:
    """A worker that imports what its program says."""

    def __init__(self, counters: Any, name: str) -> None:
        self.counters, self.name = counters, name

    def step(self) -> bool:
        found = callables.find(self.name)
        self.counters.add("env_steps", found is not None)
        return found is not None


@pytest.mark.parametrize("allowed", [True, False])
def test_processes_import_what_their_starter_may_import(allowed: bool) -> None:
    program = Program()
    program.add("importer", Importer, program.add("counters", Counters, ROWS), "os:getcwd")

    def scenario(nodes: Any) -> Iterator[None]:
        yield from wait(lambda: nodes.count(NAMES[0]) > 0, 20, "it imports")

    with callables.only({"os:getcwd"} if allowed else set()):
        if allowed:
            return play(Local(), program, scenario)
        with pytest.raises(UserError, match="'os:getcwd' is code, and importing it was not allowed here"):
            play(Local(), program, scenario)
