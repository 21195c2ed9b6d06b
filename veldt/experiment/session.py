"""Session: one stretch of training, from the start or a checkpoint to the end or an interruption.

`Session._train` is the loop. When due, `Progress` (progress.py) writes a line of metrics, and `Saving` (saving.py) a
checkpoint. `Ending` (listening.py) calls the caller's functions, and decides whether the run ends early.
"""

import contextlib
import logging
import math
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
import yaml

from veldt import metrics
from veldt.acting.actor import Evaluation
from veldt.errors import UserError
from veldt.experiment import changes, saved_spec
from veldt.experiment.checkpoint import Checkpoint, Checkpoints
from veldt.experiment.config import Config
from veldt.experiment.directory import MAY_CHANGE, asks, check_same, exclusive, load_config
from veldt.experiment.ending import Summary, evaluate_weights
from veldt.experiment.env_names import command
from veldt.experiment.listening import Callbacks, CheckpointSaved, Ending, EvaluationDone, LogLine
from veldt.experiment.prepare import Prepared, introduction, make_runtime, prepare
from veldt.experiment.progress import Progress
from veldt.experiment.saving import NODE, Best, Saving
from veldt.experiment.settings import as_plain, flat
from veldt.files import replace_text
from veldt.machine import format_bytes
from veldt.program import BLOCK_MEMORY
from veldt.runtime import Nodes
from veldt.signals import interruptible
from veldt.watching.events import TensorBoard
from veldt.watching.sinks import JsonLines, Metrics, Sink, log_to
from veldt.watching.trackers import trackers
from veldt.watching.view import Screen

log = logging.getLogger("veldt")


HURRY_S = 1.5  # that processes have to answer after a signal


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after a last checkpoint."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(f"stopped by signal {number}; {path} can be resumed")
        self.code = 128 + number


class Overdue(BaseException):
    """A step did not end after a signal. No environment catches this."""


class Session:
    def __init__(
        self,
        config: Config,
        path: Path,
        quiet: bool,
        callbacks: Callbacks | None = None,
        may_change: Container[str] = MAY_CHANGE,  # settings in which the directory's config may be another
        until: int | None = None,  # env steps at which it pauses; None: it goes on to the end
    ) -> None:
        self.config, self.path, self.quiet, self.may_change = config, path, quiet, may_change
        self.goal = config.steps if until is None else min(until, config.steps)
        self.ending = Ending(callbacks or Callbacks(), config.stop_return, config.stop_after)
        self.interrupted = 0  # signal number
        self.late: list[int] = []  # signals after training, during the last evaluation
        self.nodes: Nodes | None = None  # while they run
        self.begun = self.training = False
        self.updates = 0  # of the whole run, once it has ended
        self.trained_s = 0.0  # without the start and the end
        self.stopped_by = ""  # what ended the run before its steps were done
        self.last: Evaluation | None = None  # of the last weights

    def run(self) -> None:
        config, advice = self.config, "choose another --run, or give the settings it was started with"
        if self.may_change is not MAY_CHANGE:
            advice = "it cannot change on resume (veldt resume --help lists what can)"
        check_same(self.path, config, self.may_change, advice)
        prepared = prepare(config, new=not any((self.path / "checkpoints").glob("[0-9]*")))
        torch.set_num_threads(config.threads)
        with exclusive(self.path), log_to(self.path / "log.txt", self.quiet):
            checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep, config.checkpoint.store)
            checkpoints.clean()
            self.screen = Screen(f"{config.recipe} on {config.env}", config.steps, self.quiet, prepared.declarations)
            try:
                self._start(prepared, checkpoints, checkpoints.load())
            except Interrupted:
                self.screen.say("Stopped before training began; there is nothing new to save.")
                raise
            except Exception:
                log.info("stopped by an error", exc_info=True)  # in the log file; the caller shows it
                raise
            finally:
                self.screen.close()
        if number := self.interrupted or (self.late and self.late[0]):
            raise Interrupted(number, self.path)

    def _start(self, prepared: Prepared, checkpoints: Checkpoints, checkpoint: Checkpoint | None) -> None:
        config, number = self.config, checkpoint.number if checkpoint else 0
        if checkpoint is not None and (saved := saved_spec.read(self.path)):
            saved_spec.check_fits(saved, prepared.env, self.path)
        self._introduce(prepared, checkpoint)
        services = trackers(self.path, as_plain(config))  # before anything is written: they may be missing
        sinks: list[Sink] = [JsonLines(self.path / "metrics.jsonl"), TensorBoard(self.path, flat(config)), self.screen]
        with contextlib.closing(Metrics([*sinks, *services])) as lines:
            self._run_nodes(prepared, checkpoints, checkpoint, lines)
        self._conclude(prepared, resumed_from=number)

    def _run_nodes(
        self, prepared: Prepared, checkpoints: Checkpoints, checkpoint: Checkpoint | None, lines: Metrics
    ) -> None:
        config, number = self.config, checkpoint.number if checkpoint else 0
        self._note_changes(int(checkpoint.clock("env_steps")) if checkpoint else 0)
        replace_text(self.path / "config.yaml", yaml.safe_dump(as_plain(config), sort_keys=False))
        saved_spec.write(self.path, prepared.env)
        metrics.save(prepared.declarations, self.path)
        self.progress = Progress(prepared, lines)
        self.saving = Saving(checkpoints, config.checkpoint.every, self.progress.clocks, self._note_checkpoint)
        self.best, self.known = Best(checkpoints, prepared.net), prepared.program.nodes.keys()
        try:
            runtime = make_runtime(config, self.path, number, self.screen.say)
            message = "" if self.quiet else "Stopping after a final checkpoint"
            with interruptible(self._stop, message, self._hurry), runtime.start(prepared.program) as self.nodes:
                self._restore(self.nodes, checkpoint)
                self._train(self.nodes)
            self._evaluate_last(prepared, resumed_from=number)
            self.ending.check()
        finally:
            self.saving.wait()
            self.progress.gpus.close()

    def _train(self, nodes: Nodes) -> None:
        whole, began = True, time.monotonic()  # whole: no step was broken off
        self.begun = self.training = True
        self.ending.begin()
        try:
            while not self.finished(nodes):
                self.progress.log_if_due(nodes)
                self.progress.bad.check(nodes)
                self.saving.save_if_due(nodes)
                self._note_lines(nodes)
                self.ending.check()
                nodes.step()
            if nodes.count("env_steps") > self.saving.saved_at:
                nodes.cut()
        except Overdue:
            whole = False
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.training = False
            self._save_after(error, nodes)
            raise
        self.training, self.trained_s = False, time.monotonic() - began
        if nodes.count("env_steps") > self.saving.saved_at:
            self._save_last(nodes, whole)
        elif nodes.live:  # the last scheduled checkpoint fell on the end, and the last line may be older
            self.progress.log(nodes)
        self._note_lines(nodes)
        self.updates = nodes.count("learner_steps")

    def _command(self, name: str, **changes: Any) -> str:
        return command(name, self.path, self.config, **changes)

    def _note_lines(self, nodes: Nodes) -> None:
        """Tells the callbacks of new lines of metrics, and keeps the weights of an evaluation that is the best."""
        for line in self.progress.take_lines():
            best = "eval_return" in line and NODE in self.known and self.best.offer_evaluated(nodes, line)
            self._note_line(line, best)

    def _note_line(self, line: dict[str, Any], best: bool) -> None:
        steps, updates = int(line["env_steps"]), int(line["learner_steps"])
        self.ending.add(LogLine(self.path, steps, updates, line["time_s"], line))
        if "eval_return" in line:
            at = int(line.get("eval_env_steps", steps)), int(line.get("eval_learner_steps", updates))
            self.ending.add(EvaluationDone(self.path, *at, line["eval_return"], line["eval_length"], best))

    def _note_checkpoint(self, number: int, env_steps: int) -> None:
        path = self.saving.checkpoints.directory / f"{number:06d}"
        self.ending.add(CheckpointSaved(self.path, path, number, env_steps))

    def _evaluate_last(self, prepared: Prepared, resumed_from: int) -> None:
        """Of the weights in the last checkpoint, after the nodes have ended: nothing of it is in a later resume."""
        self.stopped_by = self.ending.reason
        trained = self.updates and self.saving.number > resumed_from and not self.interrupted
        if not trained or not self.config.eval.every or NODE not in self.known:
            return
        checkpoint = self.saving.checkpoints.load(blocks=False)
        if checkpoint is None or len(checkpoint.manifest["weights"]) != 1:
            return
        weights, manifest = checkpoint.weights(), checkpoint.manifest
        with interruptible(self.late.append, "" if self.quiet else "Stopping without a last evaluation"):
            log.info("evaluating the last weights")
            self.last = evaluate_weights(self.config, prepared.env, weights, lambda: bool(self.late))
        if self.last is not None:
            steps = int(manifest["env_steps"]), int(manifest["learner_steps"])
            line = self.progress.add_evaluation(self.last, *steps)
            self._note_line(line, self.best.offer(weights, self.last.mean_return, *steps))

    def finished(self, nodes: Nodes) -> bool:
        return bool(self.interrupted or self.ending.reason) or nodes.count("env_steps") >= self.goal

    def _save_last(self, nodes: Nodes, whole: bool) -> None:
        scheduled = nodes.count("env_steps") >= self.goal  # unscheduled: an interruption's
        self.progress.log(nodes)
        self.saving.wait()
        if whole and not nodes.live:
            saved = self.saving.save(nodes, scheduled)
        else:
            saved = self.saving.salvage(nodes, HURRY_S if self.interrupted else self.config.step_timeout, scheduled)
        if not saved:
            raise UserError(
                f"The final checkpoint could not be written (see {self.path / 'log.txt'}); free disk space, and continue "
                f"from the previous one with: {self._command('resume')}"
            )

    def _save_after(self, error: BaseException, nodes: Nodes) -> None:
        """Tries to save a last checkpoint before the run ends with an error, which gets a note that says so."""
        error.add_note(f"See {self.path / 'log.txt'}")
        if nodes.count("env_steps") <= self.saving.saved_at:
            return
        try:
            self.saving.wait()
            if self.saving.salvage(nodes, self.config.step_timeout, scheduled=False):
                error.add_note(f"Saved at {self.saving.saved_at:,} env steps; continue with: {self._command('resume')}")
        except Exception as another:
            log.error("no final checkpoint could be saved (%s)", another, exc_info=True)

    def _restore(self, nodes: Nodes, checkpoint: Checkpoint | None) -> None:
        number = 0
        if checkpoint is not None:
            self.saving.checkpoints.restore(checkpoint, nodes)
            number, self.progress.earlier_s = checkpoint.number, checkpoint.clock("time_s")
            nodes.resume(number)
        if checkpoint is not None or (self.path / "metrics.jsonl").stat().st_size:  # an earlier start without a checkpoint
            clocks = self.progress.clocks(nodes)
            self.progress.lines.write({**clocks, "resumed_from": clocks["learner_steps"]})
        self.saving.begin(nodes, number)
        self.progress.begin(nodes)

    def _introduce(self, prepared: Prepared, checkpoint: Checkpoint | None) -> None:
        config = self.config
        blocks = config.envs_per_actor * config.schema(prepared.env).fresh if prepared.store.slots else 0
        for line in introduction(prepared, self.path):
            self.screen.say(line, wrap=True)
        if config.runtime == "inline" and 0 < config.checkpoint.every < blocks:
            log.warning("checkpoint.every is less than one block of each environment: the store fills with short blocks")
        log.info("%s on %s, seed %d, store %s", config.recipe, config.env, config.seed, format_bytes(prepared.store.nbytes))
        if checkpoint is not None:
            steps = int(checkpoint.clock("env_steps"))
            stores = {name for name, node in prepared.program.nodes.items() if node.has(BLOCK_MEMORY)}
            empty = "; the replay was not saved and is empty" if stores - checkpoint.manifest["blocks"].keys() else ""
            text = f"resuming from checkpoint {checkpoint.number} at {steps:,} env steps{empty}"
            log.info(text)
            self.screen.say(text)

    def _note_changes(self, env_steps: int) -> None:
        """Of the config that the directory has."""
        file = self.path / "config.yaml"
        changed = changes.differences(load_config(file, given={self.config.recipe}), self.config) if file.exists() else {}
        if changed:
            changes.record(self.path, env_steps, changed)
        for line in changes.sentences(changed, self.config, env_steps):
            log.info(line)
            self.screen.say(line)

    def _conclude(self, prepared: Prepared, resumed_from: int) -> None:
        say = self.screen.say
        if self.interrupted:
            self.stopped_by = f"signal {self.interrupted}"
            self._summarise()
            say(f"Stopped at {self.saving.saved_at:,} env steps. Continue with: {self._command('resume')}")
        elif resumed_from and self.saving.number == resumed_from and self._pauses:
            say(f"This run is at {self.saving.saved_at:,} env steps already. Continue with: {self._command('resume')}")
        elif resumed_from and self.saving.number == resumed_from:
            more = self._command("resume", steps=2 * self.config.steps)
            say(f"This run was finished before. Evaluate with: {self._command('eval')}; continue with: {more}")
        elif self._pauses and not self.stopped_by:
            self._summarise()
            where = f"{self.saving.saved_at:,} of {self.config.steps:,} env steps"
            say(f"Paused at {where}. Continue with: {self._command('resume')}")
        elif not self.updates and any(node.keep or node.role == "learner" for node in prepared.program.nodes.values()):
            why = self.stopped_by or why_no_update(self.config, self.progress.latest)
            sentence = f"The run ended without an update: {why}."
            log.info(sentence)
            more = self._command("resume", **({} if self.stopped_by else {"steps": 10 * self.config.steps}))
            say(f"{sentence} Nothing was learned. Continue with: {more}")
        else:
            if self.progress.standstill.seconds:
                say(self.progress.standstill.sentence(self.saving.saved_at))
            self._summarise()
            more = f"; continue with: {self._command('resume')}" if self.stopped_by else ""
            say(f"Done. Evaluate with: {self._command('eval')}{more}")

    @property
    def _pauses(self) -> bool:
        """Whether it ends before all of its steps, because it was to pause there."""
        return self.saving.saved_at < self.config.steps and self.goal < self.config.steps

    def _summarise(self) -> None:
        progress, best = self.progress, self.best
        found = (best.mean_return, best.env_steps) if math.isfinite(best.mean_return) else None
        trust = bool(asks(self.config).keys() & {"recipe", "algorithm.network_from"})
        done = (progress.steps_done, progress.seconds)
        summary = Summary(self.config, self.stopped_by, progress.latest, *done, self.last, found, str(self.path), trust)
        for line in summary.lines():
            log.info(line)
            self.screen.say(line)

    def _stop(self, number: int) -> None:
        """Called by a signal handler."""
        self.interrupted = number
        if not self.begun:  # there is nothing to save
            raise Interrupted(number, self.path)
        assert self.nodes is not None
        self.nodes.stop()

    def _hurry(self) -> None:
        """Called by a signal handler, every second after `_stop`. A checkpoint that is being written is not broken off."""
        if self.training and self.nodes is not None and (self.nodes.live or not self.saving.writing):
            raise Overdue


def why_no_update(config: Config, line: dict[str, Any]) -> str:
    """`line` has the newest value of each metric."""
    items, name = line.get("store_items"), "store.min_size"
    least = line.get("store_min_size", config.store.min_size)  # of all stores
    if config.store.selector == "fifo":
        least, name = config.learner.batch * config.learner.prefetch, "learner.batch"
    if items is not None and items < least:
        return f"its store had {items:,.0f} of the {least:,} items that learning starts with ({name})"
    return "it ended before the learner's first update"
