"""Seeds: one per run, from which every named random stream gets its own."""

import zlib
from typing import Protocol

import numpy as np

from veldt.records.tree import Array

_WORD = (1 << 64) - 1


def derive(seed: int, *path: str | int) -> int:
    """The seed of the stream `path`: the same for the same names, unrelated for different ones."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    # The length is mixed in too: a seed sequence reads missing words as zeros.
    return int(np.random.SeedSequence([seed, len(words), *words]).generate_state(1, np.uint64)[0] >> 1)


def nth(seed: int, i: int) -> int:
    """The i-th of many seeds that follow from a derived one, in a twentieth of the time of `derive` (SplitMix64)."""
    x = (seed + i * 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _WORD
    return (x ^ x >> 31) >> 1


class Random(Protocol):
    """A NumPy generator, or random numbers that are held for several steps. The first axis is the environment."""

    def random(self, size: tuple[int, ...], /) -> Array: ...  # uniform in [0, 1)
    def standard_normal(self, size: tuple[int, ...], /) -> Array: ...
