"""Action masks: which actions are legal now, as an environment says it in `info["action_mask"]` or in its observation.

Recorded as the column `action_mask`: one boolean for each choice of each part of the action, in one row. Where a part has
no legal choice, nothing is masked: an environment says that at the end of an episode, and padding is all False.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from veldt.records.tree import Array

MASK = "action_mask"


class Masks:
    """Reads the masks of an action whose parts, at these paths, have so many choices each."""

    def __init__(self, paths: Sequence[tuple[Any, ...]], choices: Array, combined: bool) -> None:
        self.paths, self.choices, self.combined = paths, [int(n) for n in choices], combined
        self.size = int(np.prod(self.choices)) if combined else sum(self.choices)  # of the recorded row
        self._edges = np.cumsum([0, *self.choices[:-1]])

    def flat(self) -> "Masks":
        """The same before choices are combined."""
        return Masks(self.paths, np.array(self.choices), False)

    def read(self, mask: Any, *leading: int) -> Array:
        """The masks [*leading, ...] of an environment as rows [*leading, size]. A mask is an array of all choices, or a
        tuple or dict with an array for each part of the action. What is neither is a ValueError."""
        parts = [mask]
        if isinstance(mask, dict):
            parts = [_at(mask, path) for path in self.paths]
        elif isinstance(mask, tuple):
            parts = list(mask)
        arrays = [np.asarray(part) for part in parts]
        if any(x.dtype.kind not in "biuf" for x in arrays):
            raise ValueError(f"it is {mask!r:.100}, not an array of zeros and ones")
        whole = np.concatenate([x.reshape(*leading, -1) for x in arrays], -1) != 0
        if whole.shape[-1] != sum(self.choices):
            raise ValueError(f"it has {whole.shape[-1]} elements, but there are {sum(self.choices)} choices")
        return self._combine(whole) if self.combined else whole

    def has_choice(self, rows: Array) -> Array:
        """Whether rows [..., size] leave a legal choice in every part."""
        return np.asarray(self._parts(rows).all(-1))

    def allows(self, rows: Array, action: Array) -> Array:
        """Whether recorded actions [n, ...] are legal under rows [n, size]."""
        index = action.reshape(len(rows), -1) + (0 if self.combined else self._edges)
        taken = np.take_along_axis(rows, index.astype(np.int64), -1)
        return np.asarray((taken | ~self._parts(rows)).all(-1))

    def _parts(self, rows: Array) -> Array:
        """By part, whether it has a legal choice."""
        if self.combined:
            return np.asarray(rows.any(-1, keepdims=True))
        return np.asarray(np.logical_or.reduceat(rows, self._edges, axis=-1))

    def _combine(self, whole: Array) -> Array:
        """A combination is legal if each of its choices is."""
        out = np.ones((*whole.shape[:-1], 1), np.bool_)
        for part in np.split(whole, self._edges[1:], -1):
            out = (out[..., :, None] & part[..., None, :]).reshape(*whole.shape[:-1], -1)
        return out


def _at(mask: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        try:
            mask = mask[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"it has no {'.'.join(map(str, path))}") from None
    return mask
