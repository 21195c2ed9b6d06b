"""gorila."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from veldt.bounds import above
from veldt.envs import is_atari
from veldt.experiment.config import Config
from veldt.experiment.recipes.q_learning import dqn
from veldt.learning.shards import GuardConfig
from veldt.machine import core_count, runs_processes


@dataclass(frozen=True)
class GorilaConfig(Config):
    bundles: Annotated[int, above(0)] = 2
    """Number of bundles of an actor, a learner and, with a local replay, a store: one process each."""
    shards: Annotated[int, above(0)] = 2
    """Number of parameter servers, each of which owns a slice of the weights: one process each."""
    replay: Literal["local", "global"] = "local"
    """local: each bundle has a store of this capacity, of what its own actor has seen; global: all share one."""
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def own_actors(self) -> int:
        return self.bundles


def gorila(env: str) -> GorilaConfig:
    """Gorila (Nair et al. 2015): DQN in bundles of actor, learner and replay, with parameter servers. Atari: the paper's
    numbers where they are known, but a bundle a core. Others: tuned here."""
    base = dqn(env)
    config = replace(
        GorilaConfig(**{f.name: getattr(base, f.name) for f in fields(base)}),
        recipe="gorila",
        topology="gorila",
        runtime="local" if runs_processes() else "inline",
        threads=1,
    )
    if is_atari(env):
        bundles = max(1, core_count() - 1)
        return replace(
            config,
            bundles=bundles,
            actor=replace(config.actor, epsilon_steps=4_000_000),  # a million updates, one every four steps
            store=replace(config.store, capacity=str(max(100_000, 1_000_000 // bundles))),
            learner=replace(config.learner, optimizer="adagrad", lr=0.01, eps=1e-5, target_every=60_000),
        )
    # Adam, as dqn here: with AdaGrad returns fell again after they had been at 500 (docs/results/gorila.md).
    return replace(
        config,
        steps=config.steps * 4 // 3,
        eval=replace(config.eval, every=max(10_000, config.eval.every), episodes=20),
    )
