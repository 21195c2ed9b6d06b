"""What labels with what: the target networks by their definition, labelled blocks, and labels that are too old."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from veldt.acting.recorder import Recorder
from veldt.algorithms.base import Batch
from veldt.algorithms.qt_opt import QTOpt
from veldt.counters import Counters
from veldt.demos.recording import Immediate
from veldt.envs import make_env
from veldt.experiment.populations.transplant import is_learned
from veldt.learning.bellman import BellmanUpdater
from veldt.learning.learner import LearnerConfig
from veldt.learning.optim import Flat
from veldt.learning.params import Weights
from veldt.learning.targets import Targets, TargetsConfig
from veldt.ports import Source
from veldt.records.block import Block, Schema
from veldt.storing.labelled import Labelled, Logged
from veldt.storing.limiters import MinSize, SamplesPerInsert
from veldt.storing.replay import Replay
from veldt.storing.selectors import Uniform
from veldt.storing.slots import PrivateMemory

ALGORITHM = QTOpt(hidden=(8,), gamma=0.9)
ENV = make_env("veldt/TwoGoals-v0").spec


def targets_of(average: float, lag: int, publish_every: int = 1) -> tuple[Targets, Counters, Any]:
    counters = Counters()
    how = TargetsConfig(average=average, lag=lag, publish_every=publish_every)
    targets = Targets(how, LearnerConfig(optimizer="sgd", lr=0.1), counters, 1_000)
    torch.manual_seed(0)
    return targets, counters, targets(Flat.of(ALGORITHM.network(ENV)))


@pytest.mark.parametrize("lag", [0, 1, 7, 24, 25])
def test_both_target_networks_are_their_definition(lag: int) -> None:
    targets, counters, updater = targets_of(0.9, lag)
    weights, every = updater.owned.flat.weights, max(1, -(-lag // 8))
    average = weights.clone()
    past = {0: average.clone()}  # all averages there ever were, by the number of updates
    rng = torch.Generator().manual_seed(1)
    for update in range(1, 80):
        updater.owned.flat.gradient.copy_(torch.randn(len(updater.owned.flat.gradient), generator=rng))
        assert updater.update([""], 1.0)
        counters.add("learner_steps", 1)
        average = 0.9 * average + 0.1 * weights
        past[update] = average.clone()
        both = targets.weights(update - 1)
        assert both is not None and both.version == update
        first, second = np.split(both.vector, 2)
        np.testing.assert_allclose(first, average, rtol=1e-4, atol=1e-6)
        kept = [k for k in past if k % every == 0 and k <= update - lag]
        np.testing.assert_allclose(second, past[max(kept, default=0)], rtol=1e-4, atol=1e-6)
        assert not kept or lag <= update - max(kept) < lag + every, "at most an eighth older than it should be"
    assert (first != second).any() == (lag > 0)


def test_target_networks_are_published_every_so_often_and_continue_from_their_state() -> None:
    targets, counters, updater = targets_of(0.9, 5, publish_every=4)
    seen, have = [], -1
    for _ in range(12):
        updater.owned.flat.gradient.fill_(1.0)
        updater.update([""], 1.0)
        counters.add("learner_steps", 1)
        found = targets.weights(have)
        if found is not None:
            seen.append(have := found.version)
    assert seen == [1, 5, 9]
    assert targets.weights(12) is None and targets.weights(-1) is not None
    assert targets.weights(20) is not None, "a restarted learner is behind what it had published"
    again, _, _ = targets_of(0.9, 5, publish_every=4)
    again.load_state(targets.state())
    one, other = targets.weights(), again.weights()
    assert one is not None and other is not None and one.version == other.version == 12
    assert (one.vector == other.vector).all()


@pytest.mark.parametrize(("own", "theirs"), [(60, 61), (61, 23), (5, 60)])
def test_a_member_of_a_population_gets_both_target_networks_of_the_one_it_copies(own: int, theirs: int) -> None:
    """Its number of updates is another, so the copies of the average are as old as they were, and no copy is blank."""
    runs = []
    for updates in (own, theirs):
        targets, counters, updater = targets_of(0.9, 16)
        rng = torch.Generator().manual_seed(updates)
        for _ in range(updates):
            updater.owned.flat.gradient.copy_(torch.randn(len(updater.owned.flat.gradient), generator=rng))
            updater.update([""], 1.0)
            counters.add("learner_steps", 1)
        runs.append((targets, counters, updater))
    (ours, counters, updater), (donor, _, _) = runs
    ours.load_state(ours.state() | {name: x for name, x in donor.state().items() if is_learned("targets", name, x)})
    assert ours.version == own and donor.version == theirs
    assert (ours.average == donor.average).all()
    kept = [number for number in ours.numbers if number >= 0]
    assert own < 20 or (ours.lagged == donor.lagged).all()
    assert any((ours.lagged == copy).all() for copy in donor.copies) and ours.lagged.any()
    assert len(kept) == len(set(kept)) and max(kept) <= own
    for _ in range(40):
        updater.update([""], 1.0)
        counters.add("learner_steps", 1)
    assert 16 <= ours.version - max(n for n in ours.numbers if n <= ours.version - 16) < 20, "and they go on"


# Labelled blocks.


def own_schema() -> Schema:
    rows = {**ENV.step, "action": ENV.action}
    return Schema(rows, ALGORITHM.window, 4)


def filled(blocks: int, schema: Schema) -> Replay:
    """A replay of episodes of one step: what they earn is the number of the episode."""
    store = Replay(schema, Uniform(64 * 4), MinSize(), 256, 64)
    numbers = iter(range(10_000))

    def policy(step: Any) -> Any:
        return {"action": np.full((1, 2), next(numbers) / 10_000, np.float32)}

    recorder = Recorder(Immediate(policy), store, ALGORITHM, schema, first_priorities="largest")
    for number in range(4 * blocks):
        for last in (False, True):
            step = {"obs": np.full((1, 2), number % 3 - 1, np.float32), "reward": np.full(1, number * last, np.float32)}
            step |= {"discount": np.full(1, 1 - last, np.float32), "valid": np.ones(1, np.bool_)}
            recorder.send(0, step | {"first": np.full(1, not last), "last": np.full(1, last)})
            recorder.recv(0)
    recorder.flush(0)
    return store


class Published:
    """Target networks that change now and then."""

    def __init__(self) -> None:
        size = len(Flat.of(ALGORITHM.network(ENV)).weights)
        self.newest = Weights(3, np.random.default_rng(0).normal(size=2 * size).astype(np.float32))

    def weights(self, have: int = -1) -> Weights | None:
        return None if have == self.newest.version else self.newest


class Taken:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.full = False

    def insert(self, block: Block, priorities: Any) -> bool:
        if not self.full:
            self.blocks.append(block)
        return not self.full


def updater_of(store: Any, train: Any, targets: Any, counters: Counters | None = None) -> BellmanUpdater:
    schema = ALGORITHM.labelled_schema(ENV, 16)
    return BellmanUpdater(ALGORITHM, ENV, store, train, targets, schema, counters or Counters(), seed=5)


def test_labelled_transitions_are_those_that_one_process_computes() -> None:
    train, targets = Taken(), Published()
    store, same = filled(8, own_schema()), filled(8, own_schema())
    updater = updater_of(store, train, targets)
    nets = [ALGORITHM.network(ENV).eval() for _ in range(2)]
    for net, vector in zip(nets, np.split(targets.newest.vector, 2), strict=True):
        Flat.of(net).weights.copy_(torch.from_numpy(vector))
    rng = np.random.default_rng(5)
    for _ in range(3):
        assert updater.step()
        sample: Any = same.sample(16)
        label = ALGORITHM.label(*nets, Batch(sample.rows, {}, sample.weights, torch.device("cpu")), rng)
        columns = train.blocks[-1].columns()
        assert (columns["label"] == label.numpy()).all() and (columns["labelled_at"] == 3).all()
        assert (columns["obs"] == sample.rows["obs"][:, :1]).all()
        assert (columns["action"] == sample.rows["action"][:, 0]).all()
        assert (columns["label"] == sample.rows["reward"][:, 1]).all(), "all episodes end after one step"
    assert updater.metrics()["labels"] == 48


def test_a_block_that_is_refused_is_kept_and_sent_once() -> None:
    train = Taken()
    updater = updater_of(filled(8, own_schema()), train, Published())
    train.full = True
    assert updater.step(), "it labelled"
    assert not updater.step() and not train.blocks
    sampled = updater.store.sampled
    train.full = False
    assert updater.step() and len(train.blocks) == 1 and updater.store.sampled == sampled == 16
    train.full = True
    updater.step()
    assert updater.cut()
    train.full = False
    updater.step()
    assert len(train.blocks) == 2 and updater.store.sampled == 48, "a cut drops what was not sent"


def test_nothing_is_labelled_before_there_are_target_networks() -> None:
    class Nothing:
        def weights(self, have: int = -1) -> None:
            return None

    updater = updater_of(filled(8, own_schema()), Taken(), Nothing())
    assert not updater.step() and updater.store.sampled == 0


# The store of labelled transitions.


def labelled(at: int, n: int = 8) -> Block:
    schema = ALGORITHM.labelled_schema(ENV, n)
    rows = schema.layout.zeros(n)
    columns = schema.layout.columns(rows)
    columns["labelled_at"][:], columns["label"][:] = at, at
    return Block(schema, rows, {}, np.ones(n, np.bool_))


def store_of(counters: Counters, max_age: int, memory: Any = None, slots: int = 32) -> Labelled:
    schema = ALGORITHM.labelled_schema(ENV, 8)
    return Labelled(max_age, counters, schema, Uniform(slots * 8, memory), MinSize(), slots * 8, slots, 0.0, 0, memory)


def test_no_label_is_given_out_that_is_too_old() -> None:
    """Blocks arrive in any order, as from several updaters."""
    counters, rng = Counters(), np.random.default_rng(0)
    store, alive, dropped = store_of(counters, max_age=10), list[int](), 0
    for now in range(200):
        at = now - int(rng.integers(0, 14))
        if rng.random() < 0.5:
            assert store.insert(labelled(at), None, Source(0, now))
            assert store.insert(labelled(at), None, Source(0, now)), "a label that comes twice is taken once"
            if now - at <= 10:
                alive.append(at)
            else:
                dropped += 2 * 8
        young = [at for at in alive if now - at <= 10]
        sample = store.sample(32)
        dropped += 8 * (len(alive) - len(young))
        alive = young
        assert (sample is None) == (not alive)
        if sample is not None:
            assert set(np.unique(sample.rows["labelled_at"])) == set(alive)
            assert store.metrics()["label_age_max"] == now - min(alive)
        assert store.size == 8 * len(alive) and store.dropped == dropped
        counters.add("learner_steps", 1)
    assert dropped > 100


def test_labels_that_an_earlier_process_left_are_as_old_as_they_were() -> None:
    class Memory(PrivateMemory):
        """Gives the same arrays again."""

        def __init__(self, kept: list[Any], found: bool) -> None:
            self.kept, self.found, self.next = kept, found, 0

        def zeros(self, shape: Any, dtype: Any) -> Any:
            if not self.found:
                self.kept.append(np.zeros(shape, dtype))
            self.next += 1
            return self.kept[self.next - 1]

        sparse = zeros

    counters, kept = Counters(), list[Any]()
    store = store_of(counters, 10, Memory(kept, False))
    for at in (0, 4, 8):
        store.insert(labelled(at), None)
    counters.add("learner_steps", 13)
    again = store_of(counters, 10, Memory(kept, True))
    sample = again.sample(64)
    assert sample is not None and set(np.unique(sample.rows["labelled_at"])) == {4, 8}


# Logged data beside the run's own.


def logged(fraction: Any, least: int = 8, limiter: Any = None) -> Logged:
    schema = own_schema()
    own = (schema, Uniform(256), limiter or MinSize(), 256, 64)
    return Logged(filled(8, schema), fraction, least, *own)


def test_labelling_begins_with_logged_data_and_the_fraction_of_own_steps_is_what_is_asked_for() -> None:
    now = 0.0
    store, own = logged(lambda: now), filled(8, own_schema())
    sample = store.sample(64)
    assert sample is not None and (sample.keys < 0).all(), "there is nothing else yet"
    now = 1.0
    for serial in range(4):
        if store.size < 8:
            assert (store.sample(64).keys < 0).all(), "too few of its own"  # type: ignore[union-attr]
        store.insert(own._block(serial), None)
    for now in (0.0, 0.25, 1.0):
        keys = np.concatenate([store.sample(100).keys for _ in range(40)])  # type: ignore[union-attr]
        assert (keys >= 0).mean() == pytest.approx(now, abs=0.03)


def test_actors_wait_until_the_offline_updates_are_made() -> None:
    """2,000 labels ahead, 4 labels for a step."""
    store = logged(lambda: 0.5, limiter=SamplesPerInsert(4.0, -500, 100.0))
    own = filled(16, own_schema())
    assert store.insert(own._block(0), None), "the first block of all"
    assert not store.insert(own._block(1), None)
    while store.sample(50) is not None:
        pass
    assert 2_000 <= store.sampled < 2_200
    assert store.insert(own._block(1), None)
