"""The stores that a config asks for: how large they are, and how they are built. `add_store` adds the one to a program.

Each kind has a builder of its own, because a runtime reads from a builder's annotation which class its node will be.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Algorithm
from veldt.counters import Counters
from veldt.demos.recording import Immediate
from veldt.demos.set import Demos
from veldt.errors import UserError
from veldt.machine import format_bytes
from veldt.program import BLOCK_MEMORY, Program
from veldt.records.block import Block, Schema
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree, zeros
from veldt.seeds import derive
from veldt.storing.labelled import Labelled, Logged
from veldt.storing.limiters import Limiter, MinSize, Queue, SamplesPerInsert
from veldt.storing.ranks import Ranked
from veldt.storing.replay import Mixture, Replay
from veldt.storing.ring import UnrollQueue
from veldt.storing.selectors import Prioritized, Uniform
from veldt.storing.slots import LEAF_BYTES, RANKED_BYTES, BlockMemory, Size, plan_size
from veldt.storing.store import insert_examples

log = logging.getLogger("veldt")
ROOM = 0.6  # of a GPU's free memory, for a store that goes there by itself
CANDIDATES = 4  # of which one is evicted by priority: on average 1.5 blocks are copied for it


def add_store(
    program: Program, config: Any, schema: Schema, counters: Any = None, env: EnvSpec | None = None, name: str = "store"
) -> Any:
    build, examples, constants = store_builder(config), insert_examples(schema, env), {"schema": schema}
    return program.add(name, build, config, schema, BLOCK_MEMORY, counters, examples=examples, constants=constants)


def store_builder(config: Any) -> Callable[..., Replay | UnrollQueue | Mixture]:
    """What builds the store of this config, from config, schema, block memory and the counters of the run."""
    if config.store.selector == "fifo":
        return make_queue
    if config.demos and config.topology == "qt-opt":
        return make_logged
    return make_mixture if config.demos else make_replay


def make_replay(config: Any, schema: Schema, memory: BlockMemory | None = None, counters: Counters | None = None) -> Replay:
    return Replay(*_replay_arguments(config, schema, memory, counters))


def _replay_arguments(
    config: Any, schema: Schema, memory: BlockMemory | None, counters: Counters | None, device: str | None = None
) -> tuple[Any, ...]:
    size, store = store_size(config, schema), config.store
    limiter: Limiter = MinSize(store.min_size)
    if store.samples_per_insert:
        burst, batch = config.envs_per_actor * schema.starts, config.sample_size
        limiter = SamplesPerInsert.for_run(store.samples_per_insert, store.min_size, burst, batch, store.actors_wait)
    selector, seed = _make_selector(config, size.slots * schema.starts, memory, counters), derive(config.seed, "store")
    device = store_device(config, size.nbytes) if device is None else device
    candidates = CANDIDATES if store.evict == "priority" else 1
    pinned = config.learner_device != "cpu" and not device
    return schema, selector, limiter, size.capacity, size.slots, store.slack, seed, memory, pinned, candidates, device


def make_queue(
    config: Any, schema: Schema, memory: BlockMemory | None = None, counters: Counters | None = None
) -> UnrollQueue:
    size = store_size(config, schema)
    device = store_device(config, size.nbytes)
    pinned = config.learner_device != "cpu" and not device
    return UnrollQueue(schema, Queue(size.capacity), size.slots, memory, pinned, device)


def make_mixture(
    config: Any, schema: Schema, memory: BlockMemory | None = None, counters: Counters | None = None
) -> Mixture:
    device = store_device(config, demos_size(config, schema).nbytes + store_size(config, schema).nbytes)
    demos = _make_demos(config, schema, counters, device)
    return Mixture(demos, config.demo_ratio, *_replay_arguments(config, schema, memory, counters, device))


def _make_demos(config: Any, schema: Schema, counters: Counters | None, device: str) -> Replay:
    size = demos_size(config, schema)
    leaves = size.slots * schema.starts
    selector, seed = _make_selector(config, leaves, None, counters), derive(config.seed, "demonstrations")
    demos = Replay(schema, selector, MinSize(), leaves, size.slots, seed=seed, device=device)
    for block in cut_blocks(Demos.open(config.demos), schema, config.algorithm):
        demos.insert(block, None)
    return demos


def make_logged(config: Any, schema: Schema, memory: BlockMemory | None = None, counters: Counters | None = None) -> Logged:
    """QT-Opt: the fraction of the run's own steps grows, and actors wait until the offline updates are made."""
    demos, own = _make_demos(config, schema, counters, ""), _replay_arguments(config, schema, memory, counters, "")
    ratio, least = config.store.samples_per_insert, config.store.min_size
    if ratio:
        ahead = int(config.offline_updates * config.learner.batch / (config.labels.samples_per_label or 1.0) / ratio)
        burst = config.envs_per_actor * schema.starts
        limiter = SamplesPerInsert.for_run(ratio, -ahead, burst, config.sample_size, config.store.actors_wait)
        own = (*own[:2], limiter, *own[3:])
    return Logged(demos, partial(config.on_policy_fraction, counters), least, *own)


def labelled_size(config: Any, schema: Schema) -> Size:
    """Of the store of labelled transitions, in blocks of one batch of an updater each."""
    size = plan_size(config.labels.capacity, schema)
    if 2 * config.labels.min_size > size.capacity:
        raise UserError(
            f"labels.min_size ({config.labels.min_size:,}) must be at most half of labels.capacity ({size.capacity:,})."
        )
    return size


def make_labelled(config: Any, schema: Schema, memory: BlockMemory | None, counters: Counters) -> Labelled:
    labels, learner, size = config.labels, config.learner, labelled_size(config, schema)
    limiter: Limiter = MinSize(labels.min_size)
    if labels.samples_per_label:
        burst, batch = config.updaters * schema.starts, learner.batch * learner.prefetch
        limiter = SamplesPerInsert.for_run(labels.samples_per_label, labels.min_size, burst, batch)
    selector, seed = Uniform(size.slots * schema.starts, memory), derive(config.seed, "labels")
    return Labelled(labels.max_age, counters, schema, selector, limiter, size.capacity, size.slots, 0.0, seed, memory)


def store_device(config: Any, nbytes: int) -> str:
    """The GPU on which samples are gathered; empty: in RAM. Called in the learner's process, whose GPU it asks."""
    if config.store.device == "cpu" or not config.learner_device.startswith("cuda"):
        return ""
    if config.store.device != "auto":
        return str(config.store.device)
    import torch

    free = torch.cuda.mem_get_info(config.learner_device)[0]
    if nbytes <= ROOM * free:
        return str(config.learner_device)
    log.info("store: its blocks stay in RAM: %s, and %s free on the GPU", format_bytes(nbytes), format_bytes(free))
    return ""


def _make_selector(config: Any, leaves: int, memory: BlockMemory | None, counters: Counters | None) -> Prioritized:
    store, steps = config.store, config.steps
    if store.selector == "uniform":
        return Uniform(leaves, memory)

    def annealed() -> float:
        assert counters is not None
        done = min(1.0, counters.get("env_steps") / steps)
        return float(store.beta + done * (store.beta_end - store.beta))

    beta = annealed if store.beta_end and counters is not None else store.beta
    return {"prioritized": Prioritized, "ranked": Ranked}[store.selector](leaves, store.alpha, beta, memory)


def store_size(config: Any, schema: Schema) -> Size:
    """Raises a UserError for a store with which learning could never start."""
    size = plan_size(config.store.capacity, schema, config.store.slack, _leaf_bytes(config))
    batch = config.learner.batch * config.learner.prefetch
    if config.store.selector == "fifo" and size.capacity < batch:
        raise UserError(
            f"A queue of {size.capacity:,} unrolls never holds the {batch:,} of one batch; raise store.capacity to "
            f"{batch * schema.window.stride:,} steps or more, or lower learner.batch."
        )
    # The last record of an episode is no item: with episodes of one step, only half of the store's rows are items.
    if 2 * config.store.min_size > size.capacity:
        raise UserError(
            f"A store of {size.capacity:,} items may never hold the {config.store.min_size:,} that learning starts with; "
            "store.min_size must be at most half of store.capacity."
        )
    return size


def demos_size(config: Any, schema: Schema) -> Size:
    """Of the store of demonstrations: every episode begins a block."""
    slots = int((-(-(Demos.open(config.demos).lengths + 1) // schema.fresh)).sum()) if config.demos else 0
    return plan_size(slots * schema.fresh, schema, leaf_bytes=_leaf_bytes(config)) if slots else Size(0, 0, 0)


def _leaf_bytes(config: Any) -> int:
    return RANKED_BYTES if config.store.selector == "ranked" else LEAF_BYTES


def cut_blocks(demos: Demos, schema: Schema, algorithm: Algorithm) -> Iterator[Block]:
    """The episodes as blocks of a run's schema. No window has steps of two episodes.

    The columns that an algorithm records beside the action are zero, and so is its recurrent state (Gulcehre et al. 2020),
    except for what it knows without a network (its `known_state`). There are no priorities: the store gives
    new items the largest.
    """
    starts = schema.start_layout.spec
    blank = zeros(schema.layout.spec | starts, 1)
    state: Tree = {}  # known state before the next record

    def replay(step: Tree) -> Tree:
        nonlocal state
        before = {} if step["first"][0] else state
        state = algorithm.known_state(step["action"], starts)
        return blank | before | step

    sink: Any = _Sink()  # a recorder only inserts
    recorder = Recorder(Immediate(replay), sink, algorithm, schema, first_priorities="largest")
    for episode in demos.episodes():
        for t in range(len(episode["first"])):
            recorder.send(0, {name: x[t : t + 1] for name, x in episode.items()})
            recorder.recv(0)
        recorder.flush(0)
        yield from sink.blocks
        sink.blocks.clear()


class _Sink:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def insert(self, block: Block, priorities: Array | None) -> bool:
        assert priorities is None, priorities
        self.blocks.append(block)
        return True
