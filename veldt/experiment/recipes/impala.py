"""IMPALA: many actors, a queue of unrolls, an actor-critic with V-trace; and the same with central inference."""

from __future__ import annotations

from dataclasses import replace

from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config, StoreConfig
from veldt.experiment.exploration import UnrollConfig
from veldt.experiment.recipes.base import atari, distributed, is_minatar
from veldt.learning.learner import LearnerConfig


def impala(env: str) -> Config:
    """IMPALA (Espeholt et al. 2018): many actors, a queue, an actor-critic with V-trace. Atari: the paper's numbers."""
    config = replace(distributed("impala", "impala", env), actor=UnrollConfig())
    if is_atari(env):
        return replace(
            atari(config, protocol="dqn", epsilon=1.0),  # evaluations sample from the policy
            algorithm=VTraceActorCritic(history=4, clip_reward=1.0, entropy_cost=0.01, sum_losses=True),
            store=_queue(64 * 20),
            learner=LearnerConfig(
                batch=32,
                optimizer="rmsprop",
                centered=False,
                lr=6e-4,
                anneal=True,
                eps=0.01,
                decay=0.99,
                clip_norm=40.0,
                publish_every=1,
            ),
        )
    small = is_minatar(env)
    return replace(
        config,
        steps=4_000_000 if small else 300_000,
        algorithm=VTraceActorCritic(normalize=True, entropy_cost=0.02 if small else 0.01),
        store=_queue(16 * 20),
        learner=LearnerConfig(batch=8, lr=3e-3, anneal=True, clip_norm=1.0, publish_every=1),
        eval=replace(config.eval, every=200_000 if small else 30_000),
        checkpoint=CheckpointConfig(every=500_000 if small else 100_000),
    )


def seed_vtrace(env: str) -> Config:
    """SEED RL (Espeholt et al. 2020) with V-trace: impala, but one process computes the actions of all actors."""
    return replace(impala(env), recipe="seed-vtrace", inference="central")


def _queue(steps: int) -> StoreConfig:
    return StoreConfig(capacity=str(steps), selector="fifo", min_size=0, samples_per_insert=1.0)
