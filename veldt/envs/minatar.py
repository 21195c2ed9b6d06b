"""MinAtar (Young and Tian 2019) from its package, as Gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


class Seeded(gym.Wrapper[Any, Any, Any, Any]):
    """A seeded reset begins anew in every respect.

    The games' sticky actions may repeat an action of the episode before; without this also one from before the seed.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
