"""One sentence that names what limits a run, and what to change, from a line of its metrics (see docs/view.md).

Which link waits, and which is busy, follows from the declared metrics: a node of any name counts as the link that its
metrics are declared for.
"""

from __future__ import annotations

from typing import Any

from veldt.metrics import BUSY, CHAIN, PACKAGE, WAITS, Declarations, Metric
from veldt.watching.links import fractions
from veldt.watching.text import percent

MUCH = 0.15  # fraction of its time that a link must wait to be worth a sentence
REFUSES = 0.3  # fraction of refused blocks from which the store's limiter holds up the actors
HIGH = 0.9  # fraction of the time, or of the cores, that counts as all of it


def bottleneck(line: dict[str, Any], one_thread: bool = False, declarations: Declarations = PACKAGE) -> str:
    """Empty if the line does not say: one that follows shortly after another lacks the reports of some processes."""
    items, least = line.get("store_items"), line.get("store_min_size", 0)
    if items is not None and items < least and not line.get("learner_steps_per_s"):
        return f"The store is filling: {items:,.0f} of the {least:,} items that learning starts with."
    found = Diagnosis(line, declarations)
    if one_thread:
        return found.one_thread()
    return found.sentence() if found.complete else ""


class Diagnosis:
    """The waits of the links in a line, and what they mean."""

    def __init__(self, line: dict[str, Any], declarations: Declarations) -> None:
        self.line, self.declarations = line, declarations
        self.busy, self.waits = (fractions(line, column, declarations) for column in (BUSY, WAITS))
        self.complete = "recorder" in self.waits and "learner" in self.waits
        self.actor, self.learner = self.waits.get("recorder", 0.0), self.waits.get("learner", 0.0)
        self.refusing = line.get("refusing", 0.0) >= REFUSES
        self.cores_busy = bool(line.get("cpu/all", 0.0) >= HIGH * line.get("cores", 1 << 30))
        self.for_data = f"The learner waits {percent(self.learner)} of its time for data"

    def sentence(self) -> str:
        actor, learner = self.actor, self.learner
        if "policy" in self.waits and not self.refusing and learner >= MUCH:
            return self._central()
        if max(actor, learner) < MUCH:
            return self._no_waiting()
        if min(actor, learner) >= max(MUCH, 0.5 * max(actor, learner)):
            return self._by_turns()
        if learner >= actor:
            return self._too_little_data()
        return self._slow_learner() if self.refusing else self._short_queue()

    def _too_little_data(self) -> str:
        """The learner waits for the actors."""
        line, env, policy = self.line, self.busy.get("environments", 0.0), self.busy.get("policy", 0.0)
        others = {name: x for name, x in self.busy.items() if name not in CHAIN and x >= HIGH}
        if others:
            name = max(others, key=lambda other: others[other])
            return f"{self.for_data}; the {name} is the bottleneck, busy {percent(others[name])} of its time."
        ratio = line.get("samples_per_insert", 0)
        more = f", or raise store.samples_per_insert (now {ratio:g}) to learn more from each step"
        if not ratio or line.get("store_once"):
            more = ""
        if env >= policy:
            cause, faster = f"the actors spend {percent(env)} of theirs in environments", "faster environments"
        else:
            cause = f"the actors spend {percent(policy)} of theirs in their network"
            faster = "more --envs-per-actor, a smaller network"
        if self.cores_busy:
            return f"{self.for_data}; {cause}, and all {line['cores']} cores are busy: {faster} or more cores{more}."
        return f"{self.for_data}; {cause}: add --actors (now {line.get('actors', 1)}){more}."

    def _central(self) -> str:
        """The learner waits, and one process computes the actions of all actors."""
        line, actor, inference = self.line, self.actor, self.waits["policy"]
        batch = f"{line.get('inference_batch', 0):.0f} of {line.get('envs', 0):.0f} environments at once"
        if self.cores_busy and inference >= MUCH:
            return f"{self.for_data}; all {line['cores']} cores are busy: faster environments or more cores."
        if inference < max(MUCH, 0.5 * actor):
            smaller = "or a smaller network"
            if line.get("inference_device", "cpu") == "cpu":
                smaller = "a smaller network, or a GPU with --central.device cuda"
            return (
                f"{self.for_data}; inference is the bottleneck, busy {percent(1 - inference)} of its time ({batch}): more "
                f"--envs-per-actor for larger batches, {smaller}."
            )
        if actor < max(MUCH, 0.5 * inference):
            env, actors = percent(self.busy.get("environments", 0.0)), line.get("actors", 1)
            return f"{self.for_data}; the actors spend {env} of theirs in environments: add --actors (now {actors})."
        return (
            f"{self.for_data}; actors and inference wait for each other ({percent(actor)} and {percent(inference)} of "
            f"their time, {batch}): more --central.groups or --envs-per-actor, or a shorter --central.wait-ms."
        )

    def _slow_learner(self) -> str:
        busy, ratio = percent(self.busy.get("learner", 1.0)), self.line.get("samples_per_insert", 0)
        change = f"lower store.samples_per_insert (now {ratio:g}), use fewer actors"
        if self.line.get("store_once"):  # every step is learned from once
            change = "use a larger learner.batch, fewer actors"
        return (
            f"The learner is the bottleneck: it is busy {busy} of its time, and the actors wait {percent(self.actor)} of "
            f"theirs for it: {change}, a smaller network, more --threads, or a GPU."
        )

    def _short_queue(self) -> str:
        fill, queue = percent(self.line.get("queue_fill", 1.0)), self.line.get("queue", 0)
        return (
            f"The queue to the store is the bottleneck: the actors wait {percent(self.actor)} of their time for room in it "
            f"({fill} full when it is emptied, between two updates): raise --queue (now {queue}), or make updates shorter "
            "with a smaller learner.batch."
        )

    def _by_turns(self) -> str:
        return (
            f"The actors and the learner wait for each other by turns ({percent(self.actor)} and {percent(self.learner)} "
            "of their time): data moves in batches that are too large; make actor.block or learner.prefetch smaller."
        )

    def _no_waiting(self) -> str:
        line = self.line
        wanted, inserted, sampled = (
            line.get(name, 0.0) for name in ("samples_per_insert", "inserted_per_s", "sampled_per_s")
        )
        if wanted and sampled < 0.8 * wanted * inserted:  # of this line: the ratio of the whole run lags behind
            return (
                f"The learner is the bottleneck: it is busy {percent(self.busy.get('learner', 1.0))} of its time, and "
                f"draws an item {sampled / inserted:.1f} times where {wanted:g} are asked for: fewer actors, a smaller "
                "network, more --threads, or a GPU."
            )
        if self.cores_busy:
            return f"Nobody waits, and all {line['cores']} cores are busy: more cores would make it faster."
        others = {metric: line.get(metric.name, 0.0) for metric in self._other_waits()}
        if others and max(others.values()) >= MUCH:
            metric = max(others, key=lambda other: others[other])
            reason = f" for {metric.waits_for}" if metric.waits_for else ""
            return (
                f"The {metric.link} waits {percent(others[metric])} of its time{reason}; actors and learner are in balance."
            )
        return "Nobody waits for long: actors and learner are in balance."

    def _other_waits(self) -> list[Metric]:
        """The waits of links outside the chain."""
        return [m for m in self.declarations.values() if m.column == WAITS and m.link not in CHAIN]

    def one_thread(self) -> str:
        names = {"learner": "the learner", "policy": "the actors' network"}
        shares = {names.get(link, link if link in CHAIN else f"the {link}"): x for link, x in self.busy.items()}
        shares["evaluations"] = self.line.get("busy/evaluator", 0.0)
        most = max(shares, key=lambda name: shares[name])
        if not shares[most]:
            return ""
        verb = "take" if most in ("environments", "evaluations") else "takes"
        return f"One thread does all the work, and {most} {verb} {percent(shares[most])} of its time."
