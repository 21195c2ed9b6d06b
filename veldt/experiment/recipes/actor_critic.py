"""impala and seed-vtrace."""

from dataclasses import replace

from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.envs import has_continuous_actions, is_atari
from veldt.experiment.config import CheckpointConfig, Config
from veldt.experiment.exploring import UnrollConfig
from veldt.experiment.recipes.common import QUEUE, RMSPROP, atari, distributed, is_minatar, usual_steps
from veldt.learning.learner import LearnerConfig


def impala(env: str) -> Config:
    """IMPALA (Espeholt et al. 2018): many actors, a queue, an actor-critic with V-trace. Atari: the paper's numbers."""
    config = replace(distributed("impala", "impala", env), actor=UnrollConfig())
    if is_atari(env):
        return replace(
            atari(config, protocol="dqn", epsilon=1.0),  # evaluations sample from the policy
            algorithm=VTraceActorCritic(history=4, clip_reward=1.0, entropy_cost=0.01, sum_losses=True),
            store=replace(QUEUE, capacity=str(64 * 20)),
            learner=replace(
                RMSPROP,
                batch=32,
                centered=False,
                square_start=1.0,
                lr=6e-4,
                anneal=True,
                eps=0.01,
                decay=0.99,
                publish_every=1,
            ),
        )
    small = is_minatar(env)
    continuous = not small and has_continuous_actions(env)
    learner = LearnerConfig(batch=8, lr=3e-3, anneal=True, clip_norm=1.0, publish_every=1)
    return replace(
        config,
        steps=4_000_000 if small else max(3 * usual_steps(env), 1_500_000 if continuous else 0),
        algorithm=VTraceActorCritic(
            gamma=0.97 if continuous else 0.99 if small else 0.995,
            normalize=True,
            entropy_cost=0.02 if small else 0.003,
        ),
        store=replace(QUEUE, capacity=str(16 * 20)),
        learner=replace(learner, batch=4, lr=3e-4) if continuous else learner,
        eval=replace(config.eval, every=200_000 if small else 30_000),
        checkpoint=CheckpointConfig(every=500_000 if small else 100_000),
    )


def seed_vtrace(env: str) -> Config:
    """SEED RL (Espeholt et al. 2020) with V-trace: impala, but one process computes the actions of all actors."""
    return replace(impala(env), recipe="seed-vtrace", inference="central")
