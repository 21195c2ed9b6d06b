"""The end of a run: an evaluation of its last weights, and a summary."""

import logging
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from veldt.acting.actor import Evaluation, evaluate
from veldt.acting.trained import TrainedPolicy
from veldt.experiment.config import Config
from veldt.learning import params
from veldt.records.step import EnvSpec
from veldt.records.tree import Tree
from veldt.seeds import derive
from veldt.watching.links import format_seconds

log = logging.getLogger("veldt")
LANES = 16  # environments of an evaluation, at most
POLL_S = 0.2


def evaluate_weights(
    config: Config, env: EnvSpec, weights: Tree, stopping: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """As the evaluations during training. None: it failed, an environment hangs, or `stopping` was true; the log says so.

    It is played in a thread, which the caller does not wait for if a step takes longer than `step_timeout`.
    """
    policy = TrainedPolicy(config.algorithm, env, explore=config.eval.epsilon, seed=derive(config.seed, "last"))
    params.restore(policy.net, weights)
    evaluating = _Evaluating(config, policy)
    while evaluating.thread.is_alive() and time.monotonic() - evaluating.alive_at < config.step_timeout:
        if stopping():
            evaluating.stopping = True
            log.warning("the last weights were not evaluated: interrupted")
            return None
        evaluating.thread.join(POLL_S)
    if evaluating.thread.is_alive():
        evaluating.stopping = True
        log.warning("the last weights were not evaluated: a step of %s took more than step_timeout", config.env)
    elif evaluating.error is not None:
        log.warning("the last weights were not evaluated: %s", evaluating.error)
    return evaluating.found


class _Evaluating:
    def __init__(self, config: Config, policy: TrainedPolicy) -> None:
        self.config, self.policy = config, policy
        self.found: Evaluation | None = None
        self.error: Exception | None = None
        self.stopping, self.alive_at = False, time.monotonic()
        self.thread = threading.Thread(target=self._play, name="last evaluation", daemon=True)
        self.thread.start()

    def _play(self) -> None:
        config, how = self.config, self.config.eval
        try:
            with closing(config.envs(min(how.episodes, LANES))) as envs:
                seed = derive(config.seed, "last evaluation")
                self.found = evaluate(envs, self.policy, how.episodes, seed, how.max_length, self._stopping)
        except Exception as error:
            self.error = error

    def _stopping(self) -> bool:
        self.alive_at = time.monotonic()
        return self.stopping


@dataclass(frozen=True)
class Summary:
    """What the last lines of a run say."""

    config: Config
    stopped_by: str  # empty: its steps were done
    line: dict[str, Any]  # the newest value of each metric
    steps: int  # env steps and
    seconds: float  # time of this session alone
    last: Evaluation | None
    best: tuple[float, int] | None  # mean return, env steps
    path: str
    trust: bool  # the flag that commands on this run need

    def lines(self) -> list[str]:
        done, rates = self.line.get("env_steps", 0), self._rates()
        early = f"Stopped early: {self.stopped_by}. " if self.stopped_by else ""
        out = [f"{early}{done:,} env steps in {format_seconds(self.line.get('time_s'))}{rates}."]
        out += [text for text in (self._last(), self._best()) if text]
        load = f"veldt.load({self.path!r}{', trust=True' if self.trust else ''})"
        return [*out, f"The policy in Python: {load}; its curve: veldt plot {shlex.quote(self.path)}"]

    def _rates(self) -> str:
        if self.seconds <= 0 or not self.steps:
            return ""
        updates = self.line.get("learner_steps_per_s")
        more = f", {updates:,.0f} updates/s" if updates else ""
        return f" ({self.steps / self.seconds:,.0f} env steps/s{more})"

    def _last(self) -> str:
        if self.last is not None:
            n = len(self.last.returns)
            return f"Return of the last weights: {self.last.mean_return:.1f}{interval(self.last.returns)}, {n} episodes."
        if "eval_return" in self.line:
            at = f" at {self.line['eval_env_steps']:,} env steps" if "eval_env_steps" in self.line else ""
            return f"Return of the last evaluation: {self.line['eval_return']:.1f}{at}."
        return ""

    def _best(self) -> str:
        if self.best is None:
            return ""
        return f"Best evaluation: {self.best[0]:.1f} at {self.best[1]:,} env steps (checkpoints/best; veldt eval --best)."


def interval(returns: list[float]) -> str:
    """The 95 % interval of the mean over episodes, in words."""
    from veldt.experiment.trials import bootstrap  # it imports the session

    found = bootstrap(returns)
    return "" if found is None else f" (95 % interval {found[0]:.1f} to {found[1]:.1f})"
