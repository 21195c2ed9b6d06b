"""Before training: what a config needs on this machine and whether it has that, its runtime, and what is printed."""

import dataclasses
import shlex
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from veldt import metrics
from veldt.acting.recorder import Recorder
from veldt.demos.set import Demos
from veldt.envs.atari import find_protocol
from veldt.errors import UserError
from veldt.experiment.config import Config
from veldt.experiment.env_names import shown
from veldt.experiment.initial import initial_weights
from veldt.experiment.papers import PAPERS
from veldt.gpus import is_gpu
from veldt.learning.activations import activation_bytes
from veldt.learning.learner import Learner
from veldt.machine import available_memory, find_device, format_bytes, runs_processes, used_memory
from veldt.nets.torsos import use_bfloat16
from veldt.program import BLOCK_MEMORY, Node, Program, Ref, root, walk
from veldt.records.block import Schema
from veldt.records.step import EnvSpec
from veldt.runtime import Inline, Runtime
from veldt.runtime.local import zygote
from veldt.runtime.local.plan import STREAM_BYTES, GateSettings
from veldt.storing.slots import Size
from veldt.topologies import make_program
from veldt.topologies.stores import demos_size, store_size
from veldt.watching.links import amount

LIVES = 10_000  # that a process may have between two resumes
NETWORK_COPIES = 15  # weights, target, gradient, moments, published weights, copies at the policies
STATE_COPIES = 4  # of the network in a checkpoint: weights, target, two averages of the optimizer
LIBRARIES = 20_000_000  # bytes that libraries take when first used
PROCESS = 30_000_000  # private bytes of a process, beside the pages it shares with its zygote
ZYGOTE = 130_000_000
CUDA = 1_500_000_000  # bytes of RAM, not of the GPU, that CUDA takes in a process that uses it
GPU_PROCESS = 800_000_000  # bytes of GPU memory that CUDA, its libraries and graphs take in a process
GPU_COPIES = 8  # of the network on the learner's GPU: weights, target, gradient, moments, published weights, captured ones
LIGHT_PROCESS, LIGHT_ZYGOTE = 12_000_000, 40_000_000  # the same of processes without torch


@dataclass(frozen=True)
class Prepared:
    """What a config leads to, made before anything is written."""

    config: Config
    env: EnvSpec
    net: nn.Module
    parameters: int
    program: Program
    declarations: metrics.Declarations
    store: Size
    ram: int  # bytes of the whole run when the store is full, with what this process has now
    gpu: int  # bytes of GPU memory of the whole run
    initial: list[str]  # what is said of the weights that it starts with
    activations: int  # bytes that an update takes on the learner's device, beside the network; in `ram` if that is the CPU


def prepare(config: Config, new: bool = True) -> Prepared:
    """Raises a UserError for all that cannot work on this machine, in this environment. `new`: there is no checkpoint."""
    if config.runtime == "local" and not runs_processes():
        raise UserError("The local runtime needs Linux on x86-64 or aarch64; --runtime inline works everywhere.")
    check_device(config.device)
    check_device(config.central.device or config.device)
    check_device(config.store.device)
    gate = config.gate
    if gate.listen:
        from veldt.experiment.joined import read_certificate
        from veldt.runtime.grpc.connection import Door, read_key

        Door(gate.listen, read_certificate(gate.certificate), read_key(gate.key)).check("a-token-that-is-made-later")
    env = config.env_spec()
    config.algorithm.check(env)
    check_masks(config, env)
    if config.demos:
        Demos.open(config.demos).check(env, config.protocol)
    program, net = make_program(config, env), config.algorithm.network(env)
    parameters = sum(p.numel() for p in net.parameters())
    declarations = metrics.declared(program.nodes.values())
    initial: list[str] = []
    if config.init_from and new:
        weights, initial = initial_weights(config.init_from, net)
        for node in program.nodes.values():
            if getattr(node.node_class, "TAKES_WEIGHTS", False):
                node.kwargs["initial"] = weights
    activations = 0
    if any(issubclass(node.node_class, Learner) for node in program.nodes.values()):
        if config.learner.bfloat16:
            use_bfloat16(net)
        activations = activation_bytes(config.algorithm, net, config.learner_schema(env), config.learner.batch)
    store, ram = plan_ram(config, env, program, parameters, activations)
    gpu = plan_gpu(config, env, program, parameters, activations, store)
    return Prepared(config, env, net, parameters, program, declarations, store, ram, gpu, initial, activations)


def check_masks(config: Config, env: EnvSpec) -> None:
    if env.mask and not getattr(config.algorithm, "masks", False):
        raise UserError(
            f"{env.name} has action masks, which {config.recipe} does not honour (dqn, apex-dqn, r2d2 and impala do); "
            "--no-action-masks ignores them."
        )


def check_device(name: str) -> None:
    try:
        device = torch.device(find_device(name))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"There is no device {name!r}; use cpu, cuda, mps or auto.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"This machine or this build of torch has no {name}; use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"No CUDA device is available here as {name!r}; use --device cpu.")


def plan_ram(config: Config, env: EnvSpec, program: Program, parameters: int, activations: int) -> tuple[Size, int]:
    """The size of the stores together, and about how many bytes the run takes. Raises a UserError where that much is not
    free.

    Beside the stores, for each learner: two samples of windows, copies of the network, activations, demonstrations,
    processes, CUDA. Measured on two cores: 1 % less than CartPole took, 1 % less than MinAtar, 2 % less than Atari.
    """
    schema, stores = config.schema(env), count_stores(program)
    one = store_size(config, schema) if stores else Size(0, 0, 0)
    store = Size(*(stores * x for x in one))
    learners, shards = count_role(program, "learner"), count_role(program, "shard")
    rest = 0
    if learners:
        rest += learners * (_samples(config, env) + (0 if is_gpu(config.learner_device) else activations))
    rest += 4 * NETWORK_COPIES * parameters * max(1, learners + bool(shards))
    rest += LIBRARIES + stores * demos_size(config, schema).nbytes + CUDA * _cuda_processes(config, program)
    rest += sum(array.nbytes for array in program.arrays.values()) + sum(node.ram for node in program.nodes.values())
    if config.runtime == "local":
        rest += _plan_processes(program, schema, config.queue)
        part = 4 * parameters // max(1, shards) + 1024  # the streams of gradients have as many slots as fit, at least two
        rest += learners * shards * min(config.queue * part, max(2 * part, config.queue * STREAM_BYTES))
    free = min(available_memory(), int(1e9 * config.memory.limit) or available_memory())
    check_memory(store, free - rest, rest)
    return store, used_memory() + store.nbytes + rest


def count_stores(program: Program) -> int:
    """Those of the run's own steps; what others take is in their `ram`."""
    return sum(node.has(BLOCK_MEMORY) and not node.ram for node in program.nodes.values())


def count_role(program: Program, role: str) -> int:
    return sum(node.role == role for node in program.nodes.values())


def _samples(config: Config, env: EnvSpec) -> int:
    """Bytes of two samples of windows."""
    schema = config.learner_schema(env)
    window = schema.window.rows * schema.layout.nbytes + schema.start_layout.nbytes
    return int(2 * config.learner.batch * config.learner.prefetch * window)


def plan_gpu(config: Config, env: EnvSpec, program: Program, parameters: int, activations: int, store: Size) -> int:
    """About how many bytes of GPU memory the run takes, on all GPUs together; with the copy of the store's blocks, which
    `store.device` auto makes only where they fit."""
    nbytes = GPU_PROCESS * _cuda_processes(config, program)
    learners = count_role(program, "learner")
    if learners and is_gpu(config.learner_device):
        blocks = 0 if config.store.device == "cpu" else store.nbytes + demos_size(config, config.schema(env)).nbytes
        nbytes += learners * (4 * GPU_COPIES * parameters + activations + _samples(config, env)) + blocks
    if "inference" in program.nodes and is_gpu(config.inference_device):
        nbytes += 4 * parameters
    return nbytes


def _cuda_processes(config: Config, program: Program) -> int:
    devices = {"learner": config.learner_device, "inference": config.inference_device}
    found = sum(count_role(program, role) * is_gpu(device) for role, device in devices.items())
    return found if config.runtime == "local" else min(found, 1)


def _plan_processes(program: Program, schema: Schema, queue: int) -> int:
    """About how many bytes it takes to run the nodes in processes of their own, with streams from recorders elsewhere."""
    nodes = program.nodes
    own = [node for node in nodes.values() if node.on is None and not node.everywhere]
    light = sum(node.light for node in own)
    streams = sum(issubclass(node.node_class, Recorder) and _is_apart(program, node) for node in nodes.values())
    stream = queue * min(STREAM_BYTES, schema.nbytes + 9 * schema.starts + 1024)
    zygotes = ZYGOTE + (LIGHT_ZYGOTE if light else 0)
    return zygotes + (len(own) - light) * PROCESS + light * LIGHT_PROCESS + streams * stream


def _is_apart(program: Program, recorder: Node) -> bool:
    """Whether its store is in another process."""

    nodes = program.nodes
    refs = [ref.name for ref in walk((recorder.args, recorder.kwargs), Ref)]
    return any(nodes[name].has(BLOCK_MEMORY) and root(name, nodes) != root(recorder.name, nodes) for name in refs)


def check_memory(size: Size, available: int, rest: int = 0) -> None:
    """Refuses a store that cannot fit, before anything is allocated. `available` is what is free beside `rest`."""
    if available < 0:
        raise UserError(
            f"The run needs about {format_bytes(rest)} of RAM beside its store, but {format_bytes(available + rest)} is "
            "free; use fewer --actors or --workers, a smaller --learner.batch, or --runtime inline."
        )
    if size.nbytes > 0.9 * available:
        half = format_bytes(0.5 * available).replace(" ", "")
        raise UserError(
            f"The store needs {format_bytes(size.nbytes)} for {size.capacity:,} items, but {format_bytes(available)} of "
            f"RAM is free; lower store.capacity, for example to {half}."
        )


def make_runtime(config: Config, path: Path, number: int, say: Callable[[str], None]) -> Runtime:
    """`number` is that of the checkpoint to resume from, or 0."""
    if config.runtime == "inline":
        zygote.discard()
        return Inline()
    settings, token = config.gate, ""
    if settings.listen:
        from veldt.experiment.joined import make_token

        file = Path(settings.token_file) if settings.token_file else path / "token"
        tls = f" --certificate {shlex.quote(settings.certificate)}" if settings.certificate else ""
        where = settings.listen.replace("0.0.0.0", socket.gethostname())
        say(f"actors may join: veldt actor --connect {where} --token-file {shlex.quote(str(file))}{tls}")
        token = make_token(file)
    gate = make_gate(config, token) if settings.listen or config.transport == "grpc" else None
    from veldt.runtime.local.local import Local  # which only Linux can import

    return Local(path, config.step_timeout, LIVES * number, config.queue, gate, config.restart, config.memory)


def make_gate(config: Config, token: str = "") -> GateSettings:
    from veldt.experiment.joined import assign, limits, read_certificate
    from veldt.runtime.grpc.connection import read_key

    settings, own = config.gate, config.transport == "grpc"
    joining = range(config.own_actors, config.total_actors)
    seats, claims = tuple(assign(config, i) for i in joining), tuple(limits(config, i) for i in joining)
    certificate, key = read_certificate(settings.certificate), read_key(settings.key)
    return GateSettings(own, seats, claims, settings.listen, token, certificate, key, settings.compress)


def introduction(prepared: Prepared, path: Path) -> list[str]:
    config, env, net, store = prepared.config, prepared.env, prepared.net, prepared.store
    history, learner = config.algorithm.window.history, config.learner
    seen = ", ".join(f"{name} {c}" for name, c in env.observation.items())
    keys = getattr(config.algorithm, "stacked", ()) or [name.removeprefix("obs/") for name in env.observation]
    stacking = f"; stacks {history} of {', '.join(keys)}" if history > 1 else ""
    network = type(getattr(net, "torso", net)).__name__
    lines = [
        f"{config.recipe} on {shown(config.env)}: {seen}; actions {env.action_space}",
        *env.notices,
        f"network: {network}, {prepared.parameters:,} parameters on {_device(config)}{stacking}",
        f"algorithm: {_settings(config.algorithm)}",
    ]
    if config.recipe in PAPERS and (departures := PAPERS[config.recipe].departures):
        lines.append(f"not the paper's: {'; '.join(departures)}")
    if config.protocol:
        lines.append(f"protocol {config.protocol}: {_settings(find_protocol(config.protocol))}")
    if store.slots:
        each = format_bytes(store.nbytes / store.slots / config.schema(env).starts)
        size = f"{store.capacity:,} items of {each}, {format_bytes(store.nbytes)} when full"
        stores = count_stores(prepared.program)
        size = f"{stores} of {store.capacity // stores:,} items each, {size}" if stores > 1 else size
        lines.append(f"store: {size} ({config.store.selector}); {_rate(config)}{_gathering(config)}")
    gpu = f"; about {format_bytes(prepared.gpu)} of GPU memory" if prepared.gpu else ""
    gpu += f", {format_bytes(prepared.activations)} of it activations" if is_gpu(config.learner_device) else ""
    actors = f"{config.own_actors} {'workers' if config.topology == 'workers' else 'actors'} with "
    if config.topology != "single" and not runs_processes():
        lines.append("runtime: inline, in one thread: the processes of this recipe need Linux")
    return [
        *lines,
        *prepared.initial,
        f"acting: {actors if config.own_actors > 1 else ''}{amount(config.envs_per_actor, 'environments')}"
        f"{_inference(config)}, {config.actor}; "
        f"learning: {learner.optimizer}, rate {learner.lr:g}{' to 0' if learner.anneal else ''}",
        f"memory: about {format_bytes(prepared.ram)} of RAM in all{' when the store is full' if store.slots else ''}{gpu}",
        f"disk: {_disk(prepared, path)}",
        f"run: {path}  ({config.steps:,} env steps, seed {config.seed})",
    ]


def plan_disk(prepared: Prepared) -> int:
    """About how many bytes the checkpoints take, with one that is being written: each block of the store once, also those
    that only older checkpoints have."""
    config = prepared.config
    state = (config.checkpoint.keep + 1) * 4 * STATE_COPIES * prepared.parameters
    if not prepared.store.slots:
        return state
    schema = config.schema(prepared.env)
    step = schema.nbytes / schema.fresh
    older = config.checkpoint.keep * (config.checkpoint.every or config.steps) * step
    blocks = min(prepared.store.nbytes + older, config.steps * step) if config.checkpoint.store else 0.0
    return int(blocks) + state


def _disk(prepared: Prepared, path: Path) -> str:
    needed, above = plan_disk(prepared), path.resolve()
    free = shutil.disk_usage(next(place for place in (above, *above.parents) if place.is_dir())).free
    text = f"about {format_bytes(needed)} for checkpoints; {format_bytes(free)} free"
    advice = ": --no-checkpoint.store leaves the store out" if prepared.store.slots else ""
    return text if needed < free else f"{text}, too little{advice}"


def _inference(config: Config) -> str:
    """Where actions are computed, if not by the actors."""
    central = config.central
    if config.inference == "local":
        return ""
    most = f", at most {central.batch} at once" if central.batch else ""
    return f" in {central.groups} groups (one process acts for all, on {config.inference_device}{most})"


def _device(config: Config) -> str:
    """The learner's."""
    found = config.device == "auto" and is_gpu(config.learner_device)
    return f"{config.learner_device} (the GPU here; --device cpu does without)" if found else config.learner_device


def _gathering(config: Config) -> str:
    """Where samples are gathered, if not in RAM."""
    device = config.store.device
    if device == "cpu" or not is_gpu(config.learner_device):
        return ""
    return "; copied to the GPU, if it fits" if device == "auto" else f"; copied to {device}"


def _rate(config: Config) -> str:
    store, batch = config.store, config.learner.batch
    if store.selector == "fifo":
        return f"each used once, in updates of {batch}"
    if not config.samples_per_step:
        return f"updates of {batch} without a limit"
    most = "" if store.actors_wait else "at most "
    rate = config.samples_per_step / batch / config.algorithm.window.stride
    return f"{most}{rate:.3g} updates of {batch} per env step"


def _settings(thing: Any) -> str:
    """The fields of a dataclass that are on."""
    parts = {name: x for name, x in dataclasses.asdict(thing).items() if x is not False and x not in ("", (), "auto")}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in parts.items())
