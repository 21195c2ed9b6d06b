"""Gorila's parameter servers, the guards, and the updater that pushes to them: against definitions, without processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ENV, Normed
from fakes import Store as Batches
from torch import nn

from veldt.algorithms.dqn import DQN
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning.learner import Learner, LearnerConfig
from veldt.learning.optim import Flat
from veldt.learning.shards import (
    COUNTS,
    MEMORY,
    ROW,
    GuardConfig,
    LossGuard,
    NamedWeights,
    ParamShard,
    Part,
    Sharded,
    ShardedParams,
    cut,
    sharded,
)
from veldt.records.tree import Array

SIZE = 10
NONE = np.zeros(0, np.float32)
PLAIN = LearnerConfig(optimizer="adagrad", lr=0.5, eps=1e-3)


def memory(length: int) -> tuple[Array, dict[str, Array], Array]:
    """What outlives a shard's process."""
    averages = {name: np.zeros(length, np.float32) for name in ("mean", "square")}
    return np.zeros(length, np.float32), averages, np.zeros(COUNTS, np.int64)


def shard(
    kept: Any = None,
    config: LearnerConfig = PLAIN,
    max_age: int = 0,
    counters: Counters | None = None,
    part: Part | None = None,
    first: Array | None = None,
    counting: bool = True,
) -> ParamShard:
    part = part or Part(slice(0, SIZE), slice(0, SIZE))
    start = np.linspace(-1, 1, SIZE, dtype=np.float32) if first is None else first
    kept = kept or memory(part.weights.stop - part.weights.start)
    if part.weights != part.gradient:
        kept = kept[0], {name: x[: part.gradient.stop - part.gradient.start] for name, x in kept[1].items()}, kept[2]
    return ParamShard(lambda: start, part, *kept, config, max_age, 1_000, counters or Counters(), counting)


def gradients(n: int) -> list[Array]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=SIZE).astype(np.float32) for _ in range(n)]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_the_parts_are_all_of_the_vector_once_and_the_last_has_the_buffers(shards: int) -> None:
    parts = cut(7, 10, shards)
    numbers = np.arange(10)
    assert np.concatenate([numbers[part.gradient] for part in parts]).tolist() == list(range(7))
    assert np.concatenate([numbers[part.weights] for part in parts]).tolist() == list(range(10))
    lengths = [len(numbers[part.gradient]) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_a_shard_applies_adagrad_and_counts() -> None:
    counters = Counters()
    one, expected, total = shard(counters=counters), np.linspace(-1, 1, SIZE), np.zeros(SIZE)
    for number, g in enumerate(gradients(30)):
        assert one.push(g, NONE, number)
        total += g.astype(np.float64) ** 2
        expected -= 0.5 * g / (np.sqrt(total) + 1e-3)
    found = one.weights()
    assert found is not None and found.version == 30 == counters.get("learner_steps")
    np.testing.assert_allclose(found.vector, expected, rtol=1e-4, atol=1e-6)
    assert one.weights(30) is None
    other = shard(counters=counters, counting=False)
    assert other.push(gradients(1)[0], NONE, 0) and counters.get("learner_steps") == 30, "an update is counted once"


def test_gradients_that_are_too_old_are_dropped_and_counted() -> None:
    one, g = shard(max_age=3), gradients(1)[0]
    for _ in range(10):
        one.push(g, NONE, one.version)
    before = one.vector.copy()
    assert one.push(g, NONE, 6), "a dropped gradient is taken off the stream"
    assert (one.vector == before).all() and one.version == 10
    one.push(g, NONE, 7)
    assert (one.vector != before).any() and one.version == 11
    line = one.metrics()
    assert line["gradients_applied"] == 11 and line["gradients_dropped_age"] == 1
    assert line["staleness"] == pytest.approx((4 + 3) / 12) and line["staleness_max"] == 4
    assert "staleness" not in one.metrics(), "nothing came since"
    never = shard(max_age=0)
    for _ in range(5):
        never.push(g, NONE, -1_000)
    assert never.version == 5


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adagrad", "sgd"])
def test_a_shard_that_was_killed_goes_on_bit_for_bit(optimizer: str) -> None:
    config = LearnerConfig(optimizer=optimizer, lr=0.1, eps=1e-3, square_start=0.5)  # type: ignore[arg-type]
    straight, kept = shard(config=config), memory(SIZE)
    killed = shard(kept, config)
    for number, g in enumerate(gradients(40)):
        if number == 20:
            killed = shard(kept, config, first=np.full(SIZE, 9.0, np.float32))
        straight.push(g, NONE, number)
        killed.push(g, NONE, number)
    assert (killed.vector == straight.vector).all() and killed.version == 40


def test_weights_that_are_not_finite_never_exist() -> None:
    kept = memory(SIZE)
    one = shard(kept, LearnerConfig(optimizer="sgd", lr=1e30))
    one.push(np.full(SIZE, 1e-30, np.float32), NONE, 0)
    before = one.vector.copy()
    assert one.push(np.full(SIZE, 1e30, np.float32), NONE, 1), "it is not delivered again"
    assert (one.vector == before).all() and one.version == 1
    with pytest.raises(Diverged, match="update 2 would make weights that are not finite"):
        one.weights(1)
    again = shard(kept)
    assert again.weights(0) is not None, "what was there before is saved after a restart"


# What learners and policies see.


def servers(net: nn.Module, shards: int, config: LearnerConfig = PLAIN, max_age: int = 0, **how: Any) -> Any:
    flat = Flat.of(net)
    parts = cut(len(flat.gradient), len(flat.weights), shards)
    first = flat.weights.numpy().copy()
    made = [shard(None, config, max_age, part=part, first=first, counting=not k, **how) for k, part in enumerate(parts)]
    return flat, made, parts


def test_params_have_all_slices_and_the_newest_buffers() -> None:
    flat, shards, parts = servers(Normed(), 3)
    reader = ShardedParams(shards, parts)
    found = reader.pull(-1)
    assert found is not None and (found.vector == flat.weights.numpy()).all() and found.version == 0
    assert reader.pull(0) is None
    length = parts[1].gradient.stop - parts[1].gradient.start
    shards[1].push(np.ones(length, np.float32), NONE, 0)
    found = reader.pull(0)
    assert found is not None and found.version == 0, "the version is that of shard 0"
    changed = np.flatnonzero(found.vector != flat.weights.numpy())
    assert changed.tolist() == list(range(parts[1].weights.start, parts[1].weights.stop))
    last = parts[2].gradient.stop - parts[2].gradient.start
    shards[2].push(np.zeros(last, np.float32), np.full(len(flat.buffers), 7, np.float32), 0)
    found = reader.pull(0)
    assert found is not None and (found.vector[len(flat.gradient) :] == 7).all() and reader.versions == [0, 1, 1]


class Full:
    """A shard whose stream has room for so many slices."""

    def __init__(self, one: ParamShard, room: int) -> None:
        self.shard, self.room, self.weights = one, room, one.weights

    def push(self, gradient: Array, buffers: Array, at: int) -> bool:
        if not self.room:
            return False
        self.room -= 1
        return self.shard.push(gradient, buffers, at)


def guard(deviations: float = 0.0, learners: int = 1, learner: int = 0, **how: Any) -> LossGuard:
    return LossGuard(GuardConfig(deviations=deviations, **how), np.zeros((learners, ROW)), learner)


def test_a_slice_waits_while_its_shard_is_full_and_each_arrives_once() -> None:
    flat, shards, parts = servers(nn.Linear(5, 2), 2, LearnerConfig(optimizer="sgd", lr=1.0))
    start, narrow = flat.weights.clone(), Full(shards[1], 0)
    updater = Sharded([shards[0], narrow], parts, guard(), 0.0, flat)  # type: ignore[list-item]
    assert updater.ready()
    flat.gradient.fill_(1.0)
    assert not updater.update([""], 3.0), "the weights are not new yet"
    assert [one.version for one in shards] == [1, 0]
    assert not updater.ready() and not updater.ready(), "no other gradient meanwhile"
    assert [one.version for one in shards] == [1, 0], "what has arrived is not sent again"
    narrow.room = 1
    assert updater.ready() and [one.version for one in shards] == [1, 1]
    torch.testing.assert_close(flat.weights, start - 1.0)
    assert updater.pushed == 1 and updater.version == 1


@pytest.mark.parametrize(("clip", "factor"), [(0.0, 1.0), (10.0, 1.0), (1.0, 0.2)])
def test_the_whole_gradient_is_clipped_and_not_each_slice(clip: float, factor: float) -> None:
    flat, shards, parts = servers(nn.Linear(2, 1, bias=False), 2, LearnerConfig(optimizer="sgd", lr=1.0))
    start = flat.weights.clone()
    updater = Sharded(shards, parts, guard(), clip, flat)
    updater.ready()
    flat.gradient.copy_(torch.tensor([3.0, 4.0]))
    updater.update([""], 5.0)
    updater.ready()
    torch.testing.assert_close(flat.weights, start - factor * torch.tensor([3.0, 4.0]))


def test_buffers_go_with_the_last_slice_and_come_back_to_every_learner() -> None:
    _, shards, parts = servers(Normed(), 3)
    one, other = (Sharded(shards, parts, guard(), 0.0, Flat.of(Normed())) for _ in range(2))
    assert one.ready() and other.ready()
    with torch.no_grad():
        one.flat.buffers.fill_(7.0)  # as by a forward pass
    one.flat.gradient.zero_()
    one.update([""], 0.0)
    assert other.ready() and (other.flat.buffers == 7).all()
    assert torch.equal(one.flat.weights, other.flat.weights)


# The guard of the losses.


def test_the_bound_is_the_mean_and_deviations_of_what_came_before() -> None:
    one, rng, seen = guard(3.0, warm_up=100), np.random.default_rng(0), []
    for error in rng.gamma(2.0, 1.0, MEMORY):
        expected = np.mean(seen) + 3 * np.std(seen) if len(seen) >= 100 else np.inf
        assert one.bound() == pytest.approx(expected)
        assert one.accepts(error) == (error <= expected)
        seen.append(error)
    assert 0 < one.rejected < 0.05 * MEMORY


def test_nothing_is_rejected_before_the_warm_up_or_if_the_guard_is_off() -> None:
    warming, off = guard(3.0, warm_up=50), guard(0.0, warm_up=1)
    assert all(warming.accepts(float(10**k % 97)) for k in range(49))
    assert all(off.accepts(x) for x in [1.0] * 200 + [1e9])
    exact = guard(3.0, warm_up=50)
    assert all(exact.accepts(1.0) for _ in range(50))
    assert exact.accepts(1.1) and not exact.accepts(10.0)


def test_errors_that_grow_for_good_are_taken_in_the_end() -> None:
    one = guard(4.0, against="own")
    for _ in range(2_000):
        one.accepts(1.0)
    answers = [one.accepts(10.0) for _ in range(2 * MEMORY)]
    assert not answers[0] and answers[-1] and answers == sorted(answers), "rejected at first, and never again later"


def test_a_learner_whose_errors_are_always_too_large_is_kept_out_by_the_others() -> None:
    statistics, rng = np.zeros((3, ROW)), np.random.default_rng(1)
    guards = [LossGuard(GuardConfig(), statistics, i) for i in range(3)]
    for _ in range(3_000):
        for i, one in enumerate(guards):
            one.accepts(float(rng.gamma(4.0, 0.25)) * (10.0 if i == 2 else 1.0))
    assert guards[2].rejected > 0.9 * 3_000 and max(one.rejected for one in guards[:2]) < 30
    alone = [LossGuard(GuardConfig(against="own"), np.zeros((3, ROW)), i) for i in range(3)]
    for _ in range(3_000):
        alone[2].accepts(float(rng.gamma(4.0, 0.25)) * 10.0)
    assert alone[2].rejected < 60, "to itself they are usual"


def test_a_learner_that_comes_back_remembers_what_is_usual() -> None:
    statistics = np.zeros((1, ROW))
    one = LossGuard(GuardConfig(), statistics, 0)
    for _ in range(200):
        one.accepts(1.0)
    assert not LossGuard(GuardConfig(), statistics, 0).accepts(50.0)


# A learner with servers.


def learner(
    shards: Any, parts: Any, counters: Counters, store: Any = None, statistics: Any = None, **settings: Any
) -> Learner:
    statistics = np.zeros((1, ROW)) if statistics is None else statistics
    make: Any = sharded(shards, parts, GuardConfig(), statistics, 0, 10.0)
    config = LearnerConfig(batch=4, target_every=5, **settings)
    return Learner(DQN(hidden=(8,)), ENV, store or Batches(), None, counters, config, 1_000, 7, updater=make)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return DQN(hidden=(8,)).network(ENV)


def test_the_target_follows_the_updates_of_the_servers() -> None:
    """Two learners make a gradient in turn: each copies the weights after every fifth update, its own and the other's."""
    counters = Counters()
    _, shards, parts = servers(network(7), 2, counters=counters)
    two = [learner(shards, parts, counters) for _ in range(2)]
    for one in two:  # both see the first weights
        one.store.empty = True  # type: ignore[attr-defined]
        assert not one.step()
        one.store.empty = False  # type: ignore[attr-defined]
    copies = {0: np.concatenate([one.vector for one in shards])}
    for number in range(23):
        one = two[number % 2]
        assert one.step()
        copies[shards[0].version] = np.concatenate([s.vector for s in shards])
        due = number // 5 * 5  # the version at which that learner found that it had to copy
        seen = due if due % 2 == number % 2 or due == 0 else due + 1
        assert (one.target_vector.numpy() == copies[seen]).all(), number
    assert counters.get("learner_steps") == 23 == shards[0].version == sum(one.steps for one in two)


def test_a_batch_that_is_not_finite_is_not_pushed_and_one_that_is_far_off_neither() -> None:
    counters, store = Counters(), Batches(lambda n: {150: ("reward", np.nan), 160: ("reward", 1e4)}.get(n))
    _, shards, parts = servers(network(7), 2, counters=counters)
    one = learner(shards, parts, counters, store)
    for _ in range(170):
        one.step()
    line = one.metrics()
    dropped = int(line["gradients_dropped_loss"])
    assert line["skipped_updates"] == 1 and 1 <= dropped < 10
    assert line["gradients_pushed"] == shards[0].version == 169 - dropped == counters.get("learner_steps")
    assert len(store.updates) == shards[0].version, "priorities come from batches that were used"
    assert "published" not in line and "learning_rate" in shards[0].metrics()


def test_a_learner_saves_its_target_and_leaves_the_weights_to_one_place() -> None:
    counters = Counters()
    _, shards, parts = servers(network(7), 3, counters=counters)
    one = learner(shards, parts, counters)
    for _ in range(12):
        one.step()
    state = {name: np.array(x) if isinstance(x, np.ndarray) else x for name, x in one.state().items()}
    assert not any(name.startswith("weights/") for name in state)
    saved = NamedWeights(DQN(hidden=(8,)), ENV, [s.vector for s in shards]).state()
    assert all((saved[f"weights/{name}"].ravel() == x.ravel()).all() for name, x in _named(one).items())
    again = learner(shards, parts, counters)
    again.load_state(state)
    again.step()
    assert torch.equal(again.target_vector, one.target_vector) and again.steps == 13


def _named(one: Learner) -> dict[str, Array]:
    one.updater.ready()  # type: ignore[attr-defined]
    return {name: x.detach().numpy() for name, x in one.net.state_dict().items()}


def test_nothing_is_learned_before_all_shards_have_published() -> None:
    _, shards, parts = servers(network(7), 2)
    late = Full(shards[1], 10)
    late.weights = lambda have=-1: None  # type: ignore[method-assign, assignment]
    one = learner([shards[0], late], parts, Counters())
    assert not one.step() and not one.step()
    late.weights = partial(shards[1].weights)  # type: ignore[method-assign]
    assert one.step() and shards[1].version == 1
