"""What is printed before training: the environment, the network, the store, the rates, the RAM."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from veldt.envs.atari import find_protocol
from veldt.experiment.config import Config
from veldt.experiment.ram import RamPlan
from veldt.machine import format_bytes
from veldt.records.step import EnvSpec


def introduction(config: Config, env: EnvSpec, net: nn.Module, ram: RamPlan, path: Path) -> list[str]:
    """The lines."""
    seen = ", ".join(f"{name} {list(c.shape)} {c.dtype}" for name, c in env.observation.items())
    lines = [
        f"{config.recipe} on {config.env}: {seen}; actions {env.action_space}",
        _network(config, env, net),
        f"algorithm: {_settings(config.algorithm)}",
    ]
    if config.protocol:
        lines.append(f"protocol {config.protocol}: {_settings(find_protocol(config.protocol))}")
    if ram.store.slots:
        each = format_bytes(ram.store.nbytes / ram.store.slots / config.schema(env).starts)
        lines.append(
            f"store: {ram.store.capacity:,} items of {each}, {format_bytes(ram.store.nbytes)} when full "
            f"({config.store.selector}); {_rate(config)}"
        )
    learner = config.learner
    actors = f"{config.actors} actors with {config.envs_per_actor}" if config.actors > 1 else str(config.envs_per_actor)
    return [
        *lines,
        f"acting: {actors} environments{_inference(config)}, {config.actor}; "
        f"learning: {learner.optimizer}, rate {learner.lr:g}{' to 0' if learner.anneal else ''}",
        f"memory: about {format_bytes(ram.total)} of RAM in all when the store is full",
        f"run: {path}  ({config.steps:,} env steps, seed {config.seed})",
    ]


def _network(config: Config, env: EnvSpec, net: nn.Module) -> str:
    history = config.algorithm.window.history
    keys = getattr(config.algorithm, "stacked", ()) or [name.removeprefix("obs/") for name in env.observation]
    stacking = f"; stacks {history} of {', '.join(keys)}" if history > 1 else ""
    name = type(getattr(net, "torso", net)).__name__
    return f"network: {name}, {count_parameters(net):,} parameters on {config.device}{stacking}"


def count_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def _inference(config: Config) -> str:
    """Where actions are computed, if not by the actors."""
    central = config.central
    if config.inference == "local":
        return ""
    most = f", at most {central.batch} at once" if central.batch else ""
    return f" in {central.groups} groups (one process acts for all, on {central.device or config.device}{most})"


def _rate(config: Config) -> str:
    store, batch = config.store, config.learner.batch
    if store.selector == "fifo":
        return f"each used once, in updates of {batch}"
    if not store.samples_per_insert:
        return f"updates of {batch} without a limit"
    most = "" if store.actors_wait else "at most "
    rate = store.samples_per_insert / batch / config.algorithm.window.stride
    return f"{most}{rate:.3g} updates of {batch} an env step"


def _settings(thing: Any) -> str:
    """The fields of a dataclass that are on."""
    parts = {name: x for name, x in dataclasses.asdict(thing).items() if x is not False and x not in ("", (), "auto")}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in parts.items())
