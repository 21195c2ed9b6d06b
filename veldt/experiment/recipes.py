"""Recipes: named settings that are known to work.

    config = recipes.make("dqn", env="CartPole-v1", seed=3)

Numbers for Atari are the papers'; those for small tasks were tuned here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from veldt.algorithms.dpg import DPG
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.envs import is_atari
from veldt.errors import UserError, did_you_mean
from veldt.experiment.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    GaussianConfig,
    LadderConfig,
    StoreConfig,
    UnrollConfig,
    override,
)
from veldt.learning.learner import LearnerConfig


def dqn(env: str) -> Config:
    """DQN (Mnih et al. 2015) in one process. Atari: the paper's numbers. MinAtar and small tasks: tuned here."""
    if is_atari(env):
        return Config(
            recipe="dqn",
            env=env,
            protocol="dqn",
            steps=50_000_000,
            threads=min(8, len(os.sched_getaffinity(0))),
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
            # Without random actions Breakout may never serve, and an episode lasts for 27,000 steps.
            eval=EvalConfig(every=250_000, episodes=10, epsilon=0.05),
            checkpoint=CheckpointConfig(every=250_000),
        )
    if env.startswith("MinAtar/"):
        return Config(
            recipe="dqn",
            env=env,
            steps=500_000,
            algorithm=DQN(n=3, double=True, dueling=True),
            actor=ActorConfig(block=16, epsilon_end=0.02, epsilon_steps=50_000),
            store=StoreConfig(capacity="100_000", selector="prioritized", min_size=5_000, samples_per_insert=16.0),
            learner=LearnerConfig(batch=32, lr=5e-4, anneal=True, target_every=500, prefetch=4),
            eval=EvalConfig(every=25_000, episodes=20, max_length=10_000),
            checkpoint=CheckpointConfig(every=100_000),
        )
    return Config(
        recipe="dqn",
        env=env,
        algorithm=DQN(n=3, double=True),
        learner=LearnerConfig(target_every=250, anneal=True, prefetch=4),
    )


def apex_dqn(env: str) -> Config:
    """Ape-X DQN (Horgan et al. 2018): many actors, one prioritized store, one learner. Atari: the paper's numbers."""
    if is_atari(env):
        return Config(
            recipe="apex-dqn",
            topology="apex",
            env=env,
            protocol="apex",
            steps=50_000_000,
            actors=max(1, len(os.sched_getaffinity(0)) - 1),
            runtime="local",
            algorithm=DQN(n=3, double=True, dueling=True, huber=False, history=4, clip_reward=1.0),
            actor=LadderConfig(refresh=100),  # 400 frames
            store=StoreConfig(
                capacity="2_000_000",
                slack=0.05,
                selector="prioritized",
                min_size=50_000,
                samples_per_insert=8.0,  # the paper's free-running learner draws an item 1.3 times, with 360 actors
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
            eval=EvalConfig(every=250_000, episodes=10, epsilon=0.001),
            checkpoint=CheckpointConfig(every=1_000_000),
        )
    image = env.startswith("MinAtar/")
    return Config(
        recipe="apex-dqn",
        topology="apex",
        env=env,
        steps=2_000_000 if image else 100_000,
        actors=2,
        runtime="local",
        algorithm=DQN(n=3 if image else 10, double=True, dueling=image),
        # Of few environments the paper's ladder makes half nearly greedy; a flatter one learns small tasks sooner.
        actor=LadderConfig() if image else LadderConfig(alpha=3.0),
        store=StoreConfig(
            capacity="100_000" if image else "20_000",
            slack=0.05,
            selector="prioritized",
            min_size=5_000 if image else 1_000,
            samples_per_insert=4.0,
        ),
        learner=LearnerConfig(
            lr=5e-4 if image else 3e-3,
            anneal=True,
            target_every=500 if image else 50,
            publish_every=10,
            prefetch=4,
        ),
        eval=EvalConfig(every=100_000 if image else 10_000, episodes=20, max_length=10_000),
        checkpoint=CheckpointConfig(every=200_000 if image else 40_000),
    )


def apex_dpg(env: str) -> Config:
    """Ape-X DPG (Horgan et al. 2018): continuous actions. MuJoCo: the paper's numbers, but 2 actors. Others: tuned here."""
    paper = "mujoco" in str(getattr(gym.registry.get(env), "entry_point", ""))
    return Config(
        recipe="apex-dpg",
        topology="apex",
        env=env,
        steps=1_000_000 if paper else 100_000,
        actors=2,
        runtime="local",
        algorithm=DPG(n=5) if paper else DPG(n=3, critic=(128, 128), actor=(64, 64)),
        actor=GaussianConfig(),
        store=StoreConfig(
            capacity="1_000_000" if paper else "100_000",
            slack=0.05,
            selector="prioritized",
            min_size=10_000 if paper else 2_000,
            samples_per_insert=128.0 if paper else 32.0,
        ),
        learner=LearnerConfig(
            batch=256,
            lr=1e-4 if paper else 1e-3,
            clip_norm=0.0,
            target_every=100,
            publish_every=10,
            prefetch=4,
        ),
        eval=EvalConfig(every=10_000, episodes=20, max_length=10_000),
        checkpoint=CheckpointConfig(every=100_000 if paper else 50_000),
    )


def impala(env: str) -> Config:
    """IMPALA (Espeholt et al. 2018): many actors, a queue, an actor-critic with V-trace. Atari: the paper's numbers."""
    if is_atari(env):
        return Config(
            recipe="impala",
            topology="impala",
            env=env,
            protocol="dqn",
            steps=50_000_000,
            actors=max(1, len(os.sched_getaffinity(0)) - 1),
            runtime="local",
            algorithm=VTraceActorCritic(history=4, clip_reward=1.0, entropy_cost=0.01, sum_losses=True),
            actor=UnrollConfig(),
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
            eval=EvalConfig(every=250_000, episodes=10, epsilon=1.0),  # drawn from the policy
            checkpoint=CheckpointConfig(every=1_000_000),
        )
    image = env.startswith("MinAtar/")
    return Config(
        recipe="impala",
        topology="impala",
        env=env,
        steps=4_000_000 if image else 300_000,
        actors=2,
        runtime="local",
        algorithm=VTraceActorCritic(normalize=True, entropy_cost=0.02 if image else 0.01),
        actor=UnrollConfig(),
        store=_queue(16 * 20),
        learner=LearnerConfig(batch=8, lr=3e-3, anneal=True, clip_norm=1.0, publish_every=1),
        eval=EvalConfig(every=200_000 if image else 30_000, episodes=20, max_length=10_000),
        checkpoint=CheckpointConfig(every=500_000 if image else 100_000),
    )


def seed_vtrace(env: str) -> Config:
    """SEED RL (Espeholt et al. 2020) with V-trace: impala, but one process computes the actions of all actors."""
    return dataclasses.replace(impala(env), recipe="seed-vtrace", inference="central")


def r2d2(env: str) -> Config:
    """R2D2 (Kapturowski et al. 2019): Ape-X with an LSTM, learned from sequences. Atari: the paper's numbers."""
    if is_atari(env):
        return Config(
            recipe="r2d2",
            topology="apex",
            env=env,
            protocol="r2d2",
            steps=50_000_000,
            actors=max(1, len(os.sched_getaffinity(0)) - 1),
            runtime="local",
            algorithm=R2D2(history=4),
            actor=LadderConfig(block=320, refresh=400),
            store=StoreConfig(
                capacity="4_000_000",
                slack=0.05,
                selector="prioritized",
                alpha=0.9,
                beta=0.6,
                min_size=5_000,
                samples_per_insert=0.8,
                actors_wait=False,
            ),
            learner=LearnerConfig(batch=64, lr=1e-4, eps=1e-3, clip_norm=40.0, target_every=2_500, publish_every=10),
            eval=EvalConfig(every=250_000, episodes=10, epsilon=0.001),
            checkpoint=CheckpointConfig(every=1_000_000),
        )
    image = env.startswith("MinAtar/")
    return Config(
        recipe="r2d2",
        topology="apex",
        env=env,
        steps=2_000_000 if image else 200_000,
        actors=2,
        runtime="local",
        algorithm=R2D2(
            gamma=0.99,
            n=3,
            burn_in=8,
            length=16,
            stride=8,
            lstm=128 if image else 64,
            head=128 if image else 64,
            hidden=(64,),
        ),
        actor=LadderConfig(block=64, alpha=3.0),
        store=StoreConfig(
            capacity="100_000",
            slack=0.05,
            selector="prioritized",
            alpha=0.9,
            beta=0.6,
            min_size=200,
            samples_per_insert=8.0,
        ),
        learner=LearnerConfig(
            batch=32, lr=1e-3, anneal=True, eps=1e-5, clip_norm=40.0, target_every=200, publish_every=5, prefetch=4
        ),
        eval=EvalConfig(every=20_000, episodes=20, max_length=10_000),
        checkpoint=CheckpointConfig(every=100_000),
    )


def r2d3(env: str) -> Config:
    """R2D3 (Gulcehre et al. 2020): r2d2 that learns from demonstrations too; give them with --demos."""
    config = r2d2(env)
    return dataclasses.replace(config, recipe="r2d3", demo_ratio=1 / 256 if is_atari(env) else 0.25)


def _queue(steps: int) -> StoreConfig:
    return StoreConfig(capacity=str(steps), selector="fifo", min_size=0, samples_per_insert=1.0)


RECIPES: dict[str, Callable[[str], Config]] = {
    "dqn": dqn,
    "apex-dqn": apex_dqn,
    "apex-dpg": apex_dpg,
    "impala": impala,
    "seed-vtrace": seed_vtrace,
    "r2d2": r2d2,
    "r2d3": r2d3,
}


def make(recipe: str, env: str = "CartPole-v1", **overrides: Any) -> Config:
    """The config of a recipe, with overrides by dotted name: `make("dqn", "CartPole-v1", **{"learner.lr": 1e-4})`."""
    if recipe not in RECIPES:
        known = ", ".join(RECIPES)
        raise UserError(f"There is no recipe {recipe!r}.{did_you_mean(recipe, RECIPES) or f' There are: {known}.'}")
    config: Config = override(RECIPES[recipe](env), overrides)
    return config
