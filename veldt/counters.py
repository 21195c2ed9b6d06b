"""Counters of a run: how many env steps, learner steps and episodes there were, over all its nodes."""

from __future__ import annotations

from typing import Any


class Counters:
    """`env_steps` counts applied actions, never reset rows; `learner_steps` counts updates."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"env_steps": 0, "learner_steps": 0}
        self.stopping = False  # the run is about to end: no node should begin or go on with anything long

    def add(self, name: str, n: int) -> int:
        """Adds, and returns the new count."""
        self.counts[name] = count = self.counts.get(name, 0) + n
        return count

    def get(self, name: str) -> int:
        return self.counts.get(name, 0)

    def state(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.counts = dict(state["counts"])
