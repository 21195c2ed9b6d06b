"""Veldt: the lineage of distributed off-policy deep reinforcement learning, from one laptop to a cluster.

run = veldt.train("dqn", env="CartPole-v1", steps=60_000)
run.evaluate(20).mean_return
policy = veldt.load(run.path)
action, state = policy(obs, state)
"""

from typing import TYPE_CHECKING, Any

from veldt import writable

writable.provide()
__version__ = "0.1.0"
__all__ = [
    "Config",
    "EnvSpec",
    "Run",
    "Stop",
    "TrainedPolicy",
    "UserError",
    "load",
    "make_env",
    "recipe",
    "resume",
    "train",
]

if TYPE_CHECKING:
    from veldt.acting.trained import TrainedPolicy
    from veldt.envs import make_env
    from veldt.errors import UserError
    from veldt.experiment.config import Config
    from veldt.experiment.listening import Stop
    from veldt.experiment.recipes import make as recipe
    from veldt.experiment.run import Run, load, resume, train
    from veldt.records.step import EnvSpec

_HOME = {
    "Config": "veldt.experiment.config:Config",
    "EnvSpec": "veldt.records.step:EnvSpec",
    "Run": "veldt.experiment.run:Run",
    "Stop": "veldt.experiment.listening:Stop",
    "TrainedPolicy": "veldt.acting.trained:TrainedPolicy",
    "UserError": "veldt.errors:UserError",
    "load": "veldt.experiment.run:load",
    "make_env": "veldt.envs:make_env",
    "recipe": "veldt.experiment.recipes:make",
    "resume": "veldt.experiment.run:resume",
    "train": "veldt.experiment.run:train",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: a process that needs no torch does not load it."""
    if name not in _HOME:
        raise AttributeError(f"module 'veldt' has no attribute {name!r}")
    import importlib

    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
