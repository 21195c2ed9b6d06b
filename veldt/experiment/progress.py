"""Progress: when a line of metrics is due, and what is in it."""

from __future__ import annotations

import math
import time
from typing import Any

from veldt.experiment.config import Config
from veldt.experiment.ram import RamPlan
from veldt.machine import core_count, process_age, used_memory
from veldt.metrics import Declarations
from veldt.runtime import Nodes
from veldt.watching.bottleneck import Rates, bottleneck
from veldt.watching.sinks import Metrics

EVALUATION_S = 0.1  # a live run waits this long for the metrics of an evaluation that was counted
MEMORY_S = 2.0  # between two looks at the RAM of all processes
LONGEST_RATE_S = 10.0  # that a rate is taken over, where lines are further apart


class Progress:
    def __init__(self, config: Config, ram: RamPlan, metrics: Metrics, declarations: Declarations) -> None:
        self.config, self.ram, self.metrics, self.declarations = config, ram, metrics, declarations
        self.rates = Rates(min(config.log.every, LONGEST_RATE_S), declarations)
        self.one_thread = config.topology == "single" or config.runtime == "inline"
        self.constants = {
            "actors": config.actors,
            "envs": config.actors * config.envs_per_actor,
            "cores": core_count(),
            "queue": config.queue,
            "samples_per_insert": config.store.samples_per_insert,
            "store_capacity": ram.store.capacity,
            "store_min_size": config.store.min_size,
            "store_once": config.store.selector == "fifo",
            "inference_device": config.central.device or config.device,
        }
        self.earlier_s = 0.0  # of the sessions before this one
        self._began = self._last_line = time.monotonic()
        self._evaluations = self._first_step = 0
        self._evaluation_s = 0.0
        self._first_update: dict[str, float] | None = None  # of this session; empty once it is logged
        self._ram_at, self._ram_used = -math.inf, 0

    def begin(self, nodes: Nodes) -> None:
        """The nodes are restored, and about to work."""
        self._evaluations, self._first_step = nodes.count("evaluations"), nodes.count("learner_steps")
        self._evaluation_s = EVALUATION_S if nodes.live else 0.0
        nodes.metrics()  # of the time in which they stood still
        self.rates.begin(self.clocks(nodes), nodes.resources()[0])
        self._last_line = time.monotonic()

    def clocks(self, nodes: Nodes) -> dict[str, Any]:
        """What every line and every checkpoint begins with."""
        time_s = self.earlier_s + time.monotonic() - self._began
        return {
            "time_s": round(time_s, 3),
            "env_steps": nodes.count("env_steps"),
            "learner_steps": nodes.count("learner_steps"),
        }

    def log_if_due(self, nodes: Nodes) -> None:
        self._note_first_update(nodes)
        since = time.monotonic() - self._last_line
        evaluated = nodes.count("evaluations") != self._evaluations and since >= self._evaluation_s
        if since >= self.config.log.every or evaluated:
            self.log(nodes)

    def log(self, nodes: Nodes) -> None:
        self._note_first_update(nodes)
        now = time.monotonic()
        line = self.clocks(nodes) | nodes.metrics() | (self._first_update or {})
        line |= {"memory_bytes": self._used(nodes), "memory_planned": self.ram.total}
        line |= self._derived(line, nodes)
        if sentence := bottleneck(line, self.one_thread, self.declarations):
            line["bottleneck"] = sentence
        if self._first_update:
            self._first_update = {}
        self._last_line = now
        if not self._evaluation_s or "eval_return" in line:
            self._evaluations = nodes.count("evaluations")
        self.metrics.write(line)

    def _note_first_update(self, nodes: Nodes) -> None:
        if self._first_update is None and nodes.count("learner_steps") > self._first_step:
            self._first_update = {"first_update_s": process_age(), "first_update_time_s": self.clocks(nodes)["time_s"]}

    def _derived(self, line: dict[str, Any], nodes: Nodes) -> dict[str, Any]:
        """What follows from the line before, and from the settings."""
        out: dict[str, Any] = self.rates.of(line, nodes.resources()[0])
        if line.get("store_inserted"):
            out["replay_ratio"] = line["store_sampled"] / line["store_inserted"]
        if out.get("env_steps_per_s"):
            out["left_s"] = max(0, self.config.steps - line["env_steps"]) / out["env_steps_per_s"]
        if "lag_updates" in line and out.get("learner_steps_per_s"):
            out["lag_s"] = line["lag_updates"] / out["learner_steps_per_s"]
        if "wait/inference" in line:
            out["busy/policy"] = max(0.0, 1.0 - line["wait/inference"])
        elif "busy/env" in line:
            out["busy/policy"] = max(0.0, line["busy/actor"] - line["busy/env"])
        return out | self.constants

    def _used(self, nodes: Nodes) -> int:
        if time.monotonic() - self._ram_at >= MEMORY_S:
            self._ram_at, self._ram_used = time.monotonic(), used_memory(*nodes.resources())
        return self._ram_used
