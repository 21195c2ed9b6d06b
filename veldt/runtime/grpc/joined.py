"""An actor that the run did not start: it joins from anywhere, takes a free seat, and may leave at any time.

It is told over its stream what to build (`assignment`), as JSON: names and numbers, never code. With central inference it
loads neither torch nor numba.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.runtime.grpc.connection import read_token
from veldt.runtime.grpc.link import Link

log = logging.getLogger("veldt")

METRICS_S = 0.25
WAIT_S = 0.05
CENTRAL, LOCAL = "central", "local"


def assign(config: Any, seat: int) -> dict[str, Any]:
    """What the actor on this seat is to build."""
    from veldt.experiment.settings import as_plain

    i = config.actors + seat
    told = {"index": i, "env": config.env, "inference": config.inference}
    if config.inference == LOCAL:
        return told | {"config": as_plain(config)}
    groups = list(range(i * config.central.groups, (i + 1) * config.central.groups))
    n = config.envs_per_actor // config.central.groups
    return told | {"protocol": config.protocol, "n": n, "groups": groups, "seed": config.seed}


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


def read_secret(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def live(
    link: Link,
    welcome: dict[str, Any],
    allowed: str = "",  # the environment that this machine's user agrees to import, if it is code
    say: Callable[[str], None] = log.info,
    leaving: Callable[[], bool] = lambda: False,
) -> None:
    """Acts until the run ends, or `leaving` says so."""
    told = welcome["assignment"]
    env = str(told["env"])
    if ":" in env and env != allowed:
        raise UserError(f"The run wants the environment {env}, which is code to import; allow it with --env {env}.")
    objects = _central(link, told) if told["inference"] == CENTRAL else _local(link, told)
    workers = [x for x in objects.values() if hasattr(x, "step")]
    said = 0.0
    say(f"acting in {env} as actor/{told['index']} (life {link.incarnation}), with {told['inference']} inference")
    try:
        while not link.quit and not leaving():
            worked = not link.hold and any([worker.step() for worker in workers])
            now = time.monotonic()
            if now - said > METRICS_S:
                said = now
                for thing in objects.values():
                    link.tell(thing.metrics() if hasattr(thing, "metrics") else {})
            if worked:
                link.step()
            else:
                link.wait(WAIT_S)
    finally:
        for thing in objects.values():
            if hasattr(thing, "close"):
                thing.close()


def _central(link: Link, told: dict[str, Any]) -> dict[str, Any]:
    os.environ["VELDT_LIGHT"] = "1"
    from functools import partial

    from veldt.acting.actor import Actor
    from veldt.envs import make_env
    from veldt.runtime.remote import Channel, RemotePolicy

    policy: Any = RemotePolicy(Channel(link.outbox("recorder"), link.inbox("recorder")))
    envs, name = partial(make_env, str(told["env"]), protocol=str(told["protocol"])), f"actor/{int(told['index'])}"
    groups = tuple(int(group) for group in told["groups"])
    counters: Any = link.counters
    return {name: Actor(envs, int(told["n"]), policy, counters, int(told["seed"]), name, groups, link.incarnation)}


def _local(link: Link, told: dict[str, Any]) -> dict[str, Any]:
    import torch

    from veldt.experiment import recipes
    from veldt.experiment.settings import override
    from veldt.program import Program, resolve
    from veldt.runtime.remote import Channel, RemoteParams, RemoteStore
    from veldt.topologies.wiring import add_actor

    torch.set_num_threads(1)
    values = dict(told["config"])
    config = override(recipes.make(str(values["recipe"]), str(values["env"])), values)
    with contextlib.closing(config.envs()) as envs:
        env = envs.spec
    program = Program()
    refs = [program.add(name, object) for name in ("store", "params", "counters")]
    add_actor(program, config, env, int(told["index"]), *refs)
    objects: dict[str, Any] = {}
    known = {
        "store": RemoteStore(Channel(link.outbox("store"), None)),
        "params": RemoteParams(link.latest("params")),
        "counters": link.counters,
    }
    for name, node in program.nodes.items():
        if name not in known:
            args, kwargs = resolve((node.args, node.kwargs), known | objects, link.incarnation)
            objects[name] = node.build(*args, **kwargs)
    return objects
