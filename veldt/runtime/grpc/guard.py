"""What an actor that the run did not start may say: messages, counts and metrics are checked before they have an effect.

Anyone who has the token can send anything. Who it is follows from the seat, never from what a message says: calls carry the
seat's own integers, and the number of a message is that of its ring.
"""

from collections.abc import Iterable, Mapping, Sequence

from veldt.counters import COLUMN, NAMES
from veldt.metrics import Metric
from veldt.ports import PORT
from veldt.records.tree import Tree
from veldt.runtime.grpc.wire import Refused
from veldt.runtime.local.plan import Message

LARGEST = 1e12  # of a metric
OF_THE_RUN = ("learner_steps", "evaluations")  # counts that no actor has


class Guard:
    """Checks the messages of one lane."""

    def __init__(self, kinds: Sequence[Message], keys: Iterable[int]) -> None:
        """`keys`: the integers that identify the seat's calls."""
        formats = [[(name, x.dtype, x.shape) for name, x in kind.example.items()] for kind in kinds]
        # By number of the format: the ports whose messages have it.
        self._kinds = [{k.port: k for k, f in zip(kinds, formats, strict=True) if f == own} for own in formats]
        self._keys = frozenset(keys)

    def check(self, which: int, message: Tree, number: int) -> int:
        """The env steps that a message brings. `which`: the number of its format."""
        port, *integers = message[PORT].tolist()
        kind = self._kinds[which].get(port)
        if kind is None:
            raise Refused("a message calls a method that this actor does not have")
        if kind.numbered and integers.pop(0) != number:
            raise Refused("a call has the number of another call")
        if not self._keys.issuperset(integers):
            raise Refused("a call is for environments of another actor")
        if kind.check is None:
            return 0
        if why := kind.check(message):
            raise Refused(why)
        return kind.check.steps


class Allowance:
    """Checks the counts and metrics of one seat."""

    def __init__(self, ahead: int, metrics: Mapping[str, Metric]) -> None:
        self._ahead, self._metrics = ahead, {name: _bounds(metric) for name, metric in metrics.items()}

    def check_counts(self, counts: Sequence[int], before: Sequence[int], steps: int) -> None:
        """Counts of a session never fall, and follow the `steps` in its messages. At most half of its steps may have been
        such that no block with them was sent: those without anything to train on."""
        if any(n < earlier for n, earlier in zip(counts, before, strict=True)):
            raise Refused("a count decreased")
        if any(counts[COLUMN[name]] for name in OF_THE_RUN):
            raise Refused("an actor counts updates or evaluations")
        if counts[COLUMN["env_steps"]] > 2 * steps + self._ahead:
            raise Refused(f"{counts[COLUMN['env_steps']]} env steps are counted, and {steps} were sent")
        if max(counts) > 2 * counts[COLUMN["env_steps"]] + self._ahead:
            raise Refused("more episodes or observations are counted than there were steps")

    def check_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Without those of the run's counters, which the run knows itself."""
        found = {name: x for name, x in metrics.items() if name not in NAMES}
        for name, x in found.items():
            low, high = self._metrics.get(name, (1.0, -1.0))
            if not low <= x <= high:
                raise Refused(f"the metric {name[:64]!a} is not one that an actor reports, or out of bounds")
        return found


def _bounds(metric: Metric) -> tuple[float, float]:
    """What has a unit is an amount, which is not negative."""
    return (0.0 if metric.unit else -LARGEST), (2.0 if metric.unit == "fraction" else LARGEST)
