"""Config: everything a run depends on, as nested dataclasses; and how settings by name change one."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import tyro

from veldt.acting.exploration import Explore, LinearDecay, ladder
from veldt.algorithms.dqn import DQN
from veldt.envs import Envs, is_atari, make_env
from veldt.errors import UserError, did_you_mean
from veldt.learning.learner import LearnerConfig
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array

ACTORS_PER_CORE = 16


def check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is a probability, from 0 to 1, not {value}.")


def at_least(prefix: str, config: Any, least: dict[str, int]) -> None:
    """Raises a UserError for fields that are smaller than that, or not finite."""
    for name, limit in least.items():
        value = getattr(config, name)
        if not limit <= value < math.inf:
            words = "must not be negative, but it is" if limit == 0 else "must be greater than 0, not"
            raise UserError(f"{prefix}.{name} {words} {value}.")


@dataclass(frozen=True)
class ActorConfig:
    """One epsilon for all environments, which falls linearly."""

    block: int = 8
    """Fresh steps in a block: how many an environment collects before the store sees them."""
    refresh: int = 1
    """Steps of an actor between two looks for newer weights."""
    epsilon: float = 1.0
    """Part of the actions that is random at the start."""
    epsilon_end: float = 0.05
    """The same at the end of the decay."""
    epsilon_steps: int = 10_000
    """Env steps over which epsilon falls linearly."""

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        """How environments first ... first + n - 1 of all in the run explore."""
        return LinearDecay(self.epsilon, self.epsilon_end, self.epsilon_steps)

    def check(self) -> None:
        at_least("actor", self, {"block": 1, "refresh": 1, "epsilon_steps": 0})
        for name in ("epsilon", "epsilon_end"):
            check_probability(f"actor.{name}", getattr(self, name))

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon_end:g} in {self.epsilon_steps:,} steps"


@dataclass(frozen=True)
class LadderConfig:
    """Every environment has an epsilon of its own (Horgan et al. 2018): epsilon^(1 + alpha i / (N - 1)), the i-th of N."""

    block: int = 64
    """Fresh steps in a block: how many an environment collects before the store sees them."""
    refresh: int = 8
    """Steps of an actor between two looks for newer weights."""
    epsilon: float = 0.4
    """Part of random actions of the environment that explores most."""
    alpha: float = 7.0
    """How steeply epsilon falls from one environment to the next."""

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        """How environments first ... first + n - 1 of all in the run explore. One alone is in the middle of the ladder."""
        return ladder(self.epsilon, self.alpha, first, n, total)

    def check(self) -> None:
        at_least("actor", self, {"block": 1, "refresh": 1, "alpha": 0})
        check_probability("actor.epsilon", self.epsilon)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon ** (1 + self.alpha):.2g}, each environment its own"


@dataclass(frozen=True)
class GaussianConfig:
    """Gaussian noise on continuous actions, the same in every environment (Horgan et al. 2018)."""

    block: int = 32
    """Fresh steps in a block: how many an environment collects before the store sees them."""
    refresh: int = 8
    """Steps of an actor between two looks for newer weights."""
    sigma: float = 0.3
    """Standard deviation of the noise, where half of an action's range is 1."""

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        """How environments first ... first + n - 1 of all in the run explore."""
        return np.full(n, self.sigma)

    def check(self) -> None:
        at_least("actor", self, {"block": 1, "refresh": 1, "sigma": 0})

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}"


@dataclass(frozen=True)
class UnrollConfig:
    """Actions are drawn from the policy itself, and sent an unroll at a time (Espeholt et al. 2018)."""

    refresh: int = 0
    """Steps of an actor between two looks for newer weights; 0: at the start of each unroll."""

    block: ClassVar[int] = 0  # one unroll

    def explore(self, first: int, n: int, total: int) -> Explore | Array:
        """How environments first ... first + n - 1 of all in the run explore."""
        return np.ones(n)

    def check(self) -> None:
        at_least("actor", self, {"refresh": 0})

    def __str__(self) -> str:
        return "drawing from the policy"


@dataclass(frozen=True)
class StoreConfig:
    capacity: str = "50_000"
    """Steps (100_000) or bytes (2GB)."""
    slack: float = 0.0
    """By how much the capacity may be exceeded until the learner trims."""
    selector: Literal["uniform", "prioritized", "fifo"] = "uniform"
    """How items are drawn; fifo: each once, in order, and actors wait while the store is full."""
    alpha: float = 0.6
    """Prioritized: exponent of the priorities."""
    beta: float = 0.4
    """Prioritized: exponent of the importance weights."""
    first_priorities: Literal["acted", "largest"] = "acted"
    """Prioritized: those of new items; acted: from the values computed while acting, largest: as in DQN with replay."""
    min_size: int = 1_000
    """Items before learning starts."""
    samples_per_insert: float = 32.0
    """How often an item is drawn on average: updates per env step = samples_per_insert / batch; 0: as often as it comes."""
    actors_wait: bool = True
    """Actors wait when the learner falls behind that rate; otherwise only the learner does, and items may be drawn less."""


@dataclass(frozen=True)
class CentralConfig:
    """Inference for all actors in one process (Espeholt et al. 2020)."""

    groups: int = 2
    """Groups that an actor's environments are in: it steps one while another waits for its actions."""
    batch: int = 0
    """Environments in one forward, at most; 0: all that ask."""
    wait_ms: float = 1.0
    """Milliseconds that the first to ask may wait for others to fill a batch; nobody waits for who is slow."""
    device: str = ""
    """Where inference is computed: cpu or cuda; empty: where the learner is."""

    def check(self, envs_per_actor: int) -> None:
        at_least("central", self, {"groups": 1, "batch": 0, "wait_ms": 0})
        if envs_per_actor % self.groups:
            raise UserError(
                f"{envs_per_actor} environments cannot be put in {self.groups} groups of one size; change --envs-per-actor "
                "or --central.groups."
            )


@dataclass(frozen=True)
class GateConfig:
    """Actors on other machines, and actors that share no memory with the run (gRPC)."""

    listen: str = ""
    """HOST:PORT where actors on other machines may join (`veldt actor --connect`); empty: none may."""
    seats: int = 4
    """How many of them there may be at a time."""
    token_file: str = ""
    """File with the secret that they must know; made if it is not there; empty: `token` in the run's directory."""
    certificate: str = ""
    """File with the TLS certificate (PEM); needed beyond this host."""
    key: str = ""
    """File with its key."""
    compress: bool = False
    """The run's own actors compress what they send over gRPC (lz4)."""

    @property
    def remote(self) -> int:
        """Seats for actors that this run does not start."""
        return self.seats if self.listen else 0

    def check(self) -> None:
        at_least("gate", self, {"seats": 1})
        if (self.certificate or self.key or self.token_file) and not self.listen:
            raise UserError("gate.token_file, gate.certificate and gate.key are for --gate.listen HOST:PORT.")
        if bool(self.certificate) != bool(self.key):
            raise UserError("TLS needs both gate.certificate and gate.key.")


@dataclass(frozen=True)
class EvalConfig:
    every: int = 5_000
    """Env steps between two evaluations; 0: none."""
    episodes: int = 10
    """Greedy episodes of one evaluation."""
    epsilon: float = 0.0
    """Part of their actions that is random all the same; the sigma of its noise for apex-dpg; for impala the part that is
    drawn from the policy, where otherwise the likeliest is taken."""
    max_length: int = 27_000
    """Steps after which an evaluation stops waiting for an episode's end (108K Atari frames)."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 10_000
    """Env steps between two checkpoints; 0: only one at the end. Each ends the running episodes as truncated."""
    keep: int = 2
    """Checkpoints that are kept."""


@dataclass(frozen=True)
class LogConfig:
    every: float = 1.0
    """Seconds between two lines of metrics."""
    wandb: bool = False
    """Send metrics to Weights & Biases too."""


@dataclass(frozen=True)
class Config:
    recipe: tyro.conf.Suppress[str] = "dqn"
    """The recipe that this config began as."""
    topology: tyro.conf.Suppress[str] = "single"
    """How the nodes are joined."""
    env: str = "CartPole-v1"
    """A Gymnasium id, or module:callable."""
    protocol: str = ""
    """Atari: whose settings the games are played with: dqn, apex, r2d2 or sticky; others have none."""
    steps: int = 60_000
    """Env steps in all: actions applied, over all environments."""
    seed: int = 0
    """Everything random follows from it."""
    actors: int = 1
    """Processes that act."""
    envs_per_actor: int = 8
    """Environments that one of them steps together."""
    runtime: Literal["inline", "local"] = "inline"
    """Where the nodes run: inline is one thread (exact resume, debugging), local is supervised processes."""
    step_timeout: float = 30.0
    """Local: seconds that one step of an environment or update may take before its process is replaced."""
    queue: int = 16
    """Local: blocks that may wait between one actor and the store; they are lost to a resume."""
    inference: Literal["local", "central"] = "local"
    """Who computes actions: each actor for itself, or one process for all, in batches (SEED RL)."""
    transport: Literal["shm", "grpc"] = "shm"
    """Local: how the run's own actors talk to the rest: over shared memory, or over gRPC on a Unix socket."""
    demos: str = ""
    """Directory of demonstrations (`veldt record`) that are drawn beside the run's own experience; empty: none."""
    demo_ratio: float = 0.25
    """Probability that an item of a batch is drawn from them."""
    device: str = "cpu"
    """Where the learner's tensors live: cpu or cuda."""
    threads: int = 1
    """Threads for tensor operations."""
    algorithm: Any = field(default_factory=DQN)  # an Algorithm; Any, so that the flags are those of the one it holds
    actor: Any = field(default_factory=ActorConfig)  # or another one of those above
    store: StoreConfig = field(default_factory=StoreConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    central: CentralConfig = field(default_factory=CentralConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def envs(self, n: int = 1, render: bool = False) -> Envs:
        return make_env(self.env, n, render, self.protocol)

    def check(self) -> None:
        """Raises a UserError for settings that cannot work."""
        if self.protocol and not is_atari(self.env):
            raise UserError(f"protocol {self.protocol!r} is for Atari (ALE/...), not for {self.env}.")
        positive = {
            "steps": self.steps,
            "threads": self.threads,
            "actors": self.actors,
            "envs_per_actor": self.envs_per_actor,
            "step_timeout": self.step_timeout,
            "learner.batch": self.learner.batch,
            "learner.target_every": self.learner.target_every,
            "learner.publish_every": self.learner.publish_every,
            "learner.prefetch": self.learner.prefetch,
            "learner.trim_every": self.learner.trim_every,
            "learner.lr": self.learner.lr,
            "eval.episodes": self.eval.episodes,
            "eval.max_length": self.eval.max_length,
            "checkpoint.keep": self.checkpoint.keep,
            "log.every": self.log.every,
        }
        for name, value in positive.items():
            if not value > 0 or (math.isinf(value) and name != "log.every"):
                raise UserError(f"{name} must be greater than 0, not {value}.")
        not_negative = {
            "seed": self.seed,
            "store.min_size": self.store.min_size,
            "store.samples_per_insert": self.store.samples_per_insert,
            "store.slack": self.store.slack,
            "store.alpha": self.store.alpha,
            "store.beta": self.store.beta,
            "learner.clip_norm": self.learner.clip_norm,
            "learner.momentum": self.learner.momentum,
            "learner.publish_lag": self.learner.publish_lag,
            "eval.every": self.eval.every,
            "checkpoint.every": self.checkpoint.every,
        }
        for name, value in not_negative.items():
            if not 0 <= value < math.inf:
                raise UserError(f"{name} must not be negative, but it is {value}.")
        if self.queue < 2:
            raise UserError(f"queue must be at least 2 blocks, not {self.queue}.")
        self.actor.check()
        if self.inference == "central":
            self.central.check(self.envs_per_actor)
        self.gate.check()
        if self.runtime == "inline" and (self.transport == "grpc" or self.gate.listen):
            raise UserError("--transport grpc and --gate.listen need --runtime local: inline there is but one process.")
        check_probability("eval.epsilon", self.eval.epsilon)
        self._check_selector()
        if self.topology == "single" and self.actors > 1:
            raise UserError(
                f"{self.recipe} has one actor, not {self.actors}; several are what apex-dqn and impala are for."
            )
        cores = len(os.sched_getaffinity(0))
        if self.runtime == "local" and self.actors > ACTORS_PER_CORE * cores:
            raise UserError(
                f"{self.actors} actors are too many for {cores} cores: at most {ACTORS_PER_CORE * cores}; give each "
                "of them more environments with --envs-per-actor."
            )

        check_probability("demo_ratio", self.demo_ratio)
        if self.recipe == "r2d3" and not self.demos:
            raise UserError(
                "r2d3 learns from demonstrations too: give a directory of them with --demos; veldt record makes one."
            )
        if self.demos and self.store.selector == "fifo":
            raise UserError(f"{self.recipe} learns each step once, from a queue: it cannot learn from demonstrations.")

    def _check_selector(self) -> None:
        store, unrolls = self.store, self.topology == "impala"
        if store.selector == "fifo" and not unrolls:
            raise UserError(f"store.selector fifo is a queue of unrolls, as impala has; {self.recipe} has none.")
        if store.selector == "prioritized" and unrolls:
            raise UserError("impala has no priorities: use store.selector fifo or uniform.")
        if store.selector == "fifo" and (store.samples_per_insert != 1 or store.slack or self.learner.prefetch != 1):
            raise UserError(
                "A queue (store.selector fifo) gives each unroll once: it needs store.samples_per_insert 1, store.slack 0 "
                "and learner.prefetch 1."
            )

    @property
    def total_actors(self) -> int:
        """With those that may join from other machines."""
        return self.actors + self.gate.remote

    def schema(self, env: EnvSpec) -> Schema:
        rows = {**env.step, "action": env.action, **self.algorithm.extras(env)}
        window = self.algorithm.window
        if self.actor.block % window.stride:
            raise UserError(f"actor.block ({self.actor.block}) must be a multiple of algorithm.stride ({window.stride}).")
        return Schema(rows, window, self.actor.block or window.stride, self.algorithm.state(env))

    @property
    def refresh(self) -> int:
        """Steps of an actor between two looks for newer weights."""
        return int(self.actor.refresh or self.actor.block or self.algorithm.window.stride)


def override(config: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """A copy of a (nested) dataclass with some fields replaced; names may be dotted or values nested dicts."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    fields = {f.name: f for f in dataclasses.fields(config)}
    hints = get_type_hints(type(config))
    for name, value in values.items():
        head, _, tail = str(name).partition(".")
        if head not in fields:
            raise UserError(f"There is no setting {prefix}{head!r}.{did_you_mean(head, fields)}")
        if dataclasses.is_dataclass(getattr(config, head)):
            if not tail and not isinstance(value, dict):
                raise UserError(f"{prefix}{head} is a group of settings; name one of them, as in {prefix}{head}.x.")
            nested.setdefault(head, {}).update({tail: value} if tail else value)
        elif tail:
            raise UserError(f"{prefix}{head} is one setting; there is no {prefix}{name}.")
        else:
            flat[head] = _typed(f"{prefix}{head}", value, getattr(config, head))
            choices = get_args(hints[head]) if get_origin(hints[head]) is Literal else None
            if choices and flat[head] not in choices:
                raise UserError(f"{prefix}{head} must be one of {', '.join(choices)}, not {value!r}.")
    for head, part in nested.items():
        flat[head] = override(getattr(config, head), part, f"{prefix}{head}.")
    return dataclasses.replace(config, **flat)


def _typed(name: str, value: Any, like: Any) -> Any:
    """The value with the type of the field's present one, where nothing is lost by that."""
    if isinstance(like, bool) or isinstance(value, bool):
        if isinstance(value, bool) and isinstance(like, bool):
            return value
    elif isinstance(like, float) and (isinstance(value, int | float) or _is_number(value)):
        return float(value)
    elif isinstance(like, int) and isinstance(value, int | float) and math.isfinite(value) and int(value) == value:
        return int(value)
    elif isinstance(like, tuple) and isinstance(value, list | tuple):
        if not like or all(type(part) is type(like[0]) for part in value):
            return tuple(value)
    elif isinstance(like, str) and isinstance(value, str | int):
        return str(value)
    raise UserError(f"{name} must be a {type(like).__name__}, not {value!r}.")


def _is_number(value: Any) -> bool:
    """YAML reads 5e-4 as a string."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
