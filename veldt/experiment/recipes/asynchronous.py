"""a3c, async-q, async-nstep-q and async-sarsa."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from veldt.algorithms.a3c import A3C
from veldt.algorithms.async_q import AsyncQ
from veldt.bounds import above
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config, EvalConfig, StoreConfig
from veldt.experiment.exploring import DrawnConfig, UnrollConfig
from veldt.experiment.recipes.common import is_minatar, usual_steps
from veldt.learning.learner import LearnerConfig
from veldt.machine import core_count, runs_processes

ONE_UNROLL = StoreConfig(capacity="64", selector="fifo", min_size=0, samples_per_insert=1.0, device="cpu")
PAPERS = LearnerConfig(
    batch=1, optimizer="rmsprop", lr=7e-4, anneal=True, eps=0.1, decay=0.99, centered=False, clip_norm=0.0, publish_every=1
)
SMALL = replace(PAPERS, lr=3e-3, eps=1e-3, clip_norm=40.0)


@dataclass(frozen=True)
class WorkersConfig(Config):
    """Of workers that share their weights (`veldt.topologies.workers`)."""

    workers: Annotated[int, above(0)] = 2
    """Number of workers: each has one environment, and acts and learns."""
    statistics: Literal["shared", "own"] = "shared"
    """RMSProp's mean squares. shared: one array that all workers change; own: one for each worker."""
    target_every: Annotated[int, above(0)] = 10_000
    """Value-based methods: env steps of all workers between two copies of the weights to the target network, which they
    share."""
    actor: Any = field(default_factory=UnrollConfig)

    @property
    def own_actors(self) -> int:
        return self.workers

    @property
    def learner_device(self) -> str:
        return "cpu"

    def explore(self, i: int) -> Any:
        """The exploration of the i-th worker."""
        if isinstance(self.actor, DrawnConfig):
            return self.actor.explore(i, 1, self.workers, self.seed)
        return self.actor.explore(i, 1, self.workers)


def a3c(env: str) -> Config:
    """A3C (Mnih et al. 2016): workers that act and learn, with shared weights and no lock. Atari: the paper's numbers."""
    config = _workers("a3c", env)
    if is_atari(env):
        algorithm = A3C(history=4, clip_reward=1.0, entropy_cost=0.01)
        return replace(config, algorithm=algorithm, eval=replace(config.eval, epsilon=1.0))  # evaluations sample
    # Values of returns in the hundreds would outweigh the policy in the layers that both share.
    return replace(config, algorithm=A3C(unroll=20, value_cost=0.05), learner=replace(SMALL, lr=2.5e-3))


def async_q(env: str) -> Config:
    """Asynchronous one-step Q-learning (Mnih et al. 2016). Atari: the paper's numbers."""
    return _value_based("async-q", "one-step", env)


def async_nstep_q(env: str) -> Config:
    """Asynchronous n-step Q-learning (Mnih et al. 2016). Atari: the paper's numbers."""
    return _value_based("async-nstep-q", "n-step", env)


def async_sarsa(env: str) -> Config:
    """Asynchronous one-step Sarsa (Mnih et al. 2016). Atari: the paper's numbers."""
    return _value_based("async-sarsa", "sarsa", env)


def _value_based(recipe: str, returns: Any, env: str) -> Config:
    config = _workers(recipe, env)
    if is_atari(env):
        algorithm = AsyncQ(returns=returns, history=4, clip_reward=1.0)
        return replace(config, algorithm=algorithm, actor=DrawnConfig(), eval=replace(config.eval, epsilon=0.05))
    return replace(
        config,
        algorithm=AsyncQ(returns=returns, unroll=20),
        learner=SMALL,
        actor=DrawnConfig(epsilon_steps=config.steps // 5),
        target_every=1_000,
    )


def _workers(recipe: str, env: str) -> WorkersConfig:
    """Atari: one worker a core."""
    config = WorkersConfig(
        recipe=recipe,
        topology="workers",
        env=env,
        envs_per_actor=1,
        runtime="local" if runs_processes() else "inline",
        device="cpu",
        store=ONE_UNROLL,
        learner=PAPERS,
    )
    if is_atari(env):
        return replace(
            config,
            workers=core_count(),
            protocol="dqn",
            steps=80_000_000,  # the 320 million frames of a day
            eval=EvalConfig(every=250_000, episodes=10),
            checkpoint=CheckpointConfig(every=1_000_000),
        )
    small = is_minatar(env)
    return replace(
        config,
        steps=4_000_000 if small else 2 * usual_steps(env),
        eval=EvalConfig(every=200_000 if small else 20_000, episodes=20, max_length=10_000),
        checkpoint=CheckpointConfig(every=500_000 if small else 100_000),
    )
