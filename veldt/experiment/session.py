"""Session: one stretch of training, from the start or a checkpoint to the end or an interruption."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from veldt import metrics
from veldt.demos.set import Demos
from veldt.errors import UserError
from veldt.experiment.checkpoint import Checkpoint, Checkpoints, exclusive
from veldt.experiment.config import Config
from veldt.experiment.directory import claim, write_config
from veldt.experiment.introduction import count_parameters, introduction
from veldt.experiment.launch import check_device, check_gate, make_runtime
from veldt.experiment.progress import Progress
from veldt.experiment.ram import RamPlan, plan_ram
from veldt.experiment.saving import Saving
from veldt.experiment.settings import as_plain
from veldt.machine import format_bytes
from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.runtime import Nodes
from veldt.signals import interruptible
from veldt.topologies import make_program
from veldt.watching.sinks import JsonLines, Metrics, Sink, TensorBoard, Wandb, log_to
from veldt.watching.view import Screen

log = logging.getLogger("veldt")


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after a last checkpoint."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(f"stopped by signal {number}; {path} can be resumed")
        self.code = 128 + number


@dataclass(frozen=True)
class Prepared:
    """What a config leads to, made before anything is written."""

    env: EnvSpec
    net: nn.Module
    program: Program
    ram: RamPlan


def prepare(config: Config) -> Prepared:
    """Raises a UserError for all that cannot work on this machine, in this environment."""
    check_device(config.device)
    check_gate(config.gate)
    envs = config.envs()
    env = envs.spec
    envs.close()
    config.algorithm.check(env)
    if config.demos:
        Demos.open(config.demos).check(env, config.protocol)
    program, net = make_program(config, env), config.algorithm.network(env)
    return Prepared(env, net, program, plan_ram(config, env, program, count_parameters(net)))


class Session:
    def __init__(self, config: Config, path: Path, quiet: bool) -> None:
        self.config, self.path, self.quiet = config, path, quiet
        self.interrupted = 0  # signal number
        self.nodes: Nodes | None = None  # while they run

    def run(self) -> None:
        config, prepared = self.config, prepare(self.config)
        torch.set_num_threads(config.threads)
        claim(self.path, config)
        with exclusive(self.path), log_to(self.path / "log.txt", self.quiet):
            checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep)
            checkpoints.clean()
            declarations = metrics.declared(prepared.program.nodes.values())
            self.screen = Screen(f"{config.recipe} on {config.env}", config.steps, self.quiet, declarations)
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
        self._introduce(prepared, checkpoint)
        write_config(self.path, config)
        declarations = metrics.declared(prepared.program.nodes.values())
        metrics.save(declarations, self.path)
        lines = Metrics(self._sinks())
        self.progress = Progress(config, prepared.ram, lines, declarations)
        self.saving = Saving(checkpoints, config.checkpoint.every, self.progress.clocks)
        try:
            runtime = make_runtime(config, self.path, number, self.screen.say)
            message = "" if self.quiet else "Stopping after a last checkpoint"
            with interruptible(self._stop, message), runtime.start(prepared.program) as self.nodes:
                self._restore(self.nodes, checkpoint)
                self._train(self.nodes)
        finally:
            self.saving.wait()
            lines.close()
        self.screen.close()
        self._conclude(resumed_from=number)

    def _train(self, nodes: Nodes) -> None:
        while not self.finished(nodes):
            self.progress.log_if_due(nodes)
            self.saving.save_if_due(nodes)
            nodes.step()
        if nodes.count("env_steps") > self.saving.saved_at:
            self._save_last(nodes)

    def finished(self, nodes: Nodes) -> bool:
        return bool(self.interrupted) or nodes.count("env_steps") >= self.config.steps

    def _save_last(self, nodes: Nodes) -> None:
        scheduled = nodes.count("env_steps") >= self.config.steps
        nodes.cut()
        self.progress.log(nodes)
        if not self.saving.save_last(nodes, scheduled):
            raise UserError(
                f"The last checkpoint could not be written (see {self.path / 'log.txt'}); free disk space, and go on from "
                f"the one before with: veldt resume {self.path}"
            )

    def _restore(self, nodes: Nodes, checkpoint: Checkpoint | None) -> None:
        number = 0
        if checkpoint is not None:
            self.saving.checkpoints.restore(checkpoint, nodes)
            number, self.progress.earlier_s = checkpoint.number, float(checkpoint.manifest["time_s"])
            nodes.resume(number)
        if checkpoint is not None or (self.path / "metrics.jsonl").stat().st_size:  # an earlier start without a checkpoint
            clocks = self.progress.clocks(nodes)
            self.progress.metrics.write({**clocks, "resumed_from": clocks["learner_steps"]})
        self.saving.begin(nodes, number)
        self.progress.begin(nodes)

    def _introduce(self, prepared: Prepared, checkpoint: Checkpoint | None) -> None:
        config, env, ram = self.config, prepared.env, prepared.ram
        for line in introduction(config, env, prepared.net, ram, self.path):
            self.screen.say(line)
        if config.runtime == "inline" and 0 < config.checkpoint.every < config.envs_per_actor * config.schema(env).fresh:
            log.warning("checkpoint.every is less than one block of each environment: the store fills with short blocks")
        log.info("%s on %s, seed %d, store %s", config.recipe, config.env, config.seed, format_bytes(ram.store.nbytes))
        if checkpoint is not None:
            steps = checkpoint.manifest["env_steps"]
            self.screen.say(f"resuming from checkpoint {checkpoint.number} at {steps:,} env steps")

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = [JsonLines(self.path / "metrics.jsonl"), TensorBoard(self.path), self.screen]
        if self.config.log.wandb:
            sinks.append(Wandb(self.path, as_plain(self.config)))
        return sinks

    def _conclude(self, resumed_from: int) -> None:
        say = self.screen.say
        if self.interrupted:
            say(f"Stopped at {self.saving.saved_at:,} env steps. Go on with: veldt resume {self.path}")
        elif resumed_from and self.saving.number == resumed_from:
            more = f"veldt resume {self.path} --steps {2 * self.config.steps}"
            say(f"This run was finished before. Evaluate with: veldt eval {self.path}; go on with: {more}")
        else:
            say(f"Done. Evaluate with: veldt eval {self.path}")

    def _stop(self, number: int) -> None:
        """Called by a signal handler."""
        self.interrupted = number
        if self.nodes is not None:
            self.nodes.stop()
