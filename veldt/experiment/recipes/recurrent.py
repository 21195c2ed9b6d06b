"""r2d2 and r2d3."""

from dataclasses import replace

from veldt.algorithms.r2d2 import R2D2
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config
from veldt.experiment.exploring import LadderConfig
from veldt.experiment.recipes.common import PRIORITIZED, SEQUENCES, atari, distributed, is_minatar, usual_steps
from veldt.learning.learner import LearnerConfig


def r2d2(env: str) -> Config:
    """R2D2 (Kapturowski et al. 2019): Ape-X with an LSTM, learned from sequences. Atari: the paper's numbers."""
    config = distributed("r2d2", "apex", env)
    if is_atari(env):
        return replace(
            atari(config, protocol="r2d2", epsilon=0.001),
            algorithm=R2D2(history=4),
            actor=LadderConfig(block=320, refresh=400),
            store=replace(SEQUENCES, capacity="4_000_000", min_size=5_000, samples_per_insert=0.8, actors_wait=False),
            learner=LearnerConfig(batch=64, lr=1e-4, eps=1e-3, clip_norm=40.0, target_every=2_500, publish_every=10),
        )
    learner = LearnerConfig(anneal=True, eps=1e-5, clip_norm=40.0, publish_every=5, prefetch=4)
    if is_minatar(env):
        return replace(
            config,
            steps=2_000_000,
            algorithm=R2D2(gamma=0.99, n=3, burn_in=8, length=16, stride=8, lstm=128, head=128),
            actor=LadderConfig(block=64, alpha=3.0),
            store=replace(SEQUENCES, capacity="100_000", min_size=200, samples_per_insert=8.0),
            learner=replace(learner, batch=32, lr=1e-3, target_every=200),
            eval=replace(config.eval, every=20_000),
            checkpoint=CheckpointConfig(every=100_000),
        )
    return replace(
        config,
        steps=usual_steps(env),
        # Without rescaling: where many rewards add up, h hides how little one action is better than another.
        algorithm=R2D2(
            gamma=0.99,
            n=3,
            burn_in=8,
            length=16,
            stride=8,
            lstm=64,
            head=64,
            hidden=(64,),
            rescaling=False,
            normalize_obs=True,
        ),
        actor=LadderConfig(block=64, alpha=3.0, hold=32),
        store=replace(PRIORITIZED, capacity="100_000", min_size=200, samples_per_insert=32.0),
        learner=replace(learner, batch=16, lr=5e-4, target_every=400),
        eval=replace(config.eval, every=20_000),
        checkpoint=CheckpointConfig(every=50_000),
    )


def r2d3(env: str) -> Config:
    """R2D3 (Gulcehre et al. 2020): r2d2 that also learns from demonstrations (--demos)."""
    config = replace(r2d2(env), recipe="r2d3", demo_ratio=0.25)
    if is_atari(env):  # the paper has no Atari; these are its numbers for Hard-Eight, where they are known
        algorithm = replace(config.algorithm, burn_in=40, length=40, stride=40, stored_state=False)
        return replace(config, demo_ratio=1 / 256, algorithm=algorithm)
    return config
