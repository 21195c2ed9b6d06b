"""MinAtar (Young and Tian 2019) from its package, as Gymnasium environments."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

PLOTS = ("matplotlib", "seaborn")


@contextlib.contextmanager
def without_plots() -> Iterator[None]:
    """The package loads 120 MB to draw with, which an actor never does; it is content to be told that there is nothing."""
    absent: dict[str, Any] = {name: None for name in PLOTS if name not in sys.modules}
    sys.modules.update(absent)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it says so
    try:
        yield
    finally:
        logging.disable(level)
        for name in absent:
            del sys.modules[name]


class Seeded(gym.Wrapper[Any, Any, Any, Any]):
    """A seeded reset begins anew in every respect.

    The games' sticky actions may repeat an action of the episode before; without this also one from before the seed.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
