"""Seeds: one per run, from which every named random stream gets its own."""

import zlib

import numpy as np


def derive(seed: int, *path: str | int) -> int:
    """The seed of the stream `path`: the same for the same names, unrelated for different ones."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    # The length is mixed in too: a seed sequence reads missing words as zeros.
    return int(np.random.SeedSequence([seed, len(words), *words]).generate_state(1, np.uint64)[0] >> 1)
