"""What recipes share: their stores and optimizers, how long a run is, and which environments are alike."""

from dataclasses import replace

import gymnasium as gym

from veldt.experiment.config import CheckpointConfig, Config, EvalConfig, StoreConfig
from veldt.learning.learner import LearnerConfig
from veldt.machine import core_count, runs_processes

PRIORITIZED = StoreConfig(slack=0.05, selector="prioritized")
SEQUENCES = replace(PRIORITIZED, alpha=0.9, beta=0.6)
QUEUE = StoreConfig(selector="fifo", min_size=0, samples_per_insert=1.0)
RMSPROP = LearnerConfig(optimizer="rmsprop", decay=0.95, clip_norm=40.0)


def is_minatar(env: str) -> bool:
    return env.rpartition(":")[2].startswith("MinAtar/")


def usual_steps(env: str) -> int:
    """300 of the environment's longest episodes, but 100,000 to 500,000 steps; 300,000 if it has no limit that we know."""
    longest = getattr(gym.registry.get(env), "max_episode_steps", None) or 1_000
    return min(max(300 * longest, 100_000), 500_000)


def distributed(recipe: str, topology: str, env: str) -> Config:
    """Two actors in processes of their own."""
    evaluation = EvalConfig(episodes=20, max_length=10_000)
    return Config(
        recipe=recipe,
        topology=topology,
        env=env,
        actors=2,
        runtime="local" if runs_processes() else "inline",
        eval=evaluation,
    )


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
