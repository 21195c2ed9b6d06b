"""DQN: one actor, one uniform store, one learner."""

from __future__ import annotations

from dataclasses import replace

from veldt.algorithms.dqn import DQN
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config, EvalConfig, StoreConfig
from veldt.experiment.exploration import ActorConfig
from veldt.experiment.recipes.base import atari, is_minatar
from veldt.learning.learner import LearnerConfig
from veldt.machine import core_count


def dqn(env: str) -> Config:
    """DQN (Mnih et al. 2015) in one process. Atari: the paper's numbers. MinAtar and small tasks: tuned here."""
    if is_atari(env):
        return _atari(env)
    config = Config(
        recipe="dqn",
        env=env,
        algorithm=DQN(n=3, double=True),
        learner=LearnerConfig(target_every=250, anneal=True, prefetch=4),
    )
    if not is_minatar(env):
        return config
    return replace(
        config,
        steps=500_000,
        algorithm=replace(config.algorithm, dueling=True),
        actor=ActorConfig(block=16, epsilon_end=0.02, epsilon_steps=50_000),
        store=StoreConfig(capacity="100_000", selector="prioritized", min_size=5_000, samples_per_insert=16.0),
        learner=replace(config.learner, batch=32, lr=5e-4, target_every=500),
        eval=EvalConfig(every=25_000, episodes=20, max_length=10_000),
        checkpoint=CheckpointConfig(every=100_000),
    )


def _atari(env: str) -> Config:
    config = Config(
        recipe="dqn",
        env=env,
        algorithm=DQN(gamma=0.99, history=4, clip_reward=1.0),
        actor=ActorConfig(block=64, epsilon=1.0, epsilon_end=0.1, epsilon_steps=1_000_000),
        store=StoreConfig(capacity="1_000_000", min_size=50_000, samples_per_insert=8.0),
        learner=LearnerConfig(
            batch=32,
            optimizer="rmsprop",
            lr=2.5e-4,
            eps=0.01,
            decay=0.95,
            momentum=0.95,
            clip_norm=0.0,
            target_every=10_000,
        ),
    )
    # Without random actions an agent may never serve in Breakout, and the episode lasts for 27,000 steps.
    config = atari(config, protocol="dqn", epsilon=0.05)
    return replace(config, actors=1, threads=min(8, core_count()), checkpoint=CheckpointConfig(every=250_000))
