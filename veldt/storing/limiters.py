"""How fast a store takes blocks and gives samples. `False` means "not now": the caller keeps its data and tries again.

Free of deadlock by construction: no limiter reaches a state in which it refuses both inserts and samples.
"""

from dataclasses import dataclass
from typing import Protocol, Self


class Limiter(Protocol):
    def can_insert(self, items: int, size: int, inserted: int, sampled: int) -> bool: ...
    def can_sample(self, items: int, size: int, inserted: int, sampled: int) -> bool: ...


@dataclass(frozen=True)
class MinSize:
    """Samples wait for `min_size` items; inserts never wait."""

    min_size: int = 1

    def can_insert(self, items: int, size: int, inserted: int, sampled: int) -> bool:
        return True

    def can_sample(self, items: int, size: int, inserted: int, sampled: int) -> bool:
        return size >= max(1, self.min_size)


@dataclass(frozen=True)
class SamplesPerInsert:
    """Holds error = ratio * (inserted - min_size) - sampled within [-tolerance, tolerance].

    Samples wait until `min_size` items are there. The tolerance must cover two blocks and one batch: if it were narrower
    than half of one insert plus one sample, both sides could wait for each other.
    """

    ratio: float
    min_size: int
    tolerance: float
    inserts_wait: bool = True  # False: only samples do, and the error may grow

    @classmethod
    def for_run(cls, ratio: float, min_size: int, burst: int, batch: int, inserts_wait: bool = True) -> Self:
        """The tightest tolerance for inserts that come `burst` items at a time and samples of `batch`."""
        return cls(ratio, min_size, tolerance=2 * ratio * burst + batch, inserts_wait=inserts_wait)

    def can_insert(self, items: int, size: int, inserted: int, sampled: int) -> bool:
        if not self.inserts_wait or size < max(1, self.min_size):
            return True
        return self.ratio * (inserted + items - self.min_size) - sampled <= self.tolerance

    def can_sample(self, items: int, size: int, inserted: int, sampled: int) -> bool:
        if size < max(1, self.min_size):
            return False
        return self.ratio * (inserted - self.min_size) - (sampled + items) >= -self.tolerance


@dataclass(frozen=True)
class Queue:
    """Inserts wait while `capacity` items or more are unread, samples until a whole batch is there.

    The capacity must be at least one batch, and the store must have a slot for each item of it, because a block may hold
    only one. The last insert may exceed the capacity, by less than one block.
    """

    capacity: int

    def can_insert(self, items: int, size: int, inserted: int, sampled: int) -> bool:
        return size < self.capacity

    def can_sample(self, items: int, size: int, inserted: int, sampled: int) -> bool:
        return size >= items
