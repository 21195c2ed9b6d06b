"""Actors over gRPC: each message arrives once and in order, whoever is killed or cut off; and nobody else gets in.

Run as a script, this file is the gate, or the process that answers questions, so that both can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import random
import secrets
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import veldt
from veldt.counters import NAMES, Counters
from veldt.errors import UserError
from veldt.records.tree import Tree
from veldt.runtime.grpc import wire
from veldt.runtime.grpc.connection import SILENCE_S, Door, LinkLost, grpc, read_token  # gRPC as both ends have it
from veldt.runtime.grpc.gate import Gate
from veldt.runtime.grpc.link import Link
from veldt.runtime.grpc.seats import RECORD, Lane, Seat
from veldt.runtime.grpc.wire import frame
from veldt.runtime.local.board import ROW, Board, SharedRows
from veldt.runtime.shm.memory import EventBell, Format, Latest, SharedMemory, make_shared_memory
from veldt.runtime.shm.ring import Reader, Writer

BLOCK = Format([("id", "<i8", (3,)), ("rows/x", "<f4", (50,)), ("first", "|b1", (4,))])
SEATS = 3  # most of them; the gate has the first row of the board after the supervisor's, the answering process the next


class Shared:
    """All that the processes of one run share, by descriptors that are handed down."""

    def __init__(self, fds: list[int], size: int = 400, seats: int = 1) -> None:
        self.fds, self.size, self.count = fds, size, seats
        self.board = Board(fds[0])
        self.records = SharedMemory(fds[1])
        self.gate_bell = EventBell(self.board.memory, ROW, fds[2])
        self.latest = Latest(fds[3])
        self.counts = SharedRows(fds[4], self.board, 0)

    @classmethod
    def make(cls, size: int = 400, seats: int = 1) -> Shared:
        fds = [make_shared_memory("veldt test") for _ in range(2)] + [EventBell.make()]
        fds += [make_shared_memory("veldt test") for _ in range(2 + 3 * seats)]
        SharedMemory(fds[0], ROW * (3 + seats))
        SharedMemory(fds[1], 4096)
        return cls(fds, size, seats)

    @property
    def question(self) -> Format:
        return Format([("@port", "<i8", (3,)), ("obs", "|u1", (self.size,))])

    def rings(self, seat: int) -> list[int]:
        """store, policy there, policy back"""
        return self.fds[5 + 3 * seat : 8 + 3 * seat]

    def seat(self, index: int, owned: bool) -> Seat:
        store, there, back = self.rings(index)
        bell = self.board.bell(2)
        answers = [Format([("@reply", "<i8", (2,)), ("obs", "|u1", (self.size,))])]
        lanes = [
            Lane("store", 0, Writer(store, bell, budget=4 * 320, max_slots=8), [BLOCK]),  # has room for 4
            Lane("policy", 1, Writer(there, bell, max_slots=8), [self.question], Reader(back), answers),
        ]
        record = self.records.words(index * 256, RECORD)
        rows = SharedRows(self.fds[4], self.board, 3 + index)
        name = f"actor/{index}"
        assignment = {"build": name}
        return Seat(name, lanes, {"params": self.latest}, record, rows.table, rows.row, assignment, owned)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def gate(options: dict[str, Any]) -> None:
    shared = Shared(options["fds"], options["size"], options["seats"])
    token = read_token(options["token"]) if options["token"] else ""
    doors = [Door(d["address"], *(Path(path).read_bytes() for path in d.get("tls", ()))) for d in options["doors"]]
    seats = [shared.seat(i, options["owned"]) for i in range(options["seats"])]
    times = {name: options[name] for name in ("reconnect", "silence", "handshake") if name in options}
    here = Gate(seats, doors, shared.board, shared.gate_bell, token, **times)
    here.start()
    print(json.dumps(here.addresses), flush=True)
    while not shared.board.quit:
        here.step()
        if select.select([0], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            print(json.dumps([here.metrics(), here.take_reports(), here.connected]), flush=True)
    here.close()


def answer(options: dict[str, Any]) -> None:
    """Answers every question with what was asked, as a policy's host does."""
    shared = Shared(options["fds"], options["size"], options["seats"])
    bell = shared.board.bell(2)
    rings = [shared.rings(i) for i in range(options["seats"])]
    calls = [(Reader(there), Writer(back, shared.gate_bell)) for _, there, back in rings]  # type: ignore[arg-type]
    print("up", flush=True)
    idle = 0
    parent = os.getppid()
    while not shared.board.quit and os.getppid() == parent:
        rung, idle = bell.rung(), idle + 1
        for there, back in calls:
            message = there.peek()
            if message is not None and back.put({"@reply": message["@port"][1:], "obs": message["obs"]}):
                there.pop()
                idle = 0
        if idle > 30:
            bell.wait(rung)


class Proxy:
    """Stands between actor and gate: delays, cuts, loses, or swallows what passes, as ordered over stdin."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.at, self.to = options["at"], options["to"]
        self.delay = self.loss = 0.0
        self.hole = False
        self.random = random.Random(options["seed"])
        self.open: set[asyncio.StreamWriter] = set()

    async def live(self) -> None:
        server = await asyncio.start_unix_server(self.connected, self.at)
        stdin = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        print("up", flush=True)
        while line := await stdin.readline():
            options = json.loads(line)
            self.delay, self.loss, self.hole = (
                options.get("delay", 0.0),
                options.get("loss", 0.0),
                options.get("hole", False),
            )
            if options.get("cut"):
                for writer in list(self.open):
                    writer.transport.abort()
            print("done", flush=True)
        server.close()
        os._exit(0)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(self.to)
        except OSError:
            writer.transport.abort()
            return
        pumps = [self.pump(reader, back, writer), self.pump(there, writer, back)]
        await asyncio.gather(*pumps, return_exceptions=True)

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, other: asyncio.StreamWriter) -> None:
        """Each chunk leaves `delay` after it came, or later: never before those that came before it."""
        self.open.add(sink)
        loop, swallowed, due = asyncio.get_running_loop(), False, 0.0
        try:
            while chunk := await source.read(1 << 16):
                swallowed |= self.hole  # a stream with a hole in it is never whole again
                if swallowed:
                    continue
                if self.random.random() < self.loss:
                    break
                due = max(due, loop.time() + self.delay)
                if due > loop.time():
                    loop.call_at(due, self.send, sink, chunk)
                else:
                    sink.write(chunk)
                    await sink.drain()
        finally:
            self.open.discard(sink)
            if not swallowed:
                sink.transport.abort()
                other.transport.abort()

    def send(self, sink: asyncio.StreamWriter, chunk: bytes) -> None:
        if not sink.transport.is_closing():
            sink.write(chunk)


def proxy(options: dict[str, Any]) -> None:
    asyncio.run(Proxy(options).live())


class Process:
    """This file as a process of its own."""

    def __init__(self, mode: str, options: dict[str, Any], fds: list[int], log: Path) -> None:
        command = [sys.executable, "-W", "error", __file__, mode, json.dumps(options)]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, pass_fds=fds, text=True
            )
        self.log = log
        self.first = self.line()

    def line(self, seconds: float = 20.0) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(self.log.read_text())
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return line

    def ask(self, options: Any = None) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(options) + "\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self, seconds: float = 10.0) -> int:
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):
                file.close()
        return self.process.wait(seconds)


class World:
    """A run that consists of a gate, a process that answers, and this one, which reads what the store is sent."""

    def __init__(self, folder: Path, seats: int = 1, size: int = 400, **options: Any) -> None:
        self.folder, self.seats, self.shared = folder, seats, Shared.make(size, seats)
        self.address = f"unix:{folder}/run/gate.sock"
        self.options = {"fds": self.shared.fds, "size": size, "seats": seats, "token": "", "owned": True, "reconnect": 30.0}
        self.options |= {"doors": [{"address": self.address}]} | options
        self.board = self.shared.board
        self.stores = [Reader(self.shared.rings(i)[0], self.shared.gate_bell) for i in range(seats)]
        self.links: list[Link] = []
        self.processes: list[Process] = []
        self.gate: Process
        self.start_gate()

    def start(self, mode: str, **options: Any) -> Process:
        self.processes.append(Process(mode, self.options | options, self.shared.fds, self.folder / f"{mode}.log"))
        return self.processes[-1]

    def start_gate(self) -> None:
        self.gate = self.start("gate")
        self.addresses = json.loads(self.gate.first)

    def kill_gate(self) -> None:
        self.processes.remove(self.gate)
        self.gate.kill()

    def link(self, address: str = "", seat: str = "actor/0", **kwargs: Any) -> Link:
        self.links.append(Link(address or self.address, seat=seat, **kwargs))
        return self.links[-1]

    def ask(self) -> tuple[dict[str, float], dict[str, dict[str, float]], list[str]]:
        metrics, reports, connected = json.loads(self.gate.ask())
        return metrics, reports, connected

    def count(self, seat: int, name: str = "env_steps") -> int:
        return int(self.shared.counts.table[3 + seat, NAMES.index(name)])

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.board.quit = True
        try:
            codes = [process.close() for process in self.processes]
        finally:
            for process in self.processes:
                process.process.kill()
            self.shared.close()
        assert codes == [0] * len(codes), self.log()
        assert not (self.folder / "run" / "gate.sock").exists()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(**options: Any) -> World:
        worlds.append(World(tmp_path, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


def until(true: Callable[[], Any], link: Link | None = None, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it takes too long"
        if link is None:
            time.sleep(0.005)
        else:
            link.wait(0.01)


def block(n: int) -> Tree:
    return {"id": np.array([7, 0, n]), "rows/x": np.full(50, n, np.float32), "first": np.array([n & 1, 0, 1, 1], bool)}


def question(n: int, size: int = 400) -> Tree:
    return {"@port": np.array([1, 2, n]), "obs": np.full(size, n % 251, np.uint8)}


def number_of(message: Tree) -> int:
    """Of a block that came; its content is that of its number."""
    n = int(message["id"][2])
    for name, x in block(n).items():
        np.testing.assert_array_equal(message[name], x)
    return n


def answer_to(message: Tree) -> int:
    n = int(message["@reply"][1])
    assert (message["obs"] == n % 251).all(), n
    return n


class Traffic:
    """Numbered messages both ways, for as long as it is pumped."""

    def __init__(self, world: World, link: Link, seat: int = 0) -> None:
        self.link, self.store, session = link, world.stores[seat], link.session
        self.out, self.calls = session.mailboxes["store"], session.mailboxes["policy"]
        self.sent = self.asked = 0
        self.blocks: list[int] = []
        self.answers: list[int] = []

    def pump(self, most: float = float("inf")) -> None:
        if self.sent < most and self.out.put(block(self.sent)):
            self.sent += 1
        if self.asked < most and self.calls.put(question(self.asked)):
            self.asked += 1
        self.link.session.rows.mine[0] = self.sent
        self.link.wait(0.002)
        while (message := self.store.peek()) is not None:
            self.blocks.append(number_of(message))
            self.store.pop()
        while (message := self.calls.peek()) is not None:
            self.answers.append(answer_to(message))
            self.calls.pop()

    def check(self) -> None:
        """All that was sent arrives, once and in order."""
        deadline = time.monotonic() + 20.0
        while len(self.blocks) < self.sent or len(self.answers) < self.asked:
            assert time.monotonic() < deadline, (self.sent, len(self.blocks), self.asked, len(self.answers))
            self.pump(0)
        self.pump(0)
        assert self.blocks == list(range(self.sent))
        assert self.answers == list(range(self.asked))


# How it works.


def test_an_actor_is_told_what_to_build_and_reaches_the_nodes_of_the_run(make: Callable[..., World]) -> None:
    world = make()
    world.start("answer")
    link = world.link()
    link.connect()
    assert link.session.seats[0].assignment == {"build": "actor/0"}
    assert (link.session.seat, link.session.incarnation, link.reconnects) == ("actor/0", 1, 0)
    traffic = Traffic(world, link)
    while traffic.sent < 50:
        traffic.pump(50)
    traffic.check()
    assert link.session.mailboxes["store"].written == 50
    metrics, _, connected = world.ask()
    assert connected == ["actor/0"] and metrics["gate_actors"] == 1 and metrics["gate_refused"] == 0
    assert metrics["gate_frames_in"] >= 1 + traffic.sent + traffic.asked, "a hello, and a frame for each message"
    assert metrics["gate_bytes_in"] > 448 * traffic.sent and metrics["gate_bytes_out"] > 400 * traffic.asked


def test_compressed_messages_arrive(make: Callable[..., World]) -> None:
    pytest.importorskip("lz4")
    world = make(size=20_000)
    world.start("answer")
    link = world.link(compress=True)
    link.connect()
    calls = link.session.mailboxes["policy"]
    rng = np.random.default_rng(0)
    for i in range(10):
        obs = rng.integers(0, 256, 20_000).astype(np.uint8) if i % 2 else np.full(20_000, i, np.uint8)
        assert calls.put({"@port": np.array([0, 0, i]), "obs": obs})
        until(calls.peek, link)
        answer = calls.peek()
        assert answer is not None and not answer["obs"].flags.writeable
        np.testing.assert_array_equal(answer["obs"], obs)
        calls.pop()
    assert world.ask()[0]["gate_bytes_in"] < 6 * 20_000


def test_values_come_whole_and_only_when_they_are_new(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    latest = link.session.cells["params"]
    assert latest.read(-1) is None
    rng = np.random.default_rng(0)
    values = [rng.normal(size=900_001).astype(np.float32) for _ in range(3)]  # 3.6 MB
    have = -1
    for version, value in zip((3, 4, 9), values, strict=True):
        world.shared.latest.write(version, {"vector": value})
        until(lambda have=have: latest.read(have), link)
        found = latest.read(have)
        assert found is not None and found[0] == version
        np.testing.assert_array_equal(found[1]["vector"], value)
        have = version
        assert latest.read(have) is None
    before = world.ask()[0]["gate_bytes_out"]
    for _ in range(20):
        assert latest.read(have) is None
        link.wait(0.01)
    assert world.ask()[0]["gate_bytes_out"] - before < 10_000


def test_orders_and_counts_of_the_run_are_known_to_the_actor(make: Callable[..., World]) -> None:
    world = make()
    world.shared.counts.row[0] = 1000
    link = world.link()
    link.connect()
    counters = Counters(link.session.rows)
    assert counters.get("env_steps") == 1000
    counters.add("env_steps", 5)
    assert counters.get("env_steps") == 1005
    until(lambda: world.count(0) == 5, link)
    until(lambda: link.session.rows.counted[0] == 5, link)
    assert counters.get("env_steps") == 1005
    world.shared.counts.row[0] = 2000
    until(lambda: counters.get("env_steps") == 2005, link)
    counters.add("env_steps", 95)
    assert counters.state()["counts"]["env_steps"] == 2100
    until(lambda: world.count(0) == 100, link)
    link.session.report({"episode_return": 3.5, "bad": float("nan")})
    reports: dict[str, Any] = {}
    deadline = time.monotonic() + 5.0
    while "actor/0" not in reports and time.monotonic() < deadline:
        link.wait(0.02)
        reports |= {name: x for name, x in world.ask()[1].items() if x}
    assert reports == {"actor/0": {"episode_return": 3.5}}
    for name in ("hold", "stopping"):
        setattr(world.board, name, True)
        until(lambda name=name: getattr(link.session, name), link, 2.0)
        setattr(world.board, name, False)
        until(lambda name=name: not getattr(link.session, name), link, 2.0)
    assert not counters.stopping and not link.session.quit
    world.board.quit = True
    until(lambda: link.session.quit, link, 2.0)


def test_a_full_ring_stops_the_actor_and_loses_nothing(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    out, sent = link.session.mailboxes["store"], 0
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        sent += out.put(block(sent))
        link.wait(0.001)
    assert sent == 12  # 4 in the ring, and a window of 8
    assert world.ask()[0]["gate_pending"] == 8
    assert link.session.rows is not None and link.connected
    traffic = Traffic(world, link)
    traffic.sent = sent
    while traffic.sent < 40:
        traffic.pump(40)
    traffic.asked = 0
    until(lambda: len(traffic.blocks) == 40 or traffic.pump(0), None)
    assert traffic.blocks == list(range(40))


def test_an_actor_that_leaves_has_brought_all_it_put(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    for n in range(4):
        assert link.session.mailboxes["store"].put(block(n))
    link.session.rows.add(0, 3)
    link.close()
    assert world.stores[0].waiting == 4
    until(lambda: world.count(0) == 3 and world.ask()[2] == [])
    assert not any(world.shared.records.words(0, 2))  # the seat is nobody's


def block_frame(n: int, number: int | None = None) -> bytes:
    fill = bytes(BLOCK.nbytes - sum(x.nbytes for x in block(n).values()))
    return frame(wire.DATA, *block(n).values(), fill, number=n if number is None else number)


def test_a_message_that_comes_again_is_dropped_and_a_gap_is_refused(make: Callable[..., World]) -> None:
    world = make()
    frames = [hello("actor/0"), *(block_frame(n) for n in (0, 0, 1, 0, 1, 2))]
    assert say(world.address, frames) == grpc.StatusCode.OK
    assert say(world.address, [hello("actor/0"), block_frame(3, number=4)]) == grpc.StatusCode.INVALID_ARGUMENT
    assert [number_of(world.stores[0].peek(i) or {}) for i in range(world.stores[0].waiting)] == [0, 1, 2]


def test_what_waits_for_room_goes_before_what_comes_later() -> None:
    shared = Shared.make()
    lane, reader = shared.seat(0, True).lanes[0], Reader(shared.rings(0)[0])
    for n in range(6):
        assert lane.take(wire.parse(block_frame(n))) is not None
    assert reader.waiting == 4 and len(lane.pending) == 2
    reader.pop()
    assert lane.take(wire.parse(block_frame(6))) is not None and lane.push()
    came = [0]
    while (message := reader.peek()) is not None:
        came.append(number_of(message))
        reader.pop()
        lane.push()
    assert came == list(range(7))
    for n in range(7, 7 + 4 + 8):
        assert lane.take(wire.parse(block_frame(n))) is not None
    with pytest.raises(wire.Refused, match="more messages than the window allows"):
        lane.take(wire.parse(block_frame(7 + 4 + 8)))
    shared.close()


def test_what_cannot_be_sent_is_an_error_of_the_actor(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    link.session.rows.add(0, np.int64(3))  # type: ignore[arg-type]
    until(lambda: world.count(0) == 3, link)
    link.session.rows.mine[0] = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not JSON serializable"):
        until(lambda: link.step() and False)
    with pytest.raises(TypeError, match="not JSON serializable"):
        link.wait(1.0)


def test_a_step_is_cheap(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    taken = []
    for _ in range(2000):
        began = time.perf_counter()
        link.step()
        taken.append(time.perf_counter() - began)
    assert sorted(taken)[1000] < 100e-6, sorted(taken)[1000]


# Seats.


def test_the_newest_life_of_a_process_takes_its_seat(make: Callable[..., World]) -> None:
    world = make()
    first, second = world.link(), world.link()
    first.connect()
    first.session.rows.add(0, 5)
    until(lambda: world.count(0) == 5, first)
    second.connect()
    assert second.session.incarnation == 2
    with pytest.raises(LinkLost, match="another actor has taken the seat"):
        until(lambda: False, first)
    second.session.rows.add(0, 7)
    until(lambda: world.count(0) == 12, second)


def test_a_free_seat_is_given_and_kept_for_an_actor_that_fell_away(make: Callable[..., World]) -> None:
    world = make(seats=2, owned=False, reconnect=0.6)
    first, second = world.link(seat=""), world.link(seat="")
    first.connect()
    second.connect()
    assert {first.session.seat, second.session.seat} == {"actor/0", "actor/1"}
    for seat in ("", "actor/1"):
        with pytest.raises(LinkLost, match="free; the run has 2"):
            world.link(seat=seat, patience=0.2).connect()
    second.close()  # gives up its seat
    third = world.link(seat="", patience=2.0)
    third.connect()
    assert (third.session.seat, third.session.incarnation) == ("actor/1", 2)
    # An actor that is killed does not give up its seat, which is free after a while.
    third._closing = True
    began = time.monotonic()
    assert third._main is not None
    third._main.cancel()
    fourth = world.link(seat="", patience=10.0)
    with contextlib.suppress(asyncio.CancelledError):
        third._loop.run_until_complete(third._main)
    third.connected = False  # nor does it give it up later
    until(lambda: world.ask()[2] == ["actor/0"], first)
    assert fourth.connect()["seats"][0]["incarnation"] == 3
    assert time.monotonic() - began > 0.5


def test_a_seat_is_free_as_soon_as_its_actor_has_left(make: Callable[..., World]) -> None:
    """Its goodbye has come, whatever happens to the stream after it: nobody waits until it is given up."""
    world = make(owned=False)
    for life in range(1, 16):
        link = world.link(seat="", patience=3.0)
        assert link.connect()["seats"][0]["incarnation"] == life
        link.close()


def test_a_named_seat_that_is_not_there_is_refused(make: Callable[..., World]) -> None:
    world = make()
    with pytest.raises(LinkLost, match="'actor/9' is not free"):
        world.link(seat="actor/9", patience=0.3).connect()


@pytest.mark.parametrize(("module", "name"), [("veldt", "__version__"), ("veldt.runtime.grpc.wire", "PROTOCOL")])
def test_another_version_is_refused(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    world = make()
    monkeypatch.setattr(f"{module}.{name}", "99.0")
    with pytest.raises(UserError, match="install the same on both"):
        world.link().connect()


def test_an_actor_with_other_columns_is_told_so(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    with pytest.raises(UserError, match=r"'rows/x': the run expects <f4 \(50,\), and this actor has <f4 \(51,\)"):
        link.session.mailboxes["store"].put(block(0) | {"rows/x": np.zeros(51, np.float32)})


def test_numbers_that_are_not_finite_end_the_stream_of_who_sends_them(make: Callable[..., World]) -> None:
    world = make()
    link = world.link()
    link.connect()
    link.session.mailboxes["store"].put(block(0) | {"rows/x": np.full(50, np.nan, np.float32)})
    with pytest.raises(LinkLost, match="'rows/x' has values that are not finite"):
        until(lambda: False, link)
    assert world.stores[0].waiting == 0


def test_patience_ends(tmp_path: Path) -> None:
    link = Link(f"unix:{tmp_path}/none.sock", patience=0.5)
    with pytest.raises(LinkLost, match="could not be reached for"):
        link.connect()
    link.close()


# Faults.


def kills(make: Callable[..., World], count: int, seed: int) -> None:
    rng = random.Random(seed)
    world = make()
    world.start("answer")
    link = world.link()
    link.connect()
    traffic = Traffic(world, link)
    for _ in range(count):
        moment = time.monotonic() + rng.uniform(0.0, 0.2)
        while time.monotonic() < moment:
            traffic.pump()
        world.kill_gate()
        moment = time.monotonic() + rng.uniform(0.0, 0.1)
        while time.monotonic() < moment:
            traffic.pump()
        began, before = time.monotonic(), len(traffic.answers)
        world.start_gate()
        until(lambda before=before: traffic.pump() or len(traffic.answers) > before + 8, None, 10.0)
        assert time.monotonic() - began < 6.0
    traffic.check()
    assert link.reconnects >= count and link.session.incarnation == 1
    until(lambda: world.count(0) == traffic.sent, link)
    assert world.count(0) == traffic.sent  # nothing was counted twice


def test_a_gate_may_be_killed_at_any_moment(make: Callable[..., World]) -> None:
    kills(make, 2, seed=0)


@pytest.mark.long
def test_a_gate_may_be_killed_many_times(make: Callable[..., World]) -> None:
    kills(make, 60, seed=1)


def through_proxy(
    make: Callable[..., World], seed: int = 0, silence: float = SILENCE_S
) -> tuple[World, Process, Link, Traffic]:
    world = make(silence=silence)
    world.start("answer")
    at = f"{world.folder}/run/proxy.sock"
    proxy = world.start("proxy", at=at, to=world.address.removeprefix("unix:"), seed=seed)
    link = world.link(f"unix:{at}", silence=silence)
    link.connect()
    return world, proxy, link, Traffic(world, link)


def pump_for(traffic: Traffic, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        traffic.pump()


def heal(proxy: Process, traffic: Traffic) -> float:
    """Seconds until messages arrive again."""
    proxy.ask({})
    began, blocks, answers = time.monotonic(), len(traffic.blocks), len(traffic.answers)
    until(lambda: traffic.pump() or (len(traffic.blocks) > blocks + 8 and len(traffic.answers) > answers + 8), None)
    return time.monotonic() - began


@pytest.mark.parametrize("count", [4, pytest.param(300, marks=pytest.mark.long)])
def test_a_stream_may_be_cut_at_any_moment(make: Callable[..., World], count: int) -> None:
    world, proxy, link, traffic = through_proxy(make)
    rng = random.Random(count)
    for _ in range(count):
        pump_for(traffic, rng.uniform(0.0, 0.3))
        proxy.ask({"cut": True})
    assert heal(proxy, traffic) < 5.0
    traffic.check()
    assert link.reconnects > count / 4
    until(lambda: world.count(0) == traffic.sent, link)


@pytest.mark.parametrize("seconds", [0.5, pytest.param(60.0, marks=pytest.mark.long)])
def test_lost_chunks_and_delay(make: Callable[..., World], seconds: float) -> None:
    _, proxy, link, traffic = through_proxy(make)
    proxy.ask({"loss": 0.05})
    pump_for(traffic, seconds)
    assert heal(proxy, traffic) < 5.0
    assert link.reconnects > 0
    before = link.reconnects
    proxy.ask({"delay": 0.5})
    sent = traffic.sent
    pump_for(traffic, seconds)
    assert traffic.sent > sent and link.reconnects == before  # half a second is no reason to give up
    proxy.ask({"loss": 0.05, "delay": 0.1})
    pump_for(traffic, seconds)
    assert heal(proxy, traffic) < 5.0
    traffic.check()


def test_a_black_hole_is_noticed_and_left(make: Callable[..., World]) -> None:
    world, proxy, link, traffic = through_proxy(make, silence=1.0)
    pump_for(traffic, 0.2)
    proxy.ask({"hole": True})
    pump_for(traffic, 1.5)
    assert not link.connected and world.ask()[2] == []  # both sides gave up
    assert heal(proxy, traffic) < 5.0
    traffic.check()
    assert link.session.incarnation == 1


def test_an_actor_that_was_busy_for_long_loses_nothing(make: Callable[..., World]) -> None:
    world = make(silence=1.0)
    world.start("answer")
    link = world.link(silence=1.0)
    link.connect()
    traffic = Traffic(world, link)
    pump_for(traffic, 0.1)
    time.sleep(1.2)
    pump_for(traffic, 0.1)
    traffic.check()


# Who gets in, and what malformed bytes do.


def rss(process: Process) -> int:
    return int(psutil.Process(process.process.pid).memory_info().rss)


def raw(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5.0)
    connection.connect(address.removeprefix("unix:"))
    return connection


def say(address: str, frames: list[bytes], token: str = "", seconds: float = 5.0) -> grpc.StatusCode:
    """Sends frames over a stream of its own, and returns how it ended."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        metadata = [("authorization", token)] if token else []
        call = channel.stream_stream("/veldt/actor")(iter(frames), timeout=seconds, metadata=metadata)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        code: grpc.StatusCode = call.code()
        return code


def hello(seat: str = "actor/1") -> bytes:
    content = {"protocol": wire.PROTOCOL, "veldt": veldt.__version__, "session": secrets.token_hex(16), "seat": seat}
    return frame(wire.HELLO, json.dumps(content).encode())


def mutated(rng: random.Random) -> bytes:
    """A frame that is valid but for a few changes."""
    kind = rng.choice([wire.DATA] * 4 + list(wire.KINDS))
    tree = block(0) if rng.random() < 0.5 else question(0)
    payload = b"".join(x.tobytes() for x in tree.values()) if rng.random() < 0.7 else rng.randbytes(rng.randrange(300))
    if kind in (wire.REPORT, wire.HELLO):
        content = {
            "counts": [rng.choice([0, -1, 1 << 63, "x", None]) for _ in range(5)],
            "metrics": {"a": rng.choice([1, "x", {}])},
        }
        payload = json.dumps(content).encode()
    data = bytearray(
        frame(
            kind,
            payload,
            channel=rng.choice([0, 0, 1, 1, 2, 255]),
            format_=rng.choice([0, 0, 1, 255]),
            flags=rng.choice([0, 0, 0, 1, 2]),
            number=rng.choice([0, 0, 0, 1, 5, -1]),
            ack=rng.choice([0, 0, 1, -1]),
        )
    )
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))]
    return bytes(data)


def attack(options: dict[str, Any]) -> None:
    """All that somebody without manners may do to the gate."""
    address, rng = options["doors"][0]["address"], random.Random(0)
    print("up", flush=True)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    slow = [raw(address) for _ in range(options["slow"])]  # some half open, some that send a byte now and then
    codes: dict[str, int] = {}
    for i in range(options["noise"] // 10_000):
        with contextlib.suppress(OSError), raw(address) as connection:
            connection.sendall((preface if i % 2 else b"") + rng.randbytes(10_000))
            connection.recv(100)
    for i in range(options["frames"]):
        if i % 20 == 0:
            for k, connection in enumerate(slow[::2]):
                with contextlib.suppress(OSError):
                    connection.send(preface[i // 20 % len(preface) :][:1] if k else b"x")
        code = say(address, ([] if rng.random() < 0.1 else [hello()]) + [mutated(rng) for _ in range(rng.randrange(1, 4))])
        codes[code.name] = codes.get(code.name, 0) + 1
    for size in (1 << 18, 1 << 22, 1 << 25):
        code = say(address, [hello(), frame(wire.DATA, bytes(size))])
        codes[code.name] = codes.get(code.name, 0) + 1
    for connection in slow:
        connection.close()
    print(json.dumps(codes), flush=True)


def attacked(make: Callable[..., World], noise: int, frames: int, slow: int) -> None:
    world = make(seats=2)
    world.start("answer")
    link = world.link()
    link.connect()
    traffic = Traffic(world, link)
    pump_for(traffic, 0.5)
    say(world.address, [hello(), b"nonsense"])  # what is allocated once is there before it is measured
    before, pid = rss(world.gate), world.gate.process.pid
    attacker = world.start("attack", noise=noise, frames=frames, slow=slow)
    taken: list[float] = []
    assert attacker.process.stdout is not None
    while not select.select([attacker.process.stdout], [], [], 0)[0]:
        answers, began = len(traffic.answers), time.perf_counter()
        until(lambda answers=answers: traffic.pump() or len(traffic.answers) > answers, None)
        taken.append(time.perf_counter() - began)
    codes = json.loads(attacker.line())
    traffic.check()
    grown = rss(world.gate) - before
    metrics = world.ask()[0]
    p50, p99 = np.percentile(taken, [50, 99])
    print(f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, {grown / 1e6:.1f} MB", codes)
    assert world.gate.process.poll() is None and world.gate.process.pid == pid
    assert link.reconnects == 0, "others were reached"
    assert grown < 20e6, grown
    assert codes["INVALID_ARGUMENT"] > frames / 2
    assert codes.get("RESOURCE_EXHAUSTED", 0) >= 3, codes
    assert metrics["gate_refused"] >= codes["INVALID_ARGUMENT"]
    assert p99 < 1.0
    assert world.shared.counts.table[4, 0] in range(-1, 2)
    assert world.gate.log.read_text().count("\n") < 20, world.log()


def test_malformed_bytes_reach_nobody(make: Callable[..., World]) -> None:
    attacked(make, noise=100_000, frames=100, slow=40)


@pytest.mark.long
def test_many_malformed_bytes_reach_nobody(make: Callable[..., World]) -> None:
    attacked(make, noise=1_000_000, frames=10_000, slow=100)


def test_a_stream_without_hello_is_closed(make: Callable[..., World]) -> None:
    world = make(handshake=0.5)
    stop = threading.Event()

    def silence() -> Iterator[bytes]:
        stop.wait(20.0)
        yield from ()

    with grpc.insecure_channel(world.address) as channel:
        call = channel.stream_stream("/veldt/actor")(silence(), timeout=15.0)
        began = time.monotonic()
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert call.details() == "no hello" and 0.4 < time.monotonic() - began < 3.0
        stop.set()


class Canary:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_nothing_is_ever_unpickled(make: Callable[..., World], tmp_path: Path) -> None:
    world, marker = make(seats=2), tmp_path / "marker"
    poison = pickle.dumps(Canary(marker))
    for kind in wire.KINDS:
        for greeting in ([], [hello()]):
            bad = frame(kind, poison)
            assert say(world.address, [*greeting, bad, bad], seconds=2.0) != grpc.StatusCode.DEADLINE_EXCEEDED
    with raw(world.address) as connection:
        connection.sendall(poison)
    link = world.link()
    link.connect()  # the gate is as it was
    assert not marker.exists()
    pickle.loads(poison)
    until(marker.exists)  # and the canary is a good one


TOKEN = "a-token-of-some-length-0123456789"


@pytest.fixture(scope="module")
def secrets_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, and a token."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("secrets")
    for name in ("run", "other"):
        command = (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {name}.key -out {name}.crt"
        )
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-days", "2"]
        subprocess.run(command.split() + names, cwd=folder, check=True, capture_output=True, timeout=30)
    (folder / "token").touch(0o600)
    (folder / "token").write_text(TOKEN + "\n")
    return folder


def test_only_who_has_the_token_and_the_certificate_gets_in(make: Callable[..., World], secrets_of: Path) -> None:
    certificate, key = str(secrets_of / "run.crt"), str(secrets_of / "run.key")
    doors = [{"address": "127.0.0.1:0"}, {"address": "127.0.0.1:0", "tls": [certificate, key]}]
    world = make(token=str(secrets_of / "token"), doors=doors, owned=False)
    plain, tls = world.addresses
    ca, other = (secrets_of / "run.crt").read_bytes(), (secrets_of / "other.crt").read_bytes()
    for token in ("", "Bearer", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"bearer {TOKEN}", f"Bearer  {TOKEN}"):
        assert say(plain, [hello("actor/0")], token) == grpc.StatusCode.UNAUTHENTICATED, token
    for address, kwargs in ((plain, {}), (tls, {"ca": ca})):
        with pytest.raises(UserError, match="token is wrong or missing"):
            world.link(address, token="x" * 32, **kwargs).connect()
    for address, kwargs in ((tls, {"ca": other}), (tls, {}), (plain, {"ca": ca})):
        with pytest.raises(LinkLost, match="could not be reached"):
            world.link(address, token=TOKEN, patience=0.3, **kwargs).connect()
    assert world.ask()[0]["gate_frames_in"] == 0  # not one of their frames was read
    world.start("answer")
    for address, kwargs in ((plain, {}), (tls, {"ca": ca})):
        link = world.link(address, token=TOKEN, **kwargs)
        link.connect()
        calls = link.session.mailboxes["policy"]
        calls.put(question(5))
        until(calls.peek, link)
        link.close()
    shown = world.log()
    assert "handshake" not in shown.lower()  # gRPC itself is quiet
    for process in world.processes:
        shown += Path(f"/proc/{process.process.pid}/cmdline").read_text()
        shown += Path(f"/proc/{process.process.pid}/environ").read_text()
    assert TOKEN not in shown


def test_the_seats_of_the_run_are_not_for_those_who_have_the_token(make: Callable[..., World], secrets_of: Path) -> None:
    world = make(token=str(secrets_of / "token"), doors=[{"address": "127.0.0.1:0"}])
    mine = f"Bearer {TOKEN}"
    for seat in ("actor/0", ""):
        assert say(world.addresses[0], [hello(seat)], mine) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert world.ask()[2] == [] and not any(world.shared.records.words(0, 3)), "it was never claimed"


def test_idle_connections_without_a_token_keep_nobody_out(make: Callable[..., World], secrets_of: Path) -> None:
    world = make(token=str(secrets_of / "token"), doors=[{"address": "127.0.0.1:0"}], owned=False, handshake=4.0)
    host, _, port = world.addresses[0].rpartition(":")
    idle = [socket.create_connection((host, int(port)), 10.0) for _ in range(400)]
    for connection in idle:  # HTTP/2, with empty settings, and then nothing
        with contextlib.suppress(OSError):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    link = world.link(world.addresses[0], token=TOKEN, seat="", patience=3.0)
    link.connect()  # while they are all open
    assert world.ask()[2] == ["actor/0"]
    for connection in idle:
        connection.settimeout(10.0)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass  # the gate ends those that say nothing
        connection.close()


@pytest.mark.parametrize(
    ("door", "token", "says"),
    [
        (Door("0.0.0.0:0"), "", "without a token"),
        (Door("127.0.0.1:0"), "", "without a token"),
        (Door("127.0.0.1:0"), "short", "A token has at least"),
        (Door("0.0.0.0:0"), TOKEN, "without TLS"),
        (Door("[::]:0"), TOKEN, "without TLS"),
        (Door("example.com:80"), TOKEN, "without TLS"),
        (Door("127.0.0.1.example.com:80"), TOKEN, "without TLS"),
        (Door("127.0.0.1:0", certificate=b"x"), TOKEN, "both a certificate and its key"),
        (Door("127.0.0.1"), TOKEN, "is not an address"),
        (Door("unix:relative"), "", "absolute"),
        (Door("unix:/" + "x" * 107), "", "at most 107 bytes"),
    ],
)
def test_a_gate_that_anyone_could_enter_does_not_open(door: Door, token: str, says: str) -> None:
    shared = Shared.make()
    with pytest.raises(UserError, match=says):
        Gate([], [door], shared.board, shared.gate_bell, token)
    shared.close()


@pytest.mark.parametrize(
    ("address", "token", "says"),
    [("10.0.0.1:80", "", "needs a token"), ("10.0.0.1:80", TOKEN, "needs TLS"), ("nowhere", TOKEN, "is not an address")],
)
def test_an_actor_gives_its_token_to_no_stranger(address: str, token: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Link(address, token=token)


def test_the_folder_of_a_socket_is_nobody_elses(tmp_path: Path) -> None:
    shared = Shared.make()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").mkdir(0o700)
    (tmp_path / "file" / "g.sock").write_text("precious")
    for folder, says in (("open", "accessible to you alone"), ("file", "is not a socket")):
        gate = Gate([], [Door(f"unix:{tmp_path}/{folder}/g.sock")], shared.board, shared.gate_bell)
        with pytest.raises(UserError, match=says):
            gate.start()
        gate.loop.close()
    gate = Gate([], [Door(f"unix:{tmp_path}/new/folder/g.sock")], shared.board, shared.gate_bell)
    gate.start()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    gate.close()
    assert (tmp_path / "file" / "g.sock").read_text() == "precious"
    shared.close()


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(UserError, match="cannot be read"):
        read_token(path)
    path.write_text(TOKEN + "\n")
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    (tmp_path / "link").symlink_to(path)
    assert read_token(tmp_path / "link") == TOKEN
    path.write_text("short")
    with pytest.raises(UserError, match="at least 16"):
        read_token(path)
    os.mkfifo(tmp_path / "pipe", 0o600)  # to open it would wait for a writer
    with pytest.raises(UserError, match="not a regular file"):
        read_token(tmp_path / "pipe")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    from chaos import config_of

    from veldt.experiment.prepare import make_gate

    path = tmp_path / "run.key"
    path.write_text("secret")
    path.chmod(0o644)
    config = config_of(recipe="seed-vtrace", **{"gate.listen": "127.0.0.1:0"})
    config = dataclasses.replace(config, gate=dataclasses.replace(config.gate, certificate=str(path), key=str(path)))
    with pytest.raises(UserError, match="can be read by others; run: chmod 600"):
        make_gate(config, TOKEN)
    path.chmod(0o600)
    assert make_gate(config, TOKEN).key == b"secret"


def test_neither_torch_nor_numba_is_loaded() -> None:
    code = "import sys, veldt.runtime.grpc.link; print(*{'torch', 'numba'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == ""


if __name__ == "__main__":
    {"gate": gate, "answer": answer, "proxy": proxy, "attack": attack}[sys.argv[1]](json.loads(sys.argv[2]))


@pytest.mark.parametrize("rounds", [5, pytest.param(40, marks=pytest.mark.long)])
def test_the_end_of_a_run_reaches_actors_that_are_sending(tmp_path: Path, rounds: int) -> None:
    """A connection that is closed while the other end still sends takes with it what was not read there."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for i in range(rounds):
        folder = tmp_path / str(i)
        folder.mkdir()
        doors = [{"address": "127.0.0.1:0"}]
        world = World(folder, seats=4, size=300_000, token=str(token), doors=doors, owned=False)
        try:
            world.start("answer")
            links = [world.link(world.addresses[0], f"actor/{k}", token=TOKEN) for k in range(world.seats)]
            for link in links:
                link.connect()
            sent, ends = [0] * len(links), time.monotonic() + 0.2
            while not all(link.session.quit for link in links):
                world.board.quit = time.monotonic() > ends
                assert time.monotonic() < ends + 5.0, [link._why for link in links if not link.session.quit]
                for k, link in enumerate(links):
                    if not link.session.quit:
                        sent[k] += link.session.mailboxes["policy"].put(question(sent[k], 300_000))
                    while link.session.mailboxes["policy"].peek() is not None:
                        link.session.mailboxes["policy"].pop()
                    link.step()
            assert min(sent) > 0
        finally:
            world.close()
