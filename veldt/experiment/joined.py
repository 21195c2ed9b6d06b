"""An actor that the run did not start: it joins from anywhere, takes a free seat, and may leave at any time.

It is told over its stream what to build (`assignment`), as JSON: names and numbers, never code. With central inference it
loads neither torch nor numba.
"""

import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from veldt.counters import Counters
from veldt.errors import UserError
from veldt.ports import ports_of
from veldt.program import INCARNATION, Given, Program
from veldt.runtime.base import Host
from veldt.runtime.grpc.connection import read_token
from veldt.runtime.grpc.link import Link
from veldt.runtime.proxies import Proxy

METRICS_S = 0.25
WAIT_S = 0.05


def assign(config: Any, i: int) -> dict[str, Any]:
    """What the i-th actor of all is told."""
    from veldt.experiment.settings import as_plain

    told = {"index": i, "env": config.env, "inference": config.inference}
    if config.inference == "local":
        return told | {"config": as_plain(config)}
    groups = list(range(i * config.central.groups, (i + 1) * config.central.groups))
    n = config.envs_per_actor // config.central.groups
    env = {"protocol": config.protocol, "clip": config.clip_observations}
    return told | env | {"n": n, "groups": groups, "seed": config.seed}


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


def read_secret(path: str | Path | None) -> bytes:
    """Empty where no file is named."""
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def live(link: Link, told: dict[str, Any], allowed: str, leaving: Callable[[], bool], network: str = "") -> None:
    """Acts until the run ends, or `leaving` says so. `allowed` and `network` may be imported, if the run's environment or
    network is code."""
    env = str(told["env"])
    if ":" in env and env != allowed:
        raise UserError(f"The run wants the environment {env}, which is code to import; allow it with --env {env}.")
    wanted = str(told.get("config", {}).get("algorithm", {}).get("network_from", ""))
    if wanted and wanted != network:
        raise UserError(f"The run wants the network {wanted}, which is code to import; allow it with --network {wanted}.")
    host = _central(link, told) if told["inference"] == "central" else _local(link, told)
    reported = 0.0
    who = f"actor/{told['index']} (life {link.session.incarnation})"
    print(f"acting in {env} as {who}, with {told['inference']} inference", flush=True)
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


def _host(link: Link, program: Program, known: dict[str, Any]) -> Host:
    """The nodes of a program that are not in the run."""
    given = Given(known, {}, {INCARNATION.what: link.session.incarnation})
    return Host([node for name, node in program.nodes.items() if name not in known], known, lambda node: given)


def _central(link: Link, told: dict[str, Any]) -> Host:
    os.environ["VELDT_LIGHT"] = "1"
    from veldt.acting.actor import Actor, Policy
    from veldt.envs import make_env

    session = link.session
    known = {"recorder": Proxy(ports_of(Policy), session.ends("recorder", {})), "counters": Counters(session.rows)}
    program = Program()
    recorder, counters = (program.add(name, object) for name in known)
    envs = partial(make_env, str(told["env"]), protocol=str(told["protocol"]), clip=bool(told["clip"]))
    name = f"actor/{int(told['index'])}"
    groups = tuple(int(group) for group in told["groups"])
    program.add(name, Actor, envs, int(told["n"]), recorder, counters, int(told["seed"]), name, groups, INCARNATION)
    return _host(link, program, known)


def _local(link: Link, told: dict[str, Any]) -> Host:
    import torch

    from veldt.experiment import recipes
    from veldt.learning.params import LatestParams
    from veldt.storing.store import Store
    from veldt.topologies import add_actor

    torch.set_num_threads(1)
    values = dict(told["config"])
    config = recipes.make(str(values.pop("recipe")), str(values.pop("env")), **values)
    known = {
        "store": Proxy(ports_of(Store), link.session.ends("store", {})),
        "params": LatestParams(link.session.cells["cell params"]),
        "counters": Counters(link.session.rows),
    }
    program = Program()
    add_actor(program, config, config.env_spec(), int(told["index"]), *(program.add(name, object) for name in known))
    return _host(link, program, known)
