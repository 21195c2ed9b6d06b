"""dqn, apex-dqn and apex-dqn-paper."""

from dataclasses import replace

from veldt.algorithms.dqn import DQN
from veldt.envs import is_atari
from veldt.experiment.config import CheckpointConfig, Config, EvalConfig, StoreConfig
from veldt.experiment.exploring import ActorConfig, LadderConfig
from veldt.experiment.recipes.common import PRIORITIZED, RMSPROP, atari, distributed, is_minatar, usual_steps
from veldt.learning.learner import LearnerConfig
from veldt.machine import core_count, find_device


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
