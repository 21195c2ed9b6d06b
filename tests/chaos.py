"""Pieces of the tests with real processes: programs, scenarios that play beside them, bad environments, and an oracle.

Only what is light to import: the processes of a program import this module when they are started.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from orders import LEAKS, Orders, broken_pole, hang_for_ever
from running import run_until
from setproctitle import getproctitle

from veldt.acting.actor import Policy
from veldt.algorithms.dqn import DQN
from veldt.envs.small import Counter
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.learning.learner import Learner
from veldt.program import Node, Program
from veldt.runtime.local import zygote
from veldt.storing.store import Store
from veldt.topologies import make_program

log = logging.getLogger("veldt")

SMALL: dict[str, Any] = {
    "steps": 10**9,
    "actors": 2,
    "envs_per_actor": 2,
    "algorithm.network_from": "chaos:Net",
    "actor.block": 8,
    "store.capacity": "4_000",
    "store.min_size": 100,
    "store.samples_per_insert": 0.0,
    "learner.batch": 64,
    "learner.prefetch": 1,
    "eval.every": 0,
}


# The same as an IMPALA: a queue of unrolls.
UNROLLS: dict[str, Any] = {
    "algorithm.unroll": 8,
    "store.capacity": "1_000",
    "store.min_size": 0,
    "store.samples_per_insert": 1.0,
    "learner.batch": 8,
}


# The same as an R2D2: windows with a recurrent state at their start.
SEQUENCES: dict[str, Any] = {
    "algorithm.lstm": 8,
    "algorithm.head": 8,
    "algorithm.burn_in": 3,  # so that no window begins where a stream does
    "algorithm.length": 8,
    "algorithm.stride": 4,
    "store.min_size": 50,
}


class Net(torch.nn.Module):
    """Action values of a Counter, from the time and the last action alone: the others are too large to learn from."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, env.n_actions)

    def forward(self, obs: Any) -> Any:
        return self.layer(obs[..., 2:].float() / 12)


class SlowToLearn(torch.nn.Module):
    """Acts at once, and takes its time over a gradient."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 8)

    def forward(self, obs: Any) -> Any:
        if self.layer.weight.requires_grad:
            time.sleep(0.05)
        return self.layer(obs).relu()


def settings_of(recipe: str) -> dict[str, Any]:
    if recipe in ("r2d2", "r2d3"):
        return SMALL | SEQUENCES
    if recipe not in ("impala", "seed-vtrace"):
        return SMALL
    return {name: x for name, x in SMALL.items() if name != "actor.block"} | UNROLLS


def config_of(env: Any = "veldt/Counter-v0", algorithm: Any = None, recipe: str = "apex-dqn", **changes: Any) -> Config:
    """A small Ape-X, IMPALA or R2D2. `env` may be a callable."""
    from veldt import callables

    name = env if isinstance(env, str) else callables.name_of(env)
    config = recipes.make(recipe, name, **settings_of(recipe) | changes)
    return config if algorithm is None else dataclasses.replace(config, algorithm=algorithm)


def program_of(config: Config, learner: Callable[..., Any] | None = None, *args: Any) -> Program:
    """The real program; with `learner`, a node that gets the store and the counters in place of the learner."""
    envs = config.envs()
    envs.close()
    program = make_program(config, envs.spec)
    if learner is not None:
        store, counters = program.nodes["learner"].args[2], program.nodes["learner"].args[4]
        program.nodes["learner"] = Node("learner", learner, (store, counters, *args), {}, on="store")
    return program


# Scenarios.

Scenario = Callable[[Any], Iterator[None]]


def play(runtime: Any, program: Program, scenario: Scenario, seconds: float = 60.0) -> None:
    """Runs a program beside a scenario: a generator that looks at the nodes, and yields to let them go on."""
    running: list[Iterator[None]] = []
    deadline = time.monotonic() + seconds

    def until(nodes: Any) -> bool:
        if not running:
            if nodes.live:
                zygote.start_early()  # for the next test, while this one waits
            running.append(scenario(nodes))
        assert time.monotonic() < deadline, f"the scenario has not ended after {seconds} s"
        return next(running[0], "end") == "end"

    run_until(runtime, program, until)


def wait(condition: Callable[[], Any], seconds: float, what: str) -> Iterator[None]:
    """Part of a scenario: goes on until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {seconds} s"
        yield


def child(nodes: Any, name: str) -> Any:
    return nodes.supervisor.children[name]


def kill(nodes: Any, name: str) -> int:
    """Ends a process as the kernel would; returns its pid."""
    pid = int(child(nodes, name).pid)
    assert pid > 0, f"{name} is not there"
    os.kill(pid, signal.SIGKILL)
    return pid


def steps_of(nodes: Any, name: str) -> int:
    """Env steps that a process has counted, over all its lives."""
    supervisor = nodes.supervisor
    return int(sum(rows.table[supervisor.plan.row(name), 0] for rows in supervisor.rows.values()))


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Outside of a scenario; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not after {seconds} s"
        time.sleep(0.005)
    return time.monotonic() - began


# What a run may leave behind.


def family(pid: int | None = None) -> list[psutil.Process]:
    """All living descendants of a process."""
    zygote.discard()
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if alive(process)]


def used_memory(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def belongings() -> dict[str, Any]:
    """What this process has open: to be the same before and after."""
    zygote.discard()
    gc.collect()
    return {
        "processes": sorted(process.pid for process in psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "shared memory": sorted(os.listdir("/dev/shm")),
        "mapped": sum("memfd:veldt" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


# The oracle.


def _mix(*numbers: Any) -> Any:
    """`Counter.mix` of arrays."""
    h: Any = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for x in numbers:
            h = (h ^ (np.asarray(x).astype(np.uint64) + np.uint64(1))) * np.uint64(0xBF58476D1CE4E5B9)
            h ^= h >> np.uint64(29)
    return h


def corrupt(rows: dict[str, Any], at: int | None = 0, longest: int = 12) -> Any:
    """Which of n windows [n, T] of a Counter are not what happened: bool [n]. Row `at` trains; None: many may."""
    env, episode, t, came_by = np.moveaxis(rows["obs"], -1, 0)
    valid, h = rows["valid"], _mix(env, episode, 1)
    last = t == np.where(h % np.uint64(4) == 0, 1, 1 + ((h >> np.uint64(8)) % np.uint64(longest)).astype(np.int64))
    terminal = last & (_mix(env, episode, 2) % np.uint64(2) == 0)
    reward = np.where(t > 0, (_mix(env, episode, t, came_by) % np.uint64(17)).astype(np.int64) - 8, 0)
    wrong = (rows["reward"] != reward) | (rows["discount"] != np.where(terminal, 0.0, 1.0))
    wrong |= (rows["first"] != (t == 0)) | (rows["last"] != last)
    before, after = np.s_[:, :-1], np.s_[:, 1:]
    begins = (episode[after] == episode[before] + 1) & (t[after] == 0)
    goes_on = (episode[after] == episode[before]) & (t[after] == t[before] + 1) & (came_by[after] == rows["action"][before])
    follows = (env[after] == env[before]) & np.where(last[before], begins, goes_on)
    broken = valid[before] & valid[after] & ~follows
    trains = valid & ~rows["last"]
    return (wrong & valid).any(1) | broken.any(1) | ~(trains[before].any(1) if at is None else trains[:, at])


def corrupt_starts(rows: dict[str, Any], starts: dict[str, Any], history: int = 1) -> Any:
    """Which of n windows begin with a recurrent state of R2D2 that cannot be theirs: bool [n].

    It is zero where an episode begins, and before a stream does; elsewhere an LSTM has run, and the last action is the one
    that the Counter's observation names. (A stream begins within an episode where inference is killed, and its actors are
    not: there the state is zero too.)
    """
    at = history - 1  # the row that the state is before
    within = (rows["valid"][:, at] & ~rows["first"][:, at])[:, None]
    h, c, taken = (starts[f"state/{name}"] for name in ("h", "c", "taken"))
    came_by = rows["obs"][:, at, 3, None] == np.arange(taken.shape[1])
    wrong = (taken != (came_by & within)).any(1) | ~np.isfinite(h).all(1) | ~np.isfinite(c).all(1)
    for x in (h, c):
        wrong |= ((x != 0).all(1) != within[:, 0]) | ((x != 0).any(1) != within[:, 0])
    return wrong


class Checker:
    """In place of the learner: samples all the time, and checks every window. One learner step is one window."""

    def __init__(self, store: Any, counters: Any, batch: int = 256, sleep: float = 0.0) -> None:
        self.store, self.counters, self.batch, self.sleep = store, counters, batch, sleep
        self.checked = self.corrupt = 0

    def step(self) -> bool:
        time.sleep(self.sleep)
        sample = self.store.sample(self.batch)
        if sample is None:
            return False
        window = self.store.schema.window
        bad = corrupt(sample.rows, window.before if window.slices else None)
        if "state/taken" in sample.starts:
            bad |= corrupt_starts(sample.rows, sample.starts, window.history)
        if bad.any():
            which = int(np.flatnonzero(bad)[0])
            log.error("corrupt: %s", {name: x[which].tolist() for name, x in (sample.rows | sample.starts).items()})
        self.checked += len(bad)
        self.corrupt += int(bad.sum())
        self.counters.add("learner_steps", len(bad))
        self.store.update(sample.keys, np.ones(len(bad)))
        self.store.trim()
        return True

    def metrics(self) -> dict[str, float]:
        return {"checked": float(self.checked), "corrupt": float(self.corrupt)}


class Verdict:
    """The newest words of a Checker."""

    def __init__(self, nodes: Any) -> None:
        self.nodes, self.seen = nodes, {}

    def look(self) -> dict[str, float]:
        self.seen |= self.nodes.metrics()
        return self.seen

    def more(self, windows: int) -> Callable[[], bool]:
        """Whether so many more windows were checked than until now; none of them was corrupt."""
        goal = self.look().get("checked", 0.0) + windows

        def reached() -> bool:
            seen = self.look()
            assert seen.get("corrupt", 0.0) == 0, f"{seen['corrupt']:.0f} of {seen['checked']:.0f} windows are corrupt"
            return seen.get("checked", 0.0) >= goal

        return reached


def check_blocks(snapshot: Any) -> int:
    """Checks every valid row of every block of the store, one by one, that they follow each other, and the recurrent
    states; how many rows there were."""
    store = snapshot.stores()["store"]
    first, stop, blocks = store.blocks(0, 1 << 40)
    schema, count = store.schema, stop - first
    rows = {name.removeprefix("rows/"): x for name, x in blocks.items() if name.startswith("rows/")}
    rows["packed"] = np.ascontiguousarray(rows["packed"]).view(schema.layout.record).reshape(count, schema.rows)
    columns = schema.layout.columns(rows)
    flat = {name: x.reshape(count * schema.rows, 1, *x.shape[2:]) for name, x in columns.items()}
    valid = flat["valid"][:, 0]
    kept = {name: x[valid] for name, x in flat.items()}
    kept["last"] = kept["last"].copy()
    bad = corrupt(kept) & ~kept["last"][:, 0]  # the last row of an episode trains nothing
    assert not bad.any(), f"{bad.sum()} of {len(bad)} rows in the store are corrupt"
    some = columns["valid"].any(1)
    runs = {name: x[some].copy() for name, x in columns.items()}
    end = schema.rows - 1 - runs["valid"][:, ::-1].argmax(1)  # where a cut may have ended an episode
    lane = np.arange(len(end))
    runs["valid"][lane, end] &= ~runs["last"][lane, end]
    bad = corrupt(runs, None)
    assert not bad.any(), f"{bad.sum()} of {len(bad)} blocks in the store are no run of consecutive steps"
    if "state/taken" in schema.start_layout.spec:
        starts = {name.removeprefix("starts/"): x for name, x in blocks.items() if name.startswith("starts/")}
        if "packed" in starts:
            packed = np.ascontiguousarray(starts["packed"])
            starts["packed"] = packed.view(schema.start_layout.record).reshape(count, schema.starts)
        at = np.arange(schema.starts) * schema.window.stride + schema.window.history - 1
        there = columns["valid"][:, at]
        first_rows = {name: x[:, at][there][:, None] for name, x in columns.items()}
        states = {name: x[there] for name, x in schema.start_layout.columns(starts).items()}
        bad = corrupt_starts(first_rows, states)
        assert not bad.any() and len(bad), f"{bad.sum()} of {len(bad)} recurrent states in the store are corrupt"
    return int(valid.sum())


# Bad environments.


class Moody(Counter):
    """A Counter that obeys files in a directory; each step takes `pace` seconds."""

    def __init__(self, orders: str, pace: float = 0.0) -> None:
        super().__init__()
        self.orders, self.pace = Orders(orders), pace

    def step(self, action: Any) -> Any:
        bad = self.orders.obey()
        if self.pace:
            time.sleep(self.pace)
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if bad else reward, *rest


class Raising(Counter):
    """Raises now and then, in step or in reset."""

    def __init__(self, step: float = 0.0, reset: float = 0.0) -> None:
        super().__init__()
        self.odds = {"step": step, "reset": reset}
        self.random = np.random.default_rng(np.random.SeedSequence().entropy)

    def _perhaps(self, where: str) -> None:
        if self.random.random() < self.odds[where]:
            raise ArithmeticError(f"a bad {where}")

    def reset(self, **kwargs: Any) -> Any:
        self._perhaps("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._perhaps("step")
        return super().step(action)


class Lying(Counter):
    """Some of its observations leave their space, some of its rewards are not finite."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        kind = Counter.mix(*obs.tolist(), 3) % 12
        return (obs - 2**40 * (kind == 0), (float("nan"), float("inf"), reward)[min(2, kind % 11)], *rest)


class Sluggish(Counter):
    """Its steps take longer and longer."""

    def step(self, action: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        time.sleep(3.0 if self.steps > 500 else 0.0)
        return super().step(action)


class Huge(Counter):
    """Rewards that no loss can bear."""

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, 3e38, *rest


# Learners and algorithms.


class Witness(Learner):
    """Writes into the log what it went on from."""

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        log.info("witness %d %s", self.steps, fingerprint(self.state()))


class Inspector(Learner):
    """A learner that checks every window of `orders.Pole` that it learns from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checked = self.corrupt = 0
        self.feed.store = self  # type: ignore[assignment]

    def sample(self, n: int) -> Any:
        sample = self.store.sample(n)
        if sample is not None:
            bad = broken_pole(sample.rows)
            self.checked += len(bad)
            self.corrupt += int(bad.sum())
            if bad.any():
                which = int(np.flatnonzero(bad)[0])
                log.error("corrupt: %s", {name: x[which].tolist() for name, x in sample.rows.items()})
        return sample

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"checked": float(self.checked), "corrupt": float(self.corrupt)}


def fingerprint(state: dict[str, Any]) -> str:
    """Of weights, target, optimizer, steps and random state, bit for bit."""
    import hashlib

    digest = hashlib.sha256()
    for name, x in sorted(state.items()):
        digest.update(f"{name} {getattr(x, 'dtype', type(x).__name__)} {np.shape(x)}".encode())
        digest.update(x.tobytes() if isinstance(x, np.ndarray) else repr(x).encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Poisoned(DQN):
    """Every so-many-th loss is not a number; and no actor may ever see weights that are not finite."""

    every: int = 7

    def loss(self, net: Any, target: Any, batch: Any) -> Any:
        loss = super().loss(net, target, batch)
        calls = self.__dict__.setdefault("calls", [0])
        calls[0] += 1
        if calls[0] % self.every == 0:
            loss.losses[""] = loss.losses[""] * float("nan")
        return loss

    def act(self, net: Any, *args: Any) -> Any:
        if not all(bool(torch.isfinite(p).all()) for p in net.parameters()):
            log.error("an actor has weights that are not finite")
        return super().act(net, *args)


def percentiles(seconds: Iterable[float]) -> str:
    values = np.array(list(seconds))
    return f"p50 {np.percentile(values, 50):.2f} s, p95 {np.percentile(values, 95):.2f} s, most {values.max():.2f} s"


# Small nodes for programs of any kind.


class Ticker:
    """A worker that counts up to a limit, and tells where it is."""

    def __init__(self, counters: Any, limit: int, level: float = 0.0, label: str = "ticker", other: Any = None) -> None:
        self.counters, self.limit, self.level, self.label, self.other = counters, limit, level, label, other
        self.ticks = 0

    def step(self) -> bool:
        if self.ticks == self.limit:
            return False
        self.ticks += 1
        self.counters.add("env_steps", 1)
        return True

    def metrics(self) -> dict[str, float]:
        return {"level": self.level, f"pid {self.label}": float(os.getpid())}

    def state(self) -> dict[str, Any]:
        return {"ticks": self.ticks, "array": np.arange(self.ticks, dtype=np.float32)}

    def load_state(self, state: dict[str, Any]) -> None:
        assert (state["array"] == np.arange(state["ticks"])).all()
        self.ticks = int(state["ticks"])


class Sink(Store):
    """A store that refuses every third insert, and wants the blocks of each actor in order and unchanged."""

    def __init__(self, schema: Any, counters: Any) -> None:
        self.schema, self.counters = schema, counters
        self.calls = 0
        self.next: dict[int, int] = {}

    def insert(self, block: Any, priorities: Any, source: Any = None) -> bool:
        from oracles import read_source

        self.calls += 1
        if self.calls % 3 == 0:
            return False
        actor, sequence = read_source(block)
        assert source is None or source.number == sequence, (source, sequence)
        assert sequence == self.next.get(actor, 0), (actor, sequence, self.next)
        stamp = 1000 * sequence + 10**6 * actor
        for name, column in block.columns().items():
            expected = np.zeros_like(column)
            expected[...] = stamp + np.arange(len(column)).reshape(-1, *[1] * (column.ndim - 1))
            assert (column == expected).all(), (name, column, expected)
        assert priorities is not None and (priorities == sequence + np.arange(len(priorities))).all()
        self.next[actor] = sequence + 1
        self.counters.add("learner_steps", 1)
        return True

    def sample(self, n: int) -> None:
        return None


class Producer:
    """Sends blocks as fast as they are taken."""

    def __init__(self, store: Any, schema: Any, actor: int, counters: Any, limit: int) -> None:
        self.store, self.schema, self.actor, self.counters, self.limit = store, schema, actor, counters, limit
        self.sequence = 0

    def step(self) -> bool:
        from oracles import make_block

        from veldt.ports import Source

        if self.sequence == self.limit:
            return False
        block = make_block(self.schema, Source(self.actor, self.sequence), [True] * self.schema.starts)
        if not self.store.insert(block, self.sequence + np.arange(self.schema.starts, dtype=np.float64)):
            return False
        self.sequence += 1
        self.counters.add("env_steps", 1)
        return True


def answer(obs: Any) -> int:
    """The action for an observation of a Counter."""
    return Counter.mix(*(int(x) for x in obs)) % 3


class Oracle(Policy):
    """A policy in a process of its own: the action is a function of the observation. It takes its time."""

    due = math.inf

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.waiting: dict[int, list[Any]] = {}
        self.patience: dict[int, int] = {}
        self.asked = 0

    def send(self, group: int, step: Any) -> bool:
        self.asked += 1
        time.sleep(self.pause)
        if group in self.waiting or self.asked % 5 == 0:  # "not now"
            return False
        self.waiting[group] = [answer(obs) for obs in step["obs"]]
        self.patience[group] = self.asked % 3
        return True

    def recv(self, group: int) -> Any:
        if group not in self.waiting:
            return None
        self.patience[group] -= 1
        return None if self.patience[group] >= 0 else {"action": np.array(self.waiting.pop(group), np.int64)}

    def record(self) -> None:
        pass

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        self.waiting.pop(group, None)


class Strict(Counter):
    """A Counter that takes no action but the one for what it showed last."""

    def reset(self, **kwargs: Any) -> Any:
        self.shown, info = super().reset(**kwargs)
        return self.shown, info

    def step(self, action: Any) -> Any:
        assert action == answer(self.shown), f"action {action} for {self.shown}"
        out = super().step(action)
        self.shown = out[0]
        return out


@dataclasses.dataclass(frozen=True)
class Never:
    """A limiter that takes nothing in."""

    def can_insert(self, *_: int) -> bool:
        return False

    def can_sample(self, *_: int) -> bool:
        return False


class Failing(Checker):
    """A service's process that fails after some work."""

    def step(self) -> bool:
        if self.checked > 1_000:
            raise ZeroDivisionError("the twelfth of never")
        return super().step()


class Breaking(Net):
    """A network that fails in the learner."""

    def forward(self, obs: Any) -> Any:
        if torch.is_grad_enabled() and len(obs) == SMALL["learner.batch"]:
            raise ZeroDivisionError("the twelfth of never")
        return super().forward(obs)


class TooLarge(Net):
    """A network that wants more memory than any device has, after some updates."""

    updates = 0

    def forward(self, obs: Any) -> Any:
        if torch.is_grad_enabled() and len(obs) == SMALL["learner.batch"]:
            TooLarge.updates += 1
            if TooLarge.updates > 30:
                torch.empty(1 << 50, dtype=torch.uint8, device=obs.device)
        return super().forward(obs)


class Hoarding(Net):
    """A network that takes more and more memory in the learner."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.hoard: list[bytes] = []

    def forward(self, obs: Any) -> Any:
        if torch.is_grad_enabled() and len(obs) == SMALL["learner.batch"] and len(self.hoard) < 2 * LEAKS:
            self.hoard.append(b"x" * 2_000_000)
        return super().forward(obs)


class Confined(Counter):
    """Its process may have a little more memory than now, and it wants all of it."""

    def reset(self, **kwargs: Any) -> Any:
        if not hasattr(self, "taken") and getproctitle().startswith("veldt actor/0"):
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + 200_000_000, resource.RLIM_INFINITY))
            self.taken: list[bytes] = []
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if hasattr(self, "taken"):
            self.taken.append(b"x" * 1_000_000)
        return super().step(action)


def always_raises() -> Raising:
    return Raising(step=1.0)


def cannot_be_made() -> Raising:
    raise ArithmeticError("a bad constructor")


class Parent(Counter):
    """Starts two processes in a session of their own, one by exec and one by fork; their pids are names of files."""

    def __init__(self) -> None:
        super().__init__()
        if getproctitle().startswith("veldt actor"):
            pids = [subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, os.fork()]
            if not pids[1]:
                os.setsid()
                while True:
                    time.sleep(1000)
            for pid in pids:
                (Path(os.environ["PIDS"]) / f"{os.getpid()}-{pid}").touch()


class HangsInActors(Counter):
    """Cannot be made in a process of a run other than the first."""

    def __init__(self) -> None:
        if getproctitle().startswith("veldt actor"):
            hang_for_ever()
        super().__init__()
