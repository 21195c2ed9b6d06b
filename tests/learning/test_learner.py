"""Updates: what they change, what they publish, and what happens when a loss is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import ENV, Normed, Published, Store
from torch import nn

from veldt.algorithms.base import Batch, Loss
from veldt.algorithms.dqn import DQN
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning import optim, params
from veldt.learning.learner import BAD_IN_A_ROW, Learner, LearnerConfig
from veldt.learning.optim import Flat, Owned
from veldt.learning.params import Weights
from veldt.records.tree import Array
from veldt.storing.store import Sample


def learner(store: Any, algorithm: Any = None, **config: Any) -> Learner:
    settings = LearnerConfig(**{"batch": 8, "publish_every": 1} | config)
    return Learner(algorithm or DQN(hidden=(16,)), ENV, store, Published(), Counters(), settings, env_steps=1_000, seed=3)


def published(of: Learner) -> list[Weights]:
    assert isinstance(of.params, Published)
    return of.params.all


def test_an_update_is_a_step_down_its_loss() -> None:
    """Against a plain loop with torch's own optimizer."""
    ours = learner(Store(), clip_norm=0.5, target_every=3, lr=1e-2, eps=1e-5)
    net, target = DQN(hidden=(16,)).network(ENV), DQN(hidden=(16,)).network(ENV)
    params.restore(net, params.export(ours.net))
    params.restore(target, params.export(ours.net))
    adam, store = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-5), Store()
    for step in range(1, 11):
        assert ours.step()
        sample = store.sample(8)
        assert sample is not None
        loss = DQN(hidden=(16,)).loss(net, target, Batch(sample.rows, {}, sample.weights, torch.device("cpu")))
        adam.zero_grad()
        loss.losses[""].backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        assert ours.metrics()["gradient_norm"] == pytest.approx(float(norm), rel=1e-3), "before it is clipped"
        assert ours.metrics()["learning_rate"] == 1e-2
        adam.step()
        if step % 3 == 0:
            target.load_state_dict(net.state_dict())
        keys, priorities = ours.store.updates[-1]  # type: ignore[attr-defined]
        np.testing.assert_array_equal(keys, sample.keys)
        np.testing.assert_allclose(priorities, loss.priorities.numpy(), rtol=1e-3, atol=1e-5)
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(ours.net.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
        for name, tensor in target.state_dict().items():
            torch.testing.assert_close(ours.target.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


def test_not_now() -> None:
    store = Store()
    one = learner(store)
    store.empty = True
    before = one.vector.clone()
    assert not one.step()
    assert one.steps == 0 and torch.equal(one.vector, before)


def test_weights_are_published_at_first_and_every_so_often() -> None:
    one = learner(Store(), publish_every=3)
    for _ in range(7):
        one.step()
    assert [weights.version for weights in published(one)] == [0, 3, 6]
    one.cut()
    assert published(one)[-1].version == 7
    np.testing.assert_array_equal(published(one)[-1].vector, one.vector.numpy())


@pytest.mark.parametrize(
    ("every", "lag", "versions"),
    [
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, 3, [0, 0, 0, 0, 1, 2, 3, 4]),
        (2, 2, [0, 0, 2, 4]),
        (3, 2, [0, 0, 3]),  # at least that many: what was published every third update
        (1, 100, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_published_weights_may_be_held_back(every: int, lag: int, versions: list[int]) -> None:
    """Published weights are those of an earlier update, unchanged since then."""
    one = learner(Store(), publish_every=every, publish_lag=lag)
    was = {0: one.vector.numpy().copy()}
    for _ in range(7):
        one.step()
        was[one.steps] = one.vector.numpy().copy()
    assert [weights.version for weights in published(one)] == versions
    for weights in published(one):
        np.testing.assert_array_equal(weights.vector, was[weights.version])
    assert not np.array_equal(was[0], was[1])


def test_a_cut_publishes_the_newest_weights_and_holds_back_from_there() -> None:
    one = learner(Store(), publish_lag=3)
    for _ in range(5):
        one.step()
    one.cut()
    assert published(one)[-1].version == 5
    np.testing.assert_array_equal(published(one)[-1].vector, one.vector.numpy())
    before = len(published(one))
    for _ in range(5):
        one.step()
    assert [weights.version for weights in published(one)[before:]] == [5, 5, 5, 6, 7]


def test_a_restored_learner_publishes_what_was_restored() -> None:
    """Not the delayed weights, such as those of its own initialization."""
    one, other = learner(Store(), publish_lag=3), learner(Store(), publish_lag=3)
    one.counters.add("env_steps", 70)
    for _ in range(5):
        one.step()
    state = one.state()
    other.counters.add("env_steps", 90)  # or 0: the counts of a run may be restored after its learner
    other.load_state(state)
    assert published(other)[-1].version == 5 and published(other)[-1].env_steps == 70
    np.testing.assert_array_equal(published(other)[-1].vector, one.vector.numpy())


class Acted(Store):
    """Its windows record which weights acted; only the first trained row counts."""

    def __init__(self, versions: list[int]) -> None:
        super().__init__()
        self.versions = versions

    def sample(self, n: int) -> Sample | None:
        sample = super().sample(n)
        assert sample is not None
        first = np.resize(np.array(self.versions), n)
        sample.rows["version"] = np.stack([first, np.full(n, 10**6)], 1)
        return sample


def test_how_many_updates_lie_between_acting_and_learning() -> None:
    one = learner(Acted([0, 1, 2, 1]))
    assert "policy_lag" not in one.metrics()
    for step in range(4):
        one.step()
        # Updates before this one, less those before each of the versions; what a killed learner has not done yet is 0.
        assert one.metrics()["policy_lag"] == np.maximum(0, step - np.array([0, 1, 2, 1])).mean()
    plain = learner(Store())
    plain.step()
    assert "policy_lag" not in plain.metrics()


class AfterHistory(Acted):
    def sample(self, n: int) -> Sample | None:
        sample = super().sample(n)
        assert sample is not None
        sample.rows.update({name: np.concatenate([x[:, 1:], x], 1) for name, x in sample.rows.items()})
        return sample


def test_rows_that_are_history_do_not_tell_the_lag() -> None:
    one = learner(AfterHistory([0]), DQN(hidden=(16,), history=2))
    one.step(), one.step()
    assert one.metrics()["policy_lag"] == 1


def test_rmsprop_is_centered_unless_it_is_told_otherwise() -> None:
    for centered in (True, False):
        one = learner(Store(), optimizer="rmsprop", centered=centered)
        one.step()
        assert isinstance(one.updater, Owned)
        optimizer = one.updater.optimizers[""]
        assert isinstance(optimizer, optim.RMSProp) and optimizer.centered is centered
        assert bool(optimizer.state()["mean"].any()) is centered
    assert LearnerConfig().centered


def test_a_restarted_learner_does_not_publish_its_initial_weights() -> None:
    first = learner(Store())
    second = Learner(DQN(hidden=(16,)), ENV, Store(), first.params, Counters(), first.config, env_steps=1_000, seed=4)
    assert not torch.equal(first.vector, second.vector) and len(published(first)) == 1
    second.load_state({**first.state(), "steps": 5})
    assert [weights.version for weights in published(first)] == [0, 5]
    np.testing.assert_array_equal(published(first)[-1].vector, first.vector.numpy())


def test_published_weights_are_frozen() -> None:
    one = learner(Store())
    first = published(one)[0].vector.copy()
    one.step()
    np.testing.assert_array_equal(published(one)[0].vector, first)
    with pytest.raises(ValueError, match="read-only"):
        published(one)[0].vector[0] = 1


def test_the_store_is_trimmed_every_so_often() -> None:
    store = Store()
    one = learner(store, trim_every=4)
    for _ in range(9):
        one.step()
    assert store.trims == 2


def test_prefetched_batches_are_parts_of_one_draw_and_a_cut_forgets_them() -> None:
    store = Store()
    one = learner(store, prefetch=4)
    for _ in range(6):
        one.step()
    assert store.asked == [32, 32]
    seen = np.concatenate([keys for keys, _ in store.updates[:4]])
    assert sorted(seen) == list(range(100, 132)), "every item of the draw once"
    assert all(len(keys) == 8 for keys, _ in store.updates)
    one.cut()
    one.step()
    assert store.asked == [32, 32, 32]


def test_the_learning_rate_falls_to_zero_over_the_run() -> None:
    one = learner(Store(), anneal=True, optimizer="sgd", lr=0.1)
    one.counters.add("env_steps", 750)
    assert isinstance(one.updater, Owned) and one.updater.lr() == pytest.approx(0.025)
    one.counters.add("env_steps", 1_000)
    before = one.vector.clone()
    one.step()
    assert torch.equal(one.vector, before)


@pytest.mark.parametrize("poison", [("reward", np.nan), ("reward", np.inf), ("obs", np.nan), ("obs", np.inf)], ids=str)
@pytest.mark.parametrize("huber", [True, False])
def test_a_poisoned_batch_changes_nothing_but_a_counter(
    poison: tuple[str, float], huber: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(lambda number: poison if number == 3 else None)
    one = learner(store, DQN(hidden=(16,), huber=huber))
    one.step(), one.step()
    before = {name: np.array(x) for name, x in one.state().items()}
    updates = len(store.updates)
    assert one.step()
    after = one.state()
    for name, x in before.items():
        if name not in ("steps", "bad"):
            np.testing.assert_array_equal(after[name], x, err_msg=name)
    assert (one.bad, one.metrics()["skipped_updates"]) == (1, 1.0)
    assert len(store.updates) == updates, "no priorities of a poisoned batch"
    assert "skipped" in caplog.text and "3" in caplog.text
    one.step()
    assert not np.array_equal(one.vector.numpy(), published(one)[-2].vector)
    assert one.bad == 1
    assert all(np.isfinite(weights.vector).all() for weights in published(one))
    assert all(np.isfinite(x) for x in one.metrics().values())


def test_what_comes_after_an_update_comes_after_it_and_only_then() -> None:
    seen: list[Any] = []

    class After(DQN):
        def loss(self, net: Any, target: Any, batch: Any) -> Any:
            return super().loss(net, target, batch)._replace(after=lambda: seen.append(one.vector.clone()))

    one = learner(Store(lambda number: ("reward", np.nan) if number == 2 else None), After(hidden=(16,)))
    for count in (1, 1, 2):  # the second is skipped
        before = one.vector.clone()
        one.step()
        assert len(seen) == count
        assert torch.equal(seen[-1], one.vector), "the weights were moved before"
        assert torch.equal(before, one.vector) == (count == 1 and one.bad == 1)


def test_ten_in_a_row_stop_the_run() -> None:
    one = learner(Store(lambda number: ("reward", np.nan) if number > 2 else None))
    one.step(), one.step()
    before = one.vector.clone()
    for _ in range(BAD_IN_A_ROW - 1):
        one.step()
    with pytest.raises(Diverged, match=rf"{BAD_IN_A_ROW} updates in a row were not finite.*learner\.lr"):
        one.step()
    assert BAD_IN_A_ROW == 10
    assert torch.equal(one.vector, before)
    assert all(np.isfinite(weights.vector).all() for weights in published(one))


def test_a_good_one_between_starts_the_count_again() -> None:
    one = learner(Store(lambda number: ("reward", np.nan) if number % 10 else None))
    for _ in range(40):
        one.step()
    assert one.bad == 36


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_that_overflows_the_weights_is_never_published(optimizer: str) -> None:
    """The gradient is finite, but the step is too long for a float."""
    large = Store(lambda number: ("reward", 1e6))
    one = learner(large, DQN(hidden=(16,), huber=False), lr=3e38, clip_norm=0.0, optimizer=optimizer)

    def until_it_diverges() -> None:
        for _ in range(50):
            one.step()

    with pytest.raises(Diverged):
        until_it_diverges()
    assert all(np.isfinite(weights.vector).all() for weights in published(one))


class NormedDQN(DQN):
    def network(self, env: Any) -> nn.Module:
        return Normed()


def test_running_averages_are_published_too_and_a_poisoned_batch_does_not_spoil_them() -> None:
    one = learner(Store(lambda number: ("obs", np.nan) if number == 3 else None), NormedDQN())
    one.step(), one.step()
    mean = one.net.norm.running_mean  # type: ignore[union-attr]
    assert isinstance(mean, torch.Tensor) and mean.abs().sum() > 0
    stop = len(one.vector)
    assert sum(p.numel() for p in one.net.parameters()) < stop
    one.step()
    assert one.bad == 1
    assert all(np.isfinite(weights.vector).all() for weights in published(one))


class TwoLosses(DQN):
    """Each group of parameters has a loss of its own."""

    def network(self, env: Any) -> nn.Module:
        return nn.ModuleDict({"actor": nn.Linear(8, 1), "critic": nn.Linear(8, 1)})

    def loss(self, net: Any, target: Any, batch: Batch) -> Loss:
        x = batch["obs"][:, 0]
        value = net["critic"](x)
        critic, actor = (value - 1).square().mean(), (net["actor"](x) * value).mean()
        return Loss({"critic": critic, "actor": actor}, torch.ones(len(x)), {})


def test_every_loss_moves_its_own_group_alone() -> None:
    one = learner(Store(), TwoLosses(), optimizer="sgd", lr=0.1, clip_norm=0.0)
    before = {name: x.copy() for name, x in params.export(one.net).items()}
    net = TwoLosses().network(ENV)
    params.restore(net, before)
    sample = Store().sample(8)
    assert sample is not None
    x = torch.from_numpy(sample.rows["obs"][:, 0])
    value = net["critic"](x)  # type: ignore[index,operator]
    critic = torch.autograd.grad((value - 1).square().mean(), list(net["critic"].parameters()), retain_graph=True)  # type: ignore[index,operator]
    actor = torch.autograd.grad((net["actor"](x) * value).mean(), list(net["actor"].parameters()))  # type: ignore[index,operator]
    one.step()
    after = params.export(one.net)
    for group, gradients in (("actor", actor), ("critic", critic)):
        for name, gradient in zip(("weight", "bias"), gradients, strict=True):
            expected = before[f"{group}.{name}"] - 0.1 * gradient.numpy()
            np.testing.assert_allclose(after[f"{group}.{name}"], expected, rtol=1e-4, atol=1e-6)
    assert isinstance(one.updater, Owned) and set(one.updater.optimizers) == {"actor", "critic"}


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adagrad", "sgd"])
def test_a_restored_learner_goes_on_bit_for_bit(optimizer: str) -> None:
    store = Store()
    one = learner(store, optimizer=optimizer, square_start=0.5, target_every=4)
    for _ in range(6):
        one.step()
    state = {name: np.array(x) if isinstance(x, np.ndarray) else x for name, x in one.state().items()}
    other_store = Store()
    other_store.number = store.number
    other = learner(other_store, optimizer=optimizer, square_start=0.5, target_every=4)
    other.counters.add("learner_steps", 6)
    other.load_state(state)
    assert published(other)[-1].version == 6
    np.testing.assert_array_equal(published(other)[-1].vector, one.vector.numpy())
    for _ in range(5):
        one.step(), other.step()
    for name, x in one.state().items():
        if name != "torch_rng":
            np.testing.assert_array_equal(other.state()[name], x, err_msg=name)


def test_the_target_is_in_eval_mode() -> None:
    one = learner(Store(lambda number: None), NormedDQN())
    assert one.net.training and not any(module.training for module in one.target.modules())


# Batches that are drawn early, as with a GPU


def drawing_early(of: Learner) -> Learner:
    of.feed.early = True
    return of


@pytest.mark.parametrize("prefetch", [1, 3])
def test_drawing_early_draws_one_batch_early_and_changes_nothing_else(prefetch: int) -> None:
    plain, store = learner(Store(), prefetch=prefetch, target_every=4), Store()
    early = drawing_early(learner(store, prefetch=prefetch, target_every=4))
    for step in range(1, 13):
        assert plain.step() and early.step()
        assert torch.equal(plain.vector, early.vector), step
        assert torch.equal(plain.target_vector, early.target_vector), step
    begin = ["sample", *["update"] * (prefetch - 1), "sample", "update"]  # before the last of the first draw is learned
    assert store.calls[: len(begin)] == begin
    assert store.calls.count("sample") == 12 // prefetch + 1 and store.calls.count("update") == 12


def test_a_store_that_has_no_next_batch_is_asked_again() -> None:
    store = Store()
    one = drawing_early(learner(store))
    assert one.step()
    store.empty = True
    assert one.step(), "the one that was drawn early"
    assert not one.step()
    store.empty = False
    assert one.step() and one.steps == 3
    assert [int(keys[0]) // 100 for keys, _ in store.updates] == [1, 2, 3]


def test_a_cut_forgets_the_batch_that_was_begun() -> None:
    store = Store()
    one = drawing_early(learner(store))
    assert one.step() and one.cut() and one.step()
    assert [int(keys[0]) // 100 for keys, _ in store.updates] == [1, 3]


# Another updater, and the names in a checkpoint


class Remote:
    """Sends gradients away; new weights never come."""

    owns_weights, servers, target = True, None, None

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.sent: list[tuple[list[str], torch.Tensor]] = []

    def update(self, groups: Any, norm: float) -> bool:
        assert norm == pytest.approx(float(self.flat.gradient.norm()))
        self.sent.append((list(groups), self.flat.gradient.clone()))
        return False

    def metrics(self) -> dict[str, float]:
        return {"sent": float(len(self.sent))}

    def state(self) -> dict[str, Array]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert state == {}


def test_another_updater_gets_every_finite_gradient_and_decides_when_the_weights_change() -> None:
    class After(DQN):
        def loss(self, net: Any, target: Any, batch: Any) -> Any:
            return super().loss(net, target, batch)._replace(after=lambda: pytest.fail("the weights are not new"))

    store = Store(lambda number: ("reward", np.nan) if number == 2 else None)
    config = LearnerConfig(batch=8, publish_every=1)
    one = Learner(After(hidden=(16,)), ENV, store, Published(), Counters(), config, 1_000, 3, updater=Remote)
    before = one.vector.clone()
    for _ in range(3):
        assert one.step()
    assert isinstance(one.updater, Remote) and [groups for groups, _ in one.updater.sent] == [[""], [""]]
    assert torch.equal(one.vector, before) and one.bad == 1
    assert len(store.updates) == 2, "priorities are written back"
    assert one.metrics()["sent"] == 2
    one.load_state(one.state())


def test_names_in_a_checkpoint_stay_the_same() -> None:
    """Old checkpoints can be loaded."""
    one, two = learner(Store()), learner(Store(), TwoLosses())
    one.step(), two.step()
    net = ["torso.layers.0.weight", "torso.layers.0.bias", "head.advantage.weight", "head.advantage.bias"]
    adam = ["mean", "square", "steps"]
    others = {"steps", "bad", "env_steps", "torch_rng"}
    expected = {f"{kind}/{name}" for kind in ("weights", "target") for name in net}
    assert set(one.state()) == expected | {f"optimizer//{name}" for name in adam} | others
    net = [f"{group}.{name}" for group in ("actor", "critic") for name in ("weight", "bias")]
    expected = {f"{kind}/{name}" for kind in ("weights", "target") for name in net}
    assert set(two.state()) == expected | {f"optimizer/{g}/{name}" for g in ("actor", "critic") for name in adam} | others
