"""apex-dpg."""

from dataclasses import replace

import gymnasium as gym

from veldt.algorithms.dpg import DPG
from veldt.experiment.config import CheckpointConfig, Config
from veldt.experiment.exploring import GaussianConfig
from veldt.experiment.recipes.common import PRIORITIZED, distributed, usual_steps
from veldt.learning.learner import LearnerConfig


def apex_dpg(env: str) -> Config:
    """Ape-X DPG (Horgan et al. 2018): continuous actions. MuJoCo: the paper's numbers, but 2 actors. Others: tuned here."""
    config = distributed("apex-dpg", "apex", env)
    config = replace(config, actor=GaussianConfig(), eval=replace(config.eval, every=10_000))
    learner = LearnerConfig(batch=256, clip_norm=0.0, target_every=100, publish_every=10, prefetch=4)
    if "mujoco" in str(getattr(gym.registry.get(env), "entry_point", "")):
        return replace(
            config,
            steps=1_000_000,
            algorithm=DPG(n=5),
            store=replace(PRIORITIZED, capacity="1_000_000", min_size=10_000, samples_per_insert=128.0),
            learner=replace(learner, lr=1e-4),
            checkpoint=CheckpointConfig(every=100_000),
        )
    return replace(
        config,
        steps=usual_steps(env),
        algorithm=DPG(n=3, critic=(128, 128), actor=(64, 64), invert_gradients=True, twin=True, normalize_obs=True),
        actor=GaussianConfig(hold=8),
        store=replace(PRIORITIZED, capacity="100_000", min_size=2_000, samples_per_insert=32.0),
        learner=replace(learner, lr=1e-3, anneal=True),
        checkpoint=CheckpointConfig(every=50_000),
    )
