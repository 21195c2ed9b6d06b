"""es."""

from dataclasses import replace

import gymnasium as gym

from veldt.algorithms.es import ES
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config
from veldt.experiment.exploring import EpisodesConfig
from veldt.experiment.recipes.common import atari, distributed, is_minatar
from veldt.learning.evolution import EvolutionConfig


def es(env: str) -> Config:
    """Evolution Strategies (Salimans et al. 2017): no gradients, only returns. Generations are smaller than the paper's."""
    config = replace(distributed("es", "evolution", env), actor=EpisodesConfig(), envs_per_actor=16)
    if is_atari(env):
        return replace(
            atari(config, protocol="dqn", epsilon=0.0),
            steps=250_000_000,
            algorithm=ES(history=4, batch_norm=True),
            envs_per_actor=4,
            learner=EvolutionConfig(pairs=256, sigma=0.02, lr=0.01, table=64_000_000, noiseless=0.003),
        )
    if "mujoco" in str(getattr(gym.registry.get(env), "entry_point", "")):
        return replace(
            config,
            steps=10_000_000,
            algorithm=ES(hidden=(256, 256), normalize_obs=True),
            envs_per_actor=8,
            actor=EpisodesConfig(noise=0.01),
            learner=EvolutionConfig(pairs=64, sigma=0.02, lr=0.01, table=25_000_000, noiseless=0.003, observe=0.1),
            eval=replace(config.eval, every=200_000),
            checkpoint=CheckpointConfig(every=500_000),
        )
    if is_minatar(env):
        return replace(
            config,
            steps=20_000_000,
            algorithm=ES(batch_norm=True),
            envs_per_actor=4,
            learner=EvolutionConfig(pairs=64, sigma=0.05, lr=0.02),
            eval=replace(config.eval, every=200_000),
            checkpoint=CheckpointConfig(every=500_000),
        )
    return replace(
        config,
        steps=3_000_000,
        algorithm=ES(normalize_obs=True),
        envs_per_actor=8,
        # Many small generations with large steps: with smaller ones Pendulum stays where it never learns to swing up.
        learner=EvolutionConfig(pairs=8, sigma=0.5, lr=0.4, anneal=True, weight_decay=0.0),
        eval=replace(config.eval, every=100_000),
        checkpoint=CheckpointConfig(every=250_000),
    )
