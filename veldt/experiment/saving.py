"""Saving: when checkpoints are due, and how they are taken from nodes that run or stand still."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from veldt.experiment.checkpoint import Checkpoints
from veldt.runtime import Nodes

log = logging.getLogger("veldt")


class Saving:
    def __init__(self, checkpoints: Checkpoints, every: int, clocks: Callable[[Nodes], dict[str, Any]]) -> None:
        self.checkpoints, self.every, self.clocks = checkpoints, every, clocks
        self.number = 0  # of the last checkpoint
        self.saved_at = 0  # env steps of the last checkpoint that was written
        self._next = float("inf")  # env steps
        self._writer: threading.Thread | None = None

    def begin(self, nodes: Nodes, number: int) -> None:
        """The nodes are new, or as in this checkpoint."""
        steps = nodes.count("env_steps")
        self.number, self.saved_at = number, steps if number else 0
        self._schedule(steps)

    def save_if_due(self, nodes: Nodes) -> None:
        if nodes.count("env_steps") < self._next or (self._writer is not None and self._writer.is_alive()):
            return
        if nodes.live:
            self._save_beside(nodes)
        else:
            self._save(nodes, scheduled=True)

    def save_last(self, nodes: Nodes, scheduled: bool) -> bool:
        """False: it could not be written. Unscheduled: an interruption's."""
        self.wait()
        return self._save(nodes, scheduled)

    def wait(self) -> None:
        """Waits for a checkpoint that is being written."""
        while self._writer is not None and self._writer.is_alive():
            self._writer.join(1.0)
        self._writer = None

    def _schedule(self, steps: int) -> None:
        self._next = (steps // self.every + 1) * self.every if self.every else float("inf")

    def _save(self, nodes: Nodes, scheduled: bool) -> bool:
        """The nodes stand still: a checkpoint is also a cut, see `Exact resume` in docs/decisions.md."""
        began = time.monotonic()
        nodes.cut()
        self.number += 1
        snapshot, clocks = nodes.snapshot(), self.clocks(nodes)
        saved = self.checkpoints.save(self.number, snapshot, {**clocks, "scheduled": scheduled})
        nodes.resume(self.number)
        self._schedule(clocks["env_steps"])
        if saved:
            self.saved_at = clocks["env_steps"]
            log.info("checkpoint %d at %d env steps, %.3f s", self.number, self.saved_at, time.monotonic() - began)
        return saved

    def _save_beside(self, nodes: Nodes) -> None:
        """The nodes go on: their state is copied, and a thread writes it."""
        self.wait()
        began = time.monotonic()
        self.number += 1
        number, clocks, snapshot = self.number, self.clocks(nodes), nodes.snapshot()
        self._schedule(clocks["env_steps"])

        def write() -> None:
            if self.checkpoints.save(number, snapshot, {**clocks, "scheduled": True}):
                self.saved_at = clocks["env_steps"]
                seconds, pause = time.monotonic() - began, 1000 * snapshot.paused
                text = "checkpoint %d at %d env steps, %.3f s; the learner stood still for %.1f ms"
                log.info(text, number, self.saved_at, seconds, pause)

        self._writer = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writer.start()
