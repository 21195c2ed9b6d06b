"""Rates: how fast the counts of a run grow. bottleneck: one sentence that names what limits it (see docs/view.md).

Which link waits, and which is busy, follows from the declared metrics: a node of any name counts as the link that its
metrics are declared for. Where a store lies between actors and a learner, the sentence is one of those here; other programs
declare theirs (`veldt.sentences`), or get one that follows from the shares of their links.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from typing import Any

import psutil

from veldt.metrics import BUSY, CHAIN, PACKAGE, WAITS, Declarations
from veldt.sentences import Sentences
from veldt.watching.links import Line, fill, fractions, percent

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
        return _one_thread(line, _parts(busy, declarations))
    for own in declarations.sentences:
        if all(name in line for name in own.known_by):
            return _declared(line, own, busy, declarations)
    if "recorder" not in waits or "learner" not in waits:
        return _program(line, busy, declarations)
    actor, learner, refusing = waits["recorder"], waits["learner"], line.get("refusing", 0.0) >= REFUSES
    for_data = f"The learner waits {percent(learner)} of its time for data"
    outside = {link: x for link, x in busy.items() if link not in CHAIN and x >= HIGH}
    if outside and max(actor, learner) >= MUCH:
        link = max(outside, key=lambda link: outside[link])
        found = for_data if learner >= actor else f"The actors wait {percent(actor)} of their time for the store"
        return f"{found}; the {link} is the bottleneck, busy {percent(outside[link])} of its time."
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


def _declared(line: Line, own: Sentences, busy: dict[str, float], declarations: Declarations) -> str:
    blocked, server = line.get(own.blocked, 0.0), busy.get(own.server, 0.0)
    parts = {link: x for link, x in _parts(busy, declarations).items() if link in own.parts}
    most = max(parts, key=lambda link: parts[link], default="")
    if server >= HIGH or (blocked >= MUCH and server >= 0.5 * blocked):
        text = own.served
    elif line.get(own.waits, 0.0) >= MUCH:
        text = own.idle
    elif _all_cores(line) or line.get(own.count, 0) >= line.get("cores", 1):
        text = own.cores
    else:
        text = own.busy
    faster = "faster environments" if most == "environments" else "a smaller network"
    for field, words in (("part", own.parts.get(most, "")), ("share", percent(parts.get(most, 0.0))), ("faster", faster)):
        text = text.replace(f"{{{field}}}", words)
    return fill(text, line, declarations)


def _parts(busy: dict[str, float], declarations: Declarations) -> dict[str, float]:
    """The same without the time of a link that is part of another's."""
    within = {metric.link: metric.contains for metric in declarations.values() if metric.contains}
    return {link: max(0.0, x - busy.get(within.get(link, ""), 0.0)) for link, x in busy.items()}


def _program(line: Line, busy: dict[str, float], declarations: Declarations) -> str:
    """Of a program that no sentence was written for: which process waits most for what, and which part is busy most."""
    waiting = [declarations[name] for name in declarations.waiting if name in line]
    if not waiting or len(waiting) < len(declarations.waiting) or not busy:
        return ""
    parts = _parts(busy, declarations)
    most, idlest = max(parts, key=lambda link: parts[link]), max(waiting, key=lambda metric: line[metric.name])
    share, waits = parts[most], line[idlest.name]
    if waits < MUCH:
        if _all_cores(line):
            return f"No process waits, and all {line['cores']} cores are busy: more cores would make it faster."
        return f"No process waits for long; the {most} is the busiest, {percent(share)} of its time."
    reason = f" for {idlest.waits_for}" if idlest.waits_for else ""
    found = f"The {idlest.link} waits {percent(waits)} of its time{reason}"
    if most != idlest.link and share >= HIGH:
        return f"The {most} is the bottleneck, busy {percent(share)} of its time. {found}."
    return f"{found}; the {most} is the busiest, {percent(share)} of its time."


def _queue(line: Line, who_waits: str, whose: str, fraction: float) -> str:
    return (
        f"The queue to the store is the bottleneck: {who_waits} {percent(fraction)} of {whose} time for room in it "
        f"({percent(line.get('queue_fill', 1.0))} full when it is emptied, between two updates): raise --queue (now "
        f"{line.get('queue', 0)}), or make updates shorter with a smaller learner.batch."
    )


def _one_thread(line: Line, busy: dict[str, float]) -> str:
    names = {"learner": "the learner", "policy": "the actors' network", "workers": "the network"}
    shares = {names.get(link, link if link in CHAIN else f"the {link}"): x for link, x in busy.items()}
    shares["evaluations"] = line.get("busy/evaluator", 0.0)
    most = max(shares, key=lambda name: shares[name])
    if not shares[most]:
        return ""
    verb = "take" if most in ("environments", "evaluations") else "takes"
    return f"One thread does all the work, and {most} {verb} {percent(shares[most])} of its time."


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
