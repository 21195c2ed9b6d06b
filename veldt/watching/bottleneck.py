"""Rates: how fast the counts of a run grow. bottleneck: one sentence that names what limits it (see docs/view.md).

Which link waits, and which is busy, follows from the declared metrics: a node of any name counts as the link that its
metrics are declared for.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from typing import Any

import psutil

from veldt.metrics import BUSY, CHAIN, PACKAGE, WAITS, Declarations
from veldt.watching.links import Line, fractions, percent

SHORTEST_S = 0.2  # over a shorter time a rate is too coarse: the kernel counts CPU time in ticks of 10 ms

MUCH = 0.15  # fraction of its time that a link must wait to be worth a sentence
REFUSES = 0.3  # fraction of refused blocks from which the store's limiter holds up the actors
HIGH = 0.9  # fraction of the time, or of the cores, that counts as all of it
FULL = 0.5  # how full the queue to the store is at least, where it holds up inference


Mark = tuple[float, float]  # a time and a count


class Rates:
    """The rates of all declared counts, each over `seconds` to twice as long; over less only in the first `seconds`.

    So a line that follows shortly after another one has the rates of about the same time: what a process reports is up to
    a quarter of a second old, which in a short time would be many times its share. For the same reason the time of a line
    is that at which its counts were read, and not that at which the rest of it was ready.

    A line may lack a count. A count that has become smaller belongs to a restarted process, and its rate starts again.
    """

    def __init__(self, seconds: float, declarations: Declarations = PACKAGE) -> None:
        self.seconds = seconds
        self._rates = {metric.name: metric.rate for metric in declarations.values() if metric.rate}
        self._starts: dict[str, Mark] = {}  # by name: where the rate starts
        self._next: dict[str, Mark] = {}  # where it will start, once `seconds` have passed from there
        self._cpu: tuple[float, dict[int, float]] = (0.0, {})  # time, and CPU seconds by process

    def begin(self, line: dict[str, Any], now: float, pids: Iterable[int]) -> None:
        """`now` is the time.monotonic() at which the counts of the line were read."""
        self._starts = {name: (now, line[name]) for name in self._rates if name in line}
        self._next = dict(self._starts)
        self._cpu = time.monotonic(), cpu_seconds(pids)

    def of(self, line: dict[str, Any], now: float, pids: Iterable[int]) -> dict[str, float]:
        known = [name for name in self._rates if name in line]
        out = {self._rates[name]: x for name in known if (x := self._rate(name, now, line[name])) is not None}
        return out | self._cores(pids)

    def _rate(self, name: str, now: float, count: float) -> float | None:
        """None: it is not known yet."""
        if name not in self._starts or count < self._next[name][1]:
            self._starts[name] = self._next[name] = now, count
        elif now - self._next[name][0] >= self.seconds:
            self._starts[name], self._next[name] = self._next[name], (now, count)
        since, before = self._starts[name]
        return (count - before) / (now - since) if now - since >= SHORTEST_S else None

    def _cores(self, pids: Iterable[int]) -> dict[str, float]:
        now, out = time.monotonic(), {}
        since, earlier = self._cpu
        cpu = cpu_seconds(pids)
        if now - since >= SHORTEST_S:
            out["cpu/all"] = sum(x - earlier[pid] for pid, x in cpu.items() if pid in earlier) / (now - since)
        if now - since >= max(self.seconds, SHORTEST_S):
            self._cpu = now, cpu
        return out


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """CPU time of this process and of those of the others that still exist."""
    out = {}
    for pid in (os.getpid(), *pids):
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            out[pid] = times.user + times.system
    return out


def bottleneck(line: Line, one_thread: bool = False, declarations: Declarations = PACKAGE) -> str:
    """Empty if the line does not say: one that follows shortly after another lacks the reports of some processes."""
    items, least = line.get("store_items"), line.get("store_min_size", 0)
    if items is not None and items < least and not line.get("learner_steps_per_s"):
        return f"The store is filling: {items:,.0f} of the {least:,} items that learning starts with."
    busy, waits = (fractions(line, column, declarations) for column in (BUSY, WAITS))
    if one_thread:
        return _one_thread(line, busy)
    if "shard" in busy and "recorder" not in waits:
        return _bundles(line, busy, waits)
    if line.get("workers"):
        return _workers(line, busy)
    if "workers" in busy and "master" in busy:
        return _evolution(line, busy, waits)
    if "recorder" not in waits or "learner" not in waits:
        return ""
    actor, learner, refusing = waits["recorder"], waits["learner"], line.get("refusing", 0.0) >= REFUSES
    for_data = f"The learner waits {percent(learner)} of its time for data"
    if "policy" in waits and not refusing:  # central inference: actors wait for actions, and only inference for the store
        inference, full = waits["policy"], line.get("queue_fill", 0.0) >= FULL
        if learner >= MUCH:
            return f"{for_data}; {_central(line, busy, actor, inference)}."
        if inference >= MUCH and full:
            return _queue(line, "inference waits", "its", inference)
        if actor >= MUCH:
            why = _central(line, busy, actor, inference)
            return f"{why[0].upper()}{why[1:]}."
    if max(actor, learner) < MUCH:
        return _no_waiting(line, busy, declarations)
    if min(actor, learner) >= max(MUCH, 0.5 * max(actor, learner)):
        return (
            f"The actors and the learner take turns waiting for each other ({percent(actor)} and {percent(learner)} of "
            "their time): data moves in batches that are too large; make actor.block or learner.prefetch smaller."
        )
    if learner >= actor:
        return f"{for_data}; {_too_little_data(line, busy)}."
    if refusing:
        change = f"lower store.samples_per_insert (now {line.get('samples_per_insert', 0):g}), use fewer actors"
        if line.get("store_once"):  # every step is learned from once
            change = "use a larger learner.batch, fewer actors"
        return (
            f"{_slow_learner(busy)} the actors wait {percent(actor)} of theirs for it: {change}, a smaller network, more "
            "--threads, or a GPU."
        )
    return _queue(line, "the actors wait", "their", actor)


def _bundles(line: Line, busy: dict[str, float], waits: dict[str, float]) -> str:
    """Where each process acts and learns, and servers apply the gradients."""
    if "learner" not in waits:
        return ""
    server, blocked, idle = busy["shard"], line.get("wait/shards", 0.0), waits["learner"]
    if blocked >= MUCH or server >= HIGH:
        return (
            f"The parameter servers are the bottleneck: they are busy {percent(server)} of their time, and the learners "
            f"wait {percent(blocked)} of theirs for them: add --shards."
        )
    parts = {name: busy.get(name, 0.0) for name in ("learner", "policy", "environments")}
    shares = f"{percent(parts['learner'])} of the time in gradients, {percent(parts['policy'])} in acting, "
    shares += f"{percent(parts['environments'])} in environments"
    if _all_cores(line):
        return f"All {line['cores']} cores are busy. The bundles spend {shares}; the servers are busy {percent(server)}."
    if idle >= MUCH:
        return f"The bundles wait {percent(idle)} of their time for another process; they spend {shares}."
    return f"The bundles are the bottleneck: they spend {shares}: add --bundles."


def _evolution(line: Line, busy: dict[str, float], waits: dict[str, float]) -> str:
    """Workers that evaluate, and a master that waits for all of a generation."""
    idle, update = waits.get("workers", 0.0), busy["master"]
    if idle >= MUCH and update >= 0.5 * idle:
        return (
            f"The master's update is the bottleneck: the workers wait {percent(idle)} of their time for the next "
            "generation: more learner.pairs in each, or a smaller network."
        )
    if idle >= MUCH:
        return (
            f"The workers wait {percent(idle)} of their time for the last episodes of a generation: more learner.pairs, a "
            "cap on their length (--learner.cap), or --learner.mode first."
        )
    part, faster = "environments", "faster environments"
    if busy.get("environments", 0.0) < 0.5 * busy["workers"]:
        part, faster = "network", "a smaller network"
    if _all_cores(line):
        cores = f"all {line['cores']} cores"
        return f"The workers are busy, most of the time with the {part}, and so are {cores}: {faster} or more cores."
    return f"The workers are the bottleneck, most of the time with the {part}: add --actors (now {line.get('actors', 1)})."


def _queue(line: Line, who_waits: str, whose: str, fraction: float) -> str:
    return (
        f"The queue to the store is the bottleneck: {who_waits} {percent(fraction)} of {whose} time for room in it "
        f"({percent(line.get('queue_fill', 1.0))} full when it is emptied, between two updates): raise --queue (now "
        f"{line.get('queue', 0)}), or make updates shorter with a smaller learner.batch."
    )


def _one_thread(line: Line, busy: dict[str, float]) -> str:
    if "workers" in busy:  # of evolution strategies: their time has that of their environments in it
        busy = busy | {"workers": max(0.0, busy["workers"] - busy.get("environments", 0.0))}
    names = {"learner": "the learner", "policy": "the actors' network", "workers": "the network"}
    shares = {names.get(link, link if link in CHAIN else f"the {link}"): x for link, x in busy.items()}
    shares["evaluations"] = line.get("busy/evaluator", 0.0)
    most = max(shares, key=lambda name: shares[name])
    if not shares[most]:
        return ""
    verb = "take" if most in ("environments", "evaluations") else "takes"
    return f"One thread does all the work, and {most} {verb} {percent(shares[most])} of its time."


def _workers(line: Line, busy: dict[str, float]) -> str:
    """Each of several workers does all the work, and none waits for another."""
    names = {"learner": "in updates", "policy": "in their network", "environments": "in environments"}
    shares = {names[link]: x for link, x in busy.items() if link in names}
    if not shares:
        return ""
    most = max(shares, key=lambda name: shares[name])
    found = f"The workers spend {percent(shares[most])} of their time {most}"
    if _all_cores(line) or line["workers"] >= line.get("cores", 1):
        return f"{found}, and all {line.get('cores', 1)} cores have one: more cores would make it faster."
    return f"{found}: add --workers (now {line['workers']}), one for each of the {line.get('cores', 1)} cores."


def _central(line: Line, busy: dict[str, float], actor: float, inference: float) -> str:
    """Why there is no more data, if one process computes the actions of all actors. The numbers are what these two wait."""
    batch = f"{line.get('inference_batch', 0):.0f} of {line.get('envs', 0):.0f} environments at once"
    if _all_cores(line) and inference >= MUCH:
        return f"all {line['cores']} cores are busy: faster environments or more cores"
    if inference < max(MUCH, 0.5 * actor):
        smaller = "or a smaller network"
        if line.get("inference_device", "cpu") == "cpu":
            smaller = "a smaller network, or a GPU with --central.device cuda"
        return (
            f"inference is the bottleneck, busy {percent(1 - inference)} of its time ({batch}) while the actors wait "
            f"{percent(actor)} of theirs for it: more --envs-per-actor for larger batches, {smaller}"
        )
    if actor < max(MUCH, 0.5 * inference):
        env, actors = percent(busy.get("environments", 0.0)), line.get("actors", 1)
        return f"the actors spend {env} of their time in environments: add --actors (now {actors})"
    return (
        f"actors and inference wait for each other ({percent(actor)} and {percent(inference)} of their time, {batch}): "
        "more --central.groups or --envs-per-actor, or a shorter --central.wait-ms"
    )


def _too_little_data(line: Line, busy: dict[str, float]) -> str:
    outside = [(x, link) for link, x in busy.items() if link not in CHAIN and x >= HIGH]
    if outside:
        most, link = max(outside, key=lambda x: x[0])
        return f"the {link} is the bottleneck, busy {percent(most)} of its time"
    env, policy, ratio = busy.get("environments", 0.0), busy.get("policy", 0.0), line.get("samples_per_insert", 0)
    more = f", or raise store.samples_per_insert (now {ratio:g}) to learn more from each step"
    if not ratio or line.get("store_once"):
        more = ""
    cause, faster = f"the actors spend {percent(env)} of theirs in environments", "faster environments"
    if policy > env:
        cause = f"the actors spend {percent(policy)} of theirs in their network"
        faster = "more --envs-per-actor, a smaller network"
    if _all_cores(line):
        return f"{cause}, and all {line['cores']} cores are busy: {faster} or more cores{more}"
    return f"{cause}: add --actors (now {line.get('actors', 1)}){more}"


def _no_waiting(line: Line, busy: dict[str, float], declarations: Declarations) -> str:
    wanted, inserted, sampled = (line.get(name, 0.0) for name in ("samples_per_insert", "inserted_per_s", "sampled_per_s"))
    if wanted and sampled < 0.8 * wanted * inserted:  # of this line: the ratio of the whole run lags behind
        return (
            f"{_slow_learner(busy)} samples each item {sampled / inserted:.1f} times instead of {wanted:g}: use fewer "
            "actors, a smaller network, more --threads, or a GPU."
        )
    if _all_cores(line):
        return f"No process waits, and all {line['cores']} cores are busy: more cores would make it faster."
    outside = (m for m in declarations.values() if m.column == WAITS and m.link not in CHAIN)
    most, metric = max(((line.get(m.name, 0.0), m) for m in outside), key=lambda x: x[0], default=(0.0, None))
    if metric is not None and most >= MUCH:
        reason = f" for {metric.waits_for}" if metric.waits_for else ""
        return f"The {metric.link} waits {percent(most)} of its time{reason}; actors and learner are in balance."
    return "No process waits for long: actors and learner are in balance."


def _slow_learner(busy: dict[str, float]) -> str:
    return f"The learner is the bottleneck: it is busy {percent(busy.get('learner', 1.0))} of its time, and"


def _all_cores(line: Line) -> bool:
    return bool(line.get("cpu/all", 0.0) >= HIGH * line.get("cores", 1 << 30))
