"""A run: its directory, training in it, resuming it, and evaluating what it learned.

    run = veldt.train("dqn", env="CartPole-v1", steps=60_000)
    run.evaluate(20).mean_return

The directory holds config.yaml, metrics.jsonl, TensorBoard events, log.txt and checkpoints/. Training in a directory that
has a checkpoint goes on from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from veldt import callables, metrics
from veldt.acting.evaluator import Evaluation, evaluate
from veldt.acting.policy import LocalPolicy
from veldt.counters import Counters
from veldt.demos.set import Demos
from veldt.envs import EnvLike, make_env
from veldt.envs.atari import find_protocol
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.checkpoint import Checkpoints, exclusive
from veldt.experiment.config import Config, GateConfig, override
from veldt.experiment.memory import (
    Size,
    available_memory,
    check_memory,
    format_bytes,
    plan_processes,
    plan_rest,
    used_memory,
)
from veldt.learning import params
from veldt.learning.params import LatestParams
from veldt.program import Program
from veldt.records.step import EnvSpec
from veldt.runtime import Inline, Nodes, Runtime
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Gate, Local
from veldt.seeds import derive
from veldt.signals import interruptible
from veldt.topologies.apex import apex
from veldt.topologies.impala import impala
from veldt.topologies.seed import seed
from veldt.topologies.single import single
from veldt.topologies.stores import demos_size, store_size
from veldt.watching.bottleneck import bottleneck
from veldt.watching.rates import Rates
from veldt.watching.screen import Screen
from veldt.watching.sinks import JsonLines, Metrics, Sink, TensorBoard, Wandb, log_to, read_metrics

log = logging.getLogger("veldt")

TOPOLOGIES: dict[str, Callable[[Program, Config, EnvSpec], None]] = {"single": single, "apex": apex, "impala": impala}
EVALUATION_S = 0.1  # between two lines for the sake of an evaluation
MEMORY_S = 2.0  # between two looks at the memory of all processes
LONGEST_RATE_S = 10.0  # that a rate is taken over, where lines are further apart
LIVES = 10_000  # that a process may have between two resumes
MAY_CHANGE = {  # on resume
    "steps",
    "queue",
    "transport",
    "gate.listen",
    "gate.token_file",
    "gate.certificate",
    "gate.key",
    "gate.compress",
    "log.every",
    "log.wandb",
    "checkpoint.keep",
    "threads",
    "device",
    "eval.episodes",
    "step_timeout",
}


class Run:
    """A run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Config:
        return load_config(self.path / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", self.config.checkpoint.keep)

    def policy(self, epsilon: float | None = None) -> LocalPolicy:
        """The greedy policy of the last weights; its part of random actions is eval.epsilon unless another is given."""
        config, weights = self.config, self.checkpoints().weights()
        if weights is None:
            raise UserError(f"{self.path} has no checkpoint yet; train it first.")
        env = config.envs().spec
        epsilon = config.eval.epsilon if epsilon is None else epsilon
        policy = LocalPolicy(config.algorithm, env, LatestParams(), Counters(), epsilon, seed=0)
        params.restore(policy.model.net, weights)
        return policy

    def evaluate(self, episodes: int = 20, seed: int = 0, epsilon: float | None = None, env: str = "") -> Evaluation:
        """Greedy episodes of the last weights; `epsilon` as in `policy`. `env` is another environment of the same kind."""
        if episodes < 1:
            raise UserError(f"episodes must be greater than 0, not {episodes}.")
        if seed < 0:
            raise UserError(f"seed must not be negative, but it is {seed}.")
        if epsilon is not None and not 0 <= epsilon <= 1:
            raise UserError(f"epsilon is a probability, from 0 to 1, not {epsilon}.")
        config = self.config
        envs = make_env(env or config.env, min(episodes, 20), protocol=config.protocol)
        try:
            if env:
                self._check_same(envs.spec)
            found = evaluate(envs, self.policy(epsilon), episodes, derive(seed, "evaluation"), config.eval.max_length)
            assert found is not None
            return found
        finally:
            envs.close()

    def _check_same(self, env: EnvSpec) -> None:
        with contextlib.closing(self.config.envs()) as envs:
            own = envs.spec
        if own.observation != env.observation or own.action_space != env.action_space:
            raise UserError(f"{env.name} has other observations or actions than {own.name}, which this run was trained on.")

    def weights_hash(self) -> str:
        """sha256 of the last weights, by name and value."""
        weights = self.checkpoints().weights()
        assert weights is not None, self.path
        digest = hashlib.sha256()
        for name, array in sorted(weights.items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()


def train(
    recipe: str | Config,
    env: EnvLike | None = None,
    run: str | Path | None = None,
    network: Callable[[EnvSpec], torch.nn.Module] | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Trains until `steps` env steps are done, and returns the run. If the directory has a checkpoint, goes on from it.

    Overrides are settings of the config by (dotted) name: steps=60_000, seed=1, **{"learner.lr": 5e-4}.
    """
    if env is not None and not isinstance(env, str) and not callable(env):
        raise UserError(
            f"env must be a name or a function that makes an environment, not a {type(env).__name__}; for example "
            "env=lambda: gym.make('CartPole-v1')."
        )
    if network is not None:
        overrides["algorithm.network_from"] = callables.name_of(network)
    name = callables.name_of(env) if callable(env) else env
    if isinstance(recipe, Config):
        config = override(recipe, overrides | ({"env": name} if name else {}))
    else:
        config = recipes.make(recipe, name or "CartPole-v1", **overrides)
    if config.demos:  # a resume may be started elsewhere
        config = dataclasses.replace(config, demos=str(Path(config.demos).resolve()))
    config.check()
    return Session(config, Path(run) if run else default_directory(config), quiet).run()


def resume(run: str | Path, quiet: bool = False, **overrides: Any) -> Run:
    """Goes on with a run from its last checkpoint."""
    path = Path(run)
    if not (path / "config.yaml").exists():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    config = override(load_config(path / "config.yaml"), overrides)
    config.check()
    return Session(config, path, quiet).run()


def default_directory(config: Config) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.env)
    stem = f"{config.recipe}-{name}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def load_config(path: Path) -> Config:
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"There is no {path}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings by name, as config.yaml of a run does.")
    recipe = str(values.get("recipe", "dqn"))
    config: Config = override(recipes.make(recipe, str(values.get("env", "CartPole-v1"))), values)
    return config


def make_program(config: Config, env: EnvSpec) -> Program:
    program = Program()
    topology = seed if config.inference == "central" else TOPOLOGIES[config.topology]
    topology(program, config, env)
    return program


def make_gate(config: Config, env: EnvSpec, token: str = "", certificate: bytes = b"", key: bytes = b"") -> Gate:
    """gRPC for a config's actors, and for those that may join."""
    from veldt.experiment.joined import assign

    seats = tuple(assign(config, seat) for seat in range(config.gate.remote))
    own = config.transport == "grpc"
    return Gate(own, seats, config.gate.listen, token, certificate, key, config.gate.compress)


def check_gate(gate: GateConfig) -> None:
    """Raises a UserError where the run is not allowed to listen, or cannot."""
    if gate.listen:
        from veldt.experiment.joined import read_secret
        from veldt.runtime.grpc.doors import Door

        certificate, key = (read_secret(path) if path else b"" for path in (gate.certificate, gate.key))
        Door(gate.listen, certificate, key).check("a token that is made later".replace(" ", "-"))


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"There is no device {name!r}; use cpu or cuda.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"No CUDA device is available here as {name!r}; use --device cpu.")


class Session:
    """One stretch of training, from start or checkpoint to the end or an interruption."""

    def __init__(self, config: Config, path: Path, quiet: bool) -> None:
        self.config, self.path, self.quiet = config, path, quiet
        self.interrupted = 0  # signal number
        self.nodes: Nodes | None = None  # once they run
        self.began = self.last_line = time.monotonic()
        self.earlier_s = 0.0  # of the sessions before this one
        self.number = 0  # of the last checkpoint
        self.evaluations = 0
        self.metrics = Metrics([])
        self._saving: threading.Thread | None = None
        self._memory_at, self._memory_used = -math.inf, 0
        self._first_update: dict[str, float] | None = None  # of this session; empty once it is told

    def run(self) -> Run:
        config = self.config
        check_device(config.device)
        check_gate(config.gate)
        envs = config.envs()
        env = envs.spec
        envs.close()
        config.algorithm.check(env)
        size = store_size(config, config.schema(env))
        net = config.algorithm.network(env)
        parameters = sum(p.numel() for p in net.parameters())
        rest = plan_rest(config.schema(env), config.learner.batch * config.learner.prefetch, parameters)
        if config.demos:
            Demos.open(config.demos).check(env, config.protocol)
            rest += demos_size(config, config.schema(env)).nbytes
        if config.runtime == "local":
            central, evaluator = config.inference == "central", config.eval.every > 0
            rest += plan_processes(config.schema(env), config.actors, evaluator, config.queue, central)
        check_memory(size, available_memory() - rest, rest)
        self.memory = used_memory() + size.nbytes + rest
        self._constants = {
            "actors": config.actors,
            "envs": config.actors * config.envs_per_actor,
            "cores": len(os.sched_getaffinity(0)),
            "queue": config.queue,
            "samples_per_insert": config.store.samples_per_insert,
            "store_capacity": size.capacity,
            "store_min_size": config.store.min_size,
            "store_once": config.store.selector == "fifo",
            "inference_device": config.central.device or config.device,
        }
        program = make_program(config, env)
        self.declarations = metrics.declared(program.nodes.values())
        self.rates = Rates(min(config.log.every, LONGEST_RATE_S), self.declarations)
        torch.set_num_threads(config.threads)
        self._claim()
        with exclusive(self.path), log_to(self.path / "log.txt", self.quiet):
            self.checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep)
            self.checkpoints.clean()
            self.checkpoint = self.checkpoints.load()
            self.screen = Screen(f"{config.recipe} on {config.env}", config.steps, self.quiet, self.declarations)
            try:
                self._introduce(env, size, type(getattr(net, "torso", net)).__name__, parameters)
                self._write_config()
                metrics.save(self.declarations, self.path)
                self.metrics = Metrics(self._sinks())
                with interruptible(self._stop, "" if self.quiet else "Stopping after a last checkpoint"):
                    with self._runtime(env).start(program) as nodes:
                        while not self.until(nodes):
                            nodes.step()
            except Exception:
                log.info("stopped by an error", exc_info=True)  # in the log file; whoever called us shows it
                raise
            finally:
                self._finish_saving()
                self.metrics.close()
                self.screen.close()
            self._conclude()
        if self.interrupted:
            raise Interrupted(self.interrupted, self.path)
        return Run(self.path)

    def _gate(self, env: EnvSpec) -> Gate | None:
        """gRPC, if anybody is to use it."""
        config, gate = self.config, self.config.gate
        if config.transport == "shm" and not gate.listen:
            return None
        if not gate.listen:
            return make_gate(config, env)
        from veldt.experiment.joined import make_token, read_secret

        certificate, key = (read_secret(path) if path else b"" for path in (gate.certificate, gate.key))
        file = Path(gate.token_file) if gate.token_file else self.path / "token"
        tls = f" --certificate {gate.certificate}" if certificate else ""
        where = gate.listen.replace("0.0.0.0", socket.gethostname())
        self.screen.say(f"actors may join: veldt actor --connect {where} --token-file {file}{tls}")
        return make_gate(config, env, make_token(file), certificate, key)

    def _runtime(self, env: EnvSpec) -> Runtime:
        if self.config.runtime == "inline":
            zygote.discard()
            return Inline()
        lives = LIVES * self.checkpoint.number if self.checkpoint is not None else 0
        return Local(self.path, self.config.step_timeout, lives, self.config.queue, self._gate(env))

    def until(self, nodes: Nodes) -> bool:
        """Asked between two rounds: checkpoints and logs where they are due; True when the run is over."""
        if self.nodes is None:
            self._restore(nodes)
            self.nodes = nodes
        steps = nodes.count("env_steps")
        if self._first_update is None and nodes.count("learner_steps") > self.resumed_from:
            self._first_update = {"first_update_s": process_age(), "first_update_time_s": self._when(nodes)["time_s"]}
        done = steps >= self.config.steps
        if done or self.interrupted:
            if steps > self.saved_at:
                nodes.cut()
                self._log(nodes)
                self._finish_saving()
                if not self._save(nodes, scheduled=done):
                    raise UserError(
                        f"The last checkpoint could not be written (see {self.path / 'log.txt'}); make room, and go on "
                        f"from the one before with: veldt resume {self.path}"
                    )
            return True
        since = time.monotonic() - self.last_line
        # An evaluation is told at once, or as soon as it has come from its process.
        evaluated = nodes.count("evaluations") != self.evaluations and (not nodes.live or since > EVALUATION_S)
        if since >= self.config.log.every or evaluated:
            self._log(nodes)
        if steps >= self.next_checkpoint and not (self._saving is not None and self._saving.is_alive()):
            if nodes.live:
                self._save_beside(nodes)
            else:
                self._save(nodes, scheduled=True)
        return False

    def _restore(self, nodes: Nodes) -> None:
        self.saved_at = 0
        if self.checkpoint is not None:
            manifest = self.checkpoint.manifest
            self.checkpoints.restore(self.checkpoint, nodes)
            self.number, self.earlier_s = self.checkpoint.number, float(manifest["time_s"])
            self.saved_at = nodes.count("env_steps")
            nodes.resume(self.number)
            line = {**self._when(nodes), "resumed_from": nodes.count("learner_steps")}
            self.metrics.write(line)
        elif (self.path / "metrics.jsonl").stat().st_size:  # of a start that came to no checkpoint
            self.metrics.write({**self._when(nodes), "resumed_from": 0})
        self.evaluations, self.resumed_from = nodes.count("evaluations"), nodes.count("learner_steps")
        nodes.metrics()  # of the time in which all stood still
        self.rates.begin(self._when(nodes), nodes.memory()[0])
        self.last_line = time.monotonic()
        self._schedule(nodes.count("env_steps"))

    def _schedule(self, steps: int) -> None:
        every = self.config.checkpoint.every
        self.next_checkpoint = (steps // every + 1) * every if every else float("inf")

    def _save_beside(self, nodes: Nodes) -> None:
        """A checkpoint while all goes on: the state is asked for, and written by a thread of ours."""
        self._finish_saving()
        began = time.monotonic()
        self.number += 1
        number, when, snapshot = self.number, self._when(nodes), nodes.snapshot()
        self._schedule(when["env_steps"])

        def write() -> None:
            if self.checkpoints.save(number, snapshot, {**when, "scheduled": True}):
                self.saved_at = when["env_steps"]
                seconds, pause = time.monotonic() - began, 1000 * snapshot.paused
                text = "checkpoint %d at %d env steps, %.3f s; the learner stood still for %.1f ms"
                log.info(text, number, self.saved_at, seconds, pause)

        self._saving = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._saving.start()

    def _finish_saving(self) -> None:
        """Waits for a checkpoint that is being written."""
        while self._saving is not None and self._saving.is_alive():
            self._saving.join(1.0)
        self._saving = None

    def _save(self, nodes: Nodes, scheduled: bool) -> bool:
        """A checkpoint is also a cut: see `Exact resume` in docs/decisions.md."""
        began = time.monotonic()
        nodes.cut()
        self.number += 1
        snapshot = nodes.snapshot()
        when = self._when(nodes)
        saved = self.checkpoints.save(self.number, snapshot, {**when, "scheduled": scheduled})
        nodes.resume(self.number)
        self._schedule(when["env_steps"])
        if saved:
            self.saved_at = when["env_steps"]
            log.info("checkpoint %d at %d env steps, %.3f s", self.number, self.saved_at, time.monotonic() - began)
        return saved

    def _when(self, nodes: Nodes) -> dict[str, Any]:
        time_s = self.earlier_s + time.monotonic() - self.began
        return {
            "time_s": round(time_s, 3),
            "env_steps": nodes.count("env_steps"),
            "learner_steps": nodes.count("learner_steps"),
        }

    def _log(self, nodes: Nodes) -> None:
        now = time.monotonic()
        line = (
            self._when(nodes)
            | nodes.metrics()
            | (self._first_update or {})
            | {"memory_bytes": self._memory(nodes), "memory_planned": self.memory}
        )
        line |= self._derived(line, nodes)
        one_thread = self.config.topology == "single" or not nodes.live
        if sentence := bottleneck(line, one_thread, self.declarations):
            line["bottleneck"] = sentence
        if self._first_update:
            self._first_update = {}
        self.last_line = now
        if not nodes.live or "eval_return" in line:
            self.evaluations = nodes.count("evaluations")
        self.metrics.write(line)

    def _derived(self, line: dict[str, Any], nodes: Nodes) -> dict[str, Any]:
        """What follows from the line before, and from the settings."""
        out: dict[str, Any] = self.rates.of(line, nodes.memory()[0])
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
        return out | self._constants

    def _memory(self, nodes: Nodes) -> int:
        if time.monotonic() - self._memory_at >= MEMORY_S:
            self._memory_at, self._memory_used = time.monotonic(), used_memory(*nodes.memory())
        return self._memory_used

    def _claim(self) -> None:
        """Makes the directory, or finds that it belongs to this config."""
        file = self.path / "config.yaml"
        if file.exists():
            theirs, ours = flat(load_config(file)), flat(self.config)
            different = [name for name in ours if theirs.get(name) != ours[name] and name not in MAY_CHANGE]
            if different:
                name = different[0]
                raise UserError(
                    f"{self.path} belongs to another config: {name} is {theirs.get(name)} there and {ours[name]} here; "
                    "choose another --run, or give the settings it was started with."
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / ".lock").touch()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); choose another --run.") from None

    def _write_config(self) -> None:
        aside = self.path / ".aside-config.yaml"
        try:
            aside.write_text(yaml.safe_dump(as_plain(self.config), sort_keys=False))
            os.replace(aside, self.path / "config.yaml")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); choose another --run.") from None

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = [JsonLines(self.path / "metrics.jsonl"), TensorBoard(self.path), self.screen]
        if self.config.log.wandb:
            sinks.append(Wandb(self.path, as_plain(self.config)))
        return sinks

    def _where(self) -> str:
        """Where actions are computed, if that is not at the actors."""
        central = self.config.central
        if self.config.inference == "local":
            return ""
        most = f", at most {central.batch} at once" if central.batch else ""
        return f" in {central.groups} groups (one process acts for all, on {central.device or self.config.device}{most})"

    def _introduce(self, env: EnvSpec, size: Size, network: str, parameters: int) -> None:
        config, say = self.config, self.screen.say
        seen = ", ".join(f"{name} {list(c.shape)} {c.dtype}" for name, c in env.observation.items())
        say(f"{config.recipe} on {config.env}: {seen}; actions {env.action_space}")
        history = config.algorithm.window.history
        keys = getattr(config.algorithm, "stacked", ()) or [name.removeprefix("obs/") for name in env.observation]
        stacking = f"; stacks {history} of {', '.join(keys)}" if history > 1 else ""
        say(f"network: {network}, {parameters:,} parameters on {config.device}{stacking}")
        say(f"algorithm: {_settings(config.algorithm)}")
        if config.protocol:
            say(f"protocol {config.protocol}: {_settings(find_protocol(config.protocol))}")
        each = format_bytes(size.nbytes / size.slots / config.schema(env).starts)
        say(
            f"store: {size.capacity:,} items of {each}, {format_bytes(size.nbytes)} when full ({config.store.selector}); "
            f"{self._rate()}"
        )
        learner = config.learner
        actors = f"{config.actors} actors with {config.envs_per_actor}" if config.actors > 1 else str(config.envs_per_actor)
        say(
            f"acting: {actors} environments{self._where()}, {config.actor}; "
            f"learning: {learner.optimizer}, rate {learner.lr:g}{' to 0' if learner.anneal else ''}"
        )
        say(f"memory: about {format_bytes(self.memory)} in all when the store is full")
        say(f"run: {self.path}  ({config.steps:,} env steps, seed {config.seed})")
        if config.runtime == "inline" and 0 < config.checkpoint.every < config.envs_per_actor * config.schema(env).fresh:
            log.warning("checkpoint.every is less than one block of each environment: the store fills with short blocks")
        log.info("%s on %s, seed %d, store %s", config.recipe, config.env, config.seed, format_bytes(size.nbytes))
        if self.checkpoint is not None:
            manifest = self.checkpoint.manifest
            say(f"resuming from checkpoint {self.checkpoint.number} at {manifest['env_steps']:,} env steps")

    def _rate(self) -> str:
        store, batch = self.config.store, self.config.learner.batch
        if store.selector == "fifo":
            return f"each used once, in updates of {batch}"
        if not store.samples_per_insert:
            return f"updates of {batch} as fast as they come"
        most = "" if store.actors_wait else "at most "
        rate = store.samples_per_insert / batch / self.config.algorithm.window.stride
        return f"{most}{rate:.3g} updates of {batch} an env step"

    def _conclude(self) -> None:
        if self.interrupted:
            self.screen.say(f"Stopped at {self.saved_at:,} env steps. Go on with: veldt resume {self.path}")
        elif self.checkpoint is not None and self.number == self.checkpoint.number:
            more = f"veldt resume {self.path} --steps {2 * self.config.steps}"
            self.screen.say(f"It was trained to the end before. Evaluate with: veldt eval {self.path}; go on with: {more}")
        else:
            self.screen.say(f"Done. Evaluate with: veldt eval {self.path}")

    def _stop(self, number: int) -> None:
        self.interrupted = number
        if self.nodes is not None:
            self.nodes.stop()


def process_age() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _settings(thing: Any) -> str:
    """The fields of a dataclass that are on."""
    parts = {name: x for name, x in dataclasses.asdict(thing).items() if x is not False and x not in ("", (), "auto")}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in parts.items())


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after a last checkpoint."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(f"stopped by signal {number}; {path} can be resumed")
        self.code = 128 + number


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config as dotted names and values."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out |= flat(value, f"{prefix}{field.name}.")
        else:
            out[f"{prefix}{field.name}"] = value
    return out


def as_plain(config: Any) -> dict[str, Any]:
    """A config as nested dicts of numbers, strings and lists, for YAML."""
    plain = dataclasses.asdict(config)

    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lists(part) for key, part in value.items()}
        return list(value) if isinstance(value, tuple) else value

    out: dict[str, Any] = lists(plain)
    return out
