"""Config: everything a run depends on, as nested dataclasses with declared bounds."""

import contextlib
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import tyro

from veldt.acting.policy import Explore, LinearDecay
from veldt.algorithms.dqn import DQN
from veldt.bounds import above, at_least, between
from veldt.envs import Envs, make_env
from veldt.errors import UserError
from veldt.learning.learner import LearnerConfig
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array
from veldt.runtime.local.watchdog import Restarts

# How actors explore, record and refresh their weights: one dataclass a method; `Config.actor` is one of them.
#   block                    fresh steps in a block; 0: one unroll
#   refresh                  steps of an actor between two looks for newer weights; 0: once a block
#   explore(first, n, own)   the exploration of environments first ... first + n - 1; the run's own are 0 ... own - 1, and
#                            those of actors that join come after them
#   str()                    says in a few words how it explores


@dataclass(frozen=True)
class ActorConfig:
    """One epsilon for all environments, which falls linearly. The policy looks for newer weights at each step."""

    block: Annotated[int, above(0)] = 8
    """Fresh steps in a block: an environment collects this many before they enter the store."""
    epsilon: Annotated[float, between(0, 1)] = 1.0
    """Fraction of random actions at the start."""
    epsilon_end: Annotated[float, between(0, 1)] = 0.05
    """Fraction of random actions at the end of the decay."""
    epsilon_steps: Annotated[int, at_least(0)] = 10_000
    """Env steps over which epsilon falls linearly."""

    refresh: ClassVar[int] = 1

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return LinearDecay(self.epsilon, self.epsilon_end, self.epsilon_steps)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon_end:g} in {self.epsilon_steps:,} steps"


@dataclass(frozen=True)
class LadderConfig:
    """Every environment has an epsilon of its own (Horgan et al. 2018): epsilon^(1 + alpha i / (N - 1)), the i-th of N.

    N are the environments of the run's own actors. Those of actors that join are between them, wherever seats stay empty:
    1/2, 1/4, 3/4, 1/8, ... of the way down (a van der Corput sequence) instead of i / (N - 1).
    """

    block: Annotated[int, above(0)] = 64
    """Fresh steps in a block: an environment collects this many before they enter the store."""
    refresh: Annotated[int, above(0)] = 8
    """Steps of an actor between two looks for newer weights."""
    epsilon: Annotated[float, between(0, 1)] = 0.4
    """Fraction of random actions of the environment that explores most."""
    alpha: Annotated[float, at_least(0)] = 7.0
    """How steeply epsilon falls from one environment to the next."""

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        """A single environment of the run's own is in the middle."""
        i = np.arange(first, first + n)
        down = i / (own - 1) if own > 1 else np.full(n, 0.5)
        down[i >= own] = [van_der_corput(k) for k in (i[i >= own] - own + 1).tolist()]
        return self.epsilon ** (1 + self.alpha * down)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} to {self.epsilon ** (1 + self.alpha):.2g}, one for each environment"


def van_der_corput(k: int) -> float:
    """1/2, 1/4, 3/4, 1/8, 5/8, ... for k = 1, 2, 3, ...: the binary digits of k, mirrored at the point."""
    return int(f"{k:b}"[::-1], 2) / (1 << k.bit_length())


@dataclass(frozen=True)
class GaussianConfig:
    """Gaussian noise on continuous actions, the same in every environment (Horgan et al. 2018)."""

    block: Annotated[int, above(0)] = 32
    """Fresh steps in a block: an environment collects this many before they enter the store."""
    refresh: Annotated[int, above(0)] = 8
    """Steps of an actor between two looks for newer weights."""
    sigma: Annotated[float, at_least(0)] = 0.3
    """Standard deviation of the noise, where half of an action's range is 1."""

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return np.full(n, self.sigma)

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}"


@dataclass(frozen=True)
class UnrollConfig:
    """Actions are sampled from the policy itself, and sent an unroll at a time (Espeholt et al. 2018)."""

    refresh: Annotated[int, at_least(0)] = 0
    """Steps of an actor between two looks for newer weights; 0: at the start of each unroll."""

    block: ClassVar[int] = 0  # one unroll

    def explore(self, first: int, n: int, own: int) -> Explore | Array:
        return np.ones(n)

    def __str__(self) -> str:
        return "sampling from the policy"


@dataclass(frozen=True)
class StoreConfig:
    capacity: str = "50_000"
    """Steps (100_000) or bytes (2GB)."""
    slack: Annotated[float, at_least(0)] = 0.0
    """Fraction by which the store may exceed its capacity until the learner trims it."""
    selector: Literal["uniform", "prioritized", "ranked", "fifo"] = "uniform"
    """How items are drawn; prioritized: in proportion to their priority; ranked: to 1 / the rank of their priority; fifo:
    each once, in order, and actors wait while the store is full."""
    alpha: Annotated[float, at_least(0)] = 0.6
    """Prioritized, ranked: exponent of the priorities, or of the ranks."""
    beta: Annotated[float, at_least(0)] = 0.4
    """Prioritized, ranked: exponent of the importance weights, of which the largest in each batch is 1."""
    beta_end: Annotated[float, at_least(0)] = 0.0
    """Prioritized, ranked: beta at the end of the run, approached linearly with env steps; 0: it stays constant."""
    first_priorities: Literal["acted", "largest"] = "acted"
    """Prioritized, ranked: priorities of new items; acted: from the values computed while acting, largest: the largest so
    far."""
    evict: Literal["oldest", "priority"] = "oldest"
    """Prioritized, ranked: which block a full store evicts: the oldest, or one of the four oldest, by the sum of its
    priorities to the power of -0.4 (Ape-X DPG)."""
    min_size: Annotated[int, at_least(0)] = 1_000
    """Items before learning starts."""
    samples_per_insert: Annotated[float, at_least(0)] = 32.0
    """Replay ratio: how often an item is drawn on average. Updates per env step = this / batch; 0: no limit."""
    actors_wait: bool = True
    """Actors wait when the learner is slower than the replay ratio; otherwise only the learner waits."""


@dataclass(frozen=True)
class CentralConfig:
    """Inference for all actors in one process (Espeholt et al. 2020)."""

    groups: Annotated[int, above(0)] = 2
    """Groups of an actor's environments: it steps one group while another waits for its actions."""
    batch: Annotated[int, at_least(0)] = 0
    """Environments in one forward pass, at most; 0: all that wait."""
    wait_ms: Annotated[float, at_least(0)] = 1.0
    """Milliseconds that the first group of a batch waits for others; a slow group never delays the others."""
    device: str = ""
    """Where inference is computed: cpu or cuda; empty: the learner's device."""


@dataclass(frozen=True)
class GateConfig:
    """gRPC: actors on other machines, and the run's own actors with --transport grpc."""

    listen: str = ""
    """HOST:PORT where actors on other machines may join (`veldt actor --connect`); empty: none may."""
    seats: Annotated[int, above(0)] = 4
    """How many actors may join at a time."""
    token_file: str = ""
    """File with the secret that they must know; created if missing; empty: `token` in the run's directory."""
    certificate: str = ""
    """File with the TLS certificate (PEM); needed beyond this host."""
    key: str = ""
    """File with the key of the certificate."""
    compress: bool = False
    """The run's own actors compress what they send over gRPC (lz4)."""


@dataclass(frozen=True)
class EvalConfig:
    every: Annotated[int, at_least(0)] = 5_000
    """Env steps between two evaluations; 0: none."""
    episodes: Annotated[int, above(0)] = 10
    """Greedy episodes of one evaluation."""
    epsilon: Annotated[float, between(0, 1)] = 0.0
    """Fraction of random actions; for apex-dpg the sigma of the noise; for impala the fraction of actions that is sampled
    from the policy instead of taking the likeliest."""
    max_length: Annotated[int, above(0)] = 27_000
    """Steps after which an evaluation stops waiting for an episode's end (108K Atari frames)."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, at_least(0)] = 10_000
    """Env steps between two checkpoints; 0: only one at the end. Inline, each truncates the running episodes."""
    keep: Annotated[int, above(0)] = 2
    """Checkpoints that are kept."""
    store: bool = True
    """Save the replay too; without it a resumed run has the weights, and collects experience anew."""


@dataclass(frozen=True)
class LogConfig:
    every: Annotated[float, above(0, infinite=True)] = 1.0
    """Seconds between two lines of metrics."""
    wandb: bool = False
    """Send metrics to Weights & Biases too."""


@dataclass(frozen=True)
class Config:
    # `algorithm` is an Algorithm; it and `actor` are typed Any, so that the flags are those of their own classes.

    recipe: tyro.conf.Suppress[str] = "dqn"
    """The recipe that this config began as."""
    topology: tyro.conf.Suppress[str] = "single"
    """How the nodes are connected (`veldt.topologies`)."""
    env: str = "CartPole-v1"
    """A Gymnasium id, or module:callable."""
    protocol: str = ""
    """Atari: the evaluation protocol of the games: dqn, apex, r2d2, machado or dopamine. apex:minimal has the game's own
    actions instead of all 18, dqn:full all 18; so for every protocol."""
    steps: Annotated[int, above(0)] = 60_000
    """Env steps in all: actions applied, over all environments."""
    seed: Annotated[int, at_least(0)] = 0
    """Everything random follows from it."""
    clip_observations: bool = False
    """Clip observations to the bounds of their space; otherwise those outside are kept, with a warning."""
    max_bad: Annotated[float, between(0, 1)] = 0.1
    """Fraction of bad observations (they, or their rewards, are not finite) of the last thousand, above which the run ends;
    1: it goes on."""
    actors: Annotated[int, above(0)] = 1
    """Processes that act."""
    envs_per_actor: Annotated[int, above(0)] = 8
    """Environments that one actor steps together."""
    runtime: Literal["inline", "local"] = "inline"
    """Where the nodes run: inline is one thread (exact resume, debugging), local is supervised processes."""
    step_timeout: Annotated[float, above(0)] = 30.0
    """Local: seconds that one step of an environment or update may take before its process is restarted."""
    queue: Annotated[int, at_least(2)] = 16
    """Local: blocks that may wait between one actor and the store; a resume loses them."""
    inference: Literal["local", "central"] = "local"
    """Where actions are computed: by each actor, or by one process for all, in batches (SEED RL)."""
    transport: Literal["shm", "grpc"] = "shm"
    """Local: how the run's own actors reach the rest: shared memory, or gRPC on a Unix socket."""
    demos: str = ""
    """Directory of demonstrations (`veldt record`) that are sampled beside the run's own experience; empty: none."""
    demo_ratio: Annotated[float, between(0, 1)] = 0.25
    """Probability that an item of a batch is a demonstration."""
    device: str = "cpu"
    """Device of the learner: cpu or cuda."""
    threads: Annotated[int, above(0)] = 1
    """Threads for tensor operations."""
    algorithm: Any = field(default_factory=DQN)
    """The recipe's algorithm."""
    actor: Any = field(default_factory=ActorConfig)
    """How the recipe's actors explore and record."""
    store: StoreConfig = field(default_factory=StoreConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    central: CentralConfig = field(default_factory=CentralConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: Restarts = field(default_factory=Restarts)
    log: LogConfig = field(default_factory=LogConfig)

    def envs(self, n: int = 1, render: bool = False) -> Envs:
        return make_env(self.env, n, render, self.protocol, self.clip_observations)

    def env_spec(self) -> EnvSpec:
        with contextlib.closing(self.envs()) as envs:
            return envs.spec

    @property
    def total_actors(self) -> int:
        """With the actors that may join from other machines."""
        return self.actors + (self.gate.seats if self.gate.listen else 0)

    def schema(self, env: EnvSpec) -> Schema:
        rows = {**env.step, "action": env.action, **self.algorithm.extras(env)}
        window = self.algorithm.window
        if self.actor.block % window.stride:
            raise UserError(f"actor.block ({self.actor.block}) must be a multiple of algorithm.stride ({window.stride}).")
        return Schema(rows, window, self.actor.block or window.stride, self.algorithm.state(env))

    @property
    def refresh(self) -> int:
        return int(self.actor.refresh or self.actor.block or self.algorithm.window.stride)
