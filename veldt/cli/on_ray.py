"""veldt train ... --runtime ray: the same training on a Ray cluster (`veldt.runtime.ray`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veldt.callables import is_code, is_unstable
from veldt.env_kwargs import words_of_text
from veldt.errors import UserError
from veldt.experiment.config import Config
from veldt.experiment.directory import default_directory
from veldt.machine import find_device, runs_processes
from veldt.signals import interruptible

JOINABLE = ("apex", "impala")  # topologies whose actors may be elsewhere
SEATS = 64  # at other hosts together
FLAGS = {"--address": "", "--site-actors": "0", "--site-seats": str(SEATS)}


@dataclass(frozen=True)
class Cluster:
    address: str  # empty: a Ray of this host alone is started
    actors: int  # at each other host; 0: as many as it has CPUs
    seats: int


def split(flags: list[str]) -> tuple[list[str], Cluster | None]:
    """Takes out what is said of the cluster. None: it is not to run on one."""
    values, left, words = dict(FLAGS), list[str](), iter(flags)
    on_ray = False
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--runtime" and (value or not equals):
            value = value or next(words, "")
            on_ray = value == "ray"
            left += [] if on_ray else [name, value]
        elif name in FLAGS:
            values[name] = value if equals else next(words, "")
        else:
            left.append(word)
    if not on_ray:
        return flags, None
    numbers = [values[name] for name in ("--site-actors", "--site-seats")]
    if not all(text.isdecimal() and int(text) <= 4096 for text in numbers):
        raise UserError("--site-actors and --site-seats are numbers, at most 4096.")
    return left, Cluster(values["--address"], *map(int, numbers))


def train(recipe: str, given: list[str], run: Path | None, config: Config, cluster: Cluster) -> int:
    if not runs_processes():
        raise UserError("--runtime ray needs Linux on x86-64 or aarch64; --runtime inline works everywhere.")
    from veldt.runtime import ray

    joinable = config.topology in JOINABLE and config.runtime == "local" and not config.gate.listen
    if joinable and is_unstable(config.env):
        raise UserError(
            f"{config.env!r} is not on other hosts: put it in a package that is installed there (module:callable)."
        )
    directory = (run or default_directory(config)).resolve()
    command = ("train", recipe, *_without(given, "--run"))
    seats = cluster.seats if joinable else 0
    job = ray.ClusterRun(str(directory), command, str(Path.cwd()), _allowed(config), cluster.actors, seats)
    gpus = sum(find_device(name) != "cpu" for name in {config.device, config.central.device or config.device})
    left: list[int] = []
    with interruptible(left.append, "Stopping the run"):
        return ray.drive(job, cluster.address, gpus, lambda line: print(line, flush=True), lambda: left[0] if left else 0)


def _allowed(config: Any) -> tuple[str, ...]:
    """What this user's command line lets the run's actors import, at other hosts too."""
    found = ["--env", config.env] if is_code(config.env) else []
    network = getattr(config.algorithm, "network_from", "")
    found += ["--network", network] if network else []
    found += ["--wrappers", *config.wrappers] if config.wrappers else []
    texts = words_of_text(config.env_kwargs)
    return tuple(found + (["--env-kwargs", *texts] if texts else []))


def _without(flags: list[str], name: str) -> list[str]:
    left, words = list[str](), iter(flags)
    for word in words:
        if word == name:
            next(words, "")
        elif not word.startswith(f"{name}="):
            left.append(word)
    return left
