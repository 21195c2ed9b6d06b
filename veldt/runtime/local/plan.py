"""The plan of a program: which nodes share a process, which processes can reach which nodes, and what they share.

The supervisor pickles it to shared memory that only its own children inherit. Nothing from a socket or a file is ever
unpickled.
"""

import copy
import functools
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym

from veldt import callables
from veldt.counters import Counters
from veldt.errors import UserError
from veldt.metrics import Metric, own_metrics
from veldt.ports import LATEST, Check, Examples, Port, example_messages
from veldt.program import BLOCK_MEMORY, CELL, ROWS, Node, Parts, Program, Ref, root, walk
from veldt.records.tree import Spec, Tree

GATE = "gate"  # the process that serves actors that share no memory with the run
STREAM_BYTES = 1 << 20  # of a stream's ring, for each message that may wait in it


class Channel(NamedTuple):
    """From one process to a node of another."""

    process: str
    node: str


class Message(NamedTuple):
    """A kind of message: one of its format, and what it may contain if it comes from an actor that joined."""

    example: Tree
    port: int  # index of the port among those of the node
    numbered: bool = False  # its header has the number of the message
    check: Check | None = None


class Messages(NamedTuple):
    """The messages that may go to a node or come back."""

    stream: list[Message]
    calls: list[Message]
    replies: list[Message]


class Limits(NamedTuple):
    """What an actor that joined may claim."""

    keys: tuple[int, ...] = ()  # the integers that identify its calls
    ahead: int = 0  # env steps that it may have counted and not sent


@dataclass(frozen=True)
class GateSettings:
    """gRPC, for actors that share no memory with the run: its own, if `own`, and those that join (`experiment.joined`)."""

    own: bool = True
    assignments: tuple[dict[str, Any], ...] = ()  # what an actor that joins has to build; one for each seat
    limits: tuple[Limits, ...] = ()  # one for each seat
    listen: str = ""  # HOST:PORT for actors that join
    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    compress: bool = False
    own_listen: bool = False  # the run's own actors connect there too, as from another machine


@dataclass(frozen=True)
class GatePlan:
    """What the gate (`runtime.grpc.gate`) serves to whom."""

    gate: GateSettings
    socket: str  # a path
    messages: dict[str, Messages]  # by node
    seats: list[str]  # processes of the run, and names for actors that may join, which come last
    assignments: dict[str, dict[str, Any]]  # by seat
    limits: dict[str, Limits]  # by seat, of actors that may join
    metrics: dict[str, Metric]  # by name: what actors that join may report
    cells: dict[str, list[str]]  # seat -> the cells that it may read
    rows: dict[str, str]  # seat -> the name of the rows with its counts
    own_token: str  # by which the run's own processes are known where they connect over TCP


@dataclass
class Plan:
    """The part of the program's description that every process has."""

    nodes: dict[str, Node]
    processes: dict[str, list[str]]  # process -> its nodes, in the order in which they are built
    shared: list[str]  # nodes that every process builds for itself
    channels: list[Channel]
    ports: dict[str, dict[str, Port]]  # of the nodes that are called from other processes
    arrays: Spec
    parts: dict[str, Parts]  # of the arrays that are saved in parts
    queue: int  # messages that may wait in a stream; a checkpoint does not contain them
    light: list[str]  # processes without torch
    functions: dict[str, bytes]  # pickled functions that cannot be imported
    envs: dict[str, Any]  # Gymnasium ids that the user registered
    imports: frozenset[str] | None = None  # names that may be imported; None: all
    constants: dict[str, Any] = field(default_factory=dict)  # of nodes for which this process has proxies
    gate: GatePlan | None = None

    @property
    def seats(self) -> list[str]:
        return [] if self.gate is None else self.gate.seats

    def row(self, name: str) -> int:
        """The row on the board of a process or of a seat at the gate; row 0 is the supervisor's."""
        return 1 + [*self.processes, *self.seats].index(name)

    @property
    def evented(self) -> list[str]:
        """Processes that sleep in an event loop of their own, where a bell has to be a descriptor."""
        nodes = [(process, self.nodes[name].node_class) for process, names in self.processes.items() for name in names]
        return [process for process, kind in nodes if getattr(kind, "EVENT_LOOP", False)]

    @property
    def rows(self) -> int:
        return 1 + len(self.processes) + len(self.seats)

    def home(self, node: str) -> str:
        return next(process for process, nodes in self.processes.items() if node in nodes)

    def callers(self, node: str) -> list[str]:
        return [channel.process for channel in self.channels if channel.node == node]

    def is_called(self, process: str) -> bool:
        return any(self.callers(node) for node in self.processes[process])

    def keeps(self, process: str) -> bool:
        """Whether its state is kept for a restart: a node asks for that, other processes call it, or it has blocks."""
        return self.is_called(process) or self.has_state(process)

    def has_state(self, process: str) -> bool:
        return any(node.keep or node.has(BLOCK_MEMORY) for node in map(self.nodes.__getitem__, self.processes[process]))

    def optional(self, process: str) -> bool:
        """Whether a run can continue without it: all its workers are `OPTIONAL`, and no other process calls it."""
        workers = [node.node_class for name in self.processes[process] if (node := self.nodes[name]).is_worker]
        return bool(workers) and all(getattr(x, "OPTIONAL", False) for x in workers) and not self.keeps(process)

    def needs(self, process: str) -> list[str]:
        """The shared nodes that a process builds for its nodes."""
        wanted, left = set[str](), list(self.processes[process])
        while left:
            node = self.nodes[left.pop()]
            found = {ref.name for ref in walk((node.args, node.kwargs), Ref) if ref.name in self.shared} - wanted
            wanted |= found
            left += found
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
            called = {port.with_calls for port in self.ports[channel.node].values() if port.kind != LATEST}
            names += [stream_ring(channel)] if False in called else []
            names += call_rings(channel) if True in called else []
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
    def load(fd: int, process: str) -> "Plan":
        """The plan for one process: with its own nodes, and the ports of the nodes it calls or serves."""
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            plan, parts = cloudpickle.load(file)
        callables.install({name: functools.partial(cloudpickle.loads, data) for name, data in plan.functions.items()})
        callables.restrict(plan.imports)
        for name, entry in plan.envs.items():
            gym.registry.setdefault(name, entry)
        nodes, ports, constants = cloudpickle.loads(parts[process])
        loaded: Plan = replace(plan, nodes=nodes, ports=ports, constants=constants)
        return loaded


def stream_ring(channel: Channel) -> str:
    return f"{channel.process}>{channel.node}"


def call_rings(channel: Channel) -> tuple[str, str]:
    return f"{channel.process}?{channel.node}", f"{channel.process}!{channel.node}"


def make_plan(program: Program, queue: int = 16, gate: GateSettings | None = None, socket: str = "") -> Plan:
    """`socket` is the path at which the gate serves the run's own actors."""
    nodes = program.nodes
    shared = [name for name, node in nodes.items() if node.everywhere]
    groups: dict[str, list[str]] = {}
    for name in nodes:
        if name not in shared:
            groups.setdefault(root(name, nodes), []).append(name)
    processes: dict[str, list[str]] = {} if gate is None else {GATE: []}
    for group in groups.values():  # a process is named after its first worker
        processes[next((name for name in group if nodes[name].is_worker), group[0])] = group
    channels = _channels(nodes, processes, shared)
    for module in callables.files():  # another process cannot import what these define
        cloudpickle.register_pickle_by_value(module)
    plan = Plan(
        nodes,
        processes,
        shared,
        channels,
        ports={channel.node: nodes[channel.node].ports for channel in channels},
        arrays=program.arrays,
        parts=program.parts,
        queue=queue,
        light=[name for name, group in processes.items() if all(nodes[node].light for node in group)],
        functions=portable(callables.local()),
        envs=registered(),
        imports=callables.allowed(),
    )
    return plan if gate is None else _with_gate(plan, gate, socket)


def _with_gate(plan: Plan, gate: GateSettings, socket: str) -> Plan:
    """Adds seats. Those for actors that join have the channels, cells and rows of the run's own."""
    outside = [name for name, group in plan.processes.items() if any(plan.nodes[node].elsewhere for node in group)]
    if not outside:
        raise UserError("No node of this program can run elsewhere: add one with elsewhere=True, or do not use gRPC.")
    joining = {f"seat/{i}": assignment for i, assignment in enumerate(gate.assignments)}
    limits = dict(zip(joining, gate.limits, strict=True))
    seats = [*(outside if gate.own else []), *joining]
    channels = list(plan.channels)
    channels += [Channel(seat, node) for seat in joining for process, node in plan.channels if process == outside[0]]
    reached = {channel.node: plan.nodes[channel.node] for channel in channels if channel.process in seats}
    messages = {name: messages_of(name, node.ports, node.examples) for name, node in reached.items()}
    reported = own_metrics([plan.nodes[name] for name in plan.processes[outside[0]]])
    cells, rows = {}, {}
    for seat in seats:
        called = [channel.node for channel in channels if channel.process == seat]
        shared = plan.needs(seat if seat in plan.processes else outside[0])
        cells[seat] = [f"cell {name}" for name in shared if plan.nodes[name].has(CELL)]
        cells[seat] += [f"cell {n}.{p.name}" for n in called for p in plan.ports[n].values() if p.kind == LATEST]
        counted = [name for name in shared if issubclass(plan.nodes[name].node_class, Counters)]
        if len(counted) != 1:
            raise UserError(f"{seat} is reached over gRPC and needs one node of Counters; it has {len(counted)}.")
        rows[seat] = f"rows {counted[0]}"
    token = secrets.token_hex(32)
    planned = GatePlan(gate, socket, messages, seats, joining, limits, reported, cells, rows, token)
    return replace(plan, channels=channels, gate=planned)


def _channels(nodes: dict[str, Node], processes: dict[str, list[str]], shared: list[str]) -> list[Channel]:
    channels: dict[Channel, None] = {}
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
                channels[Channel(process, ref.name)] = None
    return list(channels)


def messages_of(node: str, ports: Mapping[str, Port], examples: Mapping[str, Examples]) -> Messages:
    """The formats of a node's messages, from its examples. A port whose shapes are unknown cannot be used over gRPC."""
    found, unknown = Messages([], [], []), ""
    for index, port in enumerate(ports.values()):
        if port.kind == LATEST:
            continue
        given = examples.get(port.name)
        try:
            there, back = example_messages(port, given, index)
        except TypeError as error:
            unknown = str(error)
            continue
        check = None if given is None else given.check
        kinds = [Message(example, index, port.with_calls, check) for example in there]
        (found.calls if port.with_calls else found.stream).extend(kinds)
        found.replies.extend(Message(example, index) for example in back)
    if unknown and not (found.stream or found.calls):
        raise UserError(f"{node} cannot be reached over gRPC: {unknown}.")
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


def registered() -> dict[str, Any]:
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
