"""Session: one stretch of training, from the start or a checkpoint to the end or an interruption.

`Session._train` is the loop; `Progress` writes the lines of metrics, and `Saving` the checkpoints, when they are due.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import yaml

from veldt import metrics
from veldt.errors import UserError
from veldt.experiment import saved_spec
from veldt.experiment.checkpoint import Checkpoint, Checkpoints
from veldt.experiment.config import Config
from veldt.experiment.directory import MAY_CHANGE, check_same, exclusive
from veldt.experiment.env_names import command
from veldt.experiment.observations import BadObservations, bad_fraction
from veldt.experiment.prepare import Prepared, introduction, make_runtime, prepare
from veldt.experiment.settings import as_plain, flat
from veldt.experiment.standstill import Standstill
from veldt.files import replace_text
from veldt.gpus import Gpus
from veldt.machine import core_count, format_bytes, process_age, processor_name, used_memory
from veldt.program import BLOCK_MEMORY
from veldt.runtime import Nodes
from veldt.signals import interruptible
from veldt.watching.bottleneck import Rates, bottleneck
from veldt.watching.events import TensorBoard
from veldt.watching.sinks import JsonLines, Metrics, Sink, log_to
from veldt.watching.trackers import trackers
from veldt.watching.view import Screen

log = logging.getLogger("veldt")
EVALUATION_S = 0.1  # a live run waits this long for the metrics of an evaluation that was counted
MEMORY_S = 2.0  # between two looks at the RAM of all processes
HURRY_S = 1.5  # that processes have to answer after a signal
SHORTEST_RATE_S, LONGEST_RATE_S = 1.0, 10.0  # that rates are taken over, where lines are closer or further apart


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after a last checkpoint."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(f"stopped by signal {number}; {path} can be resumed")
        self.code = 128 + number


class Overdue(BaseException):
    """A step did not end after a signal. No environment catches this."""


class Session:
    def __init__(self, config: Config, path: Path, quiet: bool, may_change: Collection[str] = MAY_CHANGE) -> None:
        self.config, self.path, self.quiet, self.may_change = config, path, quiet, may_change
        self.interrupted = 0  # signal number
        self.nodes: Nodes | None = None  # while they run
        self.begun = self.training = False
        self.updates = 0  # of the whole run, once it has ended

    def run(self) -> None:
        config, prepared = self.config, prepare(self.config)
        torch.set_num_threads(config.threads)
        check_same(self.path, config, self.may_change, "choose another --run, or give the settings it was started with")
        with exclusive(self.path), log_to(self.path / "log.txt", self.quiet):
            checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep, config.checkpoint.store)
            checkpoints.clean()
            self.screen = Screen(f"{config.recipe} on {config.env}", config.steps, self.quiet, prepared.declarations)
            try:
                self._start(prepared, checkpoints, checkpoints.load())
            except Exception:
                log.info("stopped by an error", exc_info=True)  # in the log file; the caller shows it
                raise
            finally:
                self.screen.close()
        if self.interrupted:
            raise Interrupted(self.interrupted, self.path)

    def _start(self, prepared: Prepared, checkpoints: Checkpoints, checkpoint: Checkpoint | None) -> None:
        config, number = self.config, checkpoint.number if checkpoint else 0
        if checkpoint is not None and (saved := saved_spec.read(self.path)):
            saved_spec.check_fits(saved, prepared.env, self.path)
        self._introduce(prepared, checkpoint)
        replace_text(self.path / "config.yaml", yaml.safe_dump(as_plain(config), sort_keys=False))
        saved_spec.write(self.path, prepared.env)
        metrics.save(prepared.declarations, self.path)
        sinks: list[Sink] = [JsonLines(self.path / "metrics.jsonl"), TensorBoard(self.path, flat(config)), self.screen]
        lines = Metrics([*sinks, *trackers(self.path, as_plain(config))])
        self.progress = Progress(prepared, lines)
        self.saving = Saving(checkpoints, config.checkpoint.every, self.progress.clocks)
        try:
            runtime = make_runtime(config, self.path, number, self.screen.say)
            message = "" if self.quiet else "Stopping after a final checkpoint"
            with interruptible(self._stop, message, self._hurry), runtime.start(prepared.program) as self.nodes:
                self._restore(self.nodes, checkpoint)
                self._train(self.nodes)
        finally:
            self.saving.wait()
            self.progress.gpus.close()
            lines.close()
        self._conclude(prepared, resumed_from=number)

    def _train(self, nodes: Nodes) -> None:
        whole = True  # no step was broken off
        self.begun = self.training = True
        try:
            while not self.finished(nodes):
                self.progress.log_if_due(nodes)
                self.progress.bad.check(nodes)
                self.saving.save_if_due(nodes)
                nodes.step()
            if nodes.count("env_steps") > self.saving.saved_at:
                nodes.cut()
        except Overdue:
            whole = False
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.training = False
            self._save_after(error, nodes)
            raise
        self.training = False
        if nodes.count("env_steps") > self.saving.saved_at:
            self._save_last(nodes, whole)
        elif nodes.live:  # the last scheduled checkpoint fell on the end, and the last line may be older
            self.progress.log(nodes)
        self.updates = nodes.count("learner_steps")

    def _command(self, name: str, **changes: Any) -> str:
        return command(name, self.path, self.config, **changes)

    def finished(self, nodes: Nodes) -> bool:
        return bool(self.interrupted) or nodes.count("env_steps") >= self.config.steps

    def _save_last(self, nodes: Nodes, whole: bool) -> None:
        scheduled = nodes.count("env_steps") >= self.config.steps  # unscheduled: an interruption's
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
            number, self.progress.earlier_s = checkpoint.number, float(checkpoint.manifest["time_s"])
            nodes.resume(number)
        if checkpoint is not None or (self.path / "metrics.jsonl").stat().st_size:  # an earlier start without a checkpoint
            clocks = self.progress.clocks(nodes)
            self.progress.lines.write({**clocks, "resumed_from": clocks["learner_steps"]})
        self.saving.begin(nodes, number)
        self.progress.begin(nodes)

    def _introduce(self, prepared: Prepared, checkpoint: Checkpoint | None) -> None:
        config, blocks = self.config, self.config.envs_per_actor * self.config.schema(prepared.env).fresh
        for line in introduction(prepared, self.path):
            self.screen.say(line, wrap=True)
        if config.runtime == "inline" and 0 < config.checkpoint.every < blocks:
            log.warning("checkpoint.every is less than one block of each environment: the store fills with short blocks")
        log.info("%s on %s, seed %d, store %s", config.recipe, config.env, config.seed, format_bytes(prepared.store.nbytes))
        if checkpoint is not None:
            steps = checkpoint.manifest["env_steps"]
            stores = {name for name, node in prepared.program.nodes.items() if node.has(BLOCK_MEMORY)}
            empty = "; the replay was not saved and is empty" if stores - checkpoint.manifest["blocks"].keys() else ""
            text = f"resuming from checkpoint {checkpoint.number} at {steps:,} env steps{empty}"
            log.info(text)
            self.screen.say(text)

    def _conclude(self, prepared: Prepared, resumed_from: int) -> None:
        say = self.screen.say
        if self.interrupted:
            say(f"Stopped at {self.saving.saved_at:,} env steps. Continue with: {self._command('resume')}")
        elif resumed_from and self.saving.number == resumed_from:
            more = self._command("resume", steps=2 * self.config.steps)
            say(f"This run was finished before. Evaluate with: {self._command('eval')}; continue with: {more}")
        elif not self.updates and "learner" in prepared.program.nodes:
            sentence = f"The run ended without an update: {why_no_update(self.config, self.progress.latest)}."
            log.info(sentence)
            more = self._command("resume", steps=10 * self.config.steps)
            say(f"{sentence} Nothing was learned. Continue with: {more}")
        else:
            if self.progress.standstill.seconds:
                say(self.progress.standstill.sentence(self.saving.saved_at))
            say(f"Done. Evaluate with: {self._command('eval')}")

    def _stop(self, number: int) -> None:
        """Called by a signal handler."""
        self.interrupted = number
        if not self.begun:  # there is nothing to save
            raise Interrupted(number, self.path)
        assert self.nodes is not None
        self.nodes.stop()

    def _hurry(self) -> None:
        """Called by a signal handler, a second after `_stop`. A checkpoint that is being written is not broken off."""
        if self.training and self.nodes is not None and (self.nodes.live or not self.saving.writing):
            raise Overdue


def why_no_update(config: Config, line: dict[str, Any]) -> str:
    """`line` has the newest value of each metric."""
    items, least, name = line.get("store_items"), config.store.min_size, "store.min_size"
    if config.store.selector == "fifo":
        least, name = config.learner.batch * config.learner.prefetch, "learner.batch"
    if items is not None and items < least:
        return f"its store had {items:,.0f} of the {least:,} items that learning starts with ({name})"
    return "it ended before the learner's first update"


class Progress:
    def __init__(self, prepared: Prepared, lines: Metrics) -> None:
        self.prepared, self.config, self.lines = prepared, prepared.config, lines
        config = self.config
        self.rates = Rates(max(SHORTEST_RATE_S, min(config.log.every, LONGEST_RATE_S)), prepared.declarations)
        self.one_thread = config.topology == "single" or config.runtime == "inline"
        self.constants = {
            "actors": config.actors,
            "envs": config.actors * config.envs_per_actor,
            "cores": core_count(),
            "queue": config.queue,
            "samples_per_insert": config.store.samples_per_insert,
            "store_capacity": prepared.store.capacity,
            "store_min_size": config.store.min_size,
            "store_once": config.store.selector == "fifo",
            "inference_device": config.inference_device,
            "processor": processor_name(),
        } | ({"gpu_planned": prepared.gpu} if prepared.gpu else {})
        self.gpus = Gpus((config.learner_device, config.inference_device))
        self.bad, self.standstill = BadObservations(config.env, config.max_bad), Standstill(config.step_timeout)
        self.earlier_s = 0.0  # of the sessions before this one
        self.latest: dict[str, Any] = {}  # the newest value of each metric
        self._began = self._last_line = time.monotonic()
        self._evaluations = self._first_step = 0
        self._evaluation_s = 0.0
        self._first_update: dict[str, float] | None = None  # of this session; empty once it is logged
        self._ram_at, self._ram_used = -math.inf, 0

    def begin(self, nodes: Nodes) -> None:
        """The nodes are restored, and about to work."""
        self._evaluations, self._first_step = nodes.count("evaluations"), nodes.count("learner_steps")
        self._evaluation_s = EVALUATION_S if nodes.live else 0.0
        self.bad.begin(nodes)
        nodes.metrics()  # of the time in which they stood still
        self._last_line = time.monotonic()
        self.rates.begin(self.clocks(nodes), self._last_line, nodes.resources()[0])

    def clocks(self, nodes: Nodes) -> dict[str, Any]:
        """What every line and every checkpoint begins with."""
        counts = {name: nodes.count(name) for name in ("env_steps", "learner_steps")}
        return {"time_s": self._time_s(time.monotonic()), **counts}

    def _time_s(self, monotonic: float) -> float:
        """Seconds of training at this time of the clock."""
        return round(self.earlier_s + monotonic - self._began, 3)

    def log_if_due(self, nodes: Nodes) -> None:
        self._note_first_update(nodes)
        since = time.monotonic() - self._last_line
        evaluated = nodes.count("evaluations") != self._evaluations and since >= self._evaluation_s
        if since >= self.config.log.every or evaluated:
            self.log(nodes)

    def log(self, nodes: Nodes) -> None:
        self._note_first_update(nodes)
        now = time.monotonic()
        clocks = self.clocks(nodes)
        line = clocks | nodes.metrics() | clocks | (self._first_update or {})  # no metric replaces a clock
        if "eval_published_at" in line:
            line["eval_time_s"] = self._time_s(line.pop("eval_published_at"))
            line |= {name: int(line[name]) for name in ("eval_env_steps", "eval_learner_steps")}
        line |= {"memory_bytes": self._used(nodes), "memory_planned": self.prepared.ram}
        line |= self.gpus.look()
        line |= {"bad_fraction": fraction} if (fraction := bad_fraction(nodes)) else {}
        if stands := self.standstill.look(now, clocks["env_steps"], clocks["learner_steps"]):
            line["learner_stands_s"] = stands
        line |= self._derived(line, nodes, now)
        if sentence := bottleneck(line, self.one_thread, self.prepared.declarations):
            line["bottleneck"] = sentence
        if self._first_update:
            self._first_update = {}
        self._last_line = now
        if not self._evaluation_s or "eval_return" in line:
            self._evaluations = nodes.count("evaluations")
        self.latest |= line
        self.lines.write(line)

    def _note_first_update(self, nodes: Nodes) -> None:
        if self._first_update is None and nodes.count("learner_steps") > self._first_step:
            self._first_update = {"first_update_s": process_age(), "first_update_time_s": self.clocks(nodes)["time_s"]}

    def _derived(self, line: dict[str, Any], nodes: Nodes, now: float) -> dict[str, Any]:
        """What follows from the lines before, and from the settings. The counts of the line were read at `now`."""
        out: dict[str, Any] = self.rates.of(line, now, nodes.resources()[0])
        if line.get("store_inserted"):
            out["replay_ratio"] = line["store_sampled"] / line["store_inserted"]
        if out.get("env_steps_per_s"):
            out["left_s"] = max(0, self.config.steps - line["env_steps"]) / out["env_steps_per_s"]
        if "lag_updates" in line and out.get("learner_steps_per_s"):
            out["lag_s"] = line["lag_updates"] / out["learner_steps_per_s"]
        if "wait/inference" in line:
            out["busy/policy"] = max(0.0, 1.0 - line["wait/inference"])
        elif "busy/env" in line:
            out["busy/policy"] = max(0.0, line["busy/actor"] - line["busy/env"])
        return out | self.constants

    def _used(self, nodes: Nodes) -> int:
        if time.monotonic() - self._ram_at >= MEMORY_S:
            self._ram_at, self._ram_used = time.monotonic(), used_memory(*nodes.resources())
        return self._ram_used


class Saving:
    def __init__(self, checkpoints: Checkpoints, every: int, clocks: Callable[[Nodes], dict[str, Any]]) -> None:
        self.checkpoints, self.every, self.clocks = checkpoints, every, clocks
        self.number = 0  # of the last checkpoint
        self.saved_at = 0  # env steps of the last checkpoint that was written
        self._next = math.inf  # env steps
        self._writer: threading.Thread | None = None
        self.writing = False

    def begin(self, nodes: Nodes, number: int) -> None:
        """The nodes are new, or as in this checkpoint."""
        steps = nodes.count("env_steps")
        self.number, self.saved_at = number, steps if number else 0
        self._schedule(steps)

    def save_if_due(self, nodes: Nodes) -> None:
        if nodes.count("env_steps") < self._next or (self._writer is not None and self._writer.is_alive()):
            return
        if nodes.live:  # they go on: their state is copied, and a thread writes it
            began, clocks = time.monotonic(), self.clocks(nodes)
            write = self._writing(nodes.snapshot(), clocks, True, began)
            self._writer = threading.Thread(target=write, name="checkpoint", daemon=True)
            self._writer.start()
        else:
            self.save(nodes, scheduled=True)

    def save(self, nodes: Nodes, scheduled: bool) -> bool:
        """The nodes stand still: a checkpoint is also a cut, see `Exact resume` in docs/decisions.md. False: it could not
        be written."""
        began = time.monotonic()
        nodes.cut()
        saved = self._writing(nodes.snapshot(), self.clocks(nodes), scheduled, began)()
        nodes.resume(self.number)
        return saved

    def salvage(self, nodes: Nodes, seconds: float, scheduled: bool) -> bool:
        """Saves what the nodes can give in this time, at the end of a run."""
        began = time.monotonic()
        snapshot = nodes.salvage(seconds)  # a learner may step until its state is taken
        return self._writing(snapshot, self.clocks(nodes), scheduled, began)()

    def wait(self) -> None:
        while self._writer is not None and self._writer.is_alive():
            self._writer.join(1.0)

    def _schedule(self, steps: int) -> None:
        self._next = (steps // self.every + 1) * self.every if self.every else math.inf

    def _writing(self, snapshot: Any, clocks: dict[str, Any], scheduled: bool, began: float) -> Callable[[], bool]:
        """Returns what writes the checkpoint. `began`: when its making did."""
        self.number += 1
        number = self.number
        self._schedule(clocks["env_steps"])

        def write() -> bool:
            self.writing = True
            try:
                saved = self.checkpoints.save(number, snapshot, {**clocks, "scheduled": scheduled})
            finally:
                self.writing = False
            if saved:
                self.saved_at = clocks["env_steps"]
                paused = getattr(snapshot, "paused", 0.0)
                pause = f"; the learner was paused for {1000 * paused:.1f} ms" if paused else ""
                log.info("checkpoint %d at %d env steps, %.3f s%s", number, self.saved_at, time.monotonic() - began, pause)
            return saved

        return write
