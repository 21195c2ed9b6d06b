"""An actor that the run did not start: it joins from anywhere, takes a free seat, and may leave at any time.

The run sends what to build as JSON (`assign`): names and numbers, never code. `parse` makes an `Assignment` of it, and
nothing else of what the run sent is used. What would be imported by name has to be allowed on the actor's command line.
With central inference an actor loads neither torch nor numba.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from veldt import bounds, callables
from veldt.counters import Counters
from veldt.env_kwargs import words_of_text
from veldt.errors import EnvError, UserError
from veldt.ports import ports_of
from veldt.program import INCARNATION, Given, Program
from veldt.records.checks import ActionCheck
from veldt.records.step import EnvSpec
from veldt.records.tree import Tree
from veldt.runtime.base import Host
from veldt.runtime.grpc.connection import LinkLost, read_token
from veldt.runtime.grpc.link import Link
from veldt.runtime.local.plan import Limits, Messages, messages_of
from veldt.runtime.proxies import Proxy

METRICS_S = 0.25
WAIT_S = 0.05
MAX_ENVS = 4096  # that a run may ask of one actor
MAX_SIZE = 8192  # of a layer, a window or a block
# What an actor with local inference builds depends on these settings; it is sent no others.
SEEN = ("env_kwargs", "wrappers", "image_size", "grayscale", "frame_skip", "action_masks")  # how environments are seen
SENT = ("recipe", "env", *SEEN, "protocol", "clip_observations", "seed", "actors", "envs_per_actor", "algorithm", "actor")


def assign(config: Any, i: int) -> dict[str, Any]:
    """What the i-th actor of all is sent."""
    from veldt.experiment.settings import as_plain

    sent, plain = {"index": i, "inference": config.inference}, as_plain(config)
    if config.inference == "local":
        store = {"first_priorities": config.store.first_priorities}
        return sent | {"settings": {name: plain[name] for name in SENT} | {"store": store}}
    n = config.envs_per_actor // config.central.groups
    named = {"env": config.env, "protocol": config.protocol, "clip": config.clip_observations, "seed": config.seed}
    named |= {name: plain[name] for name in SEEN} | {"combine": config.algorithm.one_choice}
    return sent | named | {"n": n, "groups": _groups(config, i)}


def _groups(config: Any, i: int) -> list[int]:
    return list(range(i * config.central.groups, (i + 1) * config.central.groups))


def limits(config: Any, i: int) -> Limits:
    """What the i-th actor of all may claim: its groups, and by how many steps it may be ahead of its blocks."""
    window = config.algorithm.window
    fresh = config.actor.block or window.stride
    ahead = config.envs_per_actor * (window.block_rows(fresh) + 2 * fresh + 2)
    return Limits(tuple(_groups(config, i)) if config.inference == "central" else (), ahead)


def make_token(path: Path) -> str:
    """The run's secret: what is in the file, or a new one, which nobody else can read."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UserError(f"The token file {path} cannot be written ({error.strerror}).") from None
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_token(path)


def read_certificate(path: str | Path | None) -> bytes:
    """Empty where no file is named."""
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


# What the run asks for.


@dataclass(frozen=True)
class Assignment:
    """What to build, after all checks."""

    index: int
    env: str
    imports: frozenset[str]  # module:callable, as allowed on the command line
    config: Any = None  # with local inference: a Config
    options: dict[str, Any] = field(default_factory=dict)  # of make_env; these four: with central inference
    n: int = 0
    groups: tuple[int, ...] = ()
    seed: int = 0


def parse(
    sent: Any, env: str = "", network: str = "", wrappers: Collection[str] = (), kwargs: Collection[str] = ()
) -> Assignment:
    """`env`, `network` and `wrappers`: what may be imported; `kwargs`: texts that the environment may get, beside numbers.
    Raises a UserError for anything that this actor should not build."""
    sent = sent if isinstance(sent, dict) else {}
    index, allowed = _integer(sent, "index", 0, 1 << 20), frozenset((env, network, *wrappers)) - {""}
    if sent.get("inference") == "local":
        config = _config(sent.get("settings"))
        made_by = getattr(config.algorithm, "network_from", "")
        _check_import(config.env, env, "--env")
        _check_made(config.env_kwargs, config.wrappers, wrappers, kwargs)
        if made_by:
            _check_import(made_by, network, "--network", always=True)
        return Assignment(index, config.env, allowed, config)
    if sent.get("inference") != "central":
        raise _invalid("inference")
    name, protocol, groups = _word(sent, "env"), _word(sent, "protocol"), sent.get("groups")
    _check_import(name, env, "--env")
    arguments, around = _words(sent, "env_kwargs"), _words(sent, "wrappers")
    _check_made(arguments, around, wrappers, kwargs)
    n = _integer(sent, "n", 1, MAX_ENVS)
    if not isinstance(groups, list) or not 0 < len(groups) <= MAX_ENVS // n:
        raise _invalid("groups")
    numbers = tuple(_integer({"groups": group}, "groups", 0, 1 << 32) for group in groups)
    if len(set(numbers)) < len(numbers):
        raise _invalid("groups")
    seed = _integer(sent, "seed", -(1 << 62), 1 << 62)
    options: dict[str, Any] = {name: _flag(sent, name) for name in ("clip", "grayscale", "combine", "action_masks")}
    options |= {name: _integer(sent, name, 0, MAX_SIZE) for name in ("image_size", "frame_skip")}
    options |= {"kwargs": arguments, "wrappers": around}
    return Assignment(index, name, allowed, None, {"protocol": protocol, **options}, n, numbers, seed)


def _config(settings: Any) -> Any:
    """A Config with the recipe's own values for all that an actor does not need."""
    from veldt.experiment import recipes
    from veldt.experiment.settings import flat

    if not isinstance(settings, dict) or not settings.keys() <= {*SENT, "store"}:
        raise _invalid("settings")
    values, store = {name: x for name, x in settings.items() if name != "store"}, settings.get("store")
    if not isinstance(store, dict) or store.keys() != {"first_priorities"}:
        raise _invalid("settings.store")
    recipe, env = (_word(values, name) for name in ("recipe", "env"))
    del values["recipe"], values["env"]
    if recipe not in recipes.names():  # a module of the run's machine
        raise _invalid("settings.recipe")
    config = recipes.make(recipe, env, **values, store=store)
    if config.recipe != recipe or config.env != env or config.inference != "local":
        raise _invalid("settings.recipe")
    bounds.check(config)
    for name, value in flat(config).items():
        most = MAX_ENVS if name == "envs_per_actor" else MAX_SIZE
        sized = name.startswith("algorithm.") or name in ("actor.block", "envs_per_actor")
        for x in (value if isinstance(value, tuple) else (value,)) if sized else ():
            if isinstance(x, int) and not 0 <= x <= most:
                raise _invalid(name)
        if isinstance(value, tuple) and len(value) > 64:
            raise _invalid(name)
    _word({"protocol": config.protocol}, "protocol")
    for name in ("env_kwargs", "wrappers"):
        _words({name: list(getattr(config, name))}, name)
    return config


def _check_import(name: str, allowed: str, flag: str, always: bool = False) -> None:
    """A name with a colon is code to import; a network is `always` code."""
    if (always or ":" in name) and name != allowed:
        raise UserError(f"The run wants {name[:200]!a}, which is code to import; allow it with {flag} {name[:200]}.")


def _check_made(
    kwargs: tuple[str, ...], wrappers: tuple[str, ...], may_wrap: Collection[str], may_say: Collection[str]
) -> None:
    """All wrappers are code. Of the arguments, texts may name files or code."""
    for name in wrappers:
        if name not in may_wrap:
            raise UserError(f"The run wants {name!a}, which is code to import; allow it with --wrappers {name}.")
    for word in words_of_text(kwargs):
        if word not in may_say:
            raise UserError(f"The run wants to give its environment {word!a}; allow it with --env-kwargs {word!a}.")


def _words(sent: dict[str, Any], name: str) -> tuple[str, ...]:
    values = sent.get(name)
    if not isinstance(values, list) or len(values) > 64:
        raise _invalid(name)
    return tuple(_word({name: value}, name) for value in values)


def _flag(sent: dict[str, Any], name: str) -> bool:
    value = sent.get(name)
    if not isinstance(value, bool):
        raise _invalid(name)
    return value


def _word(sent: dict[str, Any], name: str) -> str:
    """Printable: it is shown on a terminal."""
    value = sent.get(name)
    if not isinstance(value, str) or not value.isprintable() or not value.isascii() or len(value) > 200:
        raise _invalid(name)
    return value


def _integer(sent: dict[str, Any], name: str, low: int, high: int) -> int:
    value = sent.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _invalid(name)
    return value


def _invalid(name: str) -> UserError:
    return UserError(f"The run sent an assignment with an invalid {name!r}; is it the run that you meant to join?")


# Acting.


def live(link: Link, assignment: Assignment, leaving: Callable[[], bool]) -> None:
    """Acts until the run ends, or `leaving` says so."""
    with callables.only(assignment.imports):
        host = build(link, assignment)
        reported = 0.0
        where = "central" if assignment.config is None else "local"
        who = f"actor/{assignment.index} (life {link.session.incarnation})"
        print(f"acting in {assignment.env} as {who}, with {where} inference", flush=True)
        try:
            while not link.session.quit and not leaving():
                worked = not link.session.hold and host.step()
                now = time.monotonic()
                if now - reported > METRICS_S:
                    reported = now
                    link.session.report(host.metrics())
                if worked:
                    link.step()
                else:
                    link.wait(WAIT_S)
        finally:
            host.close()


def build(link: Link, assignment: Assignment) -> Host:
    """The actor's nodes, and checks of all that the run will send them."""
    with explained():
        return _central(link, assignment) if assignment.config is None else _local(link, assignment)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Building what the run asks for: settings that do not go together may raise anything."""
    try:
        yield
    except (UserError, EnvError, LinkLost):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"What the run asks for cannot be built here ({why[:500]}).") from error


def _host(link: Link, program: Program, known: dict[str, Any]) -> Host:
    """The nodes of a program that are not in the run."""
    given = Given(known, {}, {INCARNATION.what: link.session.incarnation})
    return Host([node for name, node in program.nodes.items() if name not in known], known, lambda node: given)


def _central(link: Link, assignment: Assignment) -> Host:
    os.environ["VELDT_LIGHT"] = "1"
    from veldt.acting.actor import Policy

    session = link.session
    spec, node, messages = reached(assignment)
    match(link, node, messages, ())[0].check = ActionCheck(spec)
    known = {node: Proxy(ports_of(Policy), session.ends(node, {})), "counters": Counters(session.rows)}
    program = Program()
    add_light_actor(program, assignment, *(program.add(name, object) for name in known))
    return _host(link, program, known)


def add_light_actor(program: Program, assignment: Assignment, recorder: Any, counters: Any) -> None:
    from veldt.acting.actor import Actor
    from veldt.envs import make_env

    name, envs = f"actor/{assignment.index}", partial(make_env, assignment.env, **assignment.options)
    how = (recorder, counters, assignment.seed, name, assignment.groups, INCARNATION)
    program.add(name, Actor, envs, assignment.n, *how, light=True)


def _local(link: Link, assignment: Assignment) -> Host:
    import torch

    from veldt.learning.params import LatestParams
    from veldt.storing.store import Store
    from veldt.topologies import add_actor

    torch.set_num_threads(1)
    config, session = assignment.config, link.session
    spec, node, messages = reached(assignment)
    match(link, node, messages, ("cell params",))
    known = {
        node: Proxy(ports_of(Store), session.ends(node, {})),
        "params": LatestParams(session.cells["cell params"]),
        "counters": Counters(session.rows),
    }
    program = Program()
    add_actor(program, config, spec, assignment.index, *(program.add(name, object) for name in known))
    host = _host(link, program, known)
    session.cells["cell params"].check = partial(check_weights, host.objects[f"policy/{assignment.index}"].vector.numel())
    return host


def reached(assignment: Assignment) -> tuple[EnvSpec, str, Messages]:
    """The environment, the node of the run that the actor calls, and the messages between them."""
    if assignment.config is None:
        from veldt.acting.actor import Policy, send_examples
        from veldt.envs import make_env

        with contextlib.closing(make_env(assignment.env, 1, **assignment.options)) as one:
            spec = one.spec
        return spec, "recorder", messages_of("recorder", ports_of(Policy), send_examples(spec, assignment.n))
    from veldt.storing.store import Store, insert_examples

    spec = assignment.config.env_spec()
    examples = insert_examples(assignment.config.schema(spec), spec)
    return spec, "store", messages_of("store", ports_of(Store), examples)


def match(link: Link, node: str, messages: Messages, cells: tuple[str, ...]) -> list[Any]:
    """The mailboxes to the run, whose formats must be exactly those that its actors will use and understand."""
    return [box for seat in link.session.seats for box in _match(link, seat.boxes, node, messages, cells)]


def _match(link: Link, found: dict[str, Any], node: str, messages: Messages, cells: tuple[str, ...]) -> list[Any]:
    wanted = {f"{node} stream": (messages.stream, []), f"{node} calls": (messages.calls, messages.replies)}
    wanted = {name: lane for name, lane in wanted.items() if lane[0]}
    if list(found) != list(wanted) or tuple(link.session.cells) != cells:
        raise UserError("The run does not offer the channels that this actor needs; the actor and the run do not match.")
    for box, (there, back) in zip(found.values(), wanted.values(), strict=True):
        box.expect([message.example for message in there], [message.example for message in back])
    return list(found.values())


def check_weights(size: int, value: Tree) -> str:
    shapes = {name: (x.dtype.str, x.shape) for name, x in value.items()}
    if shapes != {"vector": ("<f4", (size,)), "when": ("<f8", (2,))}:
        return "the weights belong to a different network"
    if not np.isfinite(value["vector"]).all() or not abs(value["when"][0]) <= 1 << 53 or math.isinf(value["when"][1]):
        return "the weights are not finite"
    return ""
