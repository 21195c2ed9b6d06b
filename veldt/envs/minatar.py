"""MinAtar (Young and Tian 2019) from its package, as Gymnasium environments."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

PLOTTING = ("matplotlib", "seaborn")


@contextlib.contextmanager
def without_plotting() -> Iterator[None]:
    """Hides the plotting libraries while MinAtar is imported: it works without them, and they take 120 MB of RAM."""
    absent: dict[str, Any] = {name: None for name in PLOTTING if name not in sys.modules}
    sys.modules.update(absent)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # MinAtar warns that they are missing
    try:
        yield
    finally:
        logging.disable(level)
        for name in absent:
            del sys.modules[name]


class SeededMinAtar(gym.Wrapper[Any, Any, Any, Any]):
    """Makes a seeded reset independent of what was played before it.

    With sticky actions a game may repeat the last action of the episode before, even if the reset is seeded.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
