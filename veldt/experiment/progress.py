"""Progress: the lines of metrics that a run writes, and what follows from those before."""

import math
import time
from typing import Any

from veldt.acting.actor import Evaluation
from veldt.experiment.observations import BadObservations, bad_fraction
from veldt.experiment.prepare import Prepared, count_stores
from veldt.experiment.standstill import Standstill
from veldt.gpus import Gpus
from veldt.machine import core_count, process_age, processor_name, used_memory
from veldt.runtime import Nodes
from veldt.watching.bottleneck import Rates, bottleneck
from veldt.watching.sinks import Metrics

EVALUATION_S = 0.1  # a live run waits this long for the metrics of an evaluation that was counted
LOST_S = 2.0  # after which they are lost: the evaluator was killed
MEMORY_S = 2.0  # between two looks at the RAM of all processes
SHORTEST_RATE_S, LONGEST_RATE_S = 1.0, 10.0  # that rates are taken over, where lines are closer or further apart


class Progress:
    def __init__(self, prepared: Prepared, lines: Metrics) -> None:
        self.prepared, self.config, self.lines = prepared, prepared.config, lines
        config = self.config
        self.rates = Rates(max(SHORTEST_RATE_S, min(config.log.every, LONGEST_RATE_S)), prepared.declarations)
        self.one_thread = config.topology == "single" or config.runtime == "inline"
        self.constants = {
            "actors": config.own_actors,
            "envs": config.own_actors * config.envs_per_actor,
            "cores": core_count(),
            "queue": config.queue,
            "samples_per_insert": 0.0 if config.topology == "workers" else config.store.samples_per_insert,
            "store_capacity": prepared.store.capacity,
            "store_min_size": config.store.min_size * max(1, count_stores(prepared.program)),
            "store_once": config.store.selector == "fifo",
            "inference_device": config.inference_device,
            "processor": processor_name(),
        } | ({"workers": config.own_actors} if config.topology == "workers" else {})
        self.constants |= {"gpu_planned": prepared.gpu} if prepared.gpu else {}
        self.gpus = Gpus((config.learner_device, config.inference_device))
        self.bad, self.standstill = BadObservations(config.env, config.max_bad), Standstill(config.step_timeout)
        self.earlier_s = 0.0  # of the sessions before this one
        self.latest: dict[str, Any] = {}  # the newest value of each metric
        self._new: list[dict[str, Any]] = []
        self._began = self._last_line = time.monotonic()
        self._evaluations = self._first_step = self._first_env_step = 0
        self._evaluation_s = self._evaluation_at = 0.0  # when an evaluation was counted that was not reported yet
        self._first_update: dict[str, float] | None = None  # of this session; empty once it is logged
        self._ram_at, self._ram_used = -math.inf, 0

    def begin(self, nodes: Nodes) -> None:
        """The nodes are restored, and about to work."""
        self._evaluations, self._first_step = nodes.count("evaluations"), nodes.count("learner_steps")
        self._evaluation_s = EVALUATION_S if nodes.live else 0.0
        self._first_env_step = nodes.count("env_steps")
        self.bad.begin(nodes)
        nodes.metrics()  # of the time in which they stood still
        self._last_line = time.monotonic()
        self.rates.begin(self.clocks(nodes), self._last_line, nodes.resources()[0])

    @property
    def steps_done(self) -> int:
        """Env steps of this session."""
        return int(self.latest.get("env_steps", 0)) - self._first_env_step

    @property
    def seconds(self) -> float:
        """Of training in this session, up to the newest line."""
        return float(self.latest.get("time_s", 0.0)) - self.earlier_s

    def clocks(self, nodes: Nodes) -> dict[str, Any]:
        """What every line and every checkpoint begins with."""
        counts = {name: nodes.count(name) for name in ("env_steps", "learner_steps")}
        return {"time_s": self._time_s(time.monotonic()), **counts}

    def _time_s(self, monotonic: float) -> float:
        """Seconds of training at this time of the clock."""
        return round(self.earlier_s + monotonic - self._began, 3)

    def log_if_due(self, nodes: Nodes) -> None:
        self._note_first_update(nodes)
        since = time.monotonic() - self._last_line
        evaluated = nodes.count("evaluations") != self._evaluations
        self._evaluation_at = (self._evaluation_at or time.monotonic()) if evaluated else 0.0
        if since >= self.config.log.every or (evaluated and since >= self._evaluation_s):
            self.log(nodes)

    def log(self, nodes: Nodes) -> None:
        self._note_first_update(nodes)
        now = time.monotonic()
        clocks = self.clocks(nodes)
        line = clocks | nodes.metrics() | clocks | (self._first_update or {})  # no metric replaces a clock
        if "eval_published_at" in line:
            line["eval_time_s"] = self._time_s(line.pop("eval_published_at"))
            line |= {name: int(line[name]) for name in ("eval_env_steps", "eval_learner_steps")}
        line |= {"memory_bytes": self._used(nodes), "memory_planned": self.prepared.ram}
        line |= self.gpus.look()
        line |= {"bad_fraction": fraction} if (fraction := bad_fraction(nodes)) else {}
        if stands := self.standstill.look(now, clocks["env_steps"], clocks["learner_steps"]):
            line["learner_stands_s"] = stands
        line |= self._derived(line, nodes, now)
        if sentence := bottleneck(line, self.one_thread, self.prepared.declarations):
            line["bottleneck"] = sentence
        if self._first_update:
            self._first_update = {}
        self._last_line = now
        lost = self._evaluation_at and now - self._evaluation_at > LOST_S
        if not self._evaluation_s or "eval_return" in line or lost:
            self._evaluations = nodes.count("evaluations")
        self._write(line)

    def take_lines(self) -> list[dict[str, Any]]:
        """Those that were written since the last call."""
        lines, self._new = self._new, []
        return lines

    def add_evaluation(self, found: Evaluation, env_steps: int, learner_steps: int) -> dict[str, Any]:
        """Of the last weights: a line of its own, with the newest value of everything else."""
        line = self.latest | {"time_s": self._time_s(time.monotonic()), "eval_time_s": self.latest["time_s"]}
        line |= {"eval_env_steps": env_steps, "eval_learner_steps": learner_steps}
        line |= {
            "eval_return": found.mean_return,
            "eval_length": found.mean_length,
            "eval_bad_episodes": found.bad_episodes,
        }
        self._write(line)
        return line

    def _write(self, line: dict[str, Any]) -> None:
        self.latest |= line
        self._new.append(line)
        self.lines.write(line)

    def _note_first_update(self, nodes: Nodes) -> None:
        if self._first_update is None and nodes.count("learner_steps") > self._first_step:
            self._first_update = {"first_update_s": process_age(), "first_update_time_s": self.clocks(nodes)["time_s"]}

    def _derived(self, line: dict[str, Any], nodes: Nodes, now: float) -> dict[str, Any]:
        """What follows from the lines before, and from the settings. The counts of the line were read at `now`."""
        out: dict[str, Any] = self.rates.of(line, now, nodes.resources()[0])
        if line.get("store_inserted"):
            out["replay_ratio"] = line["store_sampled"] / line["store_inserted"]
        if out.get("env_steps_per_s"):
            out["left_s"] = max(0, self.config.steps - line["env_steps"]) / out["env_steps_per_s"]
        if "lag_updates" in line and out.get("learner_steps_per_s"):
            out["lag_s"] = line["lag_updates"] / out["learner_steps_per_s"]
        if "wait/inference" in line:
            out["busy/policy"] = max(0.0, 1.0 - line["wait/inference"])
        elif "busy/env" in line and "busy/actor" in line:
            out["busy/policy"] = max(0.0, line["busy/actor"] - line["busy/env"])
        return out | self.constants

    def _used(self, nodes: Nodes) -> int:
        if time.monotonic() - self._ram_at >= MEMORY_S:
            self._ram_at, self._ram_used = time.monotonic(), used_memory(*nodes.resources())
        return self._ram_used
