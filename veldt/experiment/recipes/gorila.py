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
    """local: each bundle has a store and learns from what its own actor has seen; global: all share one store."""
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def own_actors(self) -> int:
        return self.bundles


def gorila(env: str) -> GorilaConfig:
    """Gorila (Nair et al. 2015): bundles of actor, learner and replay; parameter servers. Atari: the paper's numbers."""
    base = dqn(env)
    config = GorilaConfig(**{f.name: getattr(base, f.name) for f in fields(base)})
    bundles = max(1, core_count() - 1) if is_atari(env) else 2
    return replace(
        config,
        recipe="gorila",
        topology="gorila",
        runtime="local" if runs_processes() else "inline",
        bundles=bundles,
        actors=1,
        threads=1,
        learner=replace(config.learner, optimizer="adagrad", lr=0.02, eps=1e-5),
    )
