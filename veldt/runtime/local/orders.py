"""Orders: requests of the supervisor to processes, such as for the state of their nodes, and the answers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from veldt.errors import ProcessFailed
from veldt.records.tree import Tree
from veldt.runtime.local.board import ORDERS
from veldt.runtime.shm.memory import ALIGN, Format, SharedMemory, make_shared_memory

if TYPE_CHECKING:
    from veldt.runtime.local.supervisor import Supervisor

ANSWER_S = 20.0  # to wait for an answer that is needed
OTHERS_S = 1.0  # to wait for an answer that is not


class Answer(NamedTuple):
    result: Any
    counts: dict[str, list[int]]  # its rows of counts, with its state
    fd: int | None


class Orders:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.answers: dict[int, Answer] = {}
        self._asked = 0
        self._expected: set[int] = set()  # numbers of orders that are not answered yet

    def take(self, message: dict[str, Any], fds: list[int]) -> None:
        """Handles an answer that has arrived."""
        number = message["answer"]
        if number in self._expected:
            self._expected.remove(number)
            self.answers[number] = Answer(message.get("result"), message.get("counts", {}), fds[0] if fds else None)
        else:  # it came too late
            for fd in fds:
                os.close(fd)

    def give(self, name: str, what: str, node: str = "", args: tuple[Any, ...] = (), state: Any = None) -> int | None:
        """The number under which the answer will come; None: the process is not there at the moment."""
        child = self.supervisor.children[name]
        if child.socket is None or not child.ready:
            return None
        self._asked += 1
        fds = [] if state is None else [write_state(state)]
        data = json.dumps({"number": self._asked, "do": what, "node": node, "args": args}).encode()
        try:
            socket.send_fds(child.socket, [data], fds)
        except OSError:
            return None
        finally:
            for fd in fds:
                os.close(fd)
        self._expected.add(self._asked)
        child.row[ORDERS] += 1
        self.supervisor.board.bell(child.index).ring()
        return self._asked

    def call(self, name: str, what: str, node: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of a node, and returns its result."""
        number = self.give(name, what, node, args)
        if number is None or not self.supervisor.wait(lambda: number in self.answers, ANSWER_S, what):
            raise ProcessFailed(f"{node} does not answer")
        return self.answers.pop(number).result

    def ask_all(self, what: str, needed: Collection[str], states: dict[str, Any] | None = None) -> dict[str, Answer]:
        """The answers by process. A needed process that is down, or dies meanwhile, is asked again after its restart."""
        supervisor = self.supervisor
        answers = self.ask_once(what, supervisor.children, needed, states)
        deadline = time.monotonic() + ANSWER_S + supervisor.step_timeout
        while missing := [name for name in needed if name not in answers]:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{', '.join(missing)} did not answer ({what})")
            supervisor.tick(0.005)
            if all(supervisor.children[name].ready for name in missing):
                answers |= self.ask_once(what, missing, needed, states)
        return answers

    def ask_once(
        self, what: str, names: Collection[str], needed: Collection[str], states: dict[str, Any] | None = None
    ) -> dict[str, Answer]:
        children, wait = self.supervisor.children, self.supervisor.wait
        given = {name: self.give(name, what, state=(states or {}).get(name)) for name in names}
        numbers = {name: number for name, number in given.items() if number is not None}
        incarnations = {name: children[name].incarnation for name in numbers}

        def settled(names: Collection[str]) -> bool:
            return all(numbers[x] in self.answers or children[x].incarnation != incarnations[x] for x in names)

        wait(lambda: settled([name for name in numbers if name in needed]), ANSWER_S, what)
        wait(lambda: settled(numbers), OTHERS_S, what)
        self._expected -= set(numbers.values())
        return {name: self.answers.pop(number) for name, number in numbers.items() if number in self.answers}

    def close(self) -> None:
        for answer in self.answers.values():
            if answer.fd is not None:
                os.close(answer.fd)
        self.answers = {}


def write_state(state: dict[str, dict[str, Any]]) -> int:
    """Writes the states of nodes, which are arrays and JSON, to new shared memory; returns its descriptor.

    Uses write() instead of a mapping: the kernel then neither clears the pages nor takes a fault for each.
    """
    rest: dict[str, dict[str, Any]] = {}
    tree: Tree = {}
    for node, part in state.items():
        rest[node] = {name: x for name, x in part.items() if not isinstance(x, np.ndarray)}
        tree |= {f"{node}:{name}": x for name, x in part.items() if isinstance(x, np.ndarray)}
    format_ = Format.of(tree)
    text = json.dumps([rest, format_.columns]).encode()
    fd = make_shared_memory("veldt state")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(len(text).to_bytes(ALIGN, "little") + text + bytes(-len(text) % ALIGN))
            start = file.tell()
            file.truncate(start + format_.nbytes)
            for x, at in zip(tree.values(), format_.offsets, strict=True):
                file.seek(start + at)
                file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_state(fd: int) -> dict[str, dict[str, Any]]:
    """A copy of what `write_state` wrote; closes the descriptor."""
    memory = SharedMemory(fd)
    os.close(fd)
    (size,) = memory.words(0, 1)
    state: dict[str, dict[str, Any]]
    state, columns = json.loads(memory.map[ALIGN : ALIGN + size])
    start = ALIGN + -(-size // ALIGN) * ALIGN
    for key, view in Format(columns).views(memory.map, start).items():
        node, _, name = key.partition(":")
        state[node][name] = view.copy()
    return state
