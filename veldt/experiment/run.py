"""A run: training it, resuming it, and evaluating what it learned.

    run = veldt.train("dqn", env="CartPole-v1", steps=60_000)
    run.evaluate(20).mean_return

Its directory holds config.yaml, metrics.jsonl, TensorBoard events, log.txt and checkpoints/. Training in a directory that
has a checkpoint goes on from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from veldt import callables
from veldt.acting.evaluator import Evaluation, evaluate
from veldt.acting.policy import LocalPolicy
from veldt.bounds import above, at_least, between, check_value
from veldt.counters import Counters
from veldt.envs import EnvLike, make_env
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.config import Config
from veldt.experiment.directory import default_directory, load_config
from veldt.experiment.session import Session
from veldt.experiment.settings import check, override, refuse_without_effect
from veldt.learning import params
from veldt.learning.params import LatestParams
from veldt.records.step import EnvSpec
from veldt.seeds import derive
from veldt.watching.sinks import read_metrics


class Run:
    """A run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Config:
        if not (self.path / "config.yaml").exists():
            raise UserError(f"{self.path} is not a run directory: it has no config.yaml.")
        return load_config(self.path / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", self.config.checkpoint.keep)

    def policy(self, epsilon: float | None = None) -> LocalPolicy:
        """The greedy policy of the last weights; its fraction of random actions is eval.epsilon unless another is given."""
        config, weights = self.config, self.checkpoints().weights()
        if weights is None:
            raise UserError(f"{self.path} has no checkpoint yet; train it first.")
        env = config.env_spec()
        epsilon = config.eval.epsilon if epsilon is None else epsilon
        policy = LocalPolicy(config.algorithm, env, LatestParams(), Counters(), epsilon, seed=0)
        params.restore(policy.model.net, weights)
        return policy

    def evaluate(self, episodes: int = 20, seed: int = 0, epsilon: float | None = None, env: str = "") -> Evaluation:
        """Greedy episodes of the last weights; `epsilon` as in `policy`. `env` is another environment of the same kind."""
        check_value("episodes", episodes, above(0))
        check_value("seed", seed, at_least(0))
        if epsilon is not None:
            check_value("epsilon", epsilon, between(0, 1))
        config = self.config
        envs = make_env(env or config.env, min(episodes, 20), protocol=config.protocol)
        try:
            if env:
                self._check_same(envs.spec)
            found = evaluate(envs, self.policy(epsilon), episodes, derive(seed, "evaluation"), config.eval.max_length)
            assert found is not None
            return found
        finally:
            envs.close()

    def _check_same(self, env: EnvSpec) -> None:
        own = self.config.env_spec()
        if own.observation != env.observation or own.action_space != env.action_space:
            raise UserError(f"{env.name} has other observations or actions than {own.name}, which this run was trained on.")

    def weights_hash(self) -> str:
        """sha256 of the last weights, by name and value."""
        weights = self.checkpoints().weights()
        assert weights is not None, self.path
        digest = hashlib.sha256()
        for name, array in sorted(weights.items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()


def train(
    recipe: str | Config,
    env: EnvLike | None = None,
    run: str | Path | None = None,
    network: Callable[[EnvSpec], torch.nn.Module] | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Trains until `steps` env steps are done, and returns the run. If the directory has a checkpoint, goes on from it.

    Overrides are settings of the config by (dotted) name: steps=60_000, seed=1, **{"learner.lr": 5e-4}.
    """
    if env is not None and not isinstance(env, str) and not callable(env):
        raise UserError(
            f"env must be a name or a function that makes an environment, not a {type(env).__name__}; for example "
            "env=lambda: gym.make('CartPole-v1')."
        )
    if network is not None:
        overrides["algorithm.network_from"] = callables.name_of(network)
    name = callables.name_of(env) if callable(env) else env
    base = recipe if isinstance(recipe, Config) else recipes.make(recipe, name or "CartPole-v1")
    config = override(base, overrides | ({"env": name} if name else {}))
    if config.demos:  # absolute: the run may be resumed from another directory
        config = dataclasses.replace(config, demos=str(Path(config.demos).resolve()))
    check(config)
    refuse_without_effect(config, base)
    path = Path(run) if run else default_directory(config)
    Session(config, path, quiet).run()
    return Run(path)


def resume(run: str | Path, quiet: bool = False, **overrides: Any) -> Run:
    """Goes on with a run from its last checkpoint."""
    done = Run(run)
    config = override(done.config, overrides)
    check(config)
    Session(config, done.path, quiet).run()
    return done
