"""The counts that belong to the state of a process, such as learner steps: when a process is restarted from an older state,
they go back with it. All other counts, such as env steps, are of what has happened."""

from __future__ import annotations

from typing import Any

from veldt.counters import COLUMN, OF_STATE, Counters
from veldt.program import BLOCK_MEMORY
from veldt.runtime.local.board import SharedRows
from veldt.runtime.local.children import Child
from veldt.runtime.local.plan import Plan

COLUMNS = [COLUMN[count] for count in OF_STATE]


class KeptCounts:
    def __init__(
        self, plan: Plan, children: dict[str, Child], counters: dict[str, Counters], rows: dict[str, SharedRows]
    ) -> None:
        self.plan, self.children, self.counters, self.rows = plan, children, counters, rows

    def states(self) -> dict[str, dict[str, Any]]:
        """All counts, for a checkpoint: those that belong to a process's state as they were when that was taken."""
        out: dict[str, dict[str, Any]] = {}
        for name, counters in self.counters.items():
            out[name] = state = counters.state()
            for child in self.children.values():
                for count in OF_STATE if name in child.counts else ():
                    now = int(self.rows[name].table[self.plan.row(child.name), COLUMN[count]])
                    state["counts"][count] += child.counts[name][COLUMN[count]] - now
        return out

    def forget(self) -> None:
        """They start anew: states are about to be loaded."""
        for name in self.counters:
            self.rows[name].table[:, COLUMNS] = 0
        for child in self.children.values():
            child.counts = {}

    def reset(self, child: Child) -> None:
        """A process is restarted from its kept state, or from none. Blocks in shared memory are as they were."""
        nodes = [self.plan.nodes[name] for name in self.plan.processes[child.name]]
        if not any(hasattr(node.node_class, "load_state") and not node.has(BLOCK_MEMORY) for node in nodes):
            return
        for name in self.counters:
            kept = child.counts.get(name)
            for column in COLUMNS:
                self.rows[name].table[self.plan.row(child.name), column] = 0 if kept is None else kept[column]
