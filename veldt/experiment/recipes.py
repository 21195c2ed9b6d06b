"""Recipes: named settings that are known to work.

    config = recipes.make("dqn", env="CartPole-v1", seed=3)

Numbers for Atari are the papers'; those for small tasks were tuned here.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium as gym

from veldt import callables
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
)
from veldt.experiment.settings import override
from veldt.learning.learner import LearnerConfig
from veldt.machine import core_count, find_device, runs_processes

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


def dqn(env: str) -> Config:
    """DQN (Mnih et al. 2015) in one process. Atari: the numbers of the authors' code. MinAtar, small tasks: tuned here."""
    config = Config(recipe="dqn", env=env)
    if is_atari(env):
        return replace(
            # Without random actions an agent may never serve in Breakout, and the episode lasts for 27,000 steps.
            atari(config, protocol="dqn", epsilon=0.05),
            actors=1,
            threads=min(8, core_count()),
            algorithm=DQN(gamma=0.99, history=4, clip_reward=1.0),
            actor=ActorConfig(block=64, epsilon=1.0, epsilon_end=0.1, epsilon_steps=1_000_000),
            store=StoreConfig(capacity="1_000_000", min_size=50_000, samples_per_insert=8.0),
            # As in the authors' code: 0.01 is added to the variance of the gradient summed over the batch, where ours is a
            # mean; the target is copied every 10,000 agent steps (the text says updates), four of which make one update.
            learner=replace(RMSPROP, batch=32, lr=2.5e-4, eps=0.01 / 32**2, clip_norm=0.0, target_every=2_500),
            checkpoint=CheckpointConfig(every=250_000),
        )
    learner = LearnerConfig(target_every=250, anneal=True, prefetch=4)
    if is_minatar(env):
        return replace(
            config,
            steps=500_000,
            algorithm=DQN(n=3, double=True, dueling=True),
            actor=ActorConfig(block=16, epsilon_end=0.02, epsilon_steps=50_000),
            store=StoreConfig(capacity="100_000", selector="prioritized", min_size=5_000, samples_per_insert=16.0),
            learner=replace(learner, batch=32, lr=5e-4, target_every=500),
            eval=EvalConfig(every=25_000, episodes=20, max_length=10_000),
            checkpoint=CheckpointConfig(every=100_000),
        )
    return replace(
        config,
        steps=usual_steps(env),
        algorithm=DQN(n=3, double=True, normalize_obs=True),
        # Held random actions end episodes early; most must be whole, or what lies far from the start is forgotten.
        actor=ActorConfig(hold=32, epsilon_end=0.01),
        store=StoreConfig(capacity="100_000", samples_per_insert=16.0),
        learner=learner,
        eval=EvalConfig(max_length=10_000),
        checkpoint=CheckpointConfig(every=50_000),
    )


def apex_dqn_paper(env: str) -> Config:
    """Ape-X DQN with the paper's numbers for Atari, which were made for 360 actors and 22.8 billion frames."""
    config = apex_dqn(env)
    if not is_atari(env):
        return replace(config, recipe="apex-dqn-paper")
    return replace(
        config,
        recipe="apex-dqn-paper",
        protocol="apex",
        inference="local",
        actors=max(1, core_count() - 1),
        envs_per_actor=8,
        store=replace(config.store, capacity="2_000_000", min_size=50_000),
        learner=replace(RMSPROP, batch=512, lr=6.25e-5, eps=1.5e-7, target_every=2_500, publish_every=10, prefetch=2),
    )


def apex_dqn(env: str) -> Config:
    """Ape-X DQN (Horgan et al. 2018): many actors, one prioritized store, one learner. Atari: for one machine."""
    config = distributed("apex-dqn", "apex", env)
    if is_atari(env):
        gpu = find_device("auto") == "cuda"
        return replace(
            atari(config, protocol="apex:minimal", epsilon=0.001),
            actors=max(1, core_count() - (2 if gpu else 1)),  # with a GPU, inference takes a core too
            envs_per_actor=16,
            inference="central" if gpu else "local",
            algorithm=DQN(n=3, double=True, dueling=True, huber=False, history=4, clip_reward=1.0),
            actor=LadderConfig(refresh=100),  # 400 frames
            store=replace(
                PRIORITIZED,
                capacity="1_000_000",
                min_size=20_000,
                samples_per_insert=8.0,  # the paper's free-running learner samples an item 1.3 times, with 360 actors
                actors_wait=False,
            ),
            learner=LearnerConfig(
                batch=256, lr=2.5e-4, eps=1e-4, clip_norm=40.0, target_every=1_000, publish_every=10, prefetch=2
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
        steps=usual_steps(env),
        algorithm=DQN(n=3, double=True, normalize_obs=True),
        # With few environments the paper's ladder makes half of them nearly greedy; a flatter one learns faster.
        actor=LadderConfig(alpha=3.0, hold=32),
        store=replace(PRIORITIZED, capacity="100_000", min_size=1_000, samples_per_insert=16.0),
        learner=replace(learner, target_every=200),
        eval=replace(config.eval, every=10_000),
        checkpoint=CheckpointConfig(every=40_000),
    )


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
    return replace(
        config,
        steps=4_000_000 if small else 3 * usual_steps(env),
        algorithm=VTraceActorCritic(
            gamma=0.99 if small else 0.995,
            normalize=True,
            entropy_cost=0.02 if small else 0.003,
        ),
        store=replace(QUEUE, capacity=str(16 * 20)),
        learner=LearnerConfig(batch=8, lr=3e-3, anneal=True, clip_norm=1.0, publish_every=1),
        eval=replace(config.eval, every=200_000 if small else 30_000),
        checkpoint=CheckpointConfig(every=500_000 if small else 100_000),
    )


def seed_vtrace(env: str) -> Config:
    """SEED RL (Espeholt et al. 2020) with V-trace: impala, but one process computes the actions of all actors."""
    return replace(impala(env), recipe="seed-vtrace", inference="central")


GROUP = "veldt.recipes"  # of entry points
FUNCTIONS: tuple[Any, ...] = (dqn, apex_dqn, apex_dqn_paper, apex_dpg, impala, seed_vtrace, r2d2, r2d3)
RECIPES: dict[str, Callable[[str], Config]] = {recipe.__name__.replace("_", "-"): recipe for recipe in FUNCTIONS}


def installed() -> dict[str, EntryPoint]:
    """The recipes of other installed packages, by name: entry points of the group `veldt.recipes`. Nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in RECIPES}


def names() -> list[str]:
    return [*RECIPES, *installed()]


def find(recipe: str) -> Callable[[str], Config]:
    """The function of a recipe: of a name, or `module:function`, which is imported."""
    if recipe in RECIPES:
        return RECIPES[recipe]
    name = recipe if ":" in recipe else getattr(installed().get(recipe), "value", "")
    if not name:
        known = ", ".join(names())
        raise UserError(f"There is no recipe {recipe!r}.{did_you_mean(recipe, names()) or f' There are: {known}.'}")
    function = callables.find(name)
    if function is None:
        raise UserError(f"{recipe!r} is not a recipe: {name} is not a function from an environment to a Config.")
    return function


def make(recipe: str, env: str = "CartPole-v1", **overrides: Any) -> Config:
    """The config of a recipe, with overrides by dotted name: `make("dqn", "CartPole-v1", **{"learner.lr": 1e-4})`.

    `recipe` may be `module:function`, of a function as those of this module.
    """
    found = find(recipe)(env)
    if not isinstance(found, Config):
        raise UserError(f"The recipe {recipe!r} must return a Config, not a {type(found).__name__}.")
    if recipe not in RECIPES:
        found = replace(found, recipe=recipe, env=env)  # it is found again by this name
    config: Config = override(found, overrides)
    return config
