"""qt-opt."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from veldt.acting.exploration import LinearDecay
from veldt.algorithms.qt_opt import QTOpt
from veldt.bounds import above, at_least, between
from veldt.counters import Counters
from veldt.experiment.config import CheckpointConfig, Config, StoreConfig
from veldt.experiment.exploring import GaussianConfig
from veldt.experiment.recipes.common import distributed, usual_steps
from veldt.learning.learner import LearnerConfig
from veldt.learning.targets import TargetsConfig
from veldt.records.block import Schema
from veldt.records.step import EnvSpec


@dataclass(frozen=True)
class LabelsConfig:
    """The store of labelled transitions."""

    batch: Annotated[int, above(0)] = 64
    """Transitions that an updater labels at a time."""
    capacity: str = "10_000"
    """Labels (10_000) or bytes (2GB)."""
    min_size: Annotated[int, at_least(0)] = 1_000
    """Labels that the store must hold before learning starts."""
    samples_per_label: Annotated[float, at_least(0)] = 8.0
    """How often a label is sampled on average; 0: updaters and learner do not wait for each other."""
    max_age: Annotated[int, at_least(0)] = 2_000
    """Labels are dropped when their target networks are more than this many updates old; 0: never."""


@dataclass(frozen=True)
class QTOptConfig(Config):
    updaters: Annotated[int, above(0)] = 1
    """Number of Bellman updaters, which label transitions: one process each."""
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    on_policy: Annotated[float, between(0, 1)] = 0.01
    """With --demos: fraction of the labelled transitions that are of the run's own steps, at the start."""
    on_policy_end: Annotated[float, between(0, 1)] = 0.5
    """With --demos: that fraction at the end of the ramp."""
    on_policy_steps: Annotated[int, at_least(0)] = 10_000
    """Env steps over which the fraction grows linearly."""
    offline_updates: Annotated[int, at_least(0)] = 0
    """Updates that are made from the demonstrations alone: until then actors wait."""

    def learner_schema(self, env: EnvSpec) -> Schema:
        schema: Schema = self.algorithm.labelled_schema(env, self.labels.batch)
        return schema

    def on_policy_fraction(self, counters: Counters) -> float:
        return LinearDecay(self.on_policy, self.on_policy_end, self.on_policy_steps)(counters.get("env_steps"))

    @property
    def sample_size(self) -> int:
        """Of all updaters, which sample at the same time."""
        return self.updaters * self.labels.batch

    @property
    def samples_per_step(self) -> float:
        return self.store.samples_per_insert * self.labels.samples_per_label


def qt_opt(env: str) -> QTOptConfig:
    """QT-Opt (Kalashnikov et al. 2018): continuous actions without a policy network: sampling finds the largest Q. Tuned
    here."""
    base = distributed("qt-opt", "qt-opt", env)
    known: dict[str, Any] = {f.name: getattr(base, f.name) for f in fields(base)}
    config = replace(
        QTOptConfig(**known),
        steps=usual_steps(env),
        actor=GaussianConfig(hold=8),
        eval=replace(base.eval, every=10_000),
        checkpoint=CheckpointConfig(every=50_000),
        store=StoreConfig(capacity="100_000", min_size=1_000, samples_per_insert=4.0),
        learner=LearnerConfig(batch=128, lr=1e-3, anneal=True, clip_norm=10.0, publish_every=10, prefetch=2),
        algorithm=QTOpt(gamma=0.99, n=3, normalize_obs=True),
        targets=TargetsConfig(average=0.98, lag=40),
    )
    name = env.rpartition(":")[2]
    if name.startswith("veldt/TwoGoals"):  # returns of 0 or 1
        return replace(config, steps=20_000, algorithm=QTOpt(gamma=0.9, objective="cross-entropy"))
    if name.startswith("veldt/Grasp"):
        return replace(
            config,
            steps=60_000,
            actor=GaussianConfig(sigma=0.2),
            store=StoreConfig(capacity="50_000", min_size=1_000, samples_per_insert=4.0),
            learner=replace(config.learner, batch=64, lr=5e-4),
            algorithm=QTOpt(gamma=0.9, objective="cross-entropy", binary=(2,), random=0.05),
            labels=LabelsConfig(capacity="2_000", min_size=500),
            targets=TargetsConfig(average=0.98, lag=40),
        )
    return config
