"""What the processes of a run share beside messages: the seams, and what they are where there is but one process."""

from typing import Protocol

from veldt.records.tree import Tree, read_only

WIDTH = 16  # integers in a row


class Cell(Protocol):
    """A value of which the newest wins: one writer, many readers."""

    def write(self, tag: int, value: Tree) -> None: ...  # the tag identifies the value; all values have one format
    def read(self, have: int) -> tuple[int, Tree] | None: ...  # (tag, value); None: no value yet, or its tag is `have`


class PrivateCell:
    def __init__(self) -> None:
        self._newest: tuple[int, Tree] | None = None

    def write(self, tag: int, value: Tree) -> None:
        self._newest = tag, read_only({name: x.copy() for name, x in value.items()})

    def read(self, have: int) -> tuple[int, Tree] | None:
        return None if self._newest is None or self._newest[0] == have else self._newest


class Rows(Protocol):
    """Integers that many processes add to: each has a row of its own, and a count is the sum over all rows."""

    def add(self, column: int, n: int) -> None: ...
    def total(self, column: int) -> int: ...

    @property
    def stopping(self) -> bool: ...  # the run is about to end


class PrivateRows:
    def __init__(self) -> None:
        self._counts = [0] * WIDTH
        self.stopping = False

    def add(self, column: int, n: int) -> None:
        self._counts[column] += int(n)

    def total(self, column: int) -> int:
        return self._counts[column]
