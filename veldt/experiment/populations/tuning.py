"""A search for settings with Optuna: tree-structured Parzen estimators, and successive halving on evaluations (ASHA).

    DIR/study.yaml            the file that was run
        study.db              the study, in SQLite: optuna.load_study(study_name=NAME, storage="sqlite:///DIR/study.db")
        trial-7/              an ordinary run
        trial-7.yaml .log .json    its settings, its output, its last evaluation

The first trial has the recipe's own settings, as far as they are in the ranges. A trial that was under way when the search
was killed is resumed from its checkpoint.
"""

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.experiment.populations.study import StudySpec
from veldt.experiment.settings import flat
from veldt.experiment.sweep import Trial, check_stores
from veldt.experiment.trials import Child, Failed
from veldt.seeds import derive
from veldt.signals import interruptible
from veldt.watching.links import figure, format_seconds
from veldt.watching.sinks import EVALUATION, evaluations, read_metrics

DATABASE = "study.db"
POLL_S = 0.5  # between two looks at the evaluations of the trials under way
PRUNED = "its evaluations are not among the best"


def optuna() -> Any:
    try:
        import optuna as found
    except ImportError:
        raise UserError("veldt tune needs Optuna; install it with: pip install 'veldt[tune]'.") from None
    found.logging.set_verbosity(found.logging.WARNING)
    return found


def open_study(spec: StudySpec, directory: Path) -> Any:
    found = optuna()
    storage = f"sqlite:///{directory / DATABASE}"
    try:
        study = found.create_study(
            study_name=spec.name, storage=storage, direction="maximize", load_if_exists=True, pruner=_pruner(spec)
        )
    except Exception as error:
        why = str(error).partition("\n")[0][:200]
        raise UserError(f"{directory / DATABASE} cannot be used as a study ({type(error).__name__}: {why}).") from None
    # With the seed alone a resumed study would draw again what it drew first.
    seed = derive(spec.seed, "tune", len(study.trials)) % 2**32
    study.sampler = found.samplers.TPESampler(seed=seed, constant_liar=spec.at_once > 1)
    if not study.trials and (usual := spec.usual):
        study.enqueue_trial({name: _encode(x) for name, x in usual.items()})
    return study


def _pruner(spec: StudySpec) -> Any:
    pruners = optuna().pruners
    if spec.prune is None:
        return pruners.NopPruner()
    return pruners.SuccessiveHalvingPruner(min_resource=spec.prune.after, reduction_factor=spec.prune.factor)


def suggest(trial: Any, spec: StudySpec) -> dict[str, Any]:
    """A value for each setting. What Optuna has no type for is text there, as JSON."""
    out: dict[str, Any] = {}
    for name, tuned in spec.ranges.items():
        log = tuned.kind == "loguniform"
        if tuned.kind == "choices":
            chosen = trial.suggest_categorical(name, [_encode(x) for x in tuned.choices])
            out[name] = next(x for x in tuned.choices if _encode(x) == chosen)
        elif tuned.whole:
            out[name] = trial.suggest_int(name, int(tuned.low), int(tuned.high), log=log)
        else:
            out[name] = trial.suggest_float(name, tuned.low, tuned.high, log=log)
    return out


def _encode(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


@dataclass
class UnderWay:
    """A trial that is trained."""

    trial: Any  # Optuna's
    tuned: dict[str, Any]
    child: Child
    reported: set[int] = field(default_factory=set)  # env steps
    pruned: bool = False


class Tuner:
    def __init__(self, spec: StudySpec, directory: Path) -> None:
        self.spec, self.directory = spec, directory
        self.study = open_study(spec, directory)
        self.under_way: list[UnderWay] = []
        self.interrupted = 0  # signal number
        self.failed: list[Failed] = []
        self._began, self._fresh = time.monotonic(), 0

    @property
    def done(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def check_memory(self) -> None:
        check_stores(self.spec.at_once * self.spec.base.nbytes, self.spec.at_once, "trials")

    def run(self) -> None:
        resumed = [x for x in self.study.get_trials(deepcopy=False) if x.state == optuna().trial.TrialState.RUNNING]
        waiting = [optuna().trial.Trial(self.study, x._trial_id) for x in resumed]
        message = "Stopping after a checkpoint of each trial; the same command goes on"
        with interruptible(self._stop, message):
            try:
                while self.under_way or (not self.interrupted and (waiting or self.done < self.spec.trials)):
                    while self._may_start(len(waiting)):
                        self._start(waiting.pop(0) if waiting else self.study.ask())
                    for one in list(self.under_way):
                        self._look(one)
                    time.sleep(POLL_S)
            finally:
                for one in self.under_way:
                    one.child.kill()

    def _may_start(self, waiting: int) -> bool:
        free = len(self.under_way) < self.spec.at_once and not self.interrupted
        return free and (waiting > 0 or self.done + len(self.under_way) < self.spec.trials)

    def _start(self, trial: Any) -> None:
        tuned = suggest(trial, self.spec)  # of a trial that is resumed: what it had
        try:
            config = self.spec.config(trial.number, tuned)
        except UserError as error:
            self.study.tell(trial.number, state=optuna().trial.TrialState.FAIL)
            self._say(trial.number, f"failed, {error}", tuned)
            return
        path = self.directory / f"trial-{trial.number}"
        run = Trial(f"trial {trial.number}", config, path, self.spec.base.nbytes)
        known = set(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        child = Child(run, self.spec.episodes, self.spec.timeout_s)
        self.under_way.append(UnderWay(trial, tuned, child, known))

    def _look(self, one: UnderWay) -> None:
        if self.interrupted:
            one.child.stop("the search was stopped")
        self._report(one)
        outcome = one.child.outcome()
        if outcome is None:
            return
        self.under_way.remove(one)
        states = optuna().trial.TrialState
        if isinstance(outcome, Failed) and one.pruned:
            self._end(one, states.PRUNED, None, "pruned")
        elif isinstance(outcome, Failed) and self.interrupted:
            return  # it stays under way
        elif isinstance(outcome, Failed):
            self.failed.append(outcome)
            self._end(one, states.FAIL, None, f"failed, {outcome.why}")
        else:
            score = float(outcome["mean_return"])
            self._end(one, states.COMPLETE, score, f"return {figure(score)}")

    def _report(self, one: UnderWay) -> None:
        """New evaluations; ends a trial that is worse than others were then."""
        file = one.child.trial.path / "metrics.jsonl"
        if one.pruned or not file.exists():
            return
        for point in evaluations(read_metrics(file, EVALUATION, having="eval_return")):
            if point.env_steps not in one.reported:
                one.reported.add(int(point.env_steps))
                one.trial.report(point.mean_return, int(point.env_steps))
                one.pruned |= bool(one.trial.should_prune())
        if one.pruned:
            one.child.stop(PRUNED)

    def _end(self, one: UnderWay, state: Any, value: float | None, text: str) -> None:
        self.study.tell(one.trial.number, value, state=state)
        self._fresh += 1
        self._say(one.trial.number, text, one.tuned)

    def _say(self, trial: int, text: str, tuned: Mapping[str, Any]) -> None:
        values = ", ".join(f"{name.rpartition('.')[2]} {shown(x)}" for name, x in tuned.items())
        done, best = self.done, self.best()
        left = (self.spec.trials - done) * (time.monotonic() - self._began) / max(1, self._fresh)
        more = f"; best {figure(best[1])} (trial {best[0]})" if best else ""
        print(
            f"{done}/{self.spec.trials} trial {trial}: {text}, with {values}{more}; left {format_seconds(left)}", flush=True
        )

    def best(self) -> tuple[int, float, dict[str, Any]] | None:
        """Its number, its score and what was tuned."""
        complete = self.study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.COMPLETE,))
        if not complete:
            return None
        found = max(complete, key=lambda trial: (trial.value, -trial.number))
        tuned = flat(self.spec.config(found.number, suggest(found, self.spec)))
        return found.number, found.value, {name: tuned[name] for name in self.spec.ranges}

    def _stop(self, number_: int) -> None:
        self.interrupted = number_


def shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def best_command(spec: StudySpec, tuned: Mapping[str, Any]) -> str:
    """What to type to train with these settings."""
    config = spec.base.config
    words = ["veldt", "train", config.recipe, "--env", config.env]
    known = flat(config)
    for name, value in {**{name: known[name] for name in spec.given if name in known}, **tuned}.items():
        if isinstance(value, bool):
            head, dot, tail = name.rpartition(".")
            words.append(f"--{head}{dot}{'' if value else 'no-'}{tail}")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{name}", *(f"{x:.6g}" if isinstance(x, float) else str(x) for x in values)]
    return shlex.join(words)
