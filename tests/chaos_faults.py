"""The faults of a schedule: what is done to a run, and what is seen of it meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from chaos_run import STEP_S, Run

DEADLINE_S = 60.0  # for a fault to be over
START_S = 120.0  # for a run to begin
GONE_S = 3.0  # for what is left to be gone
ENDS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Broken(Exception):
    """A promise was."""


class Faults:
    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.began = time.monotonic()
        self.took: dict[str, list[float]] = {}  # by fault
        self.ends: list[float] = []  # seconds from a signal to the end
        self.problems: list[str] = []
        self.stalls = dict.fromkeys(("env_steps", "learner_steps"), 0.0)
        self.moved = dict.fromkeys(self.stalls, time.monotonic())
        self.updates = 0  # lines with more updates than the one before
        self.checked = self.corrupt = 0.0
        self.inspected = (0.0, 0.0)
        self.deaths: dict[str, int] = {}  # of processes, over all lives of the run
        self.resumes = self.left_actors = 0
        self.rolled_back: list[int] = []  # env steps, with each kill of the run
        self.descriptors: list[int] = []
        self.evaluations: list[float] = []
        self.fastest = 0.0  # env steps a second

    # What is seen.

    def look(self) -> None:
        time.sleep(0.02)
        now, run = time.monotonic(), self.run
        before = {name: run.line.get(name, 0) for name in self.stalls}
        for line in run.read():
            for name in self.stalls:
                if line[name] > before[name]:
                    self.updates += name == "learner_steps"
                    self.stalls[name] = max(self.stalls[name], now - self.moved[name])
                    self.moved[name] = now
                before[name] = line[name]
            if "checked" in line:
                seen = line["checked"], line["corrupt"]
                old = self.inspected if seen[0] >= self.inspected[0] else (0.0, 0.0)
                self.checked, self.corrupt = self.checked + seen[0] - old[0], self.corrupt + seen[1] - old[1]
                self.inspected = seen
            self.fastest = max(self.fastest, line.get("env_steps_per_s", 0.0))
            if "eval_return" in line:
                self.evaluations.append(line["eval_return"])
        if self.corrupt:
            raise Broken(f"{self.corrupt:.0f} of {self.checked:.0f} windows are corrupt")
        run.note_members()
        if run.process is not None and run.process.poll() is not None:
            raise Broken(f"the run ended by itself, with code {run.process.returncode}")

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Broken(f"{what}: not after {seconds:.0f} s")
            yield

    def pause(self, seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield

    def well(self) -> Callable[[], bool]:
        """Whether the run works since now: env steps, updates, and all of its processes."""
        steps, updates = self.run.line.get("env_steps", 0), self.updates

        def is_well() -> bool:
            table = self.run.table()
            there = all(entry["pid"] and psutil.pid_exists(entry["pid"]) for entry in table.values())
            moved = self.run.line.get("env_steps", 0) > steps + 50 and self.updates > updates + 1
            return bool(table) and there and moved and not self.run.orphans()

        return is_well

    # Faults: each does its harm, and ends when it is over; what follows is the recovery.

    def kill(self) -> Iterator[None]:
        name, pid = self._victim()
        os.kill(pid, signal.SIGKILL)
        yield from self.wait(
            lambda: self.run.table().get(name, {}).get("pid") not in (0, pid, None), DEADLINE_S, f"another {name}"
        )

    def stop(self) -> Iterator[None]:
        """For a while, or for longer than a step may take."""
        name, pid = self._victim()
        victim = psutil.Process(pid)
        victim.suspend()
        yield from self.pause(self.random.choice([0.5, 2.0, 2 * STEP_S]))
        try:
            victim.resume()  # never a process that has taken its pid
        except psutil.NoSuchProcess:
            yield from self.wait(lambda: self.run.table().get(name, {}).get("pid"), DEADLINE_S, f"another {name}")

    def suspend(self) -> Iterator[None]:
        """The whole run, as a closed laptop would."""
        assert self.run.process is not None
        root = psutil.Process(self.run.process.pid)
        stopped = [root, *root.children(recursive=True)]
        for each in stopped:
            quietly(each.suspend)
        deadline = time.monotonic() + 7.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
        for each in stopped:
            quietly(each.resume)
        self._forgive()
        yield

    def end(self) -> Iterator[None]:
        """The run is interrupted or killed, and started again."""
        run, number = self.run, self.random.choice(ENDS)
        assert run.process is not None
        self._note_deaths()
        told, sent = run.line.get("env_steps", 0), time.monotonic()
        run.signal(number)
        code, saved = run.process.wait(60), run.saved()
        if number != signal.SIGKILL:
            self.ends.append(time.monotonic() - sent)
            if code != 128 + number:
                raise Broken(f"code {code} after {number.name}")
        deadline = time.monotonic() + GONE_S
        while run.left() and time.monotonic() < deadline:
            time.sleep(0.02)
        if run.left() or run.orphans():
            raise Broken(f"left {GONE_S:.0f} s after {number.name}: {run.left()} {run.orphans()}")
        run.read()
        run.start()
        self.resumes += 1
        resumed: list[int] = []
        while not resumed:
            resumed += [line["env_steps"] for line in run.read() if "resumed_from" in line]
            if time.monotonic() - sent > START_S:
                raise Broken(f"no start after {number.name}")
            yield
        if number == signal.SIGKILL:
            self.rolled_back.append(max(0, told - resumed[0]))
        if resumed[0] < saved or (number != signal.SIGKILL and resumed[0] < told):
            raise Broken(f"{number.name} at {told:,} env steps, a checkpoint of {saved:,}, went on from {resumed[0]:,}")
        self._forgive()

    def disk(self) -> Iterator[None]:
        self.run.fill_disk()
        yield from self.pause(self.random.uniform(1.0, 4.0))
        self.run.free_disk()
        for name in self.moved:  # no line could be written meanwhile
            self.moved[name] = time.monotonic()

    def clock(self) -> Iterator[None]:
        self.run.set_clock(self.random.uniform(-86_400.0, 86_400.0))
        yield

    def cut(self) -> Iterator[None]:
        self.run.proxy.cut()
        yield from self._rejoined()

    def hole(self) -> Iterator[None]:
        self.run.proxy.swallows = True
        yield from self.pause(self.random.uniform(0.5, 5.0))
        self.run.proxy.swallows = False
        yield from self._rejoined()

    def refuse(self) -> Iterator[None]:
        self.run.proxy.refuses = True
        self.run.proxy.cut()
        yield from self.pause(self.random.uniform(0.5, 5.0))
        self.run.proxy.refuses = False
        yield from self._rejoined()

    def leave(self) -> Iterator[None]:
        """The actor that joined is killed, and another joins."""
        if self.run.joined is not None:
            self.run.joined.kill()
            self.run.joined.wait(30)
        self.left_actors += 1
        self.run.join()
        yield from self._rejoined()

    def order(self, name: str) -> Iterator[None]:
        """Some environment obeys. One that hangs or leaks goes with its process, unless that joined from elsewhere."""
        for file in self.run.orders.glob(f"{name}-*"):  # one may have taken such an order before
            file.unlink()
        (self.run.orders / name).touch()
        yield from self.wait(lambda: list(self.run.orders.glob(f"{name}-*")), DEADLINE_S, f"one takes {name}")
        (file,) = self.run.orders.glob(f"{name}-*")
        pid = int(file.name.partition("-")[2])
        if self.run.joined is not None and pid == self.run.joined.pid:
            if name in ("hang", "leak"):  # its own machine's matter
                yield from self.leave()
        elif name in ("hang", "leak", "raise"):
            yield from self.wait(lambda: not psutil.pid_exists(pid), 3 * DEADLINE_S, f"the one that took {name} is gone")

    def _rejoined(self) -> Iterator[None]:
        def is_there() -> bool:
            self.run.join()  # it ends with a run that ends
            return bool(self.run.line.get("gate_actors", 0) >= self.expected_actors())

        yield from self.pause(1.0)  # for a line that knows of the fault
        yield from self.wait(is_there, DEADLINE_S, "the actor that joined is back")

    def expected_actors(self) -> int:
        return 1 + ("grpc" in self.run.command and int(self.run.line["actors"]))

    def _victim(self) -> tuple[str, int]:
        while not (found := {n: e["pid"] for n, e in self.run.table().items() if n != "supervisor" and e["pid"]}):
            self.look()
        kinds = sorted({name.partition("/")[0] for name in found})
        kind = self.random.choice(kinds)  # a learner as often as an actor
        return self.random.choice(sorted((name, pid) for name, pid in found.items() if name.partition("/")[0] == kind))

    def _forgive(self) -> None:
        """The run was away: that is no stall."""
        self.moved = dict.fromkeys(self.moved, time.monotonic())
        self.inspected = (0.0, 0.0)

    def _note_deaths(self) -> None:
        for name, entry in self.run.table().items():
            self.deaths[name] = self.deaths.get(name, 0) + entry.get("restarts", 0)


def quietly(do: Callable[[], Any]) -> None:
    try:
        do()
    except psutil.NoSuchProcess:
        pass
