"""Saving: when a run writes its checkpoints, and how. Best: the weights with the best evaluation, kept beside them."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from veldt.experiment.checkpoint import Checkpoints
from veldt.learning import params
from veldt.learning.params import LatestParams
from veldt.records.tree import Tree
from veldt.runtime import Nodes

log = logging.getLogger("veldt")
NODE = "evaluated"  # the node that has the weights of the newest evaluation


class Saving:
    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int,
        clocks: Callable[[Nodes], dict[str, Any]],
        saved: Callable[[int, int], None] = lambda number, env_steps: None,
    ) -> None:
        """`saved` is called after each checkpoint, perhaps by another thread."""
        self.checkpoints, self.every, self.clocks, self._saved = checkpoints, every, clocks, saved
        self.number = 0  # of the last checkpoint
        self.saved_at = 0  # env steps of the last checkpoint that was written
        self._next = math.inf  # env steps
        self._writer: threading.Thread | None = None
        self.writing = False

    def begin(self, nodes: Nodes, number: int) -> None:
        """The nodes are new, or as in this checkpoint."""
        steps = nodes.count("env_steps")
        self.number, self.saved_at = number, steps if number else 0
        self._schedule(steps)

    def save_if_due(self, nodes: Nodes) -> None:
        if nodes.count("env_steps") < self._next or (self._writer is not None and self._writer.is_alive()):
            return
        if nodes.live:  # they go on: their state is copied, and a thread writes it
            began, clocks = time.monotonic(), self.clocks(nodes)
            write = self._writing(nodes.snapshot(), clocks, True, began)
            self._writer = threading.Thread(target=write, name="checkpoint", daemon=True)
            self._writer.start()
        else:
            self.save(nodes, scheduled=True)

    def save(self, nodes: Nodes, scheduled: bool) -> bool:
        """The nodes stand still: a checkpoint is also a cut, see `Exact resume` in docs/decisions.md. False: it could not
        be written."""
        began = time.monotonic()
        nodes.cut()
        saved = self._writing(nodes.snapshot(), self.clocks(nodes), scheduled, began)()
        nodes.resume(self.number)
        return saved

    def salvage(self, nodes: Nodes, seconds: float, scheduled: bool) -> bool:
        """Saves what the nodes can give in this time, at the end of a run."""
        began = time.monotonic()
        snapshot = nodes.salvage(seconds)  # a learner may step until its state is taken
        return self._writing(snapshot, self.clocks(nodes), scheduled, began)()

    def wait(self) -> None:
        while self._writer is not None and self._writer.is_alive():
            self._writer.join(1.0)

    def _schedule(self, steps: int) -> None:
        self._next = (steps // self.every + 1) * self.every if self.every else math.inf

    def _writing(self, snapshot: Any, clocks: dict[str, Any], scheduled: bool, began: float) -> Callable[[], bool]:
        """Returns what writes the checkpoint. `began`: when its making did."""
        self.number += 1
        number = self.number
        self._schedule(clocks["env_steps"])

        def write() -> bool:
            self.writing = True
            try:
                saved = self.checkpoints.save(number, snapshot, {**clocks, "scheduled": scheduled})
            finally:
                self.writing = False
            if saved:
                self.saved_at = clocks["env_steps"]
                paused = getattr(snapshot, "paused", 0.0)
                pause = f"; the learner was paused for {1000 * paused:.1f} ms" if paused else ""
                log.info("checkpoint %d at %d env steps, %.3f s%s", number, self.saved_at, time.monotonic() - began, pause)
                self._saved(number, self.saved_at)
            return saved

        return write


class Best:
    """The weights with the highest mean return of an evaluation so far; of equal ones, the newest."""

    def __init__(self, checkpoints: Checkpoints, net: nn.Module) -> None:
        self.checkpoints, self.net = checkpoints, net
        self._vector = params.flatten(net)
        found = checkpoints.best()
        self.mean_return = -math.inf if found is None else float(found.manifest["mean_return"])
        self.env_steps = 0 if found is None else int(found.manifest["env_steps"])

    def offer_evaluated(self, nodes: Nodes, line: Mapping[str, Any]) -> bool:
        """Takes the weights of the evaluation in this line, if they are the best. False: they are not."""
        if not line["eval_return"] >= self.mean_return or "eval_learner_steps" not in line:
            return False
        weights = LatestParams(nodes.cell(NODE)).pull(-1)
        if weights is None or weights.version != line["eval_learner_steps"]:  # another evaluation has ended since
            return False
        self._vector.copy_(torch.from_numpy(weights.vector.copy()))
        return self.offer(params.export(self.net), line["eval_return"], weights.env_steps, weights.version)

    def offer(self, weights: Tree, mean_return: float, env_steps: int, learner_steps: int) -> bool:
        if not mean_return >= self.mean_return:
            return False
        info = {"env_steps": env_steps, "learner_steps": learner_steps, "mean_return": mean_return}
        if not self.checkpoints.save_best(weights, info):
            return False
        self.mean_return, self.env_steps = mean_return, env_steps
        return True
