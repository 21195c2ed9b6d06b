"""One sentence that names what limits a run, and what to change: from a line of its metrics (see docs/view.md)."""

from __future__ import annotations

from typing import Any

from veldt.watching.view import percent

WAITS = 0.15  # of its time that somebody must wait before it is worth a word
REFUSES = 0.3  # of the blocks that arrive: from then on it is the limiter that holds them up
ALL_CORES = 0.9


def bottleneck(line: dict[str, Any], one_thread: bool = False) -> str:
    """Empty where the line does not tell: one that came right after another lacks what processes had no time to say."""
    items, least = line.get("store_items"), line.get("store_min_size", 0)
    if items is not None and items < least and not line.get("learner_steps_per_s"):
        return f"The store is filling: {items:,.0f} of the {least:,} items that learning starts with."
    if one_thread:
        return _one_thread(line)
    if "wait/learner" not in line or "wait/actor" not in line:
        return ""
    actor, learner = line["wait/actor"], line["wait/learner"]
    if "wait/inference" in line and line.get("refusing", 0.0) < REFUSES and learner >= WAITS:
        return _central(line)
    if max(actor, learner) < WAITS:
        return _nobody_waits(line)
    if min(actor, learner) >= max(WAITS, 0.5 * max(actor, learner)):
        return _by_turns(line)
    if learner >= actor:
        return _too_little_data(line)
    return _learner(line) if line.get("refusing", 0.0) >= REFUSES else _queue(line)


def _too_little_data(line: dict[str, Any]) -> str:
    """The learner waits for what actors make."""
    waits = f"The learner waits {percent(line['wait/learner'])} of its time for data"
    ratio = line.get("samples_per_insert", 0)
    more = f", or raise store.samples_per_insert (now {ratio:g}) to learn more from each step"
    if not ratio or line.get("store_once"):
        more = ""
    env, policy = line.get("busy/env", 0.0), line.get("busy/policy", 0.0)
    if env >= policy:
        cause, faster = f"the actors spend {percent(env)} of theirs in environments", "faster environments"
    else:
        cause = f"the actors spend {percent(policy)} of theirs in their network"
        faster = "more --envs-per-actor, a smaller network"
    if _cores_busy(line):
        return f"{waits}; {cause}, and all {line['cores']} cores are busy: {faster} or more cores{more}."
    return f"{waits}; {cause}: add --actors (now {line.get('actors', 1)}){more}."


def _central(line: dict[str, Any]) -> str:
    """The learner waits, and actions are computed by one process for all actors."""
    waits = f"The learner waits {percent(line['wait/learner'])} of its time for data"
    actor, inference = line["wait/actor"], line["wait/inference"]
    batch = f"{line.get('inference_batch', 0):.0f} of {line.get('envs', 0):.0f} environments at once"
    if _cores_busy(line) and inference >= WAITS:
        return f"{waits}; all {line['cores']} cores are busy: faster environments or more cores."
    if inference < max(WAITS, 0.5 * actor):
        smaller = "or a smaller network"
        if line.get("inference_device", "cpu") == "cpu":
            smaller = "a smaller network, or a GPU with --central.device cuda"
        busy = percent(1 - inference)
        return (
            f"{waits}; inference is the bottleneck, busy {busy} of its time ({batch}): more --envs-per-actor for larger "
            f"batches, {smaller}."
        )
    if actor < max(WAITS, 0.5 * inference):
        env = percent(line.get("busy/env", 0.0))
        return f"{waits}; the actors spend {env} of theirs in environments: add --actors (now {line.get('actors', 1)})."
    return (
        f"{waits}; actors and inference wait for each other ({percent(actor)} and {percent(inference)} of their time, "
        f"{batch}): more --central.groups or --envs-per-actor, or a shorter --central.wait-ms."
    )


def _learner(line: dict[str, Any]) -> str:
    busy, waits = percent(line.get("busy/learner", 1.0)), percent(line["wait/actor"])
    rate = f"lower store.samples_per_insert (now {line.get('samples_per_insert', 0):g}), use fewer actors"
    if line.get("store_once"):  # every step is learned from, once
        rate = "use a larger learner.batch, fewer actors"
    return (
        f"The learner is the bottleneck: it is busy {busy} of its time, and the actors wait {waits} of theirs for it: "
        f"{rate}, a smaller network, more --threads, or a GPU."
    )


def _queue(line: dict[str, Any]) -> str:
    waits, fill = percent(line["wait/actor"]), percent(line.get("queue_fill", 1.0))
    return (
        f"The queue to the store is the bottleneck: the actors wait {waits} of their time for room in it ({fill} full when "
        f"it is emptied, between two updates): raise --queue (now {line.get('queue', 0)}), or make updates shorter with a "
        "smaller learner.batch."
    )


def _by_turns(line: dict[str, Any]) -> str:
    actor, learner = percent(line["wait/actor"]), percent(line["wait/learner"])
    return (
        f"The actors and the learner wait for each other by turns ({actor} and {learner} of their time): too much comes "
        "and goes at once; make actor.block or learner.prefetch smaller."
    )


def _nobody_waits(line: dict[str, Any]) -> str:
    asked, inserted, sampled = (line.get(name, 0.0) for name in ("samples_per_insert", "inserted_per_s", "sampled_per_s"))
    if asked and sampled < 0.8 * asked * inserted:  # a rate of its own: the whole run's ratio lags behind
        ratio = sampled / inserted
        busy = percent(line.get("busy/learner", 1.0))
        return (
            f"The learner is the bottleneck: it is busy {busy} of its time, and draws an item "
            f"{ratio:.1f} times where {asked:g} are asked for: fewer actors, a smaller network, more --threads, or a GPU."
        )
    if _cores_busy(line):
        return f"Nobody waits, and all {line['cores']} cores are busy: more cores would make it faster."
    return "Nobody waits for long: actors and learner are in balance."


def _one_thread(line: dict[str, Any]) -> str:
    parts = {
        "the learner": line.get("busy/learner", 0.0),
        "environments": line.get("busy/env", 0.0),
        "the actors' network": line.get("busy/policy", 0.0),
        "evaluations": line.get("busy/evaluator", 0.0),
    }
    most = max(parts, key=lambda name: parts[name])
    if not parts[most]:
        return ""
    return f"One thread does it all, and {most} take{'s' if most == 'the learner' else ''} {percent(parts[most])} of it."


def _cores_busy(line: dict[str, Any]) -> bool:
    return bool(line.get("cpu/all", 0.0) >= ALL_CORES * line.get("cores", 1 << 30))
