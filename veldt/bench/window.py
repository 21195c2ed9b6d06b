"""Window: measures a run of actors for some seconds, for `inference`."""

import time
from typing import Any, NamedTuple

import psutil

from veldt.bench.latency import percentiles
from veldt.counters import COLUMN
from veldt.errors import ProcessFailed
from veldt.program import Program
from veldt.runtime.local.local import Local
from veldt.watching.bottleneck import cpu_seconds

WARM_S = 1.0
ASK_S = 20.0
TABLE = {  # column -> its figure; the last is the cost
    "p50 us": "latency_p50_us",
    "p99 us": "latency_p99_us",
    "steps/s": "env_steps_per_s",
    "batch": "batch",
    "B out": "bytes_out_per_step",
    "B in": "bytes_in_per_step",
    "cpu s/1e6": "cpu_s_per_1e6_steps",
}


class Mark(NamedTuple):
    """Counts of a run at one moment."""

    time: float
    steps: dict[str, int]  # by actor
    cpu: float  # seconds of all processes


class Window:
    """Runs a program until it is warm, and measures it for some seconds."""

    def __init__(
        self,
        runtime: Local,
        program: Program,
        seconds: float,
        actors: list[str],
        totals: tuple[str, ...] = (),  # metrics that only grow, whose growth per env step is reported
        inference: str = "",  # local: weights are counted; central: batches
        learns: bool = False,
    ) -> None:
        self.actors, self.inference = actors, inference
        self.taken: list[tuple[int, list[float]]] = []  # by actor: calls, and quantiles of their latencies
        self.weights = 0  # bytes pulled by all actors
        self.batches: list[float] = []
        self._totals: dict[str, list[tuple[int, float]]] = {name: [] for name in totals}  # (env steps, total)
        with runtime.start(program) as nodes:
            while not min(self._steps(nodes).values()) or (learns and not nodes.count("learner_steps")):
                nodes.step()
            warm = time.perf_counter() + min(WARM_S, seconds)
            while time.perf_counter() < warm:
                nodes.step()
            nodes.metrics()
            before = self._mark(nodes)
            while time.perf_counter() - before.time < seconds or not self._complete():
                nodes.step()
                self._note(nodes, nodes.metrics())
            self.marks = before, self._mark(nodes)

    def _complete(self) -> bool:
        """Whether all wanted metrics were reported, and totals twice."""
        batches = self.inference != "central" or self.batches
        return bool(batches) and all(len(seen) > 1 for seen in self._totals.values())

    def _steps(self, nodes: Any) -> dict[str, int]:
        supervisor = nodes.supervisor
        table = supervisor.rows["counters"].table
        return {name: int(table[supervisor.plan.row(name), COLUMN["env_steps"]]) for name in self.actors}

    def _note(self, nodes: Any, metrics: dict[str, float]) -> None:
        if "inference_batch" in metrics:
            self.batches.append(metrics["inference_batch"])
        for name, seen in self._totals.items():
            if name in metrics:
                seen.append((nodes.count("env_steps"), metrics[name]))

    def _mark(self, nodes: Any) -> Mark:
        """Takes from the actors what they have counted since the last mark."""
        self.taken = ask(nodes, "take", {name: name.replace("actor", "timed") for name in self.actors})
        if self.inference == "local":
            self.weights = sum(ask(nodes, "take", {name: name.replace("actor", "policy") for name in self.actors}))
        return Mark(time.perf_counter(), self._steps(nodes), cpu_of_all())

    @property
    def elapsed(self) -> float:
        return self.marks[1].time - self.marks[0].time

    @property
    def calls(self) -> int:
        return sum(calls for calls, _ in self.taken)

    def steps(self, actors: list[str] | None = None) -> int:
        """Env steps of these actors; none given: of all."""
        before, after = (mark.steps for mark in self.marks)
        return sum(after[name] - before[name] for name in actors or self.actors)

    def per_step(self, name: str) -> float:
        """Growth of a total per env step."""
        (steps0, first), *_, (steps1, last) = self._totals[name]
        return (last - first) / max(1, steps1 - steps0)

    def figures(self, batch: float, out: float, back: float) -> dict[str, float]:
        steps, cpu = self.steps(), self.marks[1].cpu - self.marks[0].cpu
        return figures(percentiles(self.taken), steps / self.elapsed, batch, out, back, cpu / max(1, steps))


def figures(
    latencies: tuple[float, float], rate: float, batch: float, out: float, back: float, cpu: float
) -> dict[str, float]:
    """`rate` in env steps a second; bytes out and back, and CPU seconds, for one env step."""
    return dict(zip(TABLE.values(), (*latencies, rate, batch, out, back, 1e6 * cpu), strict=True))


def ask(nodes: Any, what: str, whom: dict[str, str]) -> list[Any]:
    """Calls a method of one node in each of these processes, and returns the results."""
    supervisor, answers = nodes.supervisor, nodes.supervisor.answers
    numbers = [nodes.give(process, what, node) for process, node in whom.items()]
    there = None not in numbers and supervisor.wait(lambda: all(x in answers for x in numbers), ASK_S, what)
    if not there:
        raise ProcessFailed(f"{', '.join(whom)} did not answer, so nothing was measured")
    return [answers.pop(number).result for number in numbers]


def cpu_of_all() -> float:
    """CPU seconds so far of this process and all its descendants."""
    return sum(cpu_seconds(child.pid for child in psutil.Process().children(recursive=True)).values())
