"""What recipes share: a start for Atari, MinAtar and small tasks, on which each family builds with `replace`."""

from __future__ import annotations

from dataclasses import replace

from veldt.experiment.config import CheckpointConfig, Config, EvalConfig
from veldt.machine import core_count


def is_minatar(env: str) -> bool:
    return env.startswith("MinAtar/")


def distributed(recipe: str, topology: str, env: str) -> Config:
    """Two actors in processes of their own."""
    evaluation = EvalConfig(episodes=20, max_length=10_000)
    return Config(recipe=recipe, topology=topology, env=env, actors=2, runtime="local", eval=evaluation)


def atari(config: Config, protocol: str, epsilon: float) -> Config:
    """200 million frames; one actor a core, but for the learner's."""
    return replace(
        config,
        protocol=protocol,
        steps=50_000_000,
        actors=max(1, core_count() - 1),
        eval=EvalConfig(every=250_000, episodes=10, epsilon=epsilon),
        checkpoint=CheckpointConfig(every=1_000_000),
    )
