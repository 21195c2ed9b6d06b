"""Messages between two processes: shared memory against multiprocessing, Ray and memcpy.

A call is a question with the observations of eight environments that comes back as it is: put, peek, put, peek, and a copy
out of the ring. A waiting process spins for a while before it sleeps, or sleeps immediately. A stream is blocks of
Atari frames, which a process of its own puts into a ring and this one copies into an arena, as a store does.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from veldt.errors import UserError
from veldt.records.tree import Array, Tree
from veldt.runtime.local.zygote import die_with_parent
from veldt.runtime.shm.memory import Arena, Bell, SharedMemory, make_shared_memory
from veldt.runtime.shm.ring import Reader, Writer

SPIN = 200  # polls before a sleep, about 65 us: longer than it takes to wake a sleeping partner
PAYLOADS: Tree = {
    "8 x 4 float32": np.random.default_rng(0).random((8, 4), np.float32),
    "8 x 84 x 84 uint8": np.random.default_rng(0).integers(0, 256, (8, 84, 84), np.uint8),
}
RAY_NAMES = {"8 x 4 float32": "float32[8,4]", "8 x 84 x 84 uint8": "uint8[8,84,84]"}
ROWS, BLOCKS = 70, 400  # rows of a block, blocks that the arena has room for
STREAM_ROUNDS = 7  # factor for the number of turns, which are short here
SLOTS = 16  # blocks that fit into a ring, as in a run
LONGEST_S = 600  # for the whole benchmark; no wait is longer
RAY_CALL = Path(__file__).parents[2] / "benchmarks" / "peers" / "ray_call.py"

Call = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class TransportBench:
    """Calls and streams between two processes: ours against multiprocessing, Ray and memcpy."""

    calls: int = 1000
    """Calls in one turn."""
    blocks: int = 400
    """Blocks streamed in one turn."""
    rounds: int = 7
    """Turns that each contender gets."""
    ray_python: str = ""
    """A Python that has Ray; without it Ray is left out."""

    def run(self) -> dict[str, Any]:
        from veldt.bench.timing import machine  # imports torch, which the processes started here do not need

        if self.ray_python and not RAY_CALL.is_file():
            raise UserError(f"Ray is timed by {RAY_CALL}, which was not found; run this from a checkout.")
        before = machine()
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LONGEST_S)
        try:
            return {"machine": before, "results": self._results()}
        finally:
            signal.alarm(0)

    def _results(self) -> dict[str, dict[str, float]]:
        results: dict[str, dict[str, float]] = {}
        with contextlib.ExitStack() as stack:
            contenders = {
                "ours, spinning": stack.enter_context(ours(SPIN)),
                "ours, sleeping": stack.enter_context(ours(0)),
                "multiprocessing.Pipe": stack.enter_context(pipe()),
                "multiprocessing.Queue": stack.enter_context(queues()),
            }
            ray = self._ray()
            for payload, x in PAYLOADS.items():
                times = self._latencies(contenders, x)
                results[f"call, {payload}, no added load"] = _table(times, ray.get(payload))
            with busy_cores():
                for payload, x in PAYLOADS.items():
                    times = self._latencies(contenders, x)
                    results[f"call, {payload}, every core kept busy by another process"] = _table(times, None)
        results[f"stream of blocks of {ROWS} Atari frames, copied from the ring into an arena"] = self._stream()
        return results

    def _latencies(self, contenders: dict[str, Call], x: Array) -> dict[str, tuple[float, float]]:
        """p50 and p99 in us, the medians over rounds in which the contenders take turns."""
        percentiles: dict[str, list[Array]] = {name: [] for name in contenders}
        for number in range(self.rounds + 1):
            for name, call in contenders.items():
                times = np.empty(self.calls if number else min(100, self.calls))
                for i in range(len(times)):
                    began = time.perf_counter_ns()
                    call(x)
                    times[i] = time.perf_counter_ns() - began
                if number:  # the first round warms up
                    percentiles[name].append(np.percentile(times, (50, 99)) / 1e3)
        middle = {name: np.median(found, axis=0).tolist() for name, found in percentiles.items()}
        return {name: (p50, p99) for name, (p50, p99) in middle.items()}

    def _ray(self) -> dict[str, tuple[float, float]]:
        if not self.ray_python:
            return {}
        done = subprocess.run([self.ray_python, str(RAY_CALL)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"Ray could not be timed with {self.ray_python}:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return {payload: (found[name]["p50_us"], found[name]["p99_us"]) for payload, name in RAY_NAMES.items()}

    def _stream(self) -> dict[str, float]:
        block = make_block()
        nbytes = sum(x.nbytes for x in block.values())
        arena = Arena(make_shared_memory("veldt bench arena"))
        rows = {name: arena.zeros((BLOCKS, *x.shape), x.dtype) for name, x in block.items()}
        # As many blocks as the ring has slots, so that caches help both sides equally.
        sources = [{name: x.copy() for name, x in block.items()} for _ in range(SLOTS)]
        turns: dict[str, list[float]] = {"stream": [], "memcpy": []}
        with streaming() as receive:
            for number in range(STREAM_ROUNDS * self.rounds + 1):
                began = time.perf_counter()
                receive(rows, self.blocks)
                streamed = time.perf_counter()
                for i in range(self.blocks):
                    for name, x in sources[i % SLOTS].items():
                        rows[name][i % BLOCKS] = x
                copied = time.perf_counter()
                if number:  # the first round warms up
                    turns["stream"].append(streamed - began)
                    turns["memcpy"].append(copied - streamed)
        speed = {name: 1e-9 * nbytes * self.blocks / statistics.median(x) for name, x in turns.items()}
        return {
            "ring_GB_per_s": speed["stream"],
            "memcpy_GB_per_s": speed["memcpy"],
            "blocks_per_s": 1e9 * speed["stream"] / nbytes,
            "ring/memcpy speed": speed["stream"] / speed["memcpy"],
        }


def _too_long(*_: Any) -> None:
    raise UserError(f"The messages did not arrive within {LONGEST_S} s: the machine is too busy, or a process has died.")


def _table(times: dict[str, tuple[float, float]], ray: tuple[float, float] | None) -> dict[str, float]:
    times = times if ray is None else {**times, "Ray actor": ray}
    out = {f"{name} {part}_us": times[name][i] for name in times for i, part in enumerate(("p50", "p99"))}
    for name in times:
        if not name.startswith("ours"):
            out[f"ours/{name.removeprefix('multiprocessing.')} speed"] = times[name][0] / times["ours, spinning"][0]
    return out


# Veldt's. The first bell is that of this process, the second that of its partner.

NUMBERS = np.zeros(3, np.int64)  # sent with the observations of a call


def look(reader: Reader, bell: Bell, spin: int) -> Tree:
    """The next message; sleeps if there is none after this many polls."""
    looks = 0
    while True:
        rung = bell.rung()
        message = reader.peek()
        if message is not None:
            return message
        looks += 1
        if looks > spin:
            bell.wait(rung)


@contextlib.contextmanager
def ours(spin: int) -> Iterator[Call]:
    """Calls of a server in another process, over two rings."""
    with _partner("serve", 2, spin) as (board, fds):
        bell, there, back = Bell(board, 0), Writer(fds[0], Bell(board, 64), max_slots=8), Reader(fds[1])

        def call(x: Array) -> Array:
            assert there.put({"question": NUMBERS, "obs": x})
            out = look(back, bell, spin)["obs"].copy()
            back.pop()
            return out

        yield call


def serve(board: SharedMemory, fds: list[int], spin: int) -> None:
    """The other end of `ours`, until it is killed."""
    bell, there, back = Bell(board, 64), Reader(fds[0]), Writer(fds[1], Bell(board, 0))
    while True:
        message = look(there, bell, spin)
        assert back.put({"answer": NUMBERS, "obs": message["obs"]})
        there.pop()


@contextlib.contextmanager
def streaming() -> Iterator[Callable[[Tree, int], None]]:
    """Takes this many blocks from a process that sends them, and copies them into the rows [BLOCKS, ...] of an arena."""
    with _partner("send", 2, 0) as (board, fds):
        bell, orders, stream = Bell(board, 0), Writer(fds[0], Bell(board, 64)), Reader(fds[1], Bell(board, 64))

        def receive(rows: Tree, blocks: int) -> None:
            assert orders.put({"blocks": np.array(blocks)})
            for i in range(blocks):
                for name, x in look(stream, bell, 0).items():
                    rows[name][i % BLOCKS] = x
                stream.pop()

        yield receive


def send(board: SharedMemory, fds: list[int], spin: int) -> None:
    """The other end of `streaming`, until it is killed."""
    bell, orders, stream = Bell(board, 64), Reader(fds[0]), Writer(fds[1], Bell(board, 0), max_slots=SLOTS)
    block = make_block()
    while True:
        blocks = int(look(orders, bell, spin)["blocks"])
        orders.pop()
        for _ in range(blocks):
            rung = bell.rung()
            while not stream.put(block):
                bell.wait(rung)
                rung = bell.rung()


def make_block() -> Tree:
    """A block, as a proxy of a store puts it into a stream."""
    rng = np.random.default_rng(0)
    return {
        "items": np.ones(ROWS - 6, np.bool_),
        "priorities": rng.random(ROWS - 6),
        "rows/obs": rng.integers(0, 256, (ROWS, 84, 84), np.uint8),
        "rows/packed": np.zeros(ROWS * 40, np.uint8),
    }


@contextlib.contextmanager
def _partner(function: str, rings: int, spin: int) -> Iterator[tuple[SharedMemory, list[int]]]:
    """A fresh process that runs a function of this module, with a board of two bells and rings between it and us."""
    fds = [make_shared_memory("veldt bench") for _ in range(1 + rings)]
    board = SharedMemory(fds[0], 128)
    code = f"import sys; from veldt.bench import transport; transport.start(transport.{function}, sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, str(spin), *map(str, fds)], pass_fds=fds)
    try:
        yield board, fds[1:]
    finally:
        process.kill()
        process.wait(60)
        for fd in fds:
            os.close(fd)


def start(function: Callable[[SharedMemory, list[int], int], None], words: list[str]) -> None:
    spin, board, *fds = map(int, words)
    die_with_parent(os.getppid())
    function(SharedMemory(board), fds, spin)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Runs a process that spins on every core."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(60)


# Peers.

SPAWN = multiprocessing.get_context("spawn")


def pipe() -> AbstractContextManager[Call]:
    ours, theirs = SPAWN.Pipe()
    return _peer(ours.send, ours.recv, theirs.recv, theirs.send)


def queues() -> AbstractContextManager[Call]:
    there: Any = SPAWN.Queue()
    back: Any = SPAWN.Queue()
    return _peer(there.put, back.get, there.get, back.put)


@contextlib.contextmanager
def _peer(send: Any, receive: Any, their_receive: Any, their_send: Any) -> Iterator[Call]:
    """Calls of a process that sends back what it receives."""

    def call(x: Array) -> Array:
        send(x)
        out: Array = receive()
        return out

    process = SPAWN.Process(target=_send_back, args=(their_receive, their_send), daemon=True)
    process.start()
    try:
        yield call
    finally:
        process.kill()
        process.join()


def _send_back(receive: Any, send: Any) -> None:
    while True:
        send(receive())
