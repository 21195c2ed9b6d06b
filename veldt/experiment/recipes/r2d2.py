"""R2D2: Ape-X with recurrent networks and sequences; R2D3: the same with demonstrations."""

from __future__ import annotations

from dataclasses import replace

from veldt.algorithms.r2d2 import R2D2
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config, StoreConfig
from veldt.experiment.exploration import LadderConfig
from veldt.experiment.recipes.base import atari, distributed, is_minatar
from veldt.learning.learner import LearnerConfig

SEQUENCES = StoreConfig(slack=0.05, selector="prioritized", alpha=0.9, beta=0.6)


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
    small, units = is_minatar(env), 128 if is_minatar(env) else 64
    return replace(
        config,
        steps=2_000_000 if small else 200_000,
        algorithm=R2D2(gamma=0.99, n=3, burn_in=8, length=16, stride=8, lstm=units, head=units, hidden=(64,)),
        actor=LadderConfig(block=64, alpha=3.0),
        store=replace(SEQUENCES, capacity="100_000", min_size=200, samples_per_insert=8.0),
        learner=LearnerConfig(
            batch=32, lr=1e-3, anneal=True, eps=1e-5, clip_norm=40.0, target_every=200, publish_every=5, prefetch=4
        ),
        eval=replace(config.eval, every=20_000),
        checkpoint=CheckpointConfig(every=100_000),
    )


def r2d3(env: str) -> Config:
    """R2D3 (Gulcehre et al. 2020): r2d2 that also learns from demonstrations; give them with --demos."""
    return replace(r2d2(env), recipe="r2d3", demo_ratio=1 / 256 if is_atari(env) else 0.25)
