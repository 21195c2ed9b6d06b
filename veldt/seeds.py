"""Seeds: one per run, from which every named random stream gets its own."""

import zlib
from typing import Protocol

import numpy as np

from veldt.records.tree import Array


def derive(seed: int, *path: str | int) -> int:
    """The seed of the stream `path`: the same for the same names, unrelated for different ones."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    # The length is mixed in too: a seed sequence reads missing words as zeros.
    return int(np.random.SeedSequence([seed, len(words), *words]).generate_state(1, np.uint64)[0] >> 1)


class Random(Protocol):
    """A NumPy generator, or random numbers that are held for several steps. The first axis is the environment."""

    def random(self, size: tuple[int, ...], /) -> Array: ...  # uniform in [0, 1)
    def standard_normal(self, size: tuple[int, ...], /) -> Array: ...
