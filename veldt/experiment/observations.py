"""BadObservations: ends a run whose environment returns too many observations or rewards that are not finite."""

from veldt.errors import UserError
from veldt.runtime import Nodes

WINDOW = 1_000  # observations over which the fraction of bad ones is taken, at least


class BadObservations:
    def __init__(self, env: str, most: float) -> None:
        self.env, self.most = env, most  # the largest fraction that is accepted
        self._since = (0, 0)

    def begin(self, nodes: Nodes) -> None:
        self._since = _counts(nodes)

    def check(self, nodes: Nodes) -> None:
        """Raises a UserError if too many observations since the last look were bad, once there are enough of them."""
        bad, seen = (now - before for now, before in zip(_counts(nodes), self._since, strict=True))
        if seen < WINDOW:
            return
        if bad > self.most * seen:
            raise UserError(
                f"{self.env}: {bad:,} of the last {seen:,} observations were not finite, or came with such a reward: more "
                f"than max_bad ({self.most:g}) allows; fix the environment, or raise --max-bad."
            )
        self.begin(nodes)


def bad_fraction(nodes: Nodes) -> float:
    """Of all observations of the run, those before a resume too."""
    bad, seen = _counts(nodes)
    return min(1.0, bad / max(1, seen))


def _counts(nodes: Nodes) -> tuple[int, int]:
    """Bad observations, and all: one for each step and one for each reset."""
    return nodes.count("bad_observations"), nodes.count("env_steps") + nodes.count("episodes")
