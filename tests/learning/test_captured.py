"""The update as operations on the device alone, as a CUDA graph holds them. It runs on a CPU too, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import ENV, Normed, Published, Store
from gymnasium import spaces
from torch import nn

from veldt.algorithms.base import Batch, Loss
from veldt.algorithms.dpg import DPG
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.counters import Counters
from veldt.errors import Diverged
from veldt.learning.learner import BAD_IN_A_ROW, Learner, LearnerConfig
from veldt.learning.optim import Flat
from veldt.records.block import Block, Schema, window_items
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec
from veldt.storing.limiters import MinSize, Queue
from veldt.storing.replay import Replay
from veldt.storing.ring import UnrollQueue
from veldt.storing.selectors import Prioritized

DISCRETE = EnvSpec("v", {"obs": spec((4,), np.float32)}, spec((), np.int64), spaces.Discrete(3))
IMAGES = EnvSpec("i", {"obs": spec((10, 10, 4), np.bool_)}, spec((), np.int64), spaces.Discrete(3))
MULTI = EnvSpec("m", {"obs": spec((4,), np.float32)}, spec((2,), np.int64), spaces.MultiDiscrete([3, 2]))
BOX = EnvSpec("b", {"obs": spec((4,), np.float32)}, spec((2,), np.float32), spaces.Box(-2, 3, (2,)))

CASES: dict[str, tuple[Any, EnvSpec]] = {
    "dqn": (DQN(hidden=(16,)), DISCRETE),
    "dqn, n = 3, double, dueling, normalised": (
        DQN(hidden=(16,), n=3, double=True, dueling=True, normalize_obs=True, clip_reward=0.5),
        DISCRETE,
    ),
    "dqn, stacked images": (DQN(n=3, history=4, double=True), IMAGES),
    "dpg": (DPG(n=3, critic=(16, 8), actor=(16, 8)), BOX),
    "dpg, inverted": (DPG(n=2, critic=(16,), actor=(16,), invert_gradients=True, normalize_obs=True), BOX),
    "v-trace": (VTraceActorCritic(unroll=5, hidden=(16,)), DISCRETE),
    "v-trace, normalised, lstm": (
        VTraceActorCritic(unroll=5, hidden=(16,), lstm=8, normalize=True, sum_losses=True),
        MULTI,
    ),
    "v-trace, one step, box": (VTraceActorCritic(unroll=5, hidden=(16,), correction="one-step"), BOX),
    "r2d2": (R2D2(burn_in=3, length=6, stride=3, n=2, lstm=8, head=0, hidden=(16,)), DISCRETE),
    "r2d2, no lstm, zero state": (R2D2(burn_in=2, length=4, stride=2, n=3, lstm=0, history=2, hidden=(16,)), DISCRETE),
}


def filled(algorithm: Any, env: EnvSpec, blocks: int = 40, ends: float = 0.1, **options: Any) -> Replay | UnrollQueue:
    """A store of random steps, in which many episodes end, terminated or truncated."""
    rows = {**env.step, "action": env.action, **algorithm.extras(env)}
    schema = Schema(rows, algorithm.window, 3 * algorithm.window.stride, algorithm.state(env))
    rng, size = np.random.default_rng(0), blocks * schema.starts
    if "version" in rows:
        store: Replay | UnrollQueue = UnrollQueue(schema, Queue(size), blocks, **options)
    else:
        store = Replay(schema, Prioritized(size), MinSize(1), size, blocks, seed=1, **options)
    for _ in range(blocks):
        store.insert(ending_block(schema, env, rng, ends), rng.random(schema.starts))
    return store


def ending_block(schema: Schema, env: EnvSpec, rng: np.random.Generator, ends: float) -> Block:
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    columns = schema.layout.columns(rows)
    for x in (*columns.values(), *schema.start_layout.columns(starts).values()):
        x[...] = rng.normal(size=x.shape) if x.dtype.kind == "f" else rng.integers(0, 2, x.shape)
    for name in {"logits"} & set(columns):
        columns[name][...] = -rng.random(columns[name].shape)
    columns["valid"][...] = rng.random(schema.rows) < 0.98
    columns["last"][...] = rng.random(schema.rows) < ends
    columns["discount"][...] = ~columns["last"] | (rng.random(schema.rows) < 0.5)
    columns["first"][1:] = columns["last"][:-1]
    items = window_items(columns["valid"], columns["last"], schema.window, schema.fresh)
    return Block(schema, rows, starts, items)


def learner_of(store: Any, algorithm: Any, env: EnvSpec, graph: bool, **config: Any) -> Learner:
    settings = LearnerConfig(**{"batch": 8, "publish_every": 1, "target_every": 5, "clip_norm": 0.5, "lr": 1e-3} | config)
    counters = Counters()
    one = Learner(algorithm, env, store, Published(), counters, settings, env_steps=1_000, seed=3)
    if graph:
        one.use_graph()
    return one


def settled(one: Learner) -> dict[str, Array]:
    return {name: np.array(x) for name, x in one.state().items() if name not in ("torch_rng",)}


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
@pytest.mark.parametrize("case", CASES)
def test_an_update_on_the_device_is_the_update(case: str, optimizer: str) -> None:
    """Weights, target, optimizer, running averages and priorities, though losses, clipping and optimizer are others."""
    if optimizer != "adam" and case not in ("dqn", "dpg"):
        pytest.skip("enough with two algorithms")
    algorithm, env = CASES[case]
    plain, early = filled(algorithm, env), filled(algorithm, env)
    one = learner_of(plain, algorithm, env, graph=False, optimizer=optimizer, anneal=True)
    one.feed.early = True  # the order of draws and updates that a GPU has
    other = learner_of(early, algorithm, env, graph=True, optimizer=optimizer, anneal=True)
    for _ in range(12):
        assert one.step() and other.step()
        one.counters.add("env_steps", 50), other.counters.add("env_steps", 50)
    theirs = settled(other)
    assert theirs["steps"] == 12 and theirs["bad"] == 0
    for name, x in settled(one).items():
        np.testing.assert_allclose(theirs[name], x, rtol=2e-4, atol=2e-6, err_msg=name)
    if isinstance(plain, Replay) and isinstance(early, Replay):
        np.testing.assert_allclose(early.selector.save(), plain.selector.save(), rtol=1e-3, atol=1e-5)
    for name, value in one.metrics().items():
        assert other.metrics()[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def graphed(store: Any, algorithm: Any = None, **config: Any) -> Learner:
    return learner_of(store, algorithm or DQN(hidden=(16,)), ENV, graph=True, **config)


@pytest.mark.parametrize("poison", [("reward", np.nan), ("reward", np.inf), ("obs", np.nan)], ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
@pytest.mark.parametrize("number", [1, 4])
def test_a_poisoned_batch_changes_nothing_on_the_device_and_is_counted_later(
    poison: tuple[str, float], optimizer: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    class NormedDQN(DQN):
        def network(self, env: Any) -> nn.Module:
            return Normed()

    store = Store(lambda drawn: poison if drawn == number else None)
    one = graphed(store, NormedDQN(), optimizer=optimizer, publish_every=100)
    for _ in range(number - 1):
        one.step()
    before = settled(one)
    one.step()
    assert one.bad == 0 and f"update {number} skipped" not in caplog.text, "not known yet"
    if number == 1:  # averages are made with the first update, and are as they start
        before |= {name: x for name, x in settled(one).items() if name.startswith("optimizer/")}
        assert not any(x.any() for name, x in before.items() if name.startswith("optimizer/"))
    after = settled(one)
    assert one.bad == 1 and f"update {number} skipped" in caplog.text
    for name in set(before) - {"steps", "bad", "weights/norm.num_batches_tracked"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert len(store.updates) == number - 1, "no priorities of a poisoned batch"
    one.step(), one.cut()
    assert one.bad == 1 and len(store.updates) == number
    assert not np.array_equal(settled(one)["weights/q.weight"], before["weights/q.weight"])
    assert all(np.isfinite(x).all() for x in settled(one).values())


def test_what_comes_after_an_update_is_undone_where_the_update_is_skipped() -> None:
    """V-trace rescales its head after an update."""

    class After(DQN):
        def loss(self, net: Any, target: Any, batch: Any) -> Any:
            loss = super().loss(net, target, batch)
            return loss._replace(after=lambda: net.head.advantage.bias.data.mul_(loss.losses[""].detach() + 2))

    one = graphed(Store(lambda number: ("reward", np.nan) if number == 2 else None), After(hidden=(16,)))
    plain = graphed(Store(), After(hidden=(16,)))
    one.step(), plain.step()
    before = settled(one)
    assert torch.equal(one.vector, plain.vector)
    one.step(), plain.step()
    np.testing.assert_array_equal(settled(one)["weights/head.advantage.bias"], before["weights/head.advantage.bias"])
    assert not torch.equal(plain.vector, one.vector)


def test_ten_in_a_row_stop_the_run_one_update_later() -> None:
    one = graphed(Store(lambda number: ("reward", np.nan) if number > 2 else None))
    for _ in range(2 + BAD_IN_A_ROW):
        one.step()
    before = one.vector.clone()
    with pytest.raises(Diverged, match=f"{BAD_IN_A_ROW} updates in a row"):
        one.step()
    assert torch.equal(one.vector, before)


def test_priorities_are_written_while_the_next_update_runs() -> None:
    """And the next batch is drawn after that: a sample never misses the priorities of more than one update."""
    store = Store()
    one = graphed(store)
    for _ in range(3):
        one.step()
    assert store.calls == ["sample", "sample", "update", "sample", "update", "sample"]
    assert [int(keys[0]) // 100 for keys, _ in store.updates] == [1, 2]
    store.empty = True
    assert one.step(), "the batch that was drawn early"
    assert one.step(), "the end of that update"
    assert not one.step()
    assert [int(keys[0]) // 100 for keys, _ in store.updates] == [1, 2, 3, 4] and one.steps == 4


def test_a_cut_ends_what_was_launched() -> None:
    store = Store()
    one = graphed(store, publish_every=100)
    one.step(), one.step()
    assert one.cut()
    assert [int(keys[0]) // 100 for keys, _ in store.updates] == [1, 2]
    assert isinstance(one.params, Published) and one.params.all[-1].version == 2
    one.step(), one.cut()
    assert [int(keys[0]) // 100 for keys, _ in store.updates] == [1, 2, 4], "the third was drawn early, and dropped"


def test_a_restored_learner_goes_on() -> None:
    one = graphed(Store())
    for _ in range(5):
        one.step()
    one.cut()
    state, store = settled(one) | {"torch_rng": one.state()["torch_rng"]}, Store()
    store.number = one.store.number  # type: ignore[attr-defined]
    other = graphed(store)
    other.step()
    store.number -= 2
    other.feed.clear()
    other.load_state(state)
    for _ in range(4):
        one.step(), other.step()
    for name, x in settled(one).items():
        np.testing.assert_array_equal(settled(other)[name], x, err_msg=name)


def test_a_loss_that_needs_numpy_goes_on_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    class NumPy(DQN):
        def network(self, env: Any) -> nn.Module:
            return Normed()

        def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
            net.norm.running_mean.add_(1e-3)  # type: ignore[union-attr,operator]
            assert isinstance(batch.host["reward"], np.ndarray), "rewards must be arrays"
            return super().loss(net, target, batch)

    one = graphed(Store(), NumPy(), publish_every=100)
    plain = learner_of(Store(), NumPy(), ENV, graph=False, publish_every=100)
    for _ in range(4):
        assert one.step() and plain.step()
    assert one.captured is None and caplog.text.count("no CUDA graph") == 1 and "rewards must be arrays" in caplog.text
    for name, x in settled(plain).items():
        np.testing.assert_array_equal(settled(one)[name], x, err_msg=name)


def test_an_updater_that_sends_gradients_away_has_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    class Sent:
        owns_weights, servers, target = True, None, None

        def __init__(self, flat: Flat) -> None: ...

    config = LearnerConfig(batch=8)
    one = Learner(DQN(hidden=(16,)), ENV, Store(), Published(), Counters(), config, 1_000, 3, updater=Sent)  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        one.use_graph()
    assert one.captured is None and "Sent takes gradients from the host" in caplog.text
