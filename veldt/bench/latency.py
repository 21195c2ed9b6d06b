"""Parts of the inference benchmark that run in light processes (without torch and numba), and bare gRPC to compare with."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from veldt.acting.actor import Policy
from veldt.envs.small import Spin, Step
from veldt.records.tree import Array, Tree

if TYPE_CHECKING:
    from veldt.counters import Counters

QUANTILES = 1000  # at most, of the latencies of one window
QUICK_MS = 0.25
SLOWER = 100  # times
WARM_CALLS = 200


class TimedPolicy(Policy):
    """Wraps a policy and measures the time from the first attempt to send a group's step until its actions arrive."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._sent: dict[int, int] = {}  # group -> when, in ns
        self._times: list[int] = []  # ns, since `take`

    def send(self, group: int, step: Tree) -> bool:
        self._sent.setdefault(group, time.perf_counter_ns())
        return self.policy.send(group, step)

    def recv(self, group: int) -> Tree | None:
        out = self.policy.recv(group)
        if out is not None:
            self._times.append(time.perf_counter_ns() - self._sent.pop(group))
        return out

    @property
    def due(self) -> float:
        return self.policy.due

    def record(self) -> None:
        self.policy.record()

    def flush(self, group: int) -> bool:
        return self.policy.flush(group)

    def reset(self, group: int) -> None:
        self._sent.pop(group, None)
        self.policy.reset(group)

    def take(self) -> tuple[int, list[float]]:
        """The number of calls since the last time, and quantiles of their latencies in us."""
        times, self._times = self._times, []
        return len(times), thin(times)


def thin(times: list[int]) -> list[float]:
    """At most `QUANTILES` of these times in ns, evenly spaced in their order, in us."""
    if not times:
        return []
    ordered = np.sort(np.array(times, np.float64))
    if len(ordered) > QUANTILES:
        ordered = ordered[((np.arange(QUANTILES) + 0.5) * len(ordered) / QUANTILES).astype(np.int64)]
    found: list[float] = np.round(1e-3 * ordered, 2).tolist()
    return found


def percentiles(parts: Iterable[tuple[int, list[float]]]) -> tuple[float, float]:
    """p50 and p99 of several sets of calls, each given by its size and evenly spaced quantiles."""
    parts = [(calls, values) for calls, values in parts if values]
    if not parts:
        return float("nan"), float("nan")
    values = np.concatenate([values for _, values in parts])
    weights = np.concatenate([np.full(len(values), calls / len(values)) for calls, values in parts])
    p50, p99 = np.quantile(values, (0.5, 0.99), weights=weights, method="inverted_cdf").tolist()
    return p50, p99


# A call without any work.


class AtOnce(Policy):
    """A policy that returns fixed actions."""

    def __init__(self, action: Array) -> None:
        self._answer = {"action": action}

    def send(self, group: int, step: Tree) -> bool:
        return True

    def recv(self, group: int) -> Tree:
        return self._answer


class Caller:
    """A worker that repeats the same call of a policy. Each call counts as an env step."""

    def __init__(self, policy: Policy, step: Tree, counters: Counters) -> None:
        self.policy, self.counters, self._step = policy, counters, step
        self._sent = False

    def step(self) -> bool:
        self._sent = self._sent or self.policy.send(0, self._step)
        if not self._sent or self.policy.recv(0) is None:
            return False
        self.counters.add("env_steps", 1)
        self._sent = self.policy.send(0, self._step)
        return True


def serve_echo(path: str, answer: int) -> None:
    """A bare grpc.aio server on a Unix socket, until it is killed: answers every message with this many bytes."""
    asyncio.run(_serve_echo(path, bytes(answer)))


async def _serve_echo(path: str, answer: bytes) -> None:
    import grpc
    import grpc.aio

    from veldt.runtime.local.zygote import die_with_parent

    async def handle(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(answer)

    die_with_parent(os.getppid())
    server = grpc.aio.server(options=_options())
    handlers = {"echo": grpc.stream_stream_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


def call_echo(path: str, question: int, seconds: float) -> None:
    """Prints p50 and p99 in us of calls of that server, each with this many bytes."""
    print(json.dumps(asyncio.run(_call_echo(path, bytes(question), seconds))))


async def _call_echo(path: str, question: bytes, seconds: float) -> tuple[float, float]:
    import grpc.aio

    times: list[int] = []
    async with grpc.aio.insecure_channel(f"unix:{path}", options=_options()) as channel:
        call = channel.stream_stream("/bare/echo")(wait_for_ready=True)
        until = 0.0
        while not until or time.perf_counter() < until:
            began = time.perf_counter_ns()
            await call.write(question)
            await call.read()
            times.append(time.perf_counter_ns() - began)
            if len(times) == WARM_CALLS and not until:
                times, until = [], time.perf_counter() + seconds
        await call.done_writing()
    return percentiles([(len(times), thin(times))])


def _options() -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", 1 << 28), ("grpc.max_send_message_length", 1 << 28)]


# A slow environment.


class Nap(Spin):
    """Sleeps instead, without using a core."""

    def step(self, action: np.int64) -> Step:
        time.sleep(self.seconds)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def quick() -> Nap:
    return Nap(QUICK_MS)


def slow() -> Nap:
    return Nap(SLOWER * QUICK_MS)
