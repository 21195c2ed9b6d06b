"""One process of a program: hosts its nodes, serves them to other processes, and carries out orders of the supervisor."""

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import numpy as np
from setproctitle import setproctitle

from veldt.errors import Diverged, UserError
from veldt.metrics import merge
from veldt.ports import LATEST
from veldt.program import BLOCK_MEMORY, CELL, INCARNATION, ROWS, Given, Node
from veldt.runtime.base import Host
from veldt.runtime.local.board import BUILDING, DOING, ORDERS, PROGRESS, ROW, SERVING, SINCE, WAITING, Board, SharedRows
from veldt.runtime.local.plan import GATE, STREAM_BYTES, Channel, GatePlan, Plan, call_rings, stream_ring
from veldt.runtime.local.zygote import ignore_signals
from veldt.runtime.proxies import CallerEnds, Proxy, makes_calls, outboxes_of
from veldt.runtime.services import CallService, LatestService, ServiceEnds, StreamService
from veldt.runtime.shm.memory import Arena, Bell, EventBell, Latest, read_state, write_state
from veldt.runtime.shm.ring import Reader, Writer
from veldt.seeds import derive

METRICS_S = 0.25  # between two reports
MESSAGE = 1 << 17  # bytes; a longer error message is cut
SPIN = 400  # polls before a process that calls or answers sleeps; after each, other processes may run
CALL_SLOTS = 8

log = logging.getLogger("veldt")


def preload(light: bool) -> None:
    """Imports, in the zygote, what its children need."""
    for module in ("acting.actor",) if light else ("experiment.run", "topologies", "bench"):
        importlib.import_module(f"veldt.{module}")


def run(name: str, order: dict[str, Any], descriptors: dict[str, int], fds: list[int]) -> None:
    """Runs a child of the zygote, from fork to exit. `fds`: the supervisor's socket, and a state to load."""
    setproctitle(f"veldt {name}")
    ignore_signals()
    os.nice(order["nice"])
    connection = socket.socket(fileno=fds[0])
    code = 0
    try:
        Process(name, order, descriptors, connection, fds[1] if len(fds) > 1 else None).loop()
    except BaseException as error:
        code = 1
        _report_error(connection, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report_error(connection: socket.socket, error: BaseException) -> None:
    kinds: dict[type[BaseException], str] = {UserError: "user", Diverged: "diverged"}
    message = {"error": kinds.get(type(error), ""), "text": str(error)[:4_000], "type": type(error).__name__}
    message["traceback"] = traceback.format_exc()[-16_000:]
    connection.settimeout(1.0)
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message, ensure_ascii=False).encode(errors="replace"))


class Process:
    def __init__(
        self, name: str, order: dict[str, Any], descriptors: dict[str, int], connection: socket.socket, state: int | None
    ) -> None:
        self.name, self.connection, self.descriptors = name, connection, descriptors
        connection.setblocking(False)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=descriptors["stacks"], all_threads=True)
        log.setLevel(logging.INFO)
        log.addHandler(ToSupervisor(connection, name))
        self.plan = Plan.load(descriptors["plan"], name)
        self.board = Board(descriptors["board"])
        self.index = self.plan.row(name)
        self.row, self.bell = self.board.row(self.index), self._bell_of(name)
        self.row[DOING], self.row[SINCE] = BUILDING, time.monotonic_ns()
        self.orders_done = order["orders"]
        seed = derive(0, name, order["incarnation"])  # forked processes would otherwise share their random numbers
        np.random.seed(seed % 2**32)
        if name not in self.plan.light:
            import torch

            torch.set_num_threads(max(self.plan.nodes[node].threads for node in self.plan.processes[name]))
            torch.manual_seed(seed)
        self.incarnation = order["incarnation"]
        self.rows: dict[str, SharedRows] = {}  # by node
        self._streams: list[Writer] = []
        gate = self.plan.gate
        self.gate = self._make_gate(gate) if gate is not None and name == GATE else None
        self.link = self._make_link(gate) if gate is not None and name in gate.seats else None
        self.proxies = {channel.node: self._proxy(channel) for channel in self.plan.channels if channel.process == name}
        self.known: dict[str, Any] = dict(self.proxies)  # and nodes that are built here
        self.arrays = {key: Arena(descriptors[f"array {key}"]).zeros(*spec) for key, spec in self.plan.arrays.items()}
        for shared in self.plan.needs(name):
            node = self.plan.nodes[shared]
            self.known[shared] = self._given(node).build(node)
        self.host = Host([self.plan.nodes[node] for node in self.plan.processes[name]], self.known, self._given)
        self.services = [service for node in self.host.objects for service in self._services(node)]
        self.resting = next((worker for _, worker in self.host.workers if hasattr(worker, "rest")), None)
        if self.resting is not None:
            self.resting.wake_by(self.bell)
        self.waited = 0.0
        self.since, self.cpu = time.perf_counter(), time.process_time()
        self.unsent: dict[str, float] = {}
        self._too_long = False  # a report of metrics was dropped
        if state is not None:
            self.host.load_state(read_state(state))
        self._report({"ready": name})

    def loop(self) -> None:
        row, bell, board, host = self.row, self.bell, self.board, self.host
        # With more seats than cores, the gate and the actors need the cores more than a process that spins.
        crowded = len(self.plan.seats) >= len(os.sched_getaffinity(0))
        spin = 0 if crowded or self.link is not None else SPIN
        callers = [service for service in self.services if isinstance(service, CallService)]
        workers = [(i, host.nodes.index(node), worker) for i, (node, worker) in enumerate(host.workers)]
        outboxes = [outbox for proxy in self.proxies.values() for outbox in outboxes_of(proxy)]
        idle = 0
        calling = False  # calls are made or answered here
        reported = 0.0
        gc.freeze()
        while not board.quit:
            rung = bell.rung()
            if row[ORDERS] != self.orders_done:
                self._take_orders()
            worked = False
            turn = began = time.perf_counter()
            if not board.hold:
                for index, place, worker in workers:
                    row[DOING], row[SINCE] = place, time.monotonic_ns()
                    did = worker.step()
                    ended = time.perf_counter()
                    if did:
                        row[PROGRESS] += 1
                        host.busy_s[index] += ended - began
                        worked = True
                    began = ended
            row[DOING], row[SINCE] = SERVING, time.monotonic_ns()
            for service in self.services:
                worked |= service.step()
            for outbox in outboxes:
                if outbox.messages:
                    outbox.drain()
            for writer in self._streams:
                writer.ring()
            if worked and self.link is not None:
                self.link.step()
            now = time.perf_counter()  # after a step that may have been long: its metrics are not left for the next one
            if now - reported > METRICS_S:
                reported = now
                self._report_metrics()
                turn = now  # what came before is in this report
            idle = 0 if worked else idle + 1
            if idle == 1 and not calling:
                calling = any(service.used for service in callers) or any(map(makes_calls, self.proxies.values()))
            if 0 < idle <= spin and calling:
                os.sched_yield()
            elif idle:
                row[DOING] = WAITING
                self._rest(rung)
            if idle and not board.hold:
                self.waited += time.perf_counter() - turn
        for thing in (host, self.link, self.gate):
            if thing is not None:
                thing.close()

    def _rest(self, rung: int) -> None:
        if self.gate is not None:
            self.gate.step(Bell.LONGEST)
        elif self.link is not None:
            self.link.wait(Bell.LONGEST)
        elif self.resting is not None:
            self.resting.rest(Bell.LONGEST)
        else:
            rests = [service.rest for service in self.services if isinstance(service, CallService)]
            self.bell.wait(rung, min(rests, default=math.inf))

    # Arguments of the nodes.

    def _given(self, node: Node) -> Given:
        own: dict[Any, Any] = {INCARNATION: self.incarnation}
        if node.has(BLOCK_MEMORY):
            own[BLOCK_MEMORY] = Arena(self.descriptors[f"arena {node.name}"], self.descriptors[f"blocks {node.name}"])
        if node.has(CELL):
            own[CELL] = self._cell(f"cell {node.name}")
        if node.has(ROWS):
            rows = self.rows[node.name] = SharedRows(self.descriptors[f"rows {node.name}"], self.board, self.index)
            own[ROWS] = rows
        return Given(self.known, self.arrays, {placeholder.what: x for placeholder, x in own.items()})

    def _cell(self, name: str) -> Any:
        return Latest(self.descriptors[name]) if self.link is None else self.link.session.cells[name]

    def _proxy(self, channel: Channel) -> Proxy:
        node, ports = channel.node, self.plan.ports[channel.node]
        cells = {port.name: self._cell(f"cell {node}.{port.name}") for port in ports.values() if port.kind == LATEST}
        ends = self._ends(channel, cells) if self.link is None else self.link.session.ends(node, cells)
        return Proxy(ports, ends, self.plan.constants[node])

    def _ends(self, channel: Channel, cells: dict[str, Any]) -> CallerEnds:
        stream = requests = replies = None
        if stream_ring(channel) in self.descriptors:
            # The node's process is woken once for all messages of a step: each ring may preempt another process.
            stream = self._stream_writer(channel, later=True)
            self._streams.append(stream)
        if call_rings(channel)[1] in self.descriptors:
            requests, replies = self._call_writer(channel), Reader(self.descriptors[call_rings(channel)[1]])
        return CallerEnds(stream, requests, replies, cells)

    def _stream_writer(self, channel: Channel, later: bool = False) -> Writer:
        bell, queue = self._bell_of(self.plan.home(channel.node)), self.plan.queue
        return Writer(self.descriptors[stream_ring(channel)], bell, queue * STREAM_BYTES, queue, later)

    def _call_writer(self, channel: Channel) -> Writer:
        bell = self._bell_of(self.plan.home(channel.node))
        return Writer(self.descriptors[call_rings(channel)[0]], bell, max_slots=CALL_SLOTS)

    def _services(self, node: str) -> list[Any]:
        ports, thing, fds = self.plan.ports.get(node, {}), self.host.objects[node], self.descriptors
        inboxes, ends = [], []
        for caller in self.plan.callers(node):
            bell = self._bell_of(caller)
            stream, (requests, replies) = stream_ring(Channel(caller, node)), call_rings(Channel(caller, node))
            if hasattr(thing, "carry"):  # it has no services: it takes the rings themselves
                there = [Reader(fds[name], bell) if name in fds else None for name in (stream, requests)]
                thing.carry(caller, self.plan.row(caller), *there, Writer(fds[replies], bell) if replies in fds else None)
                continue
            if stream in fds:  # the writer of a full ring is woken when there is room
                inboxes.append(Reader(fds[stream], bell))
            if requests in fds:  # a caller is woken once for several replies: the service rings when all are written
                ends.append(ServiceEnds(Reader(fds[requests]), Writer(fds[replies], bell, later=True)))
        cells = {p.name: Latest(fds[f"cell {node}.{p.name}"]) for p in ports.values() if p.kind == LATEST}
        found: list[Any] = [StreamService(thing, ports, inboxes)] if inboxes else []
        found += [CallService(thing, ports, ends)] if ends else []
        return found + ([LatestService(thing, ports, cells)] if cells else [])

    def _gate_bell(self) -> EventBell:
        return EventBell(self.board.memory, ROW * self.plan.row(GATE), self.descriptors["gate bell"])

    def _bell_of(self, process: str) -> Bell:
        """An actor with a seat at the gate is woken through the gate."""
        if process in self.plan.seats:
            return self._gate_bell()
        row, fd = self.plan.row(process), self.descriptors.get(f"bell {process}")
        return self.board.bell(row) if fd is None else EventBell(self.board.memory, ROW * row, fd)

    def _make_link(self, plan: GatePlan) -> Any:
        from veldt.runtime.grpc.link import Link

        address = plan.gate.listen if plan.gate.own_listen else f"unix:{plan.socket}"
        link = Link(address, plan.own_token, seat=self.name, compress=plan.gate.compress)
        link.connect()
        return link

    def _make_gate(self, plan: GatePlan) -> Any:
        from veldt.runtime.grpc.connection import Door
        from veldt.runtime.grpc.gate import Gate
        from veldt.runtime.grpc.seats import make_seats

        gate, doors = plan.gate, [Door(f"unix:{plan.socket}")]
        if gate.listen:
            doors.append(Door(gate.listen, gate.certificate, gate.key))
        seats = make_seats(self.plan, self.board, self.descriptors, self._stream_writer, self._call_writer)
        made = Gate(seats, doors, self.board, self._gate_bell(), gate.token, plan.own_token)
        made.start()
        for address in made.addresses[1:]:
            log.info("listening on %s", address)
        return made

    # Messages to and from the supervisor, over a private socket.

    def _take_orders(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.connection, MESSAGE, 1)
            except BlockingIOError:
                return
            if not data:
                os._exit(0)
            self.orders_done += 1
            order = json.loads(data)
            answer: dict[str, Any] = {"answer": order["number"]}
            reply_fds: list[int] = []
            if order["do"] == "state":
                began = time.perf_counter()
                reply_fds = [write_state(self.host.state())]
                answer["counts"] = {name: list(rows.row) for name, rows in self.rows.items()}
                answer["result"] = time.perf_counter() - began  # seconds that this process was stopped
            elif order["do"] == "load":
                self.host.load_state(read_state(fds.pop()))
            else:
                answer["result"] = getattr(self.host.objects[order["node"]], order["do"])(*order["args"])
            self._report(answer, reply_fds)
            for fd in reply_fds:
                os.close(fd)

    def _report_metrics(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        served = [service.metrics() for service in self.services if isinstance(service, StreamService)]
        joined = [] if self.gate is None else [self.gate.metrics(), *self.gate.take_reports().values()]
        self.unsent |= merge([self.host.metrics(), *served, *joined], self.host.declarations)
        role = self.plan.nodes[self.name].role if self.name in self.plan.nodes else self.name
        elapsed = now - self.since
        metrics = self.unsent | self.host.busy(elapsed)
        metrics |= {f"wait/{role}": self.waited / elapsed, f"cpu/{role}": (cpu - self.cpu) / elapsed}
        if self._report({"metrics": metrics, "seconds": elapsed}):
            self.since, self.cpu, self.waited, self.unsent = now, cpu, 0.0, {}
            self.host.reset_busy()

    def _report(self, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        """False: the supervisor's socket is full, and metrics are not sent; other messages wait for room."""
        data = json.dumps(message).encode()
        if "metrics" in message and len(data) > MESSAGE:  # the supervisor would read a part of it
            if not self._too_long:
                log.warning("it reports more metrics than fit in %d bytes; such reports are dropped", MESSAGE)
            self._too_long = True
            return True
        try:
            socket.send_fds(self.connection, [data], fds or [])
        except BlockingIOError:
            if "metrics" in message:
                return False
            self.connection.settimeout(10.0)
            socket.send_fds(self.connection, [data], fds or [])
            self.connection.setblocking(False)
        return True


class ToSupervisor(logging.Handler):
    """Sends log records to the supervisor, which logs them with the name of the process."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        super().__init__()
        self.connection, self.process = connection, name

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self.process}: {record.getMessage()}"
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps({"log": record.levelno, "text": text[:8000]}).encode())
