"""Counters of a run: how many env steps, learner steps and episodes there were, over all its nodes."""

from __future__ import annotations

from typing import Any

NAMES = ("env_steps", "learner_steps", "episodes", "evaluations", "bad_observations")


class Counters:
    """`env_steps` counts applied actions, never reset rows; `learner_steps` counts updates."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.stopping = False  # the run is about to end: no node should begin or go on with anything long

    def add(self, name: str, n: int) -> None:
        self.counts[name] += n

    def get(self, name: str) -> int:
        return self.counts[name]

    def put(self, name: str, n: int) -> None:
        """The count is n from now on: its worker goes on from a checkpoint."""
        self.counts[name] = n

    def state(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in NAMES:
            self.put(name, int(state["counts"].get(name, 0)))
