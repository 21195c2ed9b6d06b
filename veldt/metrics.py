"""Metrics: what nodes report, and how reports add up over nodes and over time.

A node class declares its metrics as `METRICS`; everything downstream (sums over nodes, rates, the live table, the
bottleneck) follows from the declarations. docs/view.md has an example.

The declarations of the package's own nodes are here, and not beside the nodes, so that `veldt top` reads them without
importing torch. An undeclared name is averaged over nodes, and its latest value holds.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from veldt.counters import NAMES
from veldt.errors import UserError
from veldt.foreign import plain, read_text
from veldt.program import Node, root
from veldt.sentences import SENTENCES, Sentences

TOTAL, MEAN, LARGEST, LATEST = "total", "mean", "largest", "latest"
# Columns of the live table; beside it: a fact of its own, a count that should be 0, and what is not shown at all.
COLUMNS = RATE, BUSY, WAITS, MORE, FACT, TROUBLE, HIDDEN = "rate", "busy", "waits", "more", "fact", "trouble", "hidden"
CHAIN = ("environments", "policy", "recorder", "store", "learner", "weights")  # the links, in the order of the table


@dataclass(frozen=True)
class Metric:
    """A number that a node reports. In the name, {kind} stands for the node's name without scope and index.

    In `text`, {name} is a metric with its unit, {name:n} the number alone, {name:.2f} a format. [Brackets] are left out
    where a metric inside them is unknown.
    """

    name: str
    unit: str = ""  # a plural ("items"), "s", "bytes", "cores", or "fraction", which is shown in percent
    over_nodes: str = MEAN  # how several nodes' values add up: TOTAL, MEAN or LARGEST
    over_time: str = LATEST  # what holds for a line: the LATEST value, or the MEAN over the line's time
    rate: str = ""  # the name of the rate of this count; it is shown instead of the count
    link: str = ""  # the row of the live table; empty: one named after the node
    column: str = MORE
    text: str = ""  # empty: name and value
    unless: tuple[str, ...] = ()  # not shown where one of these is known
    waits_for: str = ""  # what a link waits for, if the column is WAITS
    contains: str = ""  # the link whose time is part of this share

    def __post_init__(self) -> None:
        object.__setattr__(self, "unless", tuple(self.unless))  # a list in JSON
        if not all(isinstance(x, str) for x in (*vars(self).values(), *self.unless) if x is not self.unless):
            raise TypeError(f"metric {self.name}: all values are text")
        allowed = ((self.over_nodes, (TOTAL, MEAN, LARGEST)), (self.over_time, (LATEST, MEAN)), (self.column, COLUMNS))
        for value, values in allowed:
            if value not in values:
                raise ValueError(f"metric {self.name}: {value!r} is not one of {', '.join(values)}")

    def of(self, kind: str) -> "Metric":
        name, text = (x.replace("{kind}", kind) for x in (self.name, self.text))
        return replace(self, name=name, text=text, link=self.link or kind)


Metrics = tuple[Metric, ...]


def busy(link: str = "", column: str = BUSY, name: str = "{kind}", **how: Any) -> Metric:
    """The fraction of the time that a worker, or a part of its step, takes."""
    return Metric(f"busy/{name}", "fraction", MEAN, MEAN, link=link, column=column, **how)


def wait(link: str = "", column: str = WAITS, waits_for: str = "") -> Metric:
    """The fraction of the time that a process sleeps because it has nothing to do."""
    return Metric("wait/{kind}", "fraction", MEAN, MEAN, link=link, column=column, waits_for=waits_for)


CPU = Metric("cpu/{kind}", "cores", MEAN, MEAN, column=HIDDEN)
SHARES: Metrics = (busy(), wait(), CPU)  # of any node, if its class does not declare them itself

# The nodes of the package.

ACTOR: Metrics = (
    busy("environments", MORE, text="{busy/{kind}} of the time with the policy", unless=("busy/env", "busy/policy")),
    busy("environments", name="env"),
    wait("recorder", waits_for="the store"),
    Metric("episodes", "episodes", LARGEST, column=HIDDEN),  # a counter of the run, which every actor reports
    Metric(
        "bad_observations",
        "observations",
        LARGEST,
        column=TROUBLE,
        text="{bad_observations:n}[ ({bad_fraction:.2%})]",
    ),
    Metric("bad_episodes", "episodes", LARGEST, column=TROUBLE),  # in which something was dropped
    Metric("train_return", column=HIDDEN),
    Metric("train_length", "steps", column=HIDDEN),
)
POLICY: Metrics = (
    Metric("lag_updates", "updates", MEAN, MEAN, link="weights", text="actors {lag_updates}[, {lag_s}] behind"),
    Metric("epsilon", link="policy", text="epsilon {epsilon:.3f}"),
    Metric("sigma", link="policy", text="sigma {sigma:.3f}"),
)
INFERENCE: Metrics = (
    *POLICY,
    busy(column=HIDDEN),
    wait("policy", waits_for="steps of the actors"),
    Metric("inference_batch", "environments", link="policy", text="{inference_batch} at once"),
    Metric("gpu_held/inference", "bytes", TOTAL, link="policy", text="{gpu_held/inference} of GPU memory"),
)
STORE: Metrics = (
    Metric(
        "store_items", "items", TOTAL, link="store", text="{store_items:n}[ of {store_capacity:n}] items[, {store_bytes}]"
    ),
    Metric("store_bytes", "bytes", TOTAL, column=HIDDEN),
    Metric("store_inserted", "items", TOTAL, rate="inserted_per_s", link="store", column=RATE),
    Metric("store_sampled", "items", TOTAL, rate="sampled_per_s", link="learner"),
    Metric("store_evicted", "items", TOTAL, column=HIDDEN),
    Metric("store_stale", "items", TOTAL, column=HIDDEN),
    Metric("store_duplicates", "blocks", TOTAL, column=HIDDEN),
)
DEMOS: Metrics = (Metric("demo_items", "items", TOTAL, column=HIDDEN), Metric("demo_part", "fraction", column=HIDDEN))
STREAM: Metrics = (
    Metric("stream_blocks", "blocks", TOTAL, rate="blocks_per_s", link="recorder", column=RATE),
    Metric("stream_bytes", "bytes", TOTAL, rate="bytes_per_s", link="recorder"),
    Metric("queue_fill", "fraction", MEAN, MEAN, link="recorder", text="queue {queue_fill} full"),
    Metric("refusing", "fraction", MEAN, MEAN, link="store", text="refuses {refusing} of blocks"),
)
LEARNER: Metrics = (
    busy("learner"),
    wait("learner", waits_for="data"),
    busy("learner", MORE, "sample", text="drawing {busy/sample}"),
    Metric(
        "published", "", TOTAL, rate="published_per_s", link="weights", column=RATE, text="{published_per_s:n} published/s"
    ),
    Metric("skipped_updates", "updates", TOTAL, column=TROUBLE),
    Metric("policy_lag", "updates", column=HIDDEN),
    # Of other workers, between a worker's copy of the shared weights and its own update.
    Metric("stale_updates", "updates", MEAN, MEAN, link="learner", text="{stale_updates} of others in between"),
    Metric("gpu_held/learner", "bytes", TOTAL, link="learner", text="{gpu_held/learner} of GPU memory"),
    Metric("loss", column=HIDDEN),
    Metric("gradient_norm", column=HIDDEN),  # before it is clipped
    Metric("learning_rate", column=HIDDEN),
    # Of learners that send their gradients to parameter servers.
    Metric("wait/shards", "fraction", MEAN, MEAN, link="learner", text="waits {wait/shards} for servers"),
    Metric("gradients_pushed", "gradients", TOTAL, rate="pushed_per_s", link="learner", text="{pushed_per_s} pushed"),
    Metric(
        "gradients_dropped_loss",
        "gradients",
        TOTAL,
        link="learner",
        text="{gradients_dropped_loss:n} dropped (loss)",
    ),
)
SHARD: Metrics = (
    Metric("gradients_applied", "gradients", MEAN, rate="applied_per_s", link="shard", column=RATE),
    busy(),
    wait(column=HIDDEN),
    Metric("staleness", "updates", MEAN, MEAN, link="shard", text="gradients {staleness}[, at most {staleness_max},] old"),
    Metric("staleness_max", "updates", LARGEST, column=HIDDEN),
    Metric("gradients_dropped_age", "gradients", MEAN, link="shard", text="{gradients_dropped_age:n} dropped (age)"),
    Metric("gradient_slices", "slices", TOTAL, column=HIDDEN),
    Metric("gradient_bytes", "bytes", TOTAL, rate="gradient_bytes_per_s", link="shard"),
)
EVALUATOR: Metrics = (
    busy(column=HIDDEN),
    wait(column=HIDDEN),
    Metric("eval_return", column=HIDDEN),
    Metric("eval_length", "steps", column=HIDDEN),
    Metric("eval_bad_episodes", "episodes", TOTAL, column=TROUBLE),
    Metric("eval_learner_steps", "updates", column=HIDDEN),  # these three: of the weights that played
    Metric("eval_env_steps", "steps", column=HIDDEN),
    Metric("eval_published_at", "s", column=HIDDEN),  # in seconds of time.monotonic; a line has `eval_time_s` instead
)
# Evolution strategies: a master and its workers.
MASTER: Metrics = (
    busy("master"),
    wait("master", waits_for="results"),
    Metric("learner_steps", "generations", LARGEST, rate="learner_steps_per_s", link="master", column=RATE),
    Metric("learning_rate", column=HIDDEN),
    Metric("generation_done", "fraction", column=HIDDEN),
    Metric("update_ratio", link="master", text="updates of {update_ratio:.2g} of the weights"),
    Metric("evaluated", "episodes", TOTAL, rate="episodes_per_s", link="workers", column=RATE),
    Metric("stream_blocks", "messages", TOTAL, rate="blocks_per_s", link="results", column=RATE),
    Metric("stream_bytes", "bytes", TOTAL, rate="bytes_per_s", link="results"),
    Metric("queue_fill", "fraction", MEAN, MEAN, column=HIDDEN),
    Metric("refusing", "fraction", MEAN, MEAN, column=HIDDEN),
    Metric("published", "", TOTAL, rate="published_per_s", column=HIDDEN),
    Metric("mean_weights_return", column=FACT, text="{mean_weights_return:.1f}"),
    Metric("best_pair_return", column=FACT, text="{best_pair_return:.1f}"),
    Metric("episode_cap", "steps", column=HIDDEN),
    Metric("late_results", "results", TOTAL, column=HIDDEN),
    Metric("repeated_results", "results", TOTAL, column=HIDDEN),
    Metric("equal_generations", "generations", TOTAL, column=TROUBLE),  # in which all returns were the same
)
WORKER: Metrics = (
    busy("workers", contains="environments"),
    wait("workers", waits_for="the next generation"),
    busy("environments", name="env"),
)
# QT-Opt: Bellman updaters, their target networks, and the labelled transitions.
BELLMAN: Metrics = (
    Metric("labels", "labels", TOTAL, rate="labels_per_s", link="labelling", column=RATE),
    busy("labelling"),
    wait("labelling", waits_for="data"),
    Metric("target_age", "updates", MEAN, MEAN, link="labelling", text="targets {target_age} old"),
)
TARGETS: Metrics = (Metric("target_distance", column=HIDDEN),)
LABELLED: Metrics = (
    Metric("labelled_items", "labels", TOTAL, link="labels", text="{labelled_items:n} labels"),
    Metric("labelled_sampled", "labels", TOTAL, rate="labels_used_per_s", link="labels", column=RATE),
    Metric("label_age", "updates", MEAN, MEAN, link="labels", text="{label_age}[, at most {label_age_max},] old"),
    Metric("label_age_max", "updates", LARGEST, column=HIDDEN),
    Metric("labels_dropped", "labels", TOTAL, link="labels", text="{labels_dropped:n} dropped (age)"),
    Metric("label_blocks", "blocks", TOTAL, column=HIDDEN),
    Metric("label_bytes", "bytes", TOTAL, rate="label_bytes_per_s", link="labels"),
)
GATE: Metrics = (
    wait(column=HIDDEN),
    *(Metric(f"gate_{name}", "bytes", TOTAL, column=HIDDEN) for name in ("bytes_in", "bytes_out")),
    *(Metric(f"gate_{name}", "frames", TOTAL, column=HIDDEN) for name in ("frames_in", "frames_out", "refused")),
    Metric("gate_duplicates", "messages", TOTAL, column=HIDDEN),
    Metric("gate_reconnects", "streams", TOTAL, column=HIDDEN),
    Metric("gate_actors", "actors", TOTAL, column=HIDDEN),
    Metric("gate_pending", "messages", TOTAL, column=HIDDEN),
)
RUN: Metrics = (  # what the run itself adds to a line
    Metric("env_steps", "steps", LARGEST, rate="env_steps_per_s", link="environments", column=RATE),
    Metric("learner_steps", "updates", LARGEST, rate="learner_steps_per_s", link="learner", column=RATE),
    Metric("evaluations", "evaluations", LARGEST, column=HIDDEN),
    Metric("envs", "environments", link="environments", text="{envs:n}[ in {actors}]"),
    Metric("actors", "actors", column=HIDDEN),
    Metric("workers", "workers", column=HIDDEN),
    Metric("busy/policy", "fraction", MEAN, MEAN, link="policy", column=BUSY),
    Metric("lag_s", "s", link="weights", text="actors {lag_s} behind", unless=("lag_updates",)),
    Metric("store_capacity", "items", column=HIDDEN),
    Metric("restarts", "processes", column=TROUBLE),
    Metric("memory_restarts", "processes", column=TROUBLE),
    Metric("memory_left", "bytes", column=HIDDEN),
    Metric("gpu_memory", "bytes", LARGEST, column=FACT, text="{gpu_memory}[ of {gpu_total}][, {gpu_planned} planned]"),
    Metric("gpu_total", "bytes", LARGEST, column=HIDDEN),
    Metric("gpu_planned", "bytes", column=HIDDEN),
    Metric("gpu_busy", "fraction", column=FACT),
    Metric("learner_stands_s", "s", column=TROUBLE),
    Metric("bad_fraction", "fraction", column=HIDDEN),
)
# How programs of the package call these nodes; those without metrics of their own still have a share of the time.
NODES: dict[str, Metrics] = {
    "actor": ACTOR,
    "policy": POLICY,
    "inference": INFERENCE,
    "store": STORE + DEMOS,
    "learner": LEARNER,
    "shard": SHARD,
    "bellman": BELLMAN,
    "targets": TARGETS,
    "labelled": LABELLED,
}
NODES |= {"evaluator": EVALUATOR, "gate": GATE, "recorder": (), "params": (), "evaluated": (), "counters": ()}


class Declarations(dict[str, Metric]):
    """Metrics by name. One that is missing is a mean over nodes, and a mean over time if it is a share of it."""

    sentences: tuple[Sentences, ...] = SENTENCES  # on the bottleneck
    waiting: frozenset[str] = frozenset()  # metrics that say how much each kind of process waits; empty: not known

    def __missing__(self, name: str) -> Metric:
        share = name.startswith(("busy/", "wait/", "cpu/"))
        return Metric(name, over_time=MEAN if share else LATEST, link=name, column=HIDDEN)

    def add(self, kind: str, metrics: Iterable[Metric]) -> None:
        """What nodes of this name report; their share of the time too, where that is not declared."""
        for metric in metrics:
            found = metric.of(kind)
            self[found.name] = found
            if found.rate:
                self[found.rate] = Metric(found.rate, f"{found.unit}/s", TOTAL, link=found.link, column=HIDDEN)
        for metric in SHARES:
            found = metric.of(kind)
            self.setdefault(found.name, found)


PACKAGE = Declarations()
for _kind, _metrics in {"run": RUN, **NODES, "stream": STREAM}.items():
    PACKAGE.add(_kind, _metrics)


def declared(nodes: Iterable[Node]) -> Declarations:
    """Of the nodes of a program. Any class can be a node: most declare nothing."""
    out, by_name = Declarations(PACKAGE), {node.name: node for node in nodes}
    processes: dict[str, str] = {}  # by node that has one: the role of its first worker, by which its waiting is reported
    for node in by_name.values():
        out.add(node.role, getattr(node.node_class, "METRICS", ()))
        if (own := getattr(node.node_class, "SENTENCES", None)) is not None:
            out.sentences = (own, *out.sentences)
        if node.is_worker:
            processes.setdefault(root(node.name, by_name), node.role)
    waits = (f"wait/{role}" for role in processes.values())
    out.waiting = frozenset(name for name in waits if out[name].column == WAITS)
    return out


def own_metrics(nodes: Iterable[Node]) -> dict[str, Metric]:
    """What the classes of these nodes declare, by name, without the counters of the run."""
    found = [metric.of(node.role) for node in nodes for metric in getattr(node.node_class, "METRICS", ())]
    return {metric.name: metric for metric in found if metric.name not in NAMES}


def merge(parts: Iterable[Mapping[str, float]], declarations: Declarations = PACKAGE) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, x in part.items():
            values.setdefault(name, []).append(x)
    add_up: dict[str, Callable[[list[float]], float]] = {LARGEST: max, TOTAL: sum, MEAN: lambda x: sum(x) / len(x)}
    return {name: add_up[declarations[name].over_nodes](x) for name, x in values.items()}


def busy_shares(seconds: Iterable[tuple[str, float]], elapsed: float) -> dict[str, float]:
    """`busy/kind` from the seconds that workers, or parts of their steps, took."""
    out: dict[str, float] = {}
    for kind, taken in seconds:
        out[f"busy/{kind}"] = out.get(f"busy/{kind}", 0.0) + taken / max(1e-9, elapsed)
    return out


class Reports:
    """What the processes of a run have reported since the last line."""

    def __init__(self, declarations: Declarations = PACKAGE) -> None:
        self.declarations = declarations
        self._latest: dict[str, dict[str, float]] = {}  # process -> its latest values, reported since the last line or not
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}  # of new reports: value x seconds, and seconds

    def add(self, process: str, metrics: Mapping[str, float], seconds: float) -> None:
        self._latest.setdefault(process, {}).update(metrics)
        for name, x in metrics.items():
            total, time_s = self._sums.get((process, name), (0.0, 0.0))
            self._sums[process, name] = total + seconds * x, time_s + seconds

    def take(self) -> dict[str, float]:
        """All reports since the last call as one; totals and largest values are also of processes that reported earlier."""
        return merge(self.take_each().values(), self.declarations)

    def take_each(self) -> dict[str, dict[str, float]]:
        """The same by process."""
        new, self._sums = self._sums, {}
        known = {name: self.declarations[name] for _, name in new}
        means = {key: total / max(1e-9, t) for key, (total, t) in new.items() if known[key[1]].over_time == MEAN}
        kept = {name for name, metric in known.items() if metric.over_nodes != MEAN}
        return {
            process: {n: means.get((process, n), x) for n, x in latest.items() if n in kept or (process, n) in new}
            for process, latest in self._latest.items()
        }


# Declarations in the run directory, for readers that cannot import the user's classes.

FILE = "metrics.json"


def save(declarations: Declarations, directory: Path) -> None:
    """Writes what the package does not declare itself, if there is any; a full disk does not stop the run."""
    from veldt.files import replace_text  # here: actors need no safetensors

    own = [dataclasses.asdict(metric) for name, metric in declarations.items() if PACKAGE.get(name) != metric]
    if own:
        with contextlib.suppress(UserError):
            replace_text(directory / FILE, json.dumps(own, indent=1) + "\n")


def load(directory: Path) -> Declarations:
    """The declarations of a run, as far as they can be read."""
    try:
        entries = plain(json.loads(read_text(directory / FILE)))
    except (OSError, ValueError, RecursionError):
        entries = []
    out = Declarations(PACKAGE)
    for entry in entries if isinstance(entries, list) else []:
        with contextlib.suppress(TypeError, ValueError):  # not a declaration, or one of a newer version
            metric = Metric(**entry)
            out[metric.name] = metric
    return out
