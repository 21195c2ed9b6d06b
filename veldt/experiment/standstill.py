"""Standstill: tells that the learner has made no update for long, though environments were stepped."""

import logging

log = logging.getLogger("veldt")

LONG_S = 60.0  # without an update (or twice the longest step)


class Standstill:
    def __init__(self, step_timeout: float) -> None:
        self.longest = max(LONG_S, 2 * step_timeout)
        self.seconds = 0.0  # without an update, if that is long
        self._updates = -1
        self._at, self._env_steps, self._told = 0.0, 0, True  # nothing is expected before the first update

    def look(self, now: float, env_steps: int, updates: int) -> float:
        """With the clock and the counts of a line."""
        if updates != self._updates:
            self._told = self._updates < 0
            self._updates, self._at, self._env_steps, self.seconds = updates, now, env_steps, 0.0
        elif env_steps > self._env_steps and now - self._at > self.longest and (not self._told or self.seconds):
            self.seconds = now - self._at
            if not self._told:
                log.warning("%s", self.sentence(env_steps))
            self._told = True
        return self.seconds

    def sentence(self, env_steps: int) -> str:
        """For the log, and for the end of a run that ended so."""
        return (
            f"The learner has made no update for {self.seconds:.0f} s, in which there were "
            f"{env_steps - self._env_steps:,} env steps: look at store_duplicates, refusing, bad_fraction in the metrics."
        )
