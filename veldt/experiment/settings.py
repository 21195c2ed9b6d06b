"""Settings: a config's fields by dotted name, rules between them, and which of them have no effect."""

import contextlib
import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from veldt import bounds
from veldt.envs import is_atari
from veldt.errors import UserError, did_you_mean
from veldt.experiment.config import Config
from veldt.experiment.listening import seconds
from veldt.machine import core_count

ACTORS_PER_CORE = 16


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config as dotted names and values."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out |= flat(value, f"{prefix}{field.name}.")
        else:
            out[f"{prefix}{field.name}"] = value
    return out


def as_plain(config: Any) -> dict[str, Any]:
    """A config as nested dicts of numbers, strings and lists, for YAML and JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def override(config: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """A copy of a (nested) dataclass with some fields replaced; names may be dotted, or values nested dicts."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    fields = {f.name: f for f in dataclasses.fields(config)}
    hints = get_type_hints(type(config))
    for name, value in values.items():
        head, _, tail = str(name).partition(".")
        if head not in fields:
            raise UserError(f"There is no setting {prefix}{head!r}.{did_you_mean(head, fields)}")
        if dataclasses.is_dataclass(getattr(config, head)):
            if not tail and not isinstance(value, dict):
                raise UserError(f"{prefix}{head} is a group of settings; name one of them, as in {prefix}{head}.x.")
            nested.setdefault(head, {}).update({tail: value} if tail else value)
        elif tail:
            raise UserError(f"{prefix}{head} is one setting; there is no {prefix}{name}.")
        else:
            flat[head] = _typed(f"{prefix}{head}", value, getattr(config, head))
            choices = get_args(hints[head]) if get_origin(hints[head]) is Literal else None
            if choices and flat[head] not in choices:
                raise UserError(f"{prefix}{head} must be one of {', '.join(choices)}, not {reprlib.repr(value)}.")
    for head, part in nested.items():
        flat[head] = override(getattr(config, head), part, f"{prefix}{head}.")
    return dataclasses.replace(config, **flat)


def _typed(name: str, value: Any, like: Any) -> Any:
    """The value converted to the type of the field's present one, if that loses nothing."""
    if isinstance(like, bool) or isinstance(value, bool):
        if isinstance(value, bool) and isinstance(like, bool):
            return value
    elif isinstance(like, float):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)  # YAML reads 5e-4 as a string
    elif isinstance(like, int) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        return int(value)
    elif isinstance(like, tuple) and isinstance(value, list | tuple):
        kinds = {type(part) for part in value}
        if kinds <= ({type(like[0])} if like else {str}) or (not like and kinds == {int}):  # an empty one may be of both
            return tuple(value)
    elif isinstance(like, str) and isinstance(value, str | int | Path):
        return str(value)
    raise UserError(f"{name} must be a {type(like).__name__}, not {reprlib.repr(value)}.")


def check(config: Config) -> None:
    bounds.check(config)
    for problem in _problems(config):
        raise UserError(problem)


def _problems(config: Config) -> Iterator[str]:
    """What is wrong with settings that are within their bounds, but do not go together."""
    gate, store = config.gate, config.store
    most, unrolls = ACTORS_PER_CORE * core_count(), config.topology == "impala" or _workers(config)
    if _workers(config):
        yield from _workers_problems(config)
    if config.topology == "single" and config.actors > 1:
        yield f"{config.recipe} has one actor, not {config.actors}; apex-dqn and impala have several."
    if config.runtime == "local" and config.own_actors > most:
        many = f"{config.own_actors} {'workers' if _workers(config) else 'actors'} are too many for {core_count()} cores"
        more = "" if _workers(config) else "; give each of them more environments with --envs-per-actor"
        yield f"{many}: at most {most}{more}."
    if config.topology == "evolution" and config.inference == "central":
        yield f"{config.recipe} gives each environment weights of its own: it has no --inference central."
    if config.topology == "evolution" and gate.listen:
        yield f"{config.recipe} has no actors that join from other machines yet: they would need the table of noise."
    if (gate.certificate or gate.key or gate.token_file) and not gate.listen:
        yield "gate.token_file, gate.certificate and gate.key need --gate.listen HOST:PORT."
    if bool(gate.certificate) != bool(gate.key):
        yield "TLS needs both gate.certificate and gate.key."
    if config.runtime == "inline" and (config.transport == "grpc" or gate.listen):
        yield "--transport grpc and --gate.listen need --runtime local: inline is a single process."
    if config.inference == "central" and config.envs_per_actor % config.central.groups:
        yield (
            f"{config.envs_per_actor} environments cannot be split into {config.central.groups} groups of equal size; "
            "change --envs-per-actor or --central.groups."
        )
    if store.selector == "fifo" and not unrolls:
        yield f"store.selector fifo is a queue of unrolls, as impala has; {config.recipe} has none."
    if store.selector in ("prioritized", "ranked") and unrolls:
        yield "impala has no priorities: use store.selector fifo or uniform."
    if store.selector == "fifo" and (store.samples_per_insert != 1 or store.slack or config.learner.prefetch != 1):
        yield (
            "A queue (store.selector fifo) gives each unroll once: it needs store.samples_per_insert 1, store.slack 0 "
            "and learner.prefetch 1."
        )
    if store.device not in ("auto", "cpu") and config.learner_device == "cpu":
        yield f"store.device {store.device} needs the learner on that GPU: --device {store.device}."
    if config.recipe == "r2d3" and not config.demos:
        yield "r2d3 needs demonstrations: give their directory with --demos; veldt record makes one."
    if config.demos and config.topology == "evolution":
        yield f"{config.recipe} learns from returns of whole episodes: it cannot learn from demonstrations."
    if config.demos and store.selector == "fifo":
        yield f"{config.recipe} uses each step once, from a queue: it cannot learn from demonstrations."
    if config.topology == "gorila" and (config.inference == "central" or config.transport == "grpc" or gate.listen):
        yield (
            f"{config.recipe} acts and learns in bundles on one host: it has no central inference, no gRPC and no actors "
            "that join; use apex-dqn for these."
        )
    if config.topology == "qt-opt":
        yield from _qt_opt_problems(config)
    if config.stop_after:
        seconds(config.stop_after)
    if config.stop_return < math.inf and not config.eval.every:
        yield "stop_return needs evaluations, but eval.every is 0."
    if config.protocol and not is_atari(config.env):
        yield f"protocol {config.protocol!r} is for Atari (ALE/...), not for {config.env}."


def _qt_opt_problems(config: Any) -> Iterator[str]:
    if config.inference == "central":
        yield f"{config.recipe} computes actions in each actor: use --inference local."
    if config.store.selector != "uniform":
        yield f"{config.recipe} labels what it draws uniformly: use --store.selector uniform."
    if config.offline_updates and not (config.demos and config.store.samples_per_insert):
        yield "offline_updates needs logged data (--demos DIRECTORY) and store.samples_per_insert above 0."
    oldest, every = config.labels.max_age, config.targets.publish_every
    if 0 < oldest < every:
        yield (
            f"labels.max_age ({oldest:,}) must be at least targets.publish_every ({every:,}), or 0: before the next "
            "publication all labels would be too old, and learning would stop."
        )
    held = 2 * config.own_actors * config.envs_per_actor * config.actor.block
    if config.offline_updates and config.steps < held:
        yield f"offline_updates needs steps of at least {held:,}: that many are taken before actors wait for the updates."


def _workers(config: Config) -> bool:
    """Whether its workers act and learn, and share their weights."""
    return config.topology == "workers"


def _workers_problems(config: Any) -> Iterator[str]:
    learner = config.learner
    if learner.optimizer == "adam":
        yield f"{config.recipe} has no shared Adam: use --learner.optimizer rmsprop or sgd."
    if learner.optimizer == "rmsprop" and learner.centered:
        yield f"{config.recipe} shares mean squares, and no means: RMSProp needs --no-learner.centered there."
    if config.inference == "central":
        yield f"{config.recipe} computes actions in each worker: use --inference local."
    odds = getattr(config.actor, "epsilon_odds", (1.0,))
    if len(odds) != len(getattr(config.actor, "epsilon_ends", (0,))) or abs(sum(odds) - 1) > 1e-6:
        yield "actor.epsilon_odds needs one probability for each of actor.epsilon_ends, and they must add up to 1."


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


def replays(config: Config) -> bool:
    """Whether it has a store."""
    return config.topology != "evolution"


SCOPES = (
    Scope(
        ("actors", "envs_per_actor", "device", "store.", "demos", "central.", "gate.", "queue", "transport")
        + tuple(f"learner.{x}" for x in ("batch", "target_every", "publish_every", "publish_lag", "bfloat16", "graph"))
        + ("learner.square_start", "actor.refresh", "checkpoint.store"),
        lambda c: not _workers(c),
        "a recipe with a store and one learner (this one has --workers, which share their weights)",
    ),
    Scope(("statistics",), lambda c: c.learner.optimizer == "rmsprop", "--learner.optimizer rmsprop"),
    Scope(("target_every",), lambda c: bool(c.algorithm.uses_target), "an algorithm with a target network"),
    Scope(("actors",), lambda c: c.topology != "single", "a recipe with several actors, such as apex-dqn"),
    Scope(("actors",), lambda c: c.topology != "gorila", "actors apart from learners; --bundles is the number of both"),
    Scope(
        ("transport", "gate."),
        lambda c: c.topology != "gorila",
        "actors apart from learners, as apex-dqn has",
    ),
    Scope(
        ("learner.publish_every", "learner.publish_lag", "learner.graph"),
        lambda c: c.topology != "gorila",
        "a learner that owns its weights (here servers do, which publish each update)",
    ),
    Scope(
        ("guard.against", "guard.warm_up"),
        lambda c: c.topology == "gorila" and flat(c)["guard.deviations"] > 0,
        "--guard.deviations above 0",
    ),
    Scope(("protocol",), lambda c: is_atari(c.env), "an Atari environment (ALE/...)"),
    Scope(
        ("env_kwargs", "wrappers", "image_size", "grayscale", "action_masks"),
        lambda c: not is_atari(c.env),
        "an environment that is not ALE/..., which runs in ale-py's C++ vector (see --protocol)",
    ),
    Scope(("step_timeout", "restart.", "memory."), lambda c: c.runtime == "local", "--runtime local"),
    Scope(("queue", "transport", "gate."), _separate, "--runtime local, and actors in processes of their own"),
    Scope(
        ("gate.seats", "gate.token_file", "gate.certificate", "gate.key"),
        lambda c: bool(c.gate.listen),
        "--gate.listen HOST:PORT",
    ),
    Scope(tuple(f"log.wandb_{x}" for x in ("project", "entity", "group", "tags")), lambda c: c.log.wandb, "--log.wandb"),
    Scope(("log.mlflow_uri", "log.mlflow_experiment"), lambda c: c.log.mlflow, "--log.mlflow"),
    Scope(("gate.compress",), lambda c: c.transport == "grpc", "--transport grpc"),
    Scope(("central.",), lambda c: c.inference == "central", "--inference central"),
    Scope(("actor.refresh",), lambda c: c.inference == "local", "--inference local"),
    Scope(("demos",), lambda c: c.store.selector != "fifo", "a replay store (this recipe has a queue)"),
    Scope(
        ("store.slack", "store.min_size", "store.samples_per_insert", "learner.prefetch", "learner.trim_every"),
        lambda c: c.store.selector != "fifo",
        "a replay store (this recipe has a queue)",
    ),
    Scope(("learner.trim_every",), lambda c: c.store.slack > 0, "--store.slack above 0"),
    Scope(("learner.target_every",), lambda c: bool(c.algorithm.uses_target), "an algorithm with a target network"),
    Scope(("demo_ratio",), lambda c: c.topology != "qt-opt", "a recipe other than qt-opt, which has --on-policy"),
    Scope(
        ("on_policy", "on_policy_end", "on_policy_steps", "offline_updates"), lambda c: bool(c.demos), "--demos DIRECTORY"
    ),
    Scope(("learner.graph",), lambda c: c.topology != "qt-opt", "a recipe other than qt-opt"),
    Scope(("demo_ratio",), lambda c: bool(c.demos) or c.recipe == "r2d3", "--demos DIRECTORY"),
    Scope(
        ("store.alpha", "store.beta", "store.beta_end", "store.first_priorities", "store.evict"),
        lambda c: c.store.selector in ("prioritized", "ranked"),
        "--store.selector prioritized or ranked",
    ),
    Scope(
        ("store.actors_wait",),
        lambda c: c.store.selector != "fifo" and c.store.samples_per_insert > 0,
        "a replay store with --store.samples-per-insert",
    ),
    Scope(
        ("learner.decay", "learner.centered"),
        lambda c: c.learner.optimizer == "rmsprop",
        "--learner.optimizer rmsprop",
    ),
    Scope(
        ("learner.square_start",),
        lambda c: c.learner.optimizer in ("rmsprop", "adagrad"),
        "--learner.optimizer rmsprop or adagrad",
    ),
    Scope(("learner.eps",), lambda c: c.learner.optimizer != "sgd", "--learner.optimizer adam, rmsprop or adagrad"),
    Scope(
        ("store.", "demos", "demo_ratio", "device", "central.", "gate.listen", "checkpoint.store", "algorithm.gamma"),
        replays,
        "a recipe with a store",
    ),
    Scope(("algorithm.clip_reward",), replays, "a recipe with a store"),
    Scope(("learner.sgd_momentum",), lambda c: c.learner.optimizer == "sgd", "--learner.optimizer sgd"),
    Scope(
        ("learner.cap_fraction", "learner.cap_growth"),
        lambda c: getattr(c.learner, "cap", 0) > 0,
        "a cap on the length of episodes (--learner.cap)",
    ),
    Scope(("learner.reference",), lambda c: getattr(c.algorithm, "batch_norm", False), "--algorithm.batch-norm"),
    Scope(("learner.observe",), lambda c: getattr(c.algorithm, "normalize_obs", False), "--algorithm.normalize-obs"),
    Scope(("algorithm.clip_last_reward",), lambda c: getattr(c.algorithm, "lstm", 0) > 0, "an LSTM (--algorithm.lstm)"),
    Scope(("algorithm.hidden",), lambda c: not _convolutional(c), "observations that are vectors (images have a CNN)"),
)


def without_effect(config: Config) -> dict[str, str]:
    """The settings that have no effect in this config, and what each of them needs."""
    idle = [scope for scope in SCOPES if not scope.effective(config)]
    return {name: scope.needs for name in flat(config) for scope in reversed(idle) if name in scope}


def refuse_without_effect(config: Config, recipe: Config) -> None:
    """Raises a UserError for a setting that has no effect, and was given another value than the recipe's."""
    values, usual = flat(config), flat(recipe)
    for name, needs in without_effect(config).items():
        if values[name] != usual[name]:
            raise UserError(f"{name} has no effect here: it needs {needs}.")
