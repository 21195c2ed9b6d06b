"""Ape-X: many actors, one prioritized store, one learner."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym

from veldt.algorithms.dpg import DPG
from veldt.algorithms.dqn import DQN
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config, StoreConfig
from veldt.experiment.exploration import GaussianConfig, LadderConfig
from veldt.experiment.recipes.base import atari, distributed, is_minatar
from veldt.learning.learner import LearnerConfig

PRIORITIZED = StoreConfig(slack=0.05, selector="prioritized")


def apex_dqn(env: str) -> Config:
    """Ape-X DQN (Horgan et al. 2018): many actors, one prioritized store, one learner. Atari: the paper's numbers."""
    config = distributed("apex-dqn", "apex", env)
    if is_atari(env):
        return replace(
            atari(config, protocol="apex", epsilon=0.001),
            algorithm=DQN(n=3, double=True, dueling=True, huber=False, history=4, clip_reward=1.0),
            actor=LadderConfig(refresh=100),  # 400 frames
            store=replace(
                PRIORITIZED,
                capacity="2_000_000",
                min_size=50_000,
                samples_per_insert=8.0,  # the paper's free-running learner samples an item 1.3 times, with 360 actors
                actors_wait=False,
            ),
            learner=LearnerConfig(
                batch=512,
                optimizer="rmsprop",
                lr=6.25e-5,
                eps=1.5e-7,
                decay=0.95,
                clip_norm=40.0,
                target_every=2_500,
                publish_every=10,
                prefetch=2,
            ),
        )
    learner = LearnerConfig(anneal=True, publish_every=10, prefetch=4)
    if is_minatar(env):
        return replace(
            config,
            steps=2_000_000,
            algorithm=DQN(n=3, double=True, dueling=True),
            actor=LadderConfig(),
            store=replace(PRIORITIZED, capacity="100_000", min_size=5_000, samples_per_insert=4.0),
            learner=replace(learner, lr=5e-4, target_every=500),
            eval=replace(config.eval, every=100_000),
            checkpoint=CheckpointConfig(every=200_000),
        )
    return replace(
        config,
        steps=100_000,
        algorithm=DQN(n=10, double=True),
        # With few environments the paper's ladder makes half of them nearly greedy; a flatter one learns faster.
        actor=LadderConfig(alpha=3.0),
        store=replace(PRIORITIZED, capacity="20_000", min_size=1_000, samples_per_insert=4.0),
        learner=replace(learner, lr=3e-3, target_every=50),
        eval=replace(config.eval, every=10_000),
        checkpoint=CheckpointConfig(every=40_000),
    )


def apex_dpg(env: str) -> Config:
    """Ape-X DPG (Horgan et al. 2018): continuous actions. MuJoCo: the paper's numbers, but 2 actors. Others: tuned here."""
    config = distributed("apex-dpg", "apex", env)
    config = replace(
        config,
        actor=GaussianConfig(),
        learner=LearnerConfig(batch=256, clip_norm=0.0, target_every=100, publish_every=10, prefetch=4),
        eval=replace(config.eval, every=10_000),
    )
    if "mujoco" in str(getattr(gym.registry.get(env), "entry_point", "")):
        return replace(
            config,
            steps=1_000_000,
            algorithm=DPG(n=5),
            store=replace(PRIORITIZED, capacity="1_000_000", min_size=10_000, samples_per_insert=128.0),
            learner=replace(config.learner, lr=1e-4),
            checkpoint=CheckpointConfig(every=100_000),
        )
    return replace(
        config,
        steps=100_000,
        algorithm=DPG(n=3, critic=(128, 128), actor=(64, 64)),
        store=replace(PRIORITIZED, capacity="100_000", min_size=2_000, samples_per_insert=32.0),
        learner=replace(config.learner, lr=1e-3),
        checkpoint=CheckpointConfig(every=50_000),
    )
