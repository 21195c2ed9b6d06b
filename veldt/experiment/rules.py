"""What a config must fulfil, beyond the bounds of single numbers: rules between settings, and settings without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from veldt import bounds
from veldt.envs import is_atari
from veldt.errors import UserError
from veldt.experiment.config import Config
from veldt.experiment.settings import flat
from veldt.machine import core_count

ACTORS_PER_CORE = 16


def check(config: Config) -> None:
    """Raises a UserError for settings that cannot work."""
    bounds.check(config)
    for rule in (_check_actors, _check_gate, _check_groups, _check_selector, _check_demos, _check_protocol):
        rule(config)


def _check_actors(config: Config) -> None:
    if config.topology == "single" and config.actors > 1:
        raise UserError(f"{config.recipe} has one actor, not {config.actors}; apex-dqn and impala have several.")
    most = ACTORS_PER_CORE * core_count()
    if config.runtime == "local" and config.actors > most:
        raise UserError(
            f"{config.actors} actors are too many for {core_count()} cores: at most {most}; give each of them more "
            "environments with --envs-per-actor."
        )


def _check_gate(config: Config) -> None:
    gate = config.gate
    if (gate.certificate or gate.key or gate.token_file) and not gate.listen:
        raise UserError("gate.token_file, gate.certificate and gate.key need --gate.listen HOST:PORT.")
    if bool(gate.certificate) != bool(gate.key):
        raise UserError("TLS needs both gate.certificate and gate.key.")
    if config.runtime == "inline" and (config.transport == "grpc" or gate.listen):
        raise UserError("--transport grpc and --gate.listen need --runtime local: inline is a single process.")


def _check_groups(config: Config) -> None:
    if config.inference == "central" and config.envs_per_actor % config.central.groups:
        raise UserError(
            f"{config.envs_per_actor} environments cannot be split into {config.central.groups} groups of equal size; "
            "change --envs-per-actor or --central.groups."
        )


def _check_selector(config: Config) -> None:
    store, unrolls = config.store, config.topology == "impala"
    if store.selector == "fifo" and not unrolls:
        raise UserError(f"store.selector fifo is a queue of unrolls, as impala has; {config.recipe} has none.")
    if store.selector == "prioritized" and unrolls:
        raise UserError("impala has no priorities: use store.selector fifo or uniform.")
    if store.selector == "fifo" and (store.samples_per_insert != 1 or store.slack or config.learner.prefetch != 1):
        raise UserError(
            "A queue (store.selector fifo) gives each unroll once: it needs store.samples_per_insert 1, store.slack 0 "
            "and learner.prefetch 1."
        )


def _check_demos(config: Config) -> None:
    if config.recipe == "r2d3" and not config.demos:
        raise UserError("r2d3 needs demonstrations: give their directory with --demos; veldt record makes one.")
    if config.demos and config.store.selector == "fifo":
        raise UserError(f"{config.recipe} uses each step once, from a queue: it cannot learn from demonstrations.")


def _check_protocol(config: Config) -> None:
    if config.protocol and not is_atari(config.env):
        raise UserError(f"protocol {config.protocol!r} is for Atari (ALE/...), not for {config.env}.")


class Scope(NamedTuple):
    """Settings that have an effect only in some configs."""

    names: tuple[str, ...]  # dotted; a group ends in a dot
    effective: Callable[[Config], bool]
    needs: str  # completes `it needs ...`

    def __contains__(self, name: object) -> bool:
        return any(name == own or (own.endswith(".") and str(name).startswith(own)) for own in self.names)


def _separate(config: Config) -> bool:
    """Whether actors have processes of their own."""
    return config.runtime == "local" and (config.topology != "single" or config.inference == "central")


def _convolutional(config: Config) -> bool:
    """Whether the environment's name says that it has images, and the network's class follows from that."""
    named = flat(config).get("algorithm.convnet", "auto")
    return (is_atari(config.env) or config.env.startswith("MinAtar/")) and named != "mlp"


SCOPES = (
    Scope(("actors",), lambda c: c.topology != "single", "a recipe with several actors, such as apex-dqn"),
    Scope(("protocol",), lambda c: is_atari(c.env), "an Atari environment (ALE/...)"),
    Scope(("step_timeout",), lambda c: c.runtime == "local", "--runtime local"),
    Scope(("queue", "transport", "gate."), _separate, "--runtime local, and actors in processes of their own"),
    Scope(
        ("gate.seats", "gate.token_file", "gate.certificate", "gate.key"),
        lambda c: bool(c.gate.listen),
        "--gate.listen HOST:PORT",
    ),
    Scope(("gate.compress",), lambda c: c.transport == "grpc", "--transport grpc"),
    Scope(("central.",), lambda c: c.inference == "central", "--inference central"),
    Scope(("actor.refresh",), lambda c: c.inference == "local", "--inference local"),
    Scope(("demos",), lambda c: c.store.selector != "fifo", "a replay store (this recipe has a queue)"),
    Scope(("demo_ratio",), lambda c: bool(c.demos) or c.recipe == "r2d3", "--demos DIRECTORY"),
    Scope(
        ("store.alpha", "store.beta", "store.first_priorities"),
        lambda c: c.store.selector == "prioritized",
        "--store.selector prioritized",
    ),
    Scope(
        ("store.actors_wait",),
        lambda c: c.store.selector != "fifo" and c.store.samples_per_insert > 0,
        "a replay store with --store.samples-per-insert",
    ),
    Scope(
        ("learner.decay", "learner.momentum", "learner.centered"),
        lambda c: c.learner.optimizer == "rmsprop",
        "--learner.optimizer rmsprop",
    ),
    Scope(("learner.eps",), lambda c: c.learner.optimizer != "sgd", "--learner.optimizer adam or rmsprop"),
    Scope(("algorithm.hidden",), lambda c: not _convolutional(c), "observations that are vectors (images have a CNN)"),
)


def without_effect(config: Config) -> dict[str, str]:
    """The settings that have no effect in this config, and what each of them needs."""
    idle = [scope for scope in SCOPES if not scope.effective(config)]
    return {name: scope.needs for name in flat(config) for scope in reversed(idle) if name in scope}


def refuse_without_effect(config: Config, recipe: Config) -> None:
    """Raises a UserError for a setting that was given and has no effect: it is neither the recipe's nor the default."""
    values, usual, default = flat(config), flat(recipe), flat(defaults(config))
    for name, needs in without_effect(config).items():
        if values[name] not in (usual.get(name), default[name]):
            raise UserError(f"{name} has no effect here: it needs {needs}.")


def defaults(config: Any) -> Any:
    """A config of the same classes in which every setting has its class's default."""
    parts = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return type(config)(**{name: defaults(part) for name, part in parts.items() if dataclasses.is_dataclass(part)})
