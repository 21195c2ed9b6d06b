"""Config: everything a run depends on, as nested dataclasses with declared bounds."""

import contextlib
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from veldt.algorithms.dqn import DQN
from veldt.bounds import above, at_least, between
from veldt.envs import Envs, make_env
from veldt.errors import UserError
from veldt.experiment.exploring import ActorConfig
from veldt.learning.learner import LearnerConfig
from veldt.machine import find_device
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.runtime.local.pressure import MemoryConfig
from veldt.runtime.local.watchdog import Restarts


@dataclass(frozen=True)
class StoreConfig:
    capacity: str = "50_000"
    """Steps (100_000) or bytes (2GB)."""
    slack: Annotated[float, at_least(0)] = 0.0
    """Fraction by which the store may exceed its capacity until the learner trims it."""
    selector: Literal["uniform", "prioritized", "ranked", "fifo"] = "uniform"
    """How items are sampled. prioritized: in proportion to priority^alpha; ranked: in proportion to rank^-alpha; fifo: each
    once, in order, and actors wait while the store is full."""
    alpha: Annotated[float, at_least(0)] = 0.6
    """Prioritized, ranked: exponent of the priorities, or of the ranks."""
    beta: Annotated[float, at_least(0)] = 0.4
    """Prioritized, ranked: exponent of the importance weights, which are scaled so that the largest of a batch is 1."""
    beta_end: Annotated[float, at_least(0)] = 0.0
    """Prioritized, ranked: beta is annealed to this value linearly over the env steps of the run; 0: beta is constant."""
    first_priorities: Literal["acted", "largest"] = "acted"
    """Prioritized, ranked: priorities of new items. acted: computed from the values at acting time; largest: the largest
    priority so far."""
    evict: Literal["oldest", "priority"] = "oldest"
    """Prioritized, ranked: which block a full store evicts. oldest; or priority: one of the four oldest, drawn in
    proportion to the sum of its priorities^-0.4 (Ape-X DPG)."""
    min_size: Annotated[int, at_least(0)] = 1_000
    """Items that the store must hold before learning starts."""
    samples_per_insert: Annotated[float, at_least(0)] = 32.0
    """Replay ratio: how often an item is sampled on average. Updates per env step = this / batch; 0: no limit."""
    actors_wait: bool = True
    """Actors wait when the learner is slower than the replay ratio; otherwise only the learner waits."""
    device: str = "auto"
    """Where samples are gathered: cpu, or cuda, from a copy of all blocks in the GPU's memory; auto: on the learner's GPU,
    if it has one with room for the blocks."""


@dataclass(frozen=True)
class CentralConfig:
    """Inference for all actors in one process (Espeholt et al. 2020)."""

    groups: Annotated[int, above(0)] = 2
    """Groups of an actor's environments: it steps one group while another waits for its actions."""
    batch: Annotated[int, at_least(0)] = 0
    """Maximum number of environments in one forward pass; 0: all that are waiting."""
    wait_ms: Annotated[float, at_least(0)] = 1.0
    """Milliseconds that the first group of a batch waits for others; a slow group never delays the others."""
    device: str = ""
    """Where inference is computed: cpu, cuda or auto; empty: the learner's device."""
    graph: Literal["auto", "off"] = "auto"
    """auto: on a GPU forward passes are CUDA graphs, one for each power of two of environments; off: they are not."""


@dataclass(frozen=True)
class GateConfig:
    """gRPC: actors on other machines, and the run's own actors with --transport grpc."""

    listen: str = ""
    """HOST:PORT on which actors from other machines can join (`veldt actor --connect`); empty: none can."""
    seats: Annotated[int, above(0)] = 4
    """Maximum number of actors that are joined at a time."""
    token_file: str = ""
    """File with the secret that actors need to join; created if missing; empty: `token` in the run directory."""
    certificate: str = ""
    """File with the TLS certificate (PEM); required unless the run listens on this host only."""
    key: str = ""
    """File with the private key of the certificate."""
    compress: bool = False
    """Compress what the run's own actors send over gRPC (lz4)."""


@dataclass(frozen=True)
class EvalConfig:
    every: Annotated[int, at_least(0)] = 5_000
    """Env steps between two evaluations; 0: none."""
    episodes: Annotated[int, above(0)] = 10
    """Greedy episodes in one evaluation."""
    epsilon: Annotated[float, between(0, 1)] = 0.0
    """Fraction of random actions. apex-dpg, qt-opt: standard deviation of the noise. impala: fraction of the actions that
    are sampled from the policy instead of being the most likely one."""
    max_length: Annotated[int, above(0)] = 27_000
    """Steps after which an evaluation cuts an episode off (the default is 108K Atari frames)."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, at_least(0)] = 10_000
    """Env steps between two checkpoints; 0: only one at the end. With --runtime inline, each one truncates the
    running episodes."""
    keep: Annotated[int, above(0)] = 2
    """Number of checkpoints to keep."""
    store: bool = True
    """Save the replay store too. Without it, a resumed run has the weights but starts with an empty store."""


@dataclass(frozen=True)
class LogConfig:
    every: Annotated[float, above(0, infinite=True)] = 1.0
    """Seconds between two lines of metrics."""
    wandb: bool = False
    """Also send metrics to Weights & Biases."""
    wandb_project: str = "veldt"
    """Project of Weights & Biases."""
    wandb_entity: str = ""
    """User or team of Weights & Biases; empty: your default."""
    wandb_group: str = ""
    """Group of runs."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run."""
    mlflow: bool = False
    """Also send metrics to MLflow."""
    mlflow_uri: str = ""
    """Tracking server, or a local store, of MLflow; empty: as MLFLOW_TRACKING_URI says."""
    mlflow_experiment: str = "veldt"
    """Experiment of MLflow."""


@dataclass(frozen=True)
class Config:
    # `algorithm` is an Algorithm; it, `actor` and `learner` are typed Any: the flags are those of their own classes.

    recipe: tyro.conf.Suppress[str] = "dqn"
    """The recipe that this config began as."""
    topology: tyro.conf.Suppress[str] = "single"
    """How the nodes are connected (`veldt.topologies`)."""
    env: str = "CartPole-v1"
    """A Gymnasium id, module:id (the module registers it), or module:callable."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment, key=value, typed as in YAML: size=8 flat=true."""
    wrappers: tuple[str, ...] = ()
    """Wrappers, module:callable, applied to each environment in this order, as in gymnasium.wrappers:FlattenObservation."""
    image_size: Annotated[int, between(0, 1024)] = 0
    """Resize images of at least 36 x 36 to this height and width; 0: they stay as they are."""
    grayscale: bool = False
    """Make such images grey."""
    action_masks: bool = True
    """Read which actions are legal from `action_mask` in the environment's info or Dict observation, where it has that."""
    frame_skip: Annotated[int, between(0, 1024)] = 0
    """Repeat each action for this many frames of the environment, which are one env step; 0: as the environment or its
    protocol has it."""
    protocol: str = ""
    """Atari: evaluation protocol: dqn, apex, r2d2, machado or dopamine. Any of them can be followed by :minimal (the game's
    own actions) or :full (all 18 actions), as in apex:minimal."""
    steps: Annotated[int, above(0)] = 60_000
    """Total number of env steps: actions applied, summed over all environments."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of all random numbers."""
    stop_return: Annotated[float, above(-math.inf, infinite=True)] = math.inf
    """Stop when the mean return of an evaluation reaches this; inf: never."""
    stop_after: str = ""
    """Stop after this time of training, not counting that before a resume: 90s, 30m, 2h or 1h30m; empty: never."""
    init_from: str = ""
    """Run whose last weights a new run starts with, as far as names and shapes are the same; empty: random weights."""
    clip_observations: bool = False
    """Clip observations to the bounds of their space. Otherwise out-of-bounds observations are kept, with a warning."""
    max_bad: Annotated[float, between(0, 1)] = 0.1
    """The run ends when more than this fraction of the last thousand observations is bad (the observation or its
    reward is not finite); 1: never."""
    actors: Annotated[int, above(0)] = 1
    """Number of actors."""
    envs_per_actor: Annotated[int, above(0)] = 8
    """Number of environments that each actor steps in lockstep."""
    runtime: Literal["inline", "local"] = "inline"
    """Where the nodes run: inline is one thread (exact resume, debugging), local is supervised processes."""
    step_timeout: Annotated[float, above(0)] = 30.0
    """Local: seconds that an environment step or an update may take before its process is restarted."""
    queue: Annotated[int, at_least(2)] = 16
    """Local: capacity, in blocks, of the queue between an actor and the store; queued blocks are not saved. gorila: also in
    gradients, between a learner and a server."""
    inference: Literal["local", "central"] = "local"
    """Where actions are computed: local: in each actor; central: in one process, in batches for all actors (SEED RL)."""
    transport: Literal["shm", "grpc"] = "shm"
    """Local: how the run's own actors communicate: over shared memory, or over gRPC on a Unix socket."""
    demos: str = ""
    """Directory of demonstrations (`veldt record`) to sample in addition to the run's own experience; empty: none."""
    demo_ratio: Annotated[float, between(0, 1)] = 0.25
    """Probability that an item of a batch is a demonstration."""
    device: str = "auto"
    """Device of the learner: cpu or cuda; auto: a GPU where there is one."""
    threads: Annotated[int, above(0)] = 1
    """Threads for tensor operations."""
    algorithm: Any = field(default_factory=DQN)
    """The recipe's algorithm."""
    actor: Any = field(default_factory=ActorConfig)
    """How the recipe's actors explore and record."""
    store: StoreConfig = field(default_factory=StoreConfig)
    learner: Any = field(default_factory=LearnerConfig)
    """How the recipe's learner makes updates."""
    central: CentralConfig = field(default_factory=CentralConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: Restarts = field(default_factory=Restarts)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def envs(self, n: int = 1, render: bool = False, alone: bool = False) -> Envs:
        return make_env(self.env, n, render, alone=alone, **self.env_options)

    @property
    def env_options(self) -> dict[str, Any]:
        """Arguments of `make_env`: how the environment is made and seen."""
        return {
            "protocol": self.protocol,
            "clip": self.clip_observations,
            "kwargs": self.env_kwargs,
            "wrappers": self.wrappers,
            "image_size": self.image_size,
            "grayscale": self.grayscale,
            "frame_skip": self.frame_skip,
            "combine": self.algorithm.one_choice,
            "action_masks": self.action_masks,
        }

    def options_for(self, env: str) -> dict[str, Any]:
        """The same for another environment, whose arguments may have other names."""
        return self.env_options if env == self.env else self.env_options | {"kwargs": ()}

    def env_spec(self) -> EnvSpec:
        with contextlib.closing(self.envs()) as envs:
            return envs.spec

    @property
    def own_actors(self) -> int:
        """The run's own. A family whose actors are parts of something else counts those."""
        return self.actors

    @property
    def total_actors(self) -> int:
        """With the actors that may join from other machines."""
        return self.own_actors + (self.gate.seats if self.gate.listen else 0)

    @property
    def learner_device(self) -> str:
        return find_device(self.device)

    @property
    def inference_device(self) -> str:
        """Of central inference."""
        return find_device(self.central.device or self.device)

    def schema(self, env: EnvSpec) -> Schema:
        rows = {**env.step, "action": env.action, **self.algorithm.extras(env)}
        window = self.algorithm.window
        if self.actor.block % window.stride:
            raise UserError(f"actor.block ({self.actor.block}) must be a multiple of algorithm.stride ({window.stride}).")
        return Schema(rows, window, self.actor.block or window.stride, self.algorithm.state(env))

    def learner_schema(self, env: EnvSpec) -> Schema:
        """Of what the learner samples."""
        return self.schema(env)

    @property
    def sample_size(self) -> int:
        """Items of one sample of the store."""
        return int(self.learner.batch * self.learner.prefetch)

    @property
    def samples_per_step(self) -> float:
        """How often the learner learns from each env step; 0: no limit."""
        return self.store.samples_per_insert

    @property
    def refresh(self) -> int:
        return int(self.actor.refresh or self.actor.block or self.algorithm.window.stride)
