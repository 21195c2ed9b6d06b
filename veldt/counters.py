"""Counters of a run: how many env steps, learner steps and episodes there were, over all nodes of a scope."""

from typing import Any

from veldt.shared import PrivateRows, Rows

NAMES = ("env_steps", "learner_steps", "episodes", "evaluations", "bad_observations", "bad_episodes")
COLUMN = {name: i for i, name in enumerate(NAMES)}
OF_STATE = ("learner_steps",)  # counts that go back with their process's state when that is restarted from an older one


class Counters:
    """`env_steps` counts applied actions, never reset rows; `learner_steps` counts updates.

    Workers add. Only the runtime sets a count, with `load_state`.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = PrivateRows() if rows is None else rows

    def add(self, name: str, n: int) -> None:
        self.rows.add(COLUMN[name], n)

    def get(self, name: str) -> int:
        return self.rows.total(COLUMN[name])

    @property
    def stopping(self) -> bool:
        """The run is about to end: no node should start or continue anything long."""
        return self.rows.stopping

    def state(self) -> dict[str, Any]:
        return {"counts": {name: self.get(name) for name in NAMES}}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in NAMES:
            self.add(name, int(state["counts"].get(name, 0)) - self.get(name))
