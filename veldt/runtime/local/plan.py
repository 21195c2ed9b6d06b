"""The plan of a program: which nodes share a process, which processes can reach which nodes, and what they share.

The supervisor pickles it to shared memory that only its own children inherit. Nothing from a socket or a file is ever
unpickled.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

from veldt import callables
from veldt.errors import UserError
from veldt.ports import CALL, LATEST, Port, example_messages
from veldt.program import BLOCK_MEMORY, CELL, ROWS, ArraySpec, Node, Program, Ref, walk
from veldt.records.tree import Tree
from veldt.runtime.proxies import PORT, REPLY

GATE = "gate"  # the process that serves actors that share no memory with the run


STREAM_BYTES = 1 << 20  # of a stream's ring, for each message that may wait in it


class Channel(NamedTuple):
    """From one process to a node of another."""

    process: str
    node: str


class Messages(NamedTuple):
    """One message of each format that may go to a node or come back."""

    stream: list[Tree]
    calls: list[Tree]
    replies: list[Tree]


@dataclass(frozen=True)
class GatePlan:
    """Where the gate (`runtime.grpc.gate`) listens, and whom it serves."""

    socket: str  # a path
    assignments: dict[str, dict[str, Any]] = field(default_factory=dict)  # seat -> what an actor that joins has to build
    listen: str = ""  # HOST:PORT for actors that join
    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    compress: bool = False
    own_listen: bool = False  # the run's own actors connect there too, as from another machine
    # Filled in by make_plan:
    messages: dict[str, Messages] = field(default_factory=dict)  # by node
    seats: list[str] = field(default_factory=list)  # processes of the run, and names for actors that may join
    cells: dict[str, list[str]] = field(default_factory=dict)  # seat -> the cells that it may read
    rows: dict[str, str] = field(default_factory=dict)  # seat -> the name of the rows with its counts


@dataclass
class Plan:
    """The part of the program's description that every process has."""

    nodes: dict[str, Node]
    processes: dict[str, list[str]]  # process -> its nodes, in the order in which they are built
    shared: list[str]  # nodes that every process builds for itself
    channels: list[Channel]
    ports: dict[str, dict[str, Port]]  # of the nodes that are called from other processes
    arrays: dict[str, ArraySpec] = field(default_factory=dict)
    queue: int = 16  # messages that may wait in a stream; a checkpoint does not contain them
    threads: dict[str, int] = field(default_factory=dict)  # process -> threads for tensor operations
    light: list[str] = field(default_factory=list)  # processes without torch
    roles: dict[str, str] = field(default_factory=dict)  # process -> the role of the node it is named after
    functions: dict[str, bytes] = field(default_factory=dict)  # pickled functions that cannot be imported
    envs: dict[str, Any] = field(default_factory=dict)  # Gymnasium ids that the user registered
    constants: dict[str, Any] = field(default_factory=dict)  # of nodes for which this process has proxies
    gate: GatePlan | None = None

    def row(self, name: str) -> int:
        """The row on the board of a process or of a seat at the gate; row 0 is the supervisor's."""
        if name in self.processes:
            return 1 + list(self.processes).index(name)
        return 1 + len(self.processes) + self.seats.index(name)

    @property
    def rows(self) -> int:
        return 1 + len(self.processes) + len(self.seats)

    @property
    def seats(self) -> list[str]:
        """Seats at the gate; those for actors that join come last."""
        return [] if self.gate is None else self.gate.seats

    def home(self, node: str) -> str:
        return next(process for process, nodes in self.processes.items() if node in nodes)

    def callers(self, node: str) -> list[str]:
        return [channel.process for channel in self.channels if channel.node == node]

    def needs(self, process: str) -> list[str]:
        """The shared nodes that a process builds for its nodes."""
        nodes = [self.nodes[name] for name in self.processes[process]]
        wanted = {ref.name for node in nodes for ref in walk((node.args, node.kwargs), Ref)}
        return [name for name in self.shared if name in wanted]

    def descriptors(self) -> list[str]:
        """The names of all pieces of shared memory."""
        names = ["plan", "board", "stacks", *(f"array {name}" for name in self.arrays)]
        for name, node in self.nodes.items():
            names += [f"cell {name}"] if node.has(CELL) else []
            names += [f"rows {name}"] if node.has(ROWS) else []
            names += [f"arena {name}", f"blocks {name}"] if node.has(BLOCK_MEMORY) else []
        for node_name, ports in self.ports.items():
            names += [f"cell {node_name}.{port.name}" for port in ports.values() if port.kind == LATEST]
        for channel in self.channels:
            names += rings(channel, self.ports[channel.node])
        return names + (["gate seats"] if self.gate is not None else [])

    def save(self, fd: int) -> None:
        """Pickles the nodes of each process separately: a light process must not import what the others need."""
        parts = {}
        for process, names in self.processes.items():
            nodes = {name: self.nodes[name] for name in [*self.needs(process), *names]}
            known = {c.node for c in self.channels if process in (c.process, self.home(c.node))}
            constants = {name: self.nodes[name].constants for name in known if self.home(name) != process}
            parts[process] = cloudpickle.dumps((nodes, {name: self.ports[name] for name in known}, constants))
        with os.fdopen(os.dup(fd), "wb") as file:
            cloudpickle.dump((replace(self, nodes={}, ports={}), parts), file)

    @staticmethod
    def load(fd: int, process: str) -> Plan:
        """The plan for one process: with its own nodes, and the ports of the nodes it calls or serves."""
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            plan, parts = cloudpickle.load(file)
        callables.install({name: functools.partial(cloudpickle.loads, data) for name, data in plan.functions.items()})
        for name, entry in plan.envs.items():
            gym.registry.setdefault(name, entry)
        nodes, ports, constants = cloudpickle.loads(parts[process])
        loaded: Plan = replace(plan, nodes=nodes, ports=ports, constants=constants)
        return loaded


def stream_ring(channel: Channel) -> str:
    return f"{channel.process}>{channel.node}"


def call_rings(channel: Channel) -> tuple[str, str]:
    return f"{channel.process}?{channel.node}", f"{channel.process}!{channel.node}"


def streams(ports: dict[str, Port]) -> list[Port]:
    return [port for port in ports.values() if port.kind != LATEST and not port.with_calls]


def calls(ports: dict[str, Port]) -> list[Port]:
    return [port for port in ports.values() if port.with_calls]


def rings(channel: Channel, ports: dict[str, Port]) -> list[str]:
    """The names of the rings of a channel."""
    return [*([stream_ring(channel)] if streams(ports) else []), *(call_rings(channel) if calls(ports) else ())]


def make_plan(program: Program, queue: int = 16, gate: GatePlan | None = None, own: bool = True) -> Plan:
    """`own`: the run's own actors use the gate too, if their nodes are marked `elsewhere`."""
    nodes = program.nodes
    shared = [name for name, node in nodes.items() if node.everywhere]
    groups: dict[str, list[str]] = {}
    for name in nodes:
        if name not in shared:
            groups.setdefault(_root(nodes, name), []).append(name)
    first = {_named_after(nodes, group): group for group in groups.values()}
    processes: dict[str, list[str]] = ({} if gate is None else {GATE: []}) | first
    channels = _channels(nodes, processes, shared)
    roles = {process: nodes[process].role if process in nodes else process for process in processes}
    threads = {process: max((nodes[name].threads for name in group), default=1) for process, group in processes.items()}
    light = [process for process, group in processes.items() if all(nodes[name].light for name in group)]
    ports = {channel.node: nodes[channel.node].ports for channel in channels}
    if gate is not None:
        outside = [process for process, group in processes.items() if any(nodes[name].elsewhere for name in group)]
        joining = list(gate.assignments)
        channels += [Channel(seat, node) for seat in joining for process, node in channels if process == outside[0]]
        reached = dict.fromkeys(node for process, node in channels if process in (*outside, *joining))
        messages = {node: messages_of(nodes[node]) for node in reached}
        gate = replace(gate, seats=[*(outside if own else []), *joining], messages=messages)
    functions = portable(callables.local())
    rest = (program.arrays, queue, threads, light, roles, functions, _registered())
    plan = Plan(nodes, processes, shared, channels, ports, *rest, gate=gate)
    return plan if gate is None else replace(plan, gate=_with_values(plan, gate))


def _with_values(plan: Plan, gate: GatePlan) -> GatePlan:
    """Adds the cells and rows of each seat; actors that join get the same as the run's own."""
    outside = [name for name in plan.processes if any(plan.nodes[node].elsewhere for node in plan.processes[name])]
    cells, rows = {}, {}
    for seat in gate.seats:
        shared = plan.needs(seat if seat in plan.processes else outside[0])
        reached = [channel.node for channel in plan.channels if channel.process == seat]
        cells[seat] = [f"cell {name}" for name in shared if plan.nodes[name].has(CELL)]
        cells[seat] += [f"cell {n}.{p.name}" for n in reached for p in plan.ports[n].values() if p.kind == LATEST]
        rows[seat] = next(f"rows {name}" for name in shared if plan.nodes[name].has(ROWS))
    return replace(gate, cells=cells, rows=rows)


def _channels(nodes: dict[str, Node], processes: dict[str, list[str]], shared: list[str]) -> list[Channel]:
    channels: list[Channel] = []
    for process, group in processes.items():
        for name in group:
            for ref in walk((nodes[name].args, nodes[name].kwargs), Ref):
                if ref.name in group or ref.name in shared:
                    continue
                if not nodes[ref.name].ports:
                    raise UserError(
                        f"{name} needs {ref.name}, which has no ports and can be used in one process only: add it with "
                        f"on={ref.name}."
                    )
                if Channel(process, ref.name) not in channels:
                    channels.append(Channel(process, ref.name))
    return channels


def messages_of(node: Node) -> Messages:
    """The formats of a node's messages, from its examples. Ports whose shapes are unknown have none over gRPC."""
    found, unknown = Messages([], [], []), ""
    for port in node.ports.values():
        if port.kind == LATEST:
            continue
        try:
            there, back = example_messages(port, node.examples.get(port.name))
        except TypeError as error:
            unknown = str(error)
            continue
        header = {PORT: np.zeros(2 if port.with_calls else 1, np.int64)}
        (found.calls if port.with_calls else found.stream).extend(header | message for message in there)
        if port.kind == CALL:
            found.replies.extend({REPLY: np.zeros(1, np.int64)} | message for message in back)
    if unknown and not found.stream and not found.calls:
        raise UserError(f"{node.name} cannot be reached over gRPC: {unknown}.")
    return found


def portable(functions: dict[str, Callable[..., Any]]) -> dict[str, bytes]:
    """Pickles functions for other processes; one that cannot be pickled is replaced by one that raises a UserError."""
    out: dict[str, bytes] = {}
    for name, function in functions.items():
        try:
            out[name] = cloudpickle.dumps(function)
        except Exception:  # pickling arbitrary objects may raise anything
            out[name] = cloudpickle.dumps(callables.NotPortable(name))
    return out


def _registered() -> dict[str, Any]:
    """The Gymnasium ids that the user's script or its imports registered, which a new process would lack."""
    found = {}
    for name, entry in gym.registry.items():
        where = entry.entry_point
        if isinstance(where, str):
            if where.startswith(("gymnasium.", "veldt.", "ale_py", "minatar")):
                continue
            module, _, attribute = where.partition(":")
            if module == "__main__":  # sent by value
                entry = copy.copy(entry)
                entry.entry_point = getattr(sys.modules["__main__"], attribute, where)
        found[name] = entry
    return found


def _root(nodes: dict[str, Node], name: str) -> str:
    while (on := nodes[name].on) is not None:
        name = on
    return name


def _named_after(nodes: dict[str, Node], group: list[str]) -> str:
    """The name of a process: that of its first worker."""
    return next((name for name in group if nodes[name].is_worker), group[0])
